"""The built-in verifiers: each grades one completion. A new one is a function and an entry in `BUILT_IN`.

`exact` compares the final answer with the row's; `forms.py`, `mathematics.py` and `ifeval.py` have the others. They
raise ValueError, in a few words, for a row whose answer key cannot be used. `score.py` adds them up, in processes that
can be killed: nothing here minds the time.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from pkgutil import resolve_name

from grading import Case, Grade
from grading.answer import plain, read_answer

NARROW = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)}  # full-width ASCII, and other minus signs
NARROW |= dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\ufe63"), "-")


def verify_exact(case: Case) -> Grade:
    """1.0 if the final answer, or without a mark the whole visible text, is the row's, emphasized or not; else 0.0."""
    if not (key := uniform(case.answer)):
        raise ValueError("the answer is blank")
    answer = uniform(read_answer(shown(case.completion), case.prompt, unmarked="all") or "")
    return Grade(float(key in (answer, plain(answer))), answer=answer or None)


def shown(text: str) -> str:
    """The text in NFC, without the format characters (Cf), which nobody sees."""
    return unicodedata.normalize("NFC", "".join(c for c in text if unicodedata.category(c) != "Cf"))


def uniform(text: str) -> str:
    """The text as `shown`, with one minus and narrow ASCII: what looks the same is the same."""
    return shown(text).translate(NARROW).strip()


BUILT_IN = {  # name -> where its function is: a module is loaded only by a reward that names one of its verifiers
    "math": "grading.mathematics:verify_math",
    "gsm8k": "grading.mathematics:verify_gsm8k",
    "gsm8k_strict": "grading.mathematics:verify_gsm8k_strict",
    "ifeval": "grading.ifeval:verify_ifeval",
    "exact": "grading.verifiers:verify_exact",
    "format": "grading.forms:verify_format",
    "think_format": "grading.forms:verify_think_format",
    "length": "grading.forms:verify_length",
}


def load_verifier(name: str) -> Callable[[Case], Grade]:
    return resolve_name(BUILT_IN[name])


def verifiers_of(names: Iterable[str]) -> list[str]:
    """The built-in verifiers among the terms of a reward; all of them for @COLUMN, which may name any."""
    return [*BUILT_IN] if any(name[0] == "@" for name in names) else [name for name in names if name in BUILT_IN]


def modules_of(names: Iterable[str]) -> list[str]:
    """The modules of these verifiers."""
    return sorted({BUILT_IN[name].partition(":")[0] for name in verifiers_of(names)})
