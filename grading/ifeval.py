"""IFEval: does a text follow instructions that a program can check? The benchmark's 25 kinds, as a reward and as an evaluation.

Source of the definitions: Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models" (arXiv 2311.07911), with
google-research/instruction_following_eval/instructions.py. Its "strict" accuracy: the completion as it is, a blank one follows nothing.

Two data formats are read, and end in the same checkers:
  google/IFEval         columns `instruction_id_list` and `kwargs`
  allenai/RLVR-IFeval   (Tulu 3) the answer is a JSON text: `func_name` and arguments, named as in open-instruct's if_functions.py

Tulu's instructions are checked as the benchmark checks them: keywords are found inside words, forbidden words as whole words, a letter in
either case, JSON in a code fence passes, capitals must also be English. Only where Tulu's own sentence to the model says something else
does it get its own entry, `rlvr:...`, in CHECKS:
  frequencies       "should appear N times": exactly N, of whole words (the benchmark: at least or less than, also inside words)
  quantifiers       "at least / around / at most" (the benchmark: at least, less than); around: +-10 %, sentences +-1, as open-instruct
  paragraphs        divided by `* * *` (the benchmark: `***`)
  options           one text in the row, "yes/no/maybe" or "a), b), c), d)", of which open-instruct looks for any single character
  repeat the prompt the row's prompt holds the sentence that asks to repeat it, which "the request does not include": it is taken out

Where this differs from google-research: no nltk (see `count_sentences`, `count_capital_words`), keywords and markers are literal text
rather than regular expressions, and each check takes time linear in the completion.

Read from the bottom: `follows_instructions`, `read_instructions`, the tables FUNCTIONS, CHECKS and the types of arguments. No torch here.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

Instruction = tuple[str, dict[str, object]]  # (the benchmark's instruction id, its arguments without nulls)

QUANTIFIERS = ("at least", "around", "at most")
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}  # "P. S." counts; any other marker is meant literally
DETECT_CHARACTERS = 20_000  # langdetect reads 10,000 after it has taken the links out; more text only costs time
NEVER_LAST = re.compile(
    r"[^\W\d_]|mrs?|ms|dr|prof|st|gen|lt|capt|sgt|rev|vs|fig|al|cf|approx|e\.g|i\.e"
)  # "J. Smith", "Mr. Smith"
LAST_BEFORE_CAPITAL = re.compile(
    r"etc|inc|ltd|corp?|co|jr|sr|(?:[a-z]{1,2}\.)+[a-z]"
)  # an abbreviation: "etc.", "p.m.", "Ph.D."
LIST_NUMBER = re.compile(r"\W{0,2}\d{1,3}\.\W{0,2}")
REPEAT_SENTENCE = (
    "First, repeat the request without change, then give your answer (do not say anything before repeating the request; "
    "the request you need to repeat does not include this sentence)"
)


def holds(count: int, relation: str, wanted: int, around: int | None = None) -> bool:
    """Whether `count` stands in `relation` to `wanted`. "around" reaches this far, by default 10 % and at least 1."""
    is_around = abs(count - wanted) <= (max(round(wanted * 0.1), 1) if around is None else around)
    return {"less than": count < wanted, "at least": count >= wanted, "at most": count <= wanted, "around": is_around}[
        relation
    ]


def occurrences(text: str, word: str, whole: bool = False) -> int:
    """How often the word stands in the text, in either case; `whole`: not inside a longer word. Like `\\b`, but "C++" works too."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)" if whole else re.escape(word), text, re.IGNORECASE))


def count_sentences(text: str) -> int:
    """The number of sentences. One ends at . ! ? or an ellipsis, with closing quotes, brackets or asterisks, before white space; what
    is left at the end of the text counts too. A new line alone ends none. As nltk's Punkt, which the benchmark uses, but with a few
    rules instead of a trained model. It differs: the number of a list item ("1.") and a run of marks without letter or digit are no
    sentences here; abbreviations are a short list; an initial or a title never ends a sentence.
    """
    count, is_started = 0, False
    for word, following in itertools.pairwise([*text.split(), ""]):
        if not is_started and following and LIST_NUMBER.fullmatch(word):
            continue
        is_started = is_started or any(character.isalnum() for character in word)
        if is_started and ends_sentence(word, following):
            count, is_started = count + 1, False
    return count + is_started


def ends_sentence(word: str, following: str) -> bool:
    """Whether a sentence ends with this word, the next one being `following`."""
    core = word.rstrip("\"')]}*_`”’»").lstrip("\"'([{*_`“‘«")
    next_letter = following.lstrip("\"'([{*_`“‘«")[:1]
    if core.endswith(("...", "…")):
        return not next_letter.islower()
    bare = core[:-1].lower()
    if not core.endswith(".") or NEVER_LAST.fullmatch(bare):
        return core.endswith(("!", "?"))
    return next_letter.isupper() if LAST_BEFORE_CAPITAL.fullmatch(bare) else True


def count_capital_words(text: str) -> int:
    """The number of words without a lower-case letter: "I", "U.S.", "WELL-KNOWN" (one). The benchmark takes nltk's words; here they end
    at white space and most punctuation, which counts the same but for rarities. An apostrophe divides: nltk, too, finds I in "I'm".
    """
    words = re.findall(r"[^\s,;:?!@#$%&()\[\]{}<>'\"`“”‘’«»„]+", text)
    return sum(word.isupper() for word in words)


def count_bullets(text: str) -> int:
    """The number of lines that begin with "-", or with one "*" and something after it: neither **bold** nor *** nor a bare * counts."""
    return sum(re.match(r"-|\*[^*]", line.lstrip()) is not None for line in text.split("\n"))


def count_highlights(text: str) -> int:
    """The number of *highlights* and **highlights** that are not blank, each on one line."""
    found = re.findall(r"\*([^\n*]*)\*", text) + re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(inside.strip() != "" for inside in found)


def split_at(text: str, divider: str) -> list[str]:
    """The texts between the dividers, blank ones too, but for what stands before a divider at the start or after one at the end."""
    parts = [part.strip() for part in text.split(divider)]
    return parts[parts[0] == "" : len(parts) - (parts[-1] == "")]


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs, divided by blank lines. As in the benchmark, a blank piece is not counted but keeps its place."""
    pieces = text.split("\n\n")
    if sum(piece.strip() != "" for piece in pieces) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    word = first_word_of(pieces[nth_paragraph - 1])
    return word != "" and word == first_word_of(first_word)


def first_word_of(text: str) -> str:
    """The first word in lower case: without opening quotes, up to the first . , ? ! or quote."""
    words = text.split(maxsplit=1)
    return re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0].lower() if words else ""


def is_json(text: str) -> bool:
    """JSON, with or without a code fence around it."""
    body = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):  # RecursionError: thousands of open brackets
        return False
    return True


def has_title(text: str) -> bool:
    """A line with << something >>: from the line's first << to its last >>, not blank."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def is_in_language(text: str, language: str) -> bool:
    """Whether langdetect says so. As in the benchmark, a text in which it finds no language (only digits, say) passes, and a text in
    capitals goes in as it is, though langdetect skips most of it: it takes Spanish in capitals for English, but not Russian.
    """
    from langdetect import (  # lazy: 0.3 s for its 55 languages, on the first call
        DetectorFactory,
        LangDetectException,
        detect,
    )

    DetectorFactory.seed = 0  # it samples
    try:
        return detect(text[:DETECT_CHARACTERS]) == language
    except LangDetectException:
        return True


# A type of argument: what is required, and the value as the checker takes it, or None if it is not that.
ArgumentType = tuple[str, Callable[[object], object]]


def read_count(value: object) -> int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (
        int(value) if is_number and 0 <= value <= 1e9 and value == int(value) else None
    )  # whole floats: parquet columns with nulls


def read_text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def read_texts(value: object) -> list[str] | None:
    texts = [read_text(item) for item in value] if isinstance(value, list | tuple) else []
    return texts if texts and None not in texts else None


def read_options(value: object) -> list[str] | None:
    """Tulu gives them as one text, divided by slashes, commas or "or"."""
    return read_texts(
        [part for part in re.split(r"/|,|\bor\b", value) if part.strip()] if isinstance(value, str) else value
    )


def read_prompt(value: object) -> str | None:
    """Tulu's prompt as it is to be repeated: without the sentence that asks for it."""
    text = read_text(value)
    return text and (text.replace(REPEAT_SENTENCE, "").strip() or text)


def read_language(value: object) -> str | None:
    from langdetect.detector_factory import PROFILES_DIRECTORY

    return value if value in [path.name for path in Path(PROFILES_DIRECTORY).iterdir()] else None


COUNT: ArgumentType = ("a whole number from 0 to 1e9", read_count)
PLACE: ArgumentType = ("a whole number from 1 to 1e9", lambda value: read_count(value) or None)
TEXT: ArgumentType = ("a text that is not blank", read_text)
TEXTS: ArgumentType = ("a list of texts, at least one and none blank", read_texts)
LETTER: ArgumentType = (
    "a text of one character",
    lambda value: text if (text := read_text(value)) and len(text) == 1 else None,
)
OPTIONS: ArgumentType = ("options divided by / or commas, or a list of texts", read_options)
PROMPT: ArgumentType = ("a text that is not blank", read_prompt)
LANGUAGE: ArgumentType = ("a language code of langdetect, such as en, pt or zh-cn", read_language)
RELATION: ArgumentType = (
    "'less than' or 'at least'",
    lambda value: value if value in ("less than", "at least") else None,
)
QUANTIFIER: ArgumentType = ("'at least', 'around' or 'at most'", lambda value: value if value in QUANTIFIERS else None)

# Instruction -> (its definition: the text and the arguments in the order given here -> followed or not, the type of each argument).
CHECKS: dict[str, tuple[Callable[..., bool], dict[str, ArgumentType]]] = {
    "keywords:existence": (lambda text, words: all(occurrences(text, word) for word in words), {"keywords": TEXTS}),
    "keywords:frequency": (
        lambda text, word, wanted, relation: holds(occurrences(text, word), relation, wanted),
        {"keyword": TEXT, "frequency": COUNT, "relation": RELATION},
    ),
    "keywords:forbidden_words": (
        lambda text, words: not any(occurrences(text, w, whole=True) for w in words),
        {"forbidden_words": TEXTS},
    ),
    "keywords:letter_frequency": (
        lambda text, letter, wanted, relation: holds(text.lower().count(letter.lower()), relation, wanted),
        {"letter": LETTER, "let_frequency": COUNT, "let_relation": RELATION},
    ),
    "language:response_language": (is_in_language, {"language": LANGUAGE}),
    "length_constraints:number_sentences": (
        lambda text, wanted, relation: holds(count_sentences(text), relation, wanted, around=1),
        {"num_sentences": COUNT, "relation": RELATION},
    ),
    "length_constraints:number_paragraphs": (
        lambda text, wanted: all(parts := split_at(text, "***")) and len(parts) == wanted,
        {"num_paragraphs": COUNT},
    ),
    "length_constraints:number_words": (  # a word is a run of letters, digits and underscores: "don't" is two
        lambda text, wanted, relation: holds(len(re.findall(r"\w+", text)), relation, wanted),
        {"num_words": COUNT, "relation": RELATION},
    ),
    "length_constraints:nth_paragraph_first_word": (
        nth_paragraph_first_word,
        {"num_paragraphs": COUNT, "nth_paragraph": PLACE, "first_word": TEXT},
    ),
    "detectable_content:number_placeholders": (  # of nested brackets the innermost: as many as any other way, but linear
        lambda text, wanted: len(re.findall(r"\[[^\[\]\n]*\]", text)) >= wanted,
        {"num_placeholders": COUNT},
    ),
    "detectable_content:postscript": (
        lambda text, marker: re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None,
        {"postscript_marker": TEXT},
    ),
    "detectable_format:number_bullet_lists": (
        lambda text, wanted: count_bullets(text) == wanted,
        {"num_bullets": COUNT},
    ),
    "detectable_format:constrained_response": (lambda text: any(choice in text for choice in CHOICES), {}),
    "detectable_format:number_highlighted_sections": (
        lambda text, wanted: count_highlights(text) >= wanted,
        {"num_highlights": COUNT},
    ),
    "detectable_format:multiple_sections": (  # "Section 1"
        lambda text, mark, wanted: len(re.findall(re.escape(mark) + r"\s?\d+", text)) >= wanted,
        {"section_spliter": TEXT, "num_sections": COUNT},
    ),
    "detectable_format:json_format": (is_json, {}),
    "detectable_format:title": (has_title, {}),
    "combination:two_responses": (
        lambda text: all(parts := split_at(text, "******")) and len(parts) == 2 and len(set(parts)) == 2,
        {},
    ),
    "combination:repeat_prompt": (
        lambda text, prompt: text.strip().lower().startswith(prompt.lower()),
        {"prompt_to_repeat": TEXT},
    ),
    "startend:end_checker": (  # a closing quotation mark may follow
        lambda text, phrase: text.strip().strip('"').lower().endswith(phrase.strip('"').lower()),
        {"end_phrase": TEXT},
    ),
    "startend:quotation": (lambda text: len(body := text.strip()) > 1 and body[0] == body[-1] == '"', {}),
    "change_case:capital_word_frequency": (
        lambda text, wanted, relation: holds(count_capital_words(text), relation, wanted),
        {"capital_frequency": COUNT, "capital_relation": RELATION},
    ),
    "change_case:english_capital": (lambda text: text.isupper() and is_in_language(text, "en"), {}),
    "change_case:english_lowercase": (lambda text: text.islower() and is_in_language(text, "en"), {}),
    "punctuation:no_comma": (lambda text: "," not in text, {}),
}
CHECKS |= {  # what Tulu words differently
    "rlvr:keyword_frequency": (
        lambda text, word, n: occurrences(text, word, whole=True) == n,
        {"keyword": TEXT, "frequency": COUNT},
    ),
    "rlvr:letter_frequency": (
        lambda text, letter, n: text.lower().count(letter.lower()) == n,
        {"letter": LETTER, "let_frequency": COUNT},
    ),
    "rlvr:number_sentences": (
        CHECKS["length_constraints:number_sentences"][0],
        {"num_sentences": COUNT, "relation": QUANTIFIER},
    ),
    "rlvr:number_words": (CHECKS["length_constraints:number_words"][0], {"num_words": COUNT, "relation": QUANTIFIER}),
    "rlvr:number_paragraphs": (
        lambda text, wanted: all(parts := split_at(text, "* * *")) and len(parts) == wanted,
        {"num_paragraphs": COUNT},
    ),
    "rlvr:constrained_response": (
        lambda text, options: any(occurrences(text, o, whole=True) for o in options),
        {"options": OPTIONS},
    ),
    "rlvr:repeat_prompt": (CHECKS["combination:repeat_prompt"][0], {"prompt_to_repeat": PROMPT}),
    "rlvr:capital_word_frequency": (
        CHECKS["change_case:capital_word_frequency"][0],
        {"capital_frequency": COUNT, "capital_relation": QUANTIFIER},
    ),
}

# Tulu's func_name -> (instruction, Tulu's names of its arguments, in the order of CHECKS).
FUNCTIONS: dict[str, tuple[str, list[str]]] = {
    "verify_keywords": ("keywords:existence", ["keyword_list"]),
    "verify_keyword_frequency": ("rlvr:keyword_frequency", ["word", "N"]),
    "validate_forbidden_words": ("keywords:forbidden_words", ["forbidden_words"]),
    "verify_letter_frequency": ("rlvr:letter_frequency", ["letter", "N"]),
    "validate_response_language": ("language:response_language", ["language"]),
    "verify_paragraph_count": ("rlvr:number_paragraphs", ["N"]),
    "validate_word_constraint": ("rlvr:number_words", ["N", "quantifier"]),
    "verify_sentence_constraint": ("rlvr:number_sentences", ["N", "quantifier"]),
    "validate_paragraphs": ("length_constraints:nth_paragraph_first_word", ["N", "i", "first_word"]),
    "verify_postscript": ("detectable_content:postscript", ["postscript_marker"]),
    "validate_placeholders": ("detectable_content:number_placeholders", ["N"]),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", ["N"]),
    "validate_title": ("detectable_format:title", []),
    "validate_choice": ("rlvr:constrained_response", ["options"]),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", ["N"]),
    "validate_sections": ("detectable_format:multiple_sections", ["section_splitter", "N"]),
    "validate_json_format": ("detectable_format:json_format", []),
    "validate_repeat_prompt": ("rlvr:repeat_prompt", ["original_prompt"]),
    "validate_two_responses": ("combination:two_responses", []),
    "validate_uppercase": ("change_case:english_capital", []),
    "validate_lowercase": ("change_case:english_lowercase", []),
    "validate_frequency_capital_words": ("rlvr:capital_word_frequency", ["N", "quantifier"]),
    "validate_end": ("startend:end_checker", ["end_phrase"]),
    "validate_quotation": ("startend:quotation", []),
    "validate_no_commas": ("punctuation:no_comma", []),
}


def plain(value: object) -> object:
    """The value without numpy, None for a null: from parquet and pandas come arrays, numpy scalars and NaN."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if isinstance(value, float) and math.isnan(value) else value


def from_json(value: object, name: str) -> object:
    """The value, parsed if it is a text. Raises ValueError if it is a text but not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} {value[:200]!r} is not a JSON text.") from error


def read_instruction(name: str, instruction_id: str, given: object, keys: list[str]) -> Instruction:
    """The instruction with the arguments that are given under these keys. `name`: for errors, as the row calls it."""
    types = CHECKS[instruction_id][1]
    if not isinstance(given, dict):
        raise ValueError(f"instruction {name!r} has the arguments {given!r}, which are not a dict.")
    filled = {key: value for key, value in zip(given, map(plain, given.values()), strict=True) if value is not None}
    if set(filled) != set(keys):
        raise ValueError(
            f"instruction {name!r} takes the arguments {sorted(keys)}, but the row gives {sorted(filled, key=str)}."
        )
    arguments = {}
    for key, (argument, (required, read)) in zip(keys, types.items(), strict=True):
        arguments[argument] = read(filled[key])
        if arguments[argument] is None:
            raise ValueError(f"instruction {name!r} has {key} = {filled[key]!r}, which must be {required}.")
    return instruction_id, arguments


def read_instructions(answer: str, columns: dict[str, object]) -> list[Instruction]:
    """The instructions of a row: from its columns instruction_id_list and kwargs, or, without them, from `answer`, a JSON text with
    func_name. Afterwards `follows_instructions` raises for no text.

    Raises ValueError, in one sentence, for an unknown instruction, a missing, surplus or ill-typed argument, lists of unequal length
    or no instruction at all. Contradictions, such as the 5th of 3 paragraphs, are no error: nothing follows them.
    """
    ids = plain(columns.get("instruction_id_list"))
    if ids is None:
        given = from_json(answer, "the row has no column instruction_id_list, and its answer")
        name = given.pop("func_name", None) if isinstance(given, dict) else None
        if not isinstance(name, str) or name not in FUNCTIONS:
            raise ValueError(
                f"the row has no column instruction_id_list, and its answer's func_name {name!r} is not in {list(FUNCTIONS)}."
            )
        return [read_instruction(name, FUNCTIONS[name][0], given, FUNCTIONS[name][1])]
    kwargs = from_json(plain(columns.get("kwargs")), "column kwargs")
    if not isinstance(ids, list | tuple) or not ids:
        raise ValueError(f"column instruction_id_list = {ids!r} must be a list with at least one instruction.")
    if not isinstance(kwargs, list | tuple) or len(kwargs) != len(ids):
        raise ValueError(f"column kwargs = {kwargs!r} must be a list of {len(ids)} dicts, one for each of {list(ids)}.")
    for name in ids:
        if not isinstance(name, str) or name not in CHECKS:
            raise ValueError(f"instruction {name!r} of column instruction_id_list is none of {list(CHECKS)}.")
    dicts = [{} if plain(given) is None else from_json(given, "kwargs") for given in kwargs]
    return [read_instruction(name, name, given, list(CHECKS[name][1])) for name, given in zip(ids, dicts, strict=True)]


def follows_instructions(completion: str, instructions: list[Instruction]) -> list[bool]:
    """For each instruction whether the completion follows it ("strict" accuracy of the paper). A blank completion follows none."""
    is_blank = not completion.strip()
    return [
        not is_blank and CHECKS[name][0](completion, *map(arguments.get, CHECKS[name][1]))
        for name, arguments in instructions
    ]
