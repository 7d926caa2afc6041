"""IFEval's 25 instructions in both data formats: what follows, what does not, and what is refused on reading.

The expected values are those of the benchmark's definitions (google-research/instruction_following_eval), or, for
Tulu's rows, of the sentence that Tulu's prompt puts the instruction in.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from grading.ifeval import CHECKS, FUNCTIONS, count_sentences, follows_instructions, read_instructions
from helpers.runs import lines


def benchmark_instructions(instruction, kwargs):
    """A row of the benchmark's format, with one instruction."""
    return read_instructions("", {"instruction_id_list": [instruction], "kwargs": [kwargs]})


def instructions_of(case):
    """In one of the two formats; the answer of a Tulu row holds every key, most of them null."""
    if "instruction" in case:
        return benchmark_instructions(case["instruction"], case["kwargs"])
    keys = "N quantifier end_phrase keyword_list word forbidden_words letter i first_word postscript_marker options"
    nulls = dict.fromkeys([*keys.split(), "section_splitter", "original_prompt"])
    answer = json.dumps({"func_name": case["func_name"]} | nulls | case["arguments"])
    return read_instructions(answer, {"dataset": "ifeval"})


CASES = lines(Path(__file__).with_name("ifeval_cases.jsonl"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.get("instruction") or case["func_name"])
def test_a_completion_is_checked_by_the_definition_of_its_format(case):
    assert follows_instructions(case["completion"], instructions_of(case)) == [case["follows"]]


def test_all_25_kinds_of_both_formats_are_tested_both_ways():
    benchmark = {name for name in CHECKS if not name.startswith("rlvr:")}
    for kinds, name in ((benchmark, "instruction"), (set(FUNCTIONS), "func_name")):
        tested = {(case[name], case["follows"]) for case in CASES if name in case}
        assert len(kinds) == 25 and tested == set(itertools.product(kinds, [True, False]))


@pytest.mark.parametrize(("text", "expected"), [
    ("One sentence without an end", 1), ('He said "Stop!" Then he left.', 2), ("Wait... what? Yes... Really.", 3),
    ("A heading\n\nand a line\nwithout full stops", 1), ("Mr. J. Smith paid 3.50 dollars, e.g. for tea. He left.", 2),
    ("It rained, etc. Then we left at 5 p.m. sharp.", 2), ("1. Buy milk.\n2. Go home.", 2),
    ("It was 1999. Then 42.", 2), ("**Bold end.** (Another one.) 🙂 ---", 2), ("lower case. follows here.", 2),
    ("42.", 1), ("...", 0),
])  # fmt: skip
def test_sentences_are_counted_by_the_documented_rules(text, expected):
    assert count_sentences(text) == expected


@pytest.mark.parametrize("completion", ["", " \n\t\x0b\u2028\u00a0 "])
def test_a_blank_completion_follows_nothing(completion):
    assert follows_instructions(completion, benchmark_instructions("punctuation:no_comma", {})) == [False]


def test_a_row_as_it_comes_from_the_hub_is_read():
    """Every key in every dict, nulls where it does not belong; parquet adds arrays, NaN and whole numbers as floats."""
    nulls = dict.fromkeys(["num_words", "relation", "keywords", "letter", "num_bullets", "prompt_to_repeat"])
    ids = ["length_constraints:number_words", "keywords:existence", "punctuation:no_comma"]
    kwargs = [nulls | {"num_words": 3, "relation": "at least"}, nulls | {"keywords": ["a", "b"]}, nulls]
    expected = list(zip(ids, [{"num_words": 3, "relation": "at least"}, {"keywords": ["a", "b"]}, {}], strict=True))
    words = {"num_words": np.float64(3.0), "relation": "at least"}
    pandas = [nulls | words, nulls | {"keywords": np.array(["a", "b"]), "letter": float("nan")}, None]
    for form in (kwargs, json.dumps(kwargs), [json.dumps(item) for item in kwargs], np.array(pandas, dtype=object)):
        columns = {"instruction_id_list": np.array(ids, dtype=object), "kwargs": form}
        assert read_instructions("ignored", columns) == expected
    tulu = '{"func_name": "verify_bullet_points", "N": 2.0, "quantifier": null}'
    expected = [("detectable_format:number_bullet_lists", {"num_bullets": 2})]
    assert read_instructions(tulu, {"instruction_id_list": None, "kwargs": None}) == expected


WORDS, FIRST = "length_constraints:number_words", "length_constraints:nth_paragraph_first_word"
COMMA, NTH = "punctuation:no_comma", {"num_paragraphs": 2, "nth_paragraph": 0, "first_word": "a"}
LETTERS, LEAST = {"let_frequency": 1, "let_relation": "at least"}, {"relation": "at least"}


@pytest.mark.parametrize(("instruction", "kwargs", "words"), [
    ("keywords:existance", {}, "column instruction_id_list names 'keywords:existance', which is none of"),
    (7, {}, "instruction_id_list names 7, "), (FIRST, NTH, "number from 1"),
    ("keywords:existence", {"keywords": None}, r"takes the arguments \['keywords'\], but the row gives \[\]"),
    ("keywords:existence", {"keywords": []}, r"keywords = \[\], which must be a list of texts"),
    ("keywords:existence", {"keywords": "river"}, "must be a list of texts"),
    ("keywords:existence", {"keywords": ["river", 3]}, "none blank"),
    ("keywords:existence", [1], r"has the arguments \[1\], which are not a dict"),
    ("keywords:existence", "{", "kwargs '{' is not a JSON text"),
    (COMMA, {"num_words": 3}, r"takes the arguments \[\], but the row gives \['num_words'\]"),
    (WORDS, {"num_words": 3, "relation": "exactly"}, "relation = 'exactly', which must be one of .'less"),
    (WORDS, {"num_words": 2.5} | LEAST, "num_words = 2.5, which must be a whole number"),
    *[(WORDS, {"num_words": x} | LEAST, "whole number") for x in (-1, True, "3", float("inf"))],
    ("keywords:letter_frequency", {"letter": "ab"} | LETTERS, "letter = 'ab', .* one character"),
    ("language:response_language", {"language": "Spanish"}, "language = 'Spanish', which must be one of .'af'"),
    ("startend:end_checker", {"end_phrase": " "}, "end_phrase = ' ', which must be a text that is not blank"),
])  # fmt: skip
def test_a_bad_instruction_is_refused_with_what_is_wrong(instruction, kwargs, words):
    pytest.raises(ValueError, benchmark_instructions, instruction, kwargs).match(words)


@pytest.mark.parametrize(("answer", "columns", "words"), [
    ("", {"instruction_id_list": [], "kwargs": []}, "at least one instruction"),
    ("", {"instruction_id_list": COMMA, "kwargs": [{}]}, "must be a list"),
    ("", {"instruction_id_list": [COMMA], "kwargs": []}, "a list of 1 dicts"),
    ("", {"instruction_id_list": [COMMA]}, "column kwargs = None must be a list"),
    ("", {"instruction_id_list": [COMMA], "kwargs": "[" * 100_000}, "column kwargs .* is not a JSON text"),
    ("72 apples", {}, "is not a JSON text"), ("72", {}, "func_name is None, which is none of"),
    ('{"func_name": "verify_bullets", "N": 1}', {}, "func_name is 'verify_bullets', which is none of"),
    ('{"func_name": ["a"]}', {}, r"func_name is \['a'\], which is none of"),
    ('{"func_name": "verify_bullet_points", "N": "2"}', {}, "has N = '2', which must be a whole number"),
    ('{"func_name": "validate_title", "N": 2}', {}, r"takes the arguments \[\], but the row gives \['N'\]"),
    ('{"func_name": "validate_word_constraint", "N": 2, "quantifier": "more"}', {}, "quantifier = 'more', which must"),
    ('{"func_name": "validate_choice", "options": " / "}', {}, "options = ' / ', which must be a list of texts"),
])  # fmt: skip
def test_a_row_that_cannot_be_read_is_refused_with_what_is_wrong(answer, columns, words):
    pytest.raises(ValueError, read_instructions, answer, columns).match(words)


SIZE = 2**18
REPEATED = ["(", "[", "[]", "{", "*", "* ", "***", "<", "<<", ">>", "<<a", "\x00", "\n", "\n*"]
INSIDE = [" ", "\n", "\t\n", "\u2028", "a", "A", "a.", "1", "1.", ".", '"', "'"]  # between two letters
HOSTILE = [unit * (SIZE // len(unit)) for unit in REPEATED] + [f"x{unit * (SIZE // len(unit))}x" for unit in INSIDE]
HOSTILE += ["\ud800\udfff a" * 1000, "👩‍👩‍👧 🏳️‍🌈e\u0301\u0300" * 1000, "P. P. S " * 30_000]
HOSTILE += ["[" * 50_000 + "]" * 50_000, "9" * 10_000, "a@" * 100_000, "http://a " * 30_000]


@pytest.mark.parametrize("completion", HOSTILE, ids=lambda text: repr(text[:9]))
def test_every_check_answers_yes_or_no_to_any_completion(completion):
    """A quarter of a megabyte each, which an expression with a nested repeat would read for minutes."""
    each_once = dict(itertools.chain.from_iterable(map(instructions_of, CASES)))
    assert each_once.keys() == CHECKS.keys()
    assert set(map(type, follows_instructions(completion, list(each_once.items())))) == {bool}


def test_the_same_completion_gets_the_same_answer_each_time():
    instructions = benchmark_instructions("language:response_language", {"language": "en"})
    assert len({tuple(follows_instructions("ok la de in " * 3, instructions)) for _ in range(10)}) == 1
