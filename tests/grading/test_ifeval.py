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


def follows(instruction, kwargs, completion):
    """Whether the completion follows one instruction of the benchmark's format."""
    return follows_instructions(
        completion, read_instructions("", {"instruction_id_list": [instruction], "kwargs": [kwargs]})
    )[0]


def follows_tulu(function, arguments, completion):
    """Whether the completion follows one row of Tulu's format, whose answer holds every key, most of them null."""
    keys = "N quantifier end_phrase keyword_list word forbidden_words letter i first_word postscript_marker options"
    more = ["section_splitter", "original_prompt"]
    answer = {"func_name": function} | dict.fromkeys([*keys.split(), *more]) | arguments
    return follows_instructions(completion, read_instructions(json.dumps(answer), {"dataset": "ifeval"}))[0]


CASES = [json.loads(line) for line in (Path(__file__).parent / "ifeval_cases.jsonl").read_text().splitlines()]
BENCHMARK = [case for case in CASES if "instruction" in case]
TULU = [case for case in CASES if "func_name" in case]


@pytest.mark.parametrize("case", BENCHMARK, ids=lambda case: case["instruction"])
def test_a_completion_is_checked_by_the_benchmarks_definition(case):
    assert follows(case["instruction"], case["kwargs"], case["completion"]) is case["follows"]


@pytest.mark.parametrize("case", TULU, ids=lambda case: case["func_name"])
def test_a_tulu_row_is_checked_by_its_own_wording(case):
    assert follows_tulu(case["func_name"], case["arguments"], case["completion"]) is case["follows"]


def test_all_25_kinds_of_both_formats_are_tested_both_ways():
    benchmark = {name for name in CHECKS if not name.startswith("rlvr:")}
    for kinds, cases, name in [(benchmark, BENCHMARK, "instruction"), (set(FUNCTIONS), TULU, "func_name")]:
        assert len(kinds) == 25
        assert {(case[name], case["follows"]) for case in cases} == set(itertools.product(kinds, [True, False]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One sentence without an end", 1),
        ('He said "Stop!" Then he left.', 2),
        ("A heading\n\nand a line\nwithout full stops", 1),
        ("Mr. J. Smith paid 3.50 dollars, e.g. for tea. He left.", 2),
        ("It rained, etc. Then we left at 5 p.m. sharp.", 2),
        ("Wait... what? Yes... Really.", 3),
        ("1. Buy milk.\n2. Go home.", 2),
        ("It was 1999. Then 42.", 2),
        ("**Bold end.** (Another one.) 🙂 ---", 2),
        ("lower case. follows here.", 2),
        ("42.", 1),
        ("...", 0),
    ],
)
def test_sentences_are_counted_by_the_documented_rules(text, expected):
    assert count_sentences(text) == expected


@pytest.mark.parametrize("completion", ["", " \n\t\x0b\u2028\u00a0 "])
def test_a_blank_completion_follows_nothing(completion):
    columns = {
        "instruction_id_list": ["punctuation:no_comma", "keywords:forbidden_words"],
        "kwargs": [{}, {"forbidden_words": ["a"]}],
    }
    assert follows_instructions(completion, read_instructions("", columns)) == [False, False]


def test_a_row_as_it_comes_from_the_hub_is_read():
    """Every key in every dict, nulls where it does not belong; parquet adds arrays, NaN and whole numbers as floats."""
    nulls = dict.fromkeys(["num_words", "relation", "keywords", "letter", "num_bullets", "prompt_to_repeat"])
    ids = ["length_constraints:number_words", "keywords:existence", "punctuation:no_comma"]
    kwargs = [nulls | {"num_words": 3, "relation": "at least"}, nulls | {"keywords": ["a", "b"]}, nulls]
    expected = list(zip(ids, [{"num_words": 3, "relation": "at least"}, {"keywords": ["a", "b"]}, {}], strict=True))
    pandas = [
        nulls | {"num_words": np.float64(3.0), "relation": "at least"},
        nulls | {"keywords": np.array(["a", "b"]), "letter": float("nan")},
        None,
    ]
    for form in [
        kwargs,
        json.dumps(kwargs),
        [json.dumps(item) for item in kwargs],
        pandas,
        np.array(pandas, dtype=object),
    ]:
        assert read_instructions("ignored", {"instruction_id_list": ids, "kwargs": form}) == expected
        assert (
            read_instructions("ignored", {"instruction_id_list": np.array(ids, dtype=object), "kwargs": form})
            == expected
        )
    assert follows_instructions("a, b and c", expected) == [True, True, False]
    tulu = '{"func_name": "verify_bullet_points", "N": 2.0, "quantifier": null}'
    assert read_instructions(tulu, {"instruction_id_list": None, "kwargs": None}) == [
        ("detectable_format:number_bullet_lists", {"num_bullets": 2})
    ]


@pytest.mark.parametrize(
    ("instruction", "kwargs", "words"),
    [
        ("keywords:existance", {}, "'keywords:existance' of column instruction_id_list is none of"),
        (7, {}, "instruction 7 "),
        ("keywords:existence", {}, r"takes the arguments \['keywords'\], but the row gives \[\]"),
        ("keywords:existence", {"keywords": None}, r"but the row gives \[\]"),
        ("keywords:existence", {"keywords": []}, r"keywords = \[\], which must be a list of texts"),
        ("keywords:existence", {"keywords": "river"}, "must be a list of texts"),
        ("keywords:existence", {"keywords": ["river", ""]}, "none blank"),
        ("keywords:existence", {"keywords": ["river", 3]}, "none blank"),
        ("keywords:existence", [1], r"has the arguments \[1\], which are not a dict"),
        ("keywords:existence", "{", "kwargs '{' is not a JSON text"),
        ("punctuation:no_comma", {"num_words": 3}, r"takes the arguments \[\], but the row gives \['num_words'\]"),
        (
            "length_constraints:number_words",
            {"num_words": 3, "relation": "at most"},
            "relation = 'at most', which must be 'less than' or",
        ),
        ("length_constraints:number_words", {"num_words": 3, "relation": ["at least"]}, "which must be 'less than' or"),
        (
            "length_constraints:number_words",
            {"num_words": 2.5, "relation": "at least"},
            "num_words = 2.5, which must be a whole number",
        ),
        ("length_constraints:number_words", {"num_words": -1, "relation": "at least"}, "whole number"),
        ("length_constraints:number_words", {"num_words": True, "relation": "at least"}, "whole number"),
        ("length_constraints:number_words", {"num_words": "3", "relation": "at least"}, "whole number"),
        ("length_constraints:number_words", {"num_words": float("inf"), "relation": "at least"}, "whole number"),
        ("length_constraints:number_words", {"num_words": 10**400, "relation": "at least"}, "whole number"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 0, "first_word": "a"},
            "number from 1",
        ),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "letter = 'ab', .* one character",
        ),
        ("language:response_language", {"language": "Spanish"}, "language = 'Spanish', which must be a language code"),
        ("language:response_language", {"language": ["es"]}, "which must be a language code"),
        ("startend:end_checker", {"end_phrase": " "}, "end_phrase = ' ', which must be a text that is not blank"),
    ],
)
def test_a_bad_instruction_is_refused_with_what_is_wrong(instruction, kwargs, words):
    with pytest.raises(ValueError, match=words):
        read_instructions("", {"instruction_id_list": [instruction], "kwargs": [kwargs]})


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"instruction_id_list": [], "kwargs": []}, "at least one instruction"),
        ({"instruction_id_list": "punctuation:no_comma", "kwargs": [{}]}, "must be a list"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "a list of 1 dicts"),
        ({"instruction_id_list": ["punctuation:no_comma"]}, "column kwargs = None must be a list"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[{"}, "column kwargs .* is not a JSON text"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[" * 100_000}, "is not a JSON text"),
    ],
)
def test_lists_that_do_not_fit_are_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        read_instructions("", columns)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("72 apples", "is not a JSON text"),
        ("72", "func_name None is not in"),
        ("[]", "func_name None is not in"),
        ("{}", "func_name None is not in"),
        ('{"func_name": "verify_bullets", "N": 1}', "func_name 'verify_bullets' is not in"),
        ('{"func_name": ["a"]}', r"func_name \['a'\] is not in"),
        (
            '{"func_name": "verify_bullet_points"}',
            r"'verify_bullet_points' takes the arguments \['N'\], but the row gives \[\]",
        ),
        ('{"func_name": "verify_bullet_points", "N": "2"}', "has N = '2', which must be a whole number"),
        ('{"func_name": "validate_title", "N": 2}', r"takes the arguments \[\], but the row gives \['N'\]"),
        (
            '{"func_name": "validate_word_constraint", "N": 2, "quantifier": "less than"}',
            "which must be 'at least', 'around' or 'at most'",
        ),
        ('{"func_name": "validate_choice", "options": " / "}', "which must be options"),
    ],
)
def test_a_bad_tulu_answer_is_refused_with_what_is_wrong(answer, words):
    with pytest.raises(ValueError, match=words):
        read_instructions(answer, {"messages": [], "dataset": "ifeval"})


SIZE = 2**18
HOSTILE = {
    repr(unit): unit * (SIZE // len(unit))
    for unit in ["(", "[", "[]", "{", "*", "* ", "***", "<", "<<", ">>", "<<a", "\x00", "\n", "\n*"]
}
HOSTILE |= {
    repr(unit): "x" + unit * (SIZE // len(unit)) + "x"
    for unit in [" ", "\n", "\t\n", "\u2028", "a", "A", "a.", "1", "1.", ".", '"', "'"]
}
HOSTILE |= {
    "surrogates": "\ud800\udfff a" * 1000,
    "emoji": "👩‍👩‍👧 🏳️‍🌈" * 1000,
    "combining": "e\u0301\u0300" * 1000,
    "marks": "P. P. S " * 30_000,
}
HOSTILE |= {
    "deep json": "[" * 50_000 + "]" * 50_000,
    "long number": "9" * 10_000,
    "addresses": "a@" * 100_000,
    "links": "http://a " * 30_000,
}


def every_instruction():
    """One instruction of each entry of CHECKS, by way of the cases above."""
    read = [
        read_instructions("", {"instruction_id_list": [case["instruction"]], "kwargs": [case["kwargs"]]})[0]
        for case in BENCHMARK
    ]
    read += [
        read_instructions(json.dumps({"func_name": case["func_name"]} | case["arguments"]), {})[0] for case in TULU
    ]
    assert {name for name, _ in read} == set(CHECKS)
    return list(dict(read).items())


@pytest.mark.parametrize("name", HOSTILE)
def test_no_completion_makes_a_check_raise_or_answer_anything_but_yes_or_no(name):
    """A quarter of a megabyte each, which a regular expression with a nested or unanchored repeat reads too often.

    A check that takes more than linear time makes this test run for many minutes instead of half a second.
    """
    followed = follows_instructions(HOSTILE[name], every_instruction())
    assert len(followed) == len(CHECKS)
    assert {type(value) for value in followed} == {bool}


def test_the_same_completion_gets_the_same_answer_each_time():
    unclear = "ok la de in " * 3
    instructions = read_instructions(
        "", {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "en"}]}
    )
    assert len({tuple(follows_instructions(unclear, instructions)) for _ in range(10)}) == 1
