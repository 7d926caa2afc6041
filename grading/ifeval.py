"""IFEval: does a text follow instructions that a program can check? The benchmark's 25 kinds, as reward and evaluation.

Source: Zhou et al. 2023 (arXiv 2311.07911),
google-research/instruction_following_eval/instructions.py; its "strict" accuracy: the completion
counts as it is, and a blank one follows nothing. Two data formats end in the same checkers:
  google/IFEval         columns `instruction_id_list` and `kwargs`
  allenai/RLVR-IFeval   (Tulu 3) the answer is a JSON text: `func_name`, and arguments named as in open-instruct

Tulu's instructions are checked as the benchmark checks them: keywords are found inside words,
forbidden words as whole words, a letter in either case, JSON in a code fence passes, capitals must
also be English. Where Tulu's own sentence to the model says something else, CHECKS has an entry
`rlvr:...` for it: exact frequencies of whole words; "around" (10 % or 1 sentence, as
open-instruct); paragraphs divided by `* * *`; options as one text, "yes/no/maybe" or "a), b), c)";
a prompt to repeat that holds the sentence that asks for it.

Deviations from google-research: no nltk (see `count_sentences`, `count_capital_words`), keywords
and markers are literal text and no regular expressions, and each check takes time linear in the
completion. The tables are at the end: CHECKS and FUNCTIONS.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

from grading import Case, Grade
from grading.answer import visible_text

Instruction = tuple[str, dict[str, object]]  # (the benchmark's instruction id, its arguments without nulls)

DETECT_CHARACTERS = 20_000  # langdetect reads 10,000 after it has taken the links out; more text only costs time
# A sentence does not end here: "J. Smith", "Mr. Smith"
NEVER_LAST = r"[^\W\d_]|mrs?|ms|dr|prof|st|gen|lt|capt|sgt|rev|vs|fig|al|cf|approx|e\.g|i\.e"
LAST_BEFORE_CAPITAL = r"etc|inc|ltd|corp?|co|jr|sr|(?:[a-z]{1,2}\.)+[a-z]"  # "etc.", "p.m.", "Ph.D."
LIST_NUMBER = r"\W{0,2}\d{1,3}\.\W{0,2}"
RELATIONS = ["less than", "at least", "at most", "around"]  # the first two in the benchmark, the last three in Tulu
REPEAT_SENTENCE = (
    "First, repeat the request without change, then give your answer (do not say anything before repeating the "
    "request; the request you need to repeat does not include this sentence)"
)


def verify_ifeval(case: Case) -> Grade:
    """1.0 if the completion, without its thinking, follows all instructions of its row; else 0.0."""
    instructions = read_instructions(case.answer, case.columns)
    text = visible_text(case.completion, case.prompt) or ""
    return Grade(float(all(follows_instructions(text, instructions))))


def follows_instructions(completion: str, instructions: list[Instruction]) -> list[bool]:
    """For each instruction whether the completion follows it. A blank completion follows none."""
    is_blank = not completion.strip()
    return [not is_blank and CHECKS[name](completion, **arguments) for name, arguments in instructions]


def read_instructions(answer: str, columns: dict[str, object]) -> list[Instruction]:
    """The instructions of a row: from its columns instruction_id_list and kwargs, or, without them, from `answer`, a
    JSON text with func_name. Afterwards `follows_instructions` raises for no text.

    Raises ValueError, in one sentence, for an unknown instruction, a missing, surplus or ill-typed argument, lists of
    unequal length or no instruction at all. Contradictions, such as the 5th of 3 paragraphs, are no error: nothing
    follows them.
    """
    names = python_value(columns.get("instruction_id_list"))
    if names is None:
        where = "the row has no column instruction_id_list, and its answer"
        given = from_json(answer, where)
        name = given.pop("func_name", None) if isinstance(given, dict) else None
        return [read_instruction(f"{where}'s func_name is", name, given, FUNCTIONS)]
    rows = from_json(python_value(columns.get("kwargs")), "column kwargs")
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"column instruction_id_list = {names!r} must be a list with at least one instruction.")
    if not isinstance(rows, list | tuple) or len(rows) != len(names):
        raise ValueError(f"column kwargs = {rows!r} must be a list of {len(names)} dicts, one for each of {names}.")
    return [
        read_instruction("column instruction_id_list names", name, given, INSTRUCTIONS)
        for name, given in zip(names, rows, strict=True)
    ]


def read_instruction(where: str, name: object, given: object, known: dict[str, list[str]]) -> Instruction:
    """The instruction of this name in the table, with the arguments that the row gives."""
    if name not in [*known]:  # a list may be asked for anything, a dict only for what has a hash
        raise ValueError(f"{where} {name!r}, which is none of {[*known]}.")
    instruction, *keys = known[name]
    given = {} if python_value(given) is None else from_json(given, "kwargs")
    if not isinstance(given, dict):
        raise ValueError(f"instruction {name!r} has the arguments {given!r}, which are not a dict.")
    filled = {key: python_value(value) for key, value in given.items() if python_value(value) is not None}
    if set(filled) != set(keys):
        has = sorted(filled, key=str)
        raise ValueError(f"instruction {name!r} takes the arguments {sorted(keys)}, but the row gives {has}.")
    arguments = {}
    for key, parameter in zip(keys, INSTRUCTIONS[instruction][1:], strict=True):
        required, arguments[parameter] = read_argument(parameter, filled[key])
        if arguments[parameter] is None:
            raise ValueError(f"instruction {name!r} has {key} = {filled[key]!r}, which must be {required}.")
    return instruction, arguments


def stripped(value: object) -> str:
    """The text without white space around it; "" for what is no text."""
    return value.strip() if isinstance(value, str) else ""


def read_argument(parameter: str, value: object) -> tuple[str, object]:
    """The requirement on a parameter of a checker, and the value as it is taken; None: it is none."""
    text = stripped(value)
    if parameter.endswith(("relation", "language")):
        known = RELATIONS
        if parameter == "language":
            from langdetect.detector_factory import PROFILES_DIRECTORY

            known = sorted(path.name for path in Path(PROFILES_DIRECTORY).iterdir())  # en, pt, zh-cn
        return f"one of {known}", value if value in known else None
    if re.match("num_|nth_|.*frequency", parameter):
        first = int(parameter == "nth_paragraph")
        # Whole floats pass: they come from parquet columns with nulls. True, which is an int, does not.
        is_whole = type(value) in (int, float) and first <= value <= 1e9 and value == int(value)
        return f"a whole number from {first} to 1e9", int(value) if is_whole else None
    if parameter in ("keywords", "forbidden_words", "options"):
        if parameter == "options" and text:  # Tulu gives them as one text
            value = [part for part in re.split(r"/|,|\bor\b", text) if part.strip()]
        texts = [stripped(each) for each in value] if isinstance(value, list | tuple) else []
        return "a list of texts, at least one and none blank", texts if texts and all(texts) else None
    if parameter == "letter":
        return "a text of one character", text if len(text) == 1 else None
    return "a text that is not blank", text or None


def python_value(value: object) -> object:
    """The value without numpy, None for a null: parquet and pandas give arrays, numpy scalars and NaN."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value if value == value else None  # nan equals nothing


def from_json(value: object, name: str) -> object:
    """The value, parsed if it is a text. Raises ValueError if it is a text but not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} {value[:200]!r} is not a JSON text.") from error


def holds(count: int, relation: str, wanted: int, around: int = 0) -> bool:
    """Whether `count` stands in `relation` to `wanted`. "around" reaches this far, by default 10 % and at least 1."""
    return {
        "less than": count < wanted,
        "at least": count >= wanted,
        "at most": count <= wanted,
        "around": abs(count - wanted) <= (around or max(round(wanted * 0.1), 1)),
    }[relation]


def occurrences(text: str, word: str, whole: bool = False) -> int:
    """The count of the word in the text, in either case; `whole`: not inside a longer word. "C++" works, too."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)" if whole else re.escape(word), text, re.IGNORECASE))


def has_any(text: str, words: list[str]) -> bool:
    """True if one of the words stands in the text as a whole word."""
    return any(occurrences(text, word, whole=True) for word in words)


def count_sentences(text: str) -> int:
    """The number of sentences.

    One ends at . ! ? or an ellipsis, with closing quotes, brackets or asterisks, before white space; what is left at
    the end of the text counts, too. A new line alone ends none. This follows nltk's Punkt, which the benchmark uses,
    with a few rules instead of a trained model. It differs: the number of a list item ("1.") and a run of marks without
    letter or digit are no sentences here; abbreviations are a short list; an initial or a title never ends a sentence.
    """
    count, is_started = 0, False
    for word, following in itertools.pairwise([*text.split(), ""]):
        if not is_started and following and re.fullmatch(LIST_NUMBER, word):
            continue
        is_started = is_started or any(map(str.isalnum, word))
        if is_started and ends_sentence(word, following):
            count += 1
            is_started = False
    return count + is_started


def ends_sentence(word: str, following: str) -> bool:
    """Whether a sentence ends with this word, when the next word is `following`."""
    core = word.rstrip("\"')]}*_`”’»").lstrip("\"'([{*_`“‘«")
    next_letter = following.lstrip("\"'([{*_`“‘«")[:1]
    if core.endswith(("...", "…")):
        return not next_letter.islower()
    bare = core[:-1].lower()
    if not core.endswith(".") or re.fullmatch(NEVER_LAST, bare):
        return core.endswith(("!", "?"))
    return next_letter.isupper() if re.fullmatch(LAST_BEFORE_CAPITAL, bare) else True


def count_capital_words(text: str) -> int:
    """The number of words without a lower-case letter: "I", "U.S.", "WELL-KNOWN" (one).

    The benchmark takes nltk's words; here they end at white space and most punctuation, which counts the same but for
    rarities. An apostrophe divides: nltk, too, finds I in "I'm".
    """
    words = re.findall(r"[^\s,;:?!@#$%&()\[\]{}<>'\"`“”‘’«»„]+", text)
    return sum(map(str.isupper, words))


def has_highlights(text: str, num_highlights: int) -> bool:
    """At least so many *highlights* and **highlights** that are not blank, each on one line."""
    texts = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return len([*filter(str.strip, texts)]) >= num_highlights


def split_at(text: str, divider: str) -> list[str]:
    """The texts between the dividers, of which one may also stand at the start and one at the end."""
    parts = [part.strip() for part in text.split(divider)]
    return parts[parts[0] == "" : len(parts) - (parts[-1] == "")]


def has_parts(text: str, divider: str, count: int) -> bool:
    """True if the dividers make so many parts of the text, none of them blank."""
    parts = split_at(text, divider)
    return all(parts) and len(parts) == count


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs, divided by blank lines, and the first word of one of them.

    As in the benchmark, a blank piece is not counted but keeps its place.
    """
    pieces = text.split("\n\n")
    if len([*filter(str.strip, pieces)]) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = first_word_of(pieces[nth_paragraph - 1])
    return word == first_word_of(first_word) != ""


def first_word_of(text: str) -> str:
    """The first word in lower case: without opening quotes, up to the first . , ? ! or quote."""
    return re.match(r"\s*'*\"*([^\s.,?!'\"]*)", text)[1].lower()


def is_json(text: str) -> bool:
    """JSON, with or without a code fence around it."""
    try:
        json.loads(re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip()).strip())
    except (ValueError, RecursionError):  # RecursionError: thousands of open brackets
        return False
    return True


def has_title(text: str) -> bool:
    """A line with << something >>: from the line's first << to its last >>, not blank."""
    titles = (line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n"))
    return any(title.lstrip("<").rstrip(">").strip() for title in titles)


def is_in_language(text: str, language: str) -> bool:
    """Whether langdetect says so. As in the benchmark, a text without a language, for example only digits, passes.

    A text in capitals goes in as it is, though langdetect skips most of it: it takes Spanish in capitals for English.
    """
    from langdetect import DetectorFactory, LangDetectException, detect  # here: its 55 languages take 0.3 s

    DetectorFactory.seed = 0  # it samples
    try:
        return detect(text[:DETECT_CHARACTERS]) == language
    except LangDetectException:
        return True


def starts_with(text: str, prompt: str) -> bool:
    return text.strip().lower().startswith(prompt.lower())


# Instruction -> its definition: text and arguments -> followed or not.
# fmt: off
CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(occurrences(text, word) for word in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation:
        holds(occurrences(text, keyword), relation, frequency),
    "keywords:forbidden_words": lambda text, forbidden_words: not has_any(text, forbidden_words),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation:
        holds(occurrences(text, letter), let_relation, let_frequency),
    "language:response_language": is_in_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation:
        holds(count_sentences(text), relation, num_sentences),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: has_parts(text, "***", num_paragraphs),
    "length_constraints:number_words": lambda text, num_words, relation:  # "don't" is two
        holds(len(re.findall(r"\w+", text)), relation, num_words),
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda text, num_placeholders:  # the innermost of nested ones: linear
        len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders,
    "detectable_content:postscript": lambda text, postscript_marker:  # "P. S." counts for "P.S."
        re.search(re.escape(postscript_marker.lower()).replace(r"\.", r"\.\s?"), text.lower()) is not None,
    "detectable_format:number_bullet_lists": lambda text, num_bullets:  # no **bold**, *** or bare *
        len(re.findall(r"^[^\S\n]*(?:-|\*[^*\n])", text, re.MULTILINE)) == num_bullets,
    "detectable_format:constrained_response": lambda text:
        re.search(r"My answer is (?:yes|no|maybe)\.", text) is not None,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections:
        len(re.findall(re.escape(section_spliter) + r"\s?\d+", text)) >= num_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": lambda text:
        has_parts(text, "******", 2) and len(set(split_at(text, "******"))) == 2,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: starts_with(text, prompt_to_repeat),
    "startend:end_checker": lambda text, end_phrase:  # a closing quotation mark may follow
        text.strip().strip('"').lower().endswith(end_phrase.strip('"').lower()),
    "startend:quotation": lambda text: re.fullmatch(r'\s*".*"\s*', text, re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation:
        holds(count_capital_words(text), capital_relation, capital_frequency),
    "change_case:english_capital": lambda text: text.isupper() and is_in_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and is_in_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
    # Instructions that Tulu words differently
    "rlvr:keyword_frequency": lambda text, keyword, frequency: occurrences(text, keyword, whole=True) == frequency,
    "rlvr:letter_frequency": lambda text, letter, let_frequency: occurrences(text, letter) == let_frequency,
    "rlvr:number_sentences": lambda text, num_sentences, relation:
        holds(count_sentences(text), relation, num_sentences, around=1),
    "rlvr:number_paragraphs": lambda text, num_paragraphs: has_parts(text, "* * *", num_paragraphs),
    "rlvr:constrained_response": lambda text, options: has_any(text, options),
    "rlvr:repeat_prompt": lambda text, prompt: starts_with(text, prompt.replace(REPEAT_SENTENCE, "").strip() or prompt),
}
# fmt: on
# Instruction -> itself and the parameters of its checker, which follow the text
INSTRUCTIONS = {name: [name, *[*inspect.signature(check).parameters][1:]] for name, check in CHECKS.items()}

# Tulu's func_name -> instruction, and Tulu's names of arguments in the order of the checker's.
FUNCTIONS = {name: rest for name, *rest in map(str.split, """
    verify_keywords keywords:existence keyword_list
    verify_keyword_frequency rlvr:keyword_frequency word N
    validate_forbidden_words keywords:forbidden_words forbidden_words
    verify_letter_frequency rlvr:letter_frequency letter N
    validate_response_language language:response_language language
    verify_paragraph_count rlvr:number_paragraphs N
    validate_word_constraint length_constraints:number_words N quantifier
    verify_sentence_constraint rlvr:number_sentences N quantifier
    validate_paragraphs length_constraints:nth_paragraph_first_word N i first_word
    verify_postscript detectable_content:postscript postscript_marker
    validate_placeholders detectable_content:number_placeholders N
    verify_bullet_points detectable_format:number_bullet_lists N
    validate_title detectable_format:title
    validate_choice rlvr:constrained_response options
    validate_highlighted_sections detectable_format:number_highlighted_sections N
    validate_sections detectable_format:multiple_sections section_splitter N
    validate_json_format detectable_format:json_format
    validate_repeat_prompt rlvr:repeat_prompt original_prompt
    validate_two_responses combination:two_responses
    validate_uppercase change_case:english_capital
    validate_lowercase change_case:english_lowercase
    validate_frequency_capital_words change_case:capital_word_frequency N quantifier
    validate_end startend:end_checker end_phrase
    validate_quotation startend:quotation
    validate_no_commas punctuation:no_comma
""".strip().splitlines())}  # fmt: skip
