"""The built-in verifiers: each says how good one completion is. A new one is a function and an entry in `BUILT_IN`.

`exact` compares the final answer with the row's, `format` and `think_format` check the tags,
`length` the length; `mathematics.py` and `ifeval.py` have the others. They raise ValueError, in a
few words, for a row whose answer key cannot be used. `score.py` adds them up, in processes that can
be killed: nothing here minds the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pkgutil import resolve_name

from grading import Case, Verdict
from grading.answer import opens_thought, plain, read_answer


def verify_exact(case: Case) -> Verdict:
    """1.0 if the final answer, or without a mark the whole visible text, is the row's, emphasized or not; else 0.0."""
    if not case.answer.strip():
        raise ValueError("the answer is blank")
    answer = read_answer(case.completion, case.prompt, unmarked="all")
    return float(answer is not None and case.answer.strip() in (answer, plain(answer))), answer


def verify_format(case: Case) -> Verdict:
    """1.0 if the completion is `<think>...</think><answer>...</answer>` and nothing else, each tag once; else 0.0.

    Neither may be blank. A prompt that ends with `<think>` (as QwQ's chat template does) has opened the first tag: then
    the completion must not open it again.
    """
    return float(_has_form(case, "<answer>(.*)</answer>", "think|answer")), None


def verify_think_format(case: Case) -> Verdict:
    """1.0 if the completion is `<think>...</think>` and then some text, each tag once; else 0.0. Else as `format`."""
    return float(_has_form(case, "(.*)", "think")), None


def _has_form(case: Case, ending: str, tags: str) -> bool:
    """Whether the completion is a thought and this ending, neither blank and without any other of these tags."""
    opened = "<think>" if opens_thought(case.prompt) else ""
    thought, _, rest = (opened + case.completion.strip()).partition("</think>")
    match = re.fullmatch(ending, rest.strip(), re.DOTALL)
    if not match or not thought.startswith("<think>"):
        return False
    for part in (thought.removeprefix("<think>"), match[1]):
        is_blank = not any(c.isprintable() and not c.isspace() for c in part)
        if is_blank or re.search(rf"</?(?:{tags})>", part):
            return False
    return True


def verify_length(case: Case) -> Verdict:
    """DAPO's soft overlong punishment (eq. 13): 0 up to max - cache tokens, then linearly down to -1 at max."""
    if case.num_tokens is None or case.max_tokens is None:
        raise ValueError("the reward `length` needs num_tokens and max_tokens")
    cache_tokens = case.overlong_cache_tokens or max(case.max_tokens // 5, 1)
    return min(0.0, max(-1.0, (case.max_tokens - cache_tokens - case.num_tokens) / cache_tokens)), None


BUILT_IN = {  # name -> where its function is: a module is loaded only by a reward that names one of its verifiers
    "math": "grading.mathematics:verify_math",
    "gsm8k": "grading.mathematics:verify_gsm8k",
    "gsm8k_strict": "grading.mathematics:verify_gsm8k_strict",
    "ifeval": "grading.ifeval:verify_ifeval",
    "exact": "grading.verifiers:verify_exact",
    "format": "grading.verifiers:verify_format",
    "think_format": "grading.verifiers:verify_think_format",
    "length": "grading.verifiers:verify_length",
}


def load_verifier(name: str) -> Callable[[Case], Verdict]:
    return resolve_name(BUILT_IN[name])


def verifiers_of(names: Iterable[str]) -> list[str]:
    """The built-in verifiers among the terms of a reward; all of them for @COLUMN, which may name any."""
    return [*BUILT_IN] if any(name[0] == "@" for name in names) else [name for name in names if name in BUILT_IN]


def modules_of(names: Iterable[str]) -> list[str]:
    """The modules of these verifiers."""
    return sorted({BUILT_IN[name].partition(":")[0] for name in verifiers_of(names)})
