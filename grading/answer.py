"""Which part of a completion is its final answer: `read_answer` (mathematics) and `read_final_answer` (plain text).

Read `read_answer` first. An answer is in a tag or a box, is stated in words (`STATED`), or is the value of the last
sentence that has one (`_value`). In each case `_unless_retracted` reads what is said behind it. The words
are in `phrases.py`.
"""

from __future__ import annotations

import itertools
import re

from grading import phrases
from grading.spans import Span, answer_tags, boxes_of

MAX_UNMARKED = 5000  # characters at the end of a text in which an answer without tag or box is looked for
MAX_AFTER = 1000  # characters behind an answer in which it may be taken back


def visible_text(completion: str) -> str | None:
    """What stands after the last `</think>`, if there is one; None if the completion ended while it was thinking."""
    if completion.rfind("<think>") > completion.rfind("</think>"):
        return None
    return completion.rpartition("</think>")[2]


def read_final_answer(completion: str) -> str | None:
    """The final answer as plain text, None if there is none.

    It is the inside of the last `<answer>...</answer>` of the visible text; without one, the inside of the last
    `\\boxed{...}`; else all of the visible text. A tag or box that is opened last and never closed holds no answer. One
    that is taken back behind it (`_unless_retracted`) is none either, or another.
    """
    text = visible_text(completion)
    if text is None:
        return None
    _, end, inside = (answer_tags(text) or boxes_of(text) or [(0, len(text), text)])[-1]
    answer = _unless_retracted(inside, text[end:]) if inside is not None else None
    return answer.strip() or None if answer is not None else None


def read_answer(completion: str) -> str | None:
    """The final answer of a mathematical completion, None if there is none; several answers are joined by commas.

    What stands after the last `</think>` is read. If it has an `<answer>...</answer>`, only the inside of the last one.
    Of that, the answer is, in this order:
    1. the last `\\boxed{...}` or `\\fbox{...}`;
    2. what is stated last: "the answer is ...", "####", "option B is correct";
    3. the text itself if it is no prose;
    4. what the last sentence with a value ends with. (2 to 4 are looked for in the last MAX_UNMARKED characters.)

    There is no answer if a tag or box is opened last and never closed, if it is refused ("not \\boxed{7}"), or if it is
    a part of a larger formula ("-\\boxed{7}").

    "\\boxed{3} and \\boxed{4}" names two, and so does "\\boxed{3}, or maybe 4": neither equals the key 3. After
    "\\boxed{3}. No, that is wrong, it is 4." the answer is 4 (`_unless_retracted`).
    """
    text = visible_text(completion)
    tags = answer_tags(text) if text is not None else []
    if tags:
        text = _read_spans(text, tags, may_be_part=False)
    if text is None:
        return None
    text = phrases.STRUCK.sub(lambda m: "" if "boxed" in m[0] else m[0], text)
    boxes = boxes_of(text := _without_others(_without_quotations(text)))
    answer = _read_spans(text, boxes) if boxes else _read_unmarked(text)
    if answer is not None and boxes and phrases.STATED.search(answer[:MAX_AFTER]):  # \boxed{\text{The answer is } 5}
        answer = _read_unmarked(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer))
    return answer.strip() or None if answer is not None else None


def _without_quotations(text: str) -> str:
    """The text without what somebody else is quoted to have answered, if a value follows."""
    for match in reversed(list(phrases.QUOTATION.finditer(text))):
        is_answer = boxes_of(match[0]) or phrases.STATED.search(match[0])
        is_own = phrases.OWN.search(text[max(0, match.start() - 40) : match.start()])
        if is_answer and not is_own and phrases.HAS_VALUE.search(text[match.end() :]):
            text = f"{text[: match.start()]} {text[match.end() :]}"
    return text


def _without_others(text: str) -> str:
    """The text without the sentence of its last box, if that one quotes an answer as wrong."""
    start, end, inside = (boxes_of(text) or [(0, 0, None)])[-1]
    lead, behind = text[max(0, start - 200) : start], text[end : end + 200]
    lead = lead[(_sentences(lead) or [(0, "")])[-1][0] :]
    ends = [at for at, _ in _sentences(behind) if re.search(r"\w", behind[:at])]
    is_quoted = phrases.OF_OTHERS.search(lead) and phrases.OTHERS_ERROR.search(lead + behind)
    if inside is None or not is_quoted or phrases.CONFIRMED.search(behind):
        return text
    if _unless_retracted(inside, text[end:]) not in (inside, None):
        return text
    rest = f"{text[: start - len(lead)]} {text[end:][ends[0] if ends else len(behind) :]}"
    return rest if phrases.HAS_VALUE.search(rest) else text


def _read_spans(text: str, spans: list[Span], may_be_part: bool = True) -> str | None:
    """The inside of the last span; those joined to it ("and", ",") and alternatives beside it follow after commas."""
    start, end, inside = spans[-1]
    if inside is None:
        return None
    before = text[max(0, start - 80) : start]
    is_part = may_be_part and (phrases.PART_BEFORE.search(before) or phrases.PART_BEHIND.match(text[end : end + 20]))
    if phrases.REFUSED.search(before) or is_part:
        return None  # "not \\boxed{7}", "n > \\boxed{7}", "-\\boxed{7}": it is not the answer, or not all of it
    answers = [inside]
    for earlier in reversed(spans[:-1]):
        between = text[earlier[1] : min(start, earlier[1] + 200)]
        is_alternative = len(between) < 80 and phrases.HEDGE.search(between) and not phrases.CORRECTION.search(between)
        if earlier[2] is None or not (is_alternative or phrases.JOINT.fullmatch(between)):
            break
        answers.append(earlier[2])
        start = earlier[0]
    if other := phrases.OTHER.search(text[max(0, start - 80) : start]):
        answers.append(other[1])
    answer = ", ".join(dict.fromkeys(answer.strip() for answer in reversed(answers)))
    return _unless_retracted(answer, text[end:])


def _unless_retracted(answer: str, after: str) -> str | None:
    """The answer, unless what stands behind it changes it: then several ("7 or 8"), another one, or None.

    It is taken back by a sentence that says so ("No, that is wrong."): then the answer is what the rest says, if
    anything. It is replaced where the rest states an answer, concludes one ("So there are 8."), or names one in doubt
    ("Wait, 8."). A check that ends well ("Wait, let me verify: 2+3=5, yes.") changes nothing.
    """
    if not answer.strip():
        return None
    after = _normal(after[:MAX_AFTER])
    if other := phrases.ALTERNATIVE.match(after):
        told = re.split(r"[.\n](?:\s|$)|。", after[other.end() :][:120], maxsplit=1)[0]
        if phrases.HAS_VALUE.search(told) and (not re.search(r"[.。\n]", other[0]) or phrases.SAID.fullmatch(told)):
            return f"{answer}, {_read_unmarked(told) or told}"
    rest, question, before = None, "", ""
    for start, sentence in _sentences(after):
        retracted = phrases.RETRACTED if before else phrases.AT_ONCE
        taken_back = retracted.search(sentence) or _denial(answer.strip()[:40], sentence)
        is_about_it = phrases.ABOUT_TRUTH.search(question) or answer.strip() in question
        is_no = question and not is_about_it  # it answers "Is there another?"
        is_of_other = phrases.IMAGINED.search(before) and phrases.THIS.match(sentence)
        if taken_back and not (is_no or is_of_other or phrases.SUPPOSED.search(sentence[: taken_back.end()])):
            rest = after[start + taken_back.end() :].lstrip(" ,:;.!…：，。")
        question, before = sentence if phrases.QUESTION.search(sentence) else "", sentence.strip(" .$\n)")
    if rest is None:
        return _restated(answer, after)
    new = _read_unmarked(rest)
    if new and not new.startswith(answer.strip()):
        return new
    back = rf"(?:=|\b(?:but|so|is|gets?|gives?)|[得是为])[\s$]*{re.escape(answer.strip()[:40])}(?!\w|\.\d)"
    is_back = re.search(back, rest) and not re.search(phrases.WRONG, rest)
    is_confirmed = is_back or any(phrases.CONFIRMED.search(sentence) for _, sentence in _sentences(rest))
    return answer if is_confirmed else new if new != answer.strip() else None


def _denial(answer: str, sentence: str) -> re.Match[str] | None:
    """Where a sentence denies the answer by name: "7 is wrong", "It is not 7, but 8", "But 7 is not even"."""
    start = sentence.find(answer)
    if start < 0 or re.search(r"[A-Za-z0-9_.\\−-]$", sentence[:start]):
        return None
    if phrases.DENIED_BEFORE.search(sentence[:start]):
        return re.compile(re.escape(answer)).match(sentence, start)
    pattern = phrases.DENIED_IN_CONTRAST if re.match(phrases.LEAD, sentence, re.IGNORECASE) else phrases.DENIED
    return pattern.match(sentence, start + len(answer))


def _restated(answer: str, after: str) -> str:
    """The answer that a text behind one names last: states, concludes, or says in doubt about the one before."""
    current, question = answer, ""
    told = phrases.CONCLUDED  # the pattern of what stands before a new answer
    for _, sentence in _sentences(after):
        is_confirmed = phrases.CONFIRMED.search(sentence) and (not question or phrases.ABOUT_TRUTH.search(question))
        question = sentence if phrases.QUESTION.search(sentence) else ""
        if is_confirmed:
            told, current = phrases.CONCLUDED, answer if "stands" in sentence else current
            continue
        if phrases.DOUBT.search(sentence) and not re.search("(?<!re)(?<!re-)check|verif", sentence, re.IGNORECASE):
            told = phrases.ANEW
        if new := _new_answer(sentence, told):
            letters = [text for text in (current, new) if re.fullmatch(phrases.CHOICE, text)]
            current = f"{letters[0]} {new if letters[0] == current else current}" if len(letters) == 1 else new
    return current


def _new_answer(sentence: str, told: re.Pattern[str]) -> str | None:
    """The answer that a sentence behind an answer states or, behind what `told` finds, names; None if it does not."""
    stated = [*phrases.STATED.finditer(sentence), *phrases.CORRECTED.finditer(sentence)]
    named = [*told.finditer(sentence)]
    if not (stated or named) or phrases.SUPPOSED.search(sentence):
        return None
    match = (stated or named)[-1]
    said = match[match.lastgroup] if match.lastgroup else sentence[match.end() :]
    new = _stated(said) if re.match(phrases.VALUE, said) else None
    return new if new and (stated or phrases.SAID.fullmatch(new)) else None


def _normal(text: str) -> str:
    """The text without white space that says nothing, without Markdown's marks, and with all formulas in $...$."""
    text = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text))
    text = re.sub(r"(?m)^(?:=>|->)", "⇒", text)
    text = phrases.MARK.sub(lambda m: m[m.lastindex] if m.lastindex else "", text)
    display = re.compile(r"(?:\$\$|\\\[)(.*?)([.,]?\s*)(?:\$\$|\\\])", re.DOTALL)
    return display.sub(lambda m: f"${' '.join(m[1].split())}${m[2].strip()} ", text)


def _sentences(text: str) -> list[tuple[int, str]]:
    """Where each sentence starts, and the sentence."""
    stop = r"(?<!i\.e)(?<!e\.g)(?<!vs)(?<!sq)(?:(?<!^[A-J])|(?!\. [\d$\\]))[.!?…](?=[\s)\"'*]|$)[)\"'*]*\s*"
    ends = [match.end() for match in re.finditer(stop + r"|[。！？；．]|;\s|\n", text, re.MULTILINE)]
    pairs = itertools.pairwise([0, *ends, len(text)])
    return [(start, text[start:end]) for start, end in pairs if text[start:end].strip()]


def _read_unmarked(text: str) -> str | None:
    """The answer of a text without tag and box."""
    text = _normal(phrases.STRUCK.sub("", text[-MAX_UNMARKED:]))
    for match in reversed(list(phrases.STATED.finditer(text))):
        group = match.lastgroup
        behind = text[match.end() :].lstrip()
        sentence = match[group] if group else (_sentences(behind) or [(0, "")])[0][1]
        if not sentence.strip() or phrases.QUESTION.search(sentence) or (not group and phrases.NOTHING.match(sentence)):
            continue
        if "would" in match[0] and re.search(r"\bif\b[^.!?\n]*\Z", text[: match.start()], re.IGNORECASE):
            continue
        before = text[max(0, match.start() - 40) : match.start() if group else match.end()]
        stated = _stated(sentence)
        if phrases.REFUSED.search(before) or stated is None:
            if group:
                continue
            return None
        return _unless_retracted(stated, text[match.end() :] if group else behind[len(sentence) :])
    sentences = _sentences(text)
    num_words = len(re.findall(r"[A-Za-z]{2,}", phrases.NO_WORDS.sub(" ", text)))
    if len(sentences) == 1 and num_words <= 2 and not phrases.PROSE.search(text):
        has_label = phrases.CHOSEN.search(text) or (phrases.LABEL.match(text) and phrases.HAS_VALUE.search(text))
        return (has_label and _value(text)) or _right_side(_stated(text) or text, is_asked=True)
    concluded = [at for at, said in sentences if phrases.CONCLUSION.search(said) and phrases.HAS_VALUE.search(said)]
    new = [at for at, said in sentences if _numbers(said) - _numbers(text[:at])]
    for start, sentence in reversed(sentences):
        if phrases.UNSURE.search(sentence):
            return None
        is_aside = start and phrases.ASIDE.fullmatch(sentence) and not phrases.CONCLUSION.search(sentence)
        if is_aside or phrases.QUESTION.search(sentence) or phrases.REMARK.match(sentence):
            continue
        if concluded and start > concluded[-1] and _only_tells(sentence, text[: concluded[-1]]):
            continue
        if new and start > new[-1] and phrases.TOLD.search(sentence):
            is_known = _numbers(sentence) <= _numbers(text[: new[-1]]) or phrases.GIVEN.search(sentence)
            if is_known and _only_tells(sentence, text[: new[-1]]):
                continue
        if (answer := _value(sentence)) or phrases.HAS_VALUE.search(sentence):
            return _unless_retracted(answer or "", text[start + len(sentence) :])
    return None


def _only_tells(sentence: str, given: str) -> bool:
    """Whether a sentence behind a conclusion describes it or repeats what was given, and concludes nothing itself."""
    said = sentence[[0, *(m.end() for m in phrases.SAYS.finditer(sentence))][-1] :].strip(" .。!)")
    is_value = phrases.HAS_VALUE.search(said) and phrases.SAID.fullmatch(said) and not phrases.GIVEN.search(sentence)
    is_given = phrases.GIVEN.search(sentence) or _numbers(sentence) <= _numbers(given)
    is_told = phrases.TOLD.search(sentence) or is_given
    return bool(is_told and not is_value and "=" not in sentence and not phrases.CHOSEN.search(sentence))


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d.,]*\d|\d", text))


def _stated(text: str) -> str | None:
    """The answer at the beginning of what is said to be the answer; None if that is a denial."""
    if denial := re.match(r"\W*not\b(?:.*?\bbut (?:rather )?)?", text, re.IGNORECASE):
        text = text[denial.end() :] if "but" in denial[0] else ""
    text = re.sub(r"^(?:approximately|about|roughly|around|letter) ", "", _without_remark(text))
    is_sentence = phrases.PROSE.search(text) or re.match(r"[A-Za-z]+ [a-z]+ ", phrases.NO_WORDS.sub(" ", text))
    if is_sentence and not phrases.HEDGE.search(text):
        text = _value(text) or text
    text = re.sub(r"(?<!\{)[,;]?\s+or(?:\s+maybe|\s+perhaps|\s+possibly|\s+else)?\s+", ", ", text)
    text = re.sub(r"(?<=[\d$)}]),? (?:i\.e\.|that is,).*", "", text)
    text = re.sub(rf"^({phrases.CHOICE})\s+[-–—]\s+", r"\1: ", text)
    text = re.sub(rf"^({phrases.CHOICE}) and ({phrases.CHOICE})\W*$", r"\1, \2", text)
    return re.sub(r"[.。．!]+[)\]]?$", "", text).strip() or None


def _without_remark(text: str) -> str:
    """The text without "because ..." behind a value, and without what follows such a word and has no value."""
    for remark in phrases.TAIL.finditer(text):
        before = text[: remark.start()]
        has_value = phrases.HAS_VALUE.search(remark[0]) or phrases.CHOSEN.search(remark[0])
        if before.strip() and (phrases.HAS_VALUE.search(before) or not has_value):
            return before.strip()
    return text.strip()


def _value(sentence: str) -> str | None:
    """The value that a sentence ends with: a choice, a formula, what follows "is" or "=", a number; else None."""
    sentence = _without_remark(sentence).rstrip(" .。．!")
    if word := phrases.CHOSEN.search(sentence) or phrases.WORD.search(sentence):
        group = word.lastindex or 0
        return None if phrases.REFUSED.search(sentence[: word.start(group)]) else word[group]
    formulas = [(m.start(), m.end(), m[1] or m[2]) for m in phrases.FORMULA.finditer(sentence)]
    plain = phrases.FORMULA.sub(lambda m: " " * len(m[0]), sentence)
    numbers = [(m.start(), m.end(), m[0]) for m in re.finditer(phrases.NUMBER, plain)]
    telling = [f for f in formulas if re.search(r"[\d=<>\\(]", f[2])] or ([] if numbers else formulas)
    said = sentence[[0, *(m.end() for m in phrases.SAYS.finditer(plain))][-1] :].strip(" ,:：")
    said = re.sub(r"^(?:an?|the|only|exactly) ", "", said)
    is_asked = bool(phrases.EQUATION.search(sentence))
    if phrases.HAS_VALUE.search(said) and phrases.SAID.fullmatch(said) and not re.match(r"\$[^$]*=[^$]*\$.", said):
        formula = phrases.FORMULA.fullmatch(said)
        return _right_side((formula[1] or formula[2]) if formula else said, is_asked)
    if telling and not (numbers and numbers[-1][0] > telling[-1][0]):
        answer = _read_spans(sentence, telling)
        return answer and _right_side(answer, is_asked)
    if relation := phrases.RELATION.search(plain):
        return relation[0]
    side = phrases.SIDE.search(plain)
    if side and not (numbers and numbers[-1][0] >= side.end(1)):
        return (phrases.UNSOLVED.search(plain) or side)[1]
    return _read_spans(plain, numbers) if numbers else None


def _right_side(formula: str, is_asked: bool) -> str:
    """7 of 3+4 = 7 and 28 of x+y = 28; an equation that is asked for, or is not solved (2x = 28), stays whole."""
    formula = phrases.ARROW.split(formula)[-1]
    left, right = formula.partition("=")[0].strip(), formula.rpartition("=")[2].strip()
    is_number = not re.search(r"[A-Za-z,]", re.sub(r"\\[A-Za-z]+", "", right))
    is_quantity = is_number and len(set(re.findall(phrases.NAME, left))) > 1 and not left.startswith("(")
    is_worked_out = not re.search(r"[A-Za-z<>]", re.sub(phrases.OPERATION, "", left))
    return right if "=" in formula and (is_worked_out or (is_quantity and not is_asked)) else formula
