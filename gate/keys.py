"""Rows that cannot be used: their answer key, or their images; and whether own functions can be called at all."""

from dataclasses import replace

from batch import IMAGE
from data import PromptData
from fsdp_utils import World, gather_from_ranks
from grading import Case
from grading.pool import Failure
from reward import Grader

# Texts for a trial of one's own functions: all marks of an answer, the answer alone, nothing
TRIAL = ("<think>\nSo.\n</think>\n<answer>\\boxed{KEY}\nAnswer: KEY\n#### KEY</answer>", "KEY", "")
KEYS_AT_ONCE = 64  # answer keys in a request to a worker: a request costs more than a check


def check_keys(grader: Grader, data: PromptData, world: World) -> PromptData:
    """The data without the rows whose answer key cannot be used; the engines' first ranks share the work.

    Raises ValueError, on all ranks, for a function of one's own that returns no reward, or fails in a trial.
    """
    share = range(world.engine_index, len(data.rows), world.num_engines) if grader.pool is not None else ()
    rows = [data.rows[i] for i in share]
    cases = [Case("", row.answer, row.columns, prompt=row.text, where=row.where) for row in rows]
    bad = bad_keys(grader, cases) if cases else {}
    good = next((case for i, case in enumerate(cases) if i not in bad), None)
    problem = trial(grader, good) if good and ".py:" in grader.grading.reward else ""
    for any_problem in filter(None, gather_from_ranks(problem)):
        raise ValueError(f"--reward {grader.grading.reward}: {any_problem}.")
    parts = gather_from_ranks({share[i]: reason for i, reason in bad.items()})
    return data.exclude({i: reason for part in parts for i, reason in part.items()})


def without_markers(data: PromptData) -> PromptData:
    """The data without the rows whose text has a place for an image: --image_column names none."""
    reasons = {}
    for i, row in enumerate(data.rows):
        count = sum(message["content"].count(IMAGE) for message in row.messages if message["role"] == "user")
        if count:
            reasons[i] = f"{count} {IMAGE} in the text, but no images; --image_column names their column"
    return data.exclude(reasons)


def bad_keys(grader: Grader, cases: list[Case]) -> dict[int, str]:
    """Index -> reason, of the cases whose answer key cannot be used; their completions do not matter."""
    assert grader.pool is not None, "keys are checked on the first rank of an engine"
    cases = [replace(case, completion="", num_tokens=0, max_tokens=1) for case in cases]
    reasons: dict[int, str | None] = {}
    for size in (KEYS_AT_ONCE, 1):  # the keys of a request that fails are checked again, one by one
        left = [i for i in range(len(cases)) if i not in reasons]
        shares = [left[start : start + size] for start in range(0, len(left), size)]
        for number, share in enumerate(shares):
            grader.pool.submit(number, ("check", [cases[i] for i in share]))
        for number, outcome in grader.outcomes("check keys").items():
            if not isinstance(outcome, Failure):
                reasons |= zip(shares[number], outcome, strict=True)
            elif size == 1:
                reasons[shares[number][0]] = outcome
    return {i: reason for i, reason in sorted(reasons.items()) if reason is not None}


def trial(grader: Grader, case: Case) -> str:
    """The fault of functions of one's own, which return no reward for some text, or fail for each; else ""."""
    texts = [text.replace("KEY", case.answer) for text in TRIAL]
    for kind in ["grade"] * grader.inputs.cases + ["compare"] * grader.inputs.groups:
        for b, text in enumerate(texts):
            size = len(text.split()) + 1
            ids = tuple(range(size))
            trial = replace(case, completion=text, token_ids=ids, num_tokens=size, max_tokens=size + 1)
            grader.pool.submit(b, (kind, trial if kind == "grade" else [trial, trial]))
        outcomes = [outcome for _, outcome in sorted(grader.pool.collect().items())]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        for failure in failures:
            _, is_wrong_return, reason = failure.partition("WrongReturn: ")
            if is_wrong_return:
                return f"{reason}. What it may return: docs/rewards.md"
        if len(failures) == len(outcomes):
            return (
                f"it fails for each text of a trial with {case.where}: {failures[0]}. Completions and prompts are "
                "texts, not messages; a text that it cannot read should get 0.0: docs/rewards.md"
            )
    return ""


def check_groups(grader: Grader, flag: str, *sizes: int) -> None:
    """Raises ValueError if a reward that compares completions of a prompt would compare one with itself."""
    if grader.inputs.groups and 1 in sizes:
        raise ValueError(
            f"{flag} 1: --reward {grader.grading.reward!r} takes all completions of a prompt to compare them, "
            f"and one alone compares with itself; use {flag} 2 or more."
        )
