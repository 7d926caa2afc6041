"""Tables as plain text."""


def in_columns(rows: list[list[str]]) -> list[str]:
    """The rows as lines of text, their cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def counted(number: float, noun: str) -> str:
    """The number with its noun: 1 step, 2.5 steps, 3 micro-batches."""
    plural = "es" if noun.endswith("batch") else "s"
    return f"{round(number, 2):.15g} {noun}{plural * (number != 1)}"
