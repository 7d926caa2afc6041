"""What the chat template shows of --tools. `data.render` asks for it."""

from functools import lru_cache

from transformers.utils import get_json_schema

from grading.user_code import load_reference


@lru_cache(maxsize=8)
def tool_schemas(tools: str | None) -> list[dict[str, object]] | None:
    """The schemas of the functions for the chat template, from their type hints and docstrings. Raises ValueError."""
    if not tools:
        return None
    try:
        return [get_json_schema(load_reference(tool)) for tool in tools.split(",")]
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        raise ValueError(f"--tools {tools}: {type(error).__name__}: {error}") from None
