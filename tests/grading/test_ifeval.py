"""IFEval's 25 instructions in both data formats: what follows, what does not, and what is refused on reading.

The expected values are those of the benchmark's definitions (google-research/instruction_following_eval), or, for
Tulu's rows, of the sentence that Tulu's prompt puts the instruction in.
"""

import itertools
import json

import numpy as np
import pytest

from grading.ifeval import CHECKS, FUNCTIONS, count_sentences, follows_instructions, read_instructions

AT_LEAST, LESS = "at least", "less than"
ENGLISH = "The weather is nice today and we are going for a long walk through the old town with our friends."
SPANISH = "Hoy hace muy buen tiempo y vamos a dar un largo paseo por el casco antiguo con nuestros amigos."

RUSSIAN = "Сегодня очень хорошая погода, и мы идем гулять по старому городу с нашими друзьями."


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


BENCHMARK = [
    # keywords: inside words and in either case; forbidden words as whole words; a letter in either case
    ("keywords:existence", {"keywords": ["Mona Lisa", "river"]}, "The rivers. The mona lisa.", True),
    ("keywords:existence", {"keywords": ["mona lisa", "river"]}, "The river, Mona and Lisa.", False),
    ("keywords:existence", {"keywords": ["C++ (new)"]}, "c++ (NEW)!", True),
    ("keywords:existence", {"keywords": ["a.b"]}, "axb", False),
    ("keywords:frequency", {"keyword": " rock ", "frequency": 3, "relation": AT_LEAST}, "rock ROCK rocket", True),
    ("keywords:frequency", {"keyword": "rock", "frequency": 3, "relation": LESS}, "rock ROCK rocket", False),
    ("keywords:frequency", {"keyword": "rock", "frequency": 4, "relation": LESS}, "rock ROCK rocket", True),
    ("keywords:frequency", {"keyword": "rock", "frequency": 1, "relation": LESS}, "nothing", True),
    ("keywords:forbidden_words", {"forbidden_words": ["transform", "gene"]}, "a general transformer", True),
    ("keywords:forbidden_words", {"forbidden_words": ["transform", "GENE"]}, "the gene.", False),
    ("keywords:forbidden_words", {"forbidden_words": ["c++"]}, "I like C++ a lot", False),
    (
        "keywords:letter_frequency",
        {"letter": "T", "let_frequency": 4, "let_relation": AT_LEAST},
        "There is the T. Two T's",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "t", "let_frequency": 4, "let_relation": LESS},
        "There is the T. Two T's",
        False,
    ),
    ("keywords:letter_frequency", {"letter": "t", "let_frequency": 1, "let_relation": LESS}, "none here", True),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": AT_LEAST}, "#one #two", True),
    # language: a text in which none is found passes, as in the benchmark
    ("language:response_language", {"language": "es"}, SPANISH, True),
    ("language:response_language", {"language": "es"}, ENGLISH, False),
    ("language:response_language", {"language": "es"}, "1 + 1 = 2", True),
    # lengths
    (
        "length_constraints:number_sentences",
        {"num_sentences": 4, "relation": AT_LEAST},
        "xx,x. xx,x! xx/x. x{x}x?",
        True,
    ),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": LESS}, "xx,x. xx,x! xx/x. x{x}x?", False),
    ("length_constraints:number_sentences", {"num_sentences": 5, "relation": LESS}, "xx,x. xx,x! xx/x. x{x}x?", True),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 5, "relation": AT_LEAST},
        "xx,x. xx,x! xx/x. x{x}x?",
        False,
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\none\n***\ntwo\n***", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\n***\ntwo", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 0}, "one\n***\n***\ntwo", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n\ntwo", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "one\n\ntwo", True),
    ("length_constraints:number_words", {"num_words": 4, "relation": AT_LEAST}, "I don't know", True),
    ("length_constraints:number_words", {"num_words": 4, "relation": LESS}, "I don't know", False),
    ("length_constraints:number_words", {"num_words": 5, "relation": LESS}, "I don't know - !", True),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Really"},
        'a\n\n"rEally?!" b',
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "real"},
        "a\n\nreally b",
        False,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "b"},
        "a\n\nb",
        False,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "b"},
        "a\n\nb\n\n  ",
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 3, "first_word": "b"},
        "a\n\nb",
        False,
    ),
    # content
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [address]", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 3}, "[name] of [address]", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[two\nlines]", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[[nested]]", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[[nested]]", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hello. p. s. I forgot", True),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Hello. PS: I forgot", False),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hello.\nP.P.S one more", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Hello.\nP.S. one more", False),
    ("detectable_content:postscript", {"postscript_marker": "PS:"}, "Hello.\nps: one more", True),
    # format
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}, "List (*):\n* one\n  - two\n*(no space)three", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n* two\n* three", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "**bold**\n***\nno * bullet\n* one", True),
    ("detectable_format:constrained_response", {}, "  Well. My answer is maybe. Ask again.", True),
    ("detectable_format:constrained_response", {}, "my answer is maybe.", False),
    ("detectable_format:constrained_response", {}, "My answer is no", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and * * and ****", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*two\nlines*", False),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION2 b",
        True,
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSection 2\nb",
        False,
    ),
    ("detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 2}, "Day one\nDay 2", False),
    ("detectable_format:multiple_sections", {"section_spliter": "Day", "num_sections": 1}, "Day 1 Day 2", True),
    ("detectable_format:json_format", {}, '```JSON\n{"a": [1, 2]}\n```', True),
    ("detectable_format:json_format", {}, 'Here it is: {"a": 1}', False),
    ("detectable_format:json_format", {}, "{'a': 1}", False),
    ("detectable_format:title", {}, "text\n <<Song of Joy>> text", True),
    ("detectable_format:title", {}, "<< >>", False),
    ("detectable_format:title", {}, "<<two\nlines>>", False),
    ("detectable_format:title", {}, "<<>>", False),
    ("detectable_format:title", {}, "<<x>>", True),
    # combination
    ("combination:two_responses", {}, "one\n******\ntwo", True),
    ("combination:two_responses", {}, "one\n******\n one ", False),
    ("combination:two_responses", {}, "one\n******\ntwo\n******\nthree", False),
    ("combination:two_responses", {}, "******\none\n******\ntwo\n******", True),
    ("combination:two_responses", {}, "one\n******\n******\ntwo", False),
    ("combination:two_responses", {}, "************two", False),
    ("combination:repeat_prompt", {"prompt_to_repeat": " Write a poem. "}, "\nwrite a POEM. Roses are red.", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "Sure. Write a poem. Roses are red.", False),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "Write a poem", False),
    # start and end
    ("startend:end_checker", {"end_phrase": "Any questions?"}, 'It is 7. any QUESTIONS?" \n', True),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "Any questions? No.", False),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, "Any questions?!", False),
    ("startend:quotation", {}, ' "all of it" \n', True),
    ("startend:quotation", {}, '"half" of it', False),
    ("startend:quotation", {}, '"', False),
    ("startend:quotation", {}, '""', True),
    # case
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": AT_LEAST},
        "HERE are FUlly THREE-FOLD words, I say",
        True,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 3, "capital_relation": LESS},
        "HERE are FUlly THREE-FOLD words, I say",
        False,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": LESS},
        "I'm Here. 42 - !",
        True,
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), True),
    ("change_case:english_capital", {}, ENGLISH, False),
    ("change_case:english_capital", {}, RUSSIAN.upper(), False),
    ("change_case:english_capital", {}, "1 + 1 = 2", False),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), True),
    ("change_case:english_lowercase", {}, ENGLISH, False),
    ("change_case:english_lowercase", {}, SPANISH.lower(), False),
    ("change_case:english_lowercase", {}, "1 + 1 = 2", False),
    ("punctuation:no_comma", {}, "One. Two; three", True),
    ("punctuation:no_comma", {}, "One, two", False),
    ("punctuation:no_comma", {}, "一，二", True),  # only the ASCII comma is one
]

REPEAT = (
    "First, repeat the request without change, then give your answer (do not say anything before repeating the "
    "request; the request you need to repeat does not include this sentence)"
)
TULU = [
    ("verify_keywords", {"keyword_list": ["sun", "Moon"]}, "sunny moonlight", True),
    ("verify_keywords", {"keyword_list": ["sun", "moon"]}, "sunny", False),
    ("verify_keyword_frequency", {"word": "cat", "N": 2}, "Cat, cat! Category", True),
    ("verify_keyword_frequency", {"word": "cat", "N": 2}, "cat cat cat", False),
    ("verify_keyword_frequency", {"word": "well-known", "N": 1}, "a well-known cat", True),
    ("validate_forbidden_words", {"forbidden_words": ["cat"]}, "category", True),
    ("validate_forbidden_words", {"forbidden_words": ["cat"]}, "a CAT", False),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "A cat", True),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "A black cat", False),
    ("validate_response_language", {"language": "en"}, ENGLISH, True),
    ("validate_response_language", {"language": "en"}, SPANISH, False),
    ("verify_paragraph_count", {"N": 2}, "one\n\n* * *\n\ntwo", True),
    ("verify_paragraph_count", {"N": 2}, "one\n\n***\n\ntwo", False),
    ("validate_word_constraint", {"N": 20, "quantifier": "at least"}, "word " * 20, True),
    ("validate_word_constraint", {"N": 20, "quantifier": "at least"}, "word " * 19, False),
    ("validate_word_constraint", {"N": 20, "quantifier": "at most"}, "word " * 20, True),
    ("validate_word_constraint", {"N": 20, "quantifier": "at most"}, "word " * 21, False),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "word " * 22, True),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "word " * 17, False),
    ("validate_word_constraint", {"N": 3, "quantifier": "around"}, "word " * 2, True),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at most"}, "One. Two.", True),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at most"}, "One. Two. Three.", False),
    ("verify_sentence_constraint", {"N": 30, "quantifier": "around"}, "One. " * 31, True),
    ("verify_sentence_constraint", {"N": 30, "quantifier": "around"}, "One. " * 32, False),
    ("validate_paragraphs", {"N": 2, "i": 2, "first_word": "Then"}, "First.\n\nThen, second.", True),
    ("validate_paragraphs", {"N": 2, "i": 1, "first_word": "Then"}, "First.\n\nThen, second.", False),
    ("verify_postscript", {"postscript_marker": "Before I forget:"}, "Yes.\n\nBefore I forget: no.", True),
    ("verify_postscript", {"postscript_marker": "Before I forget:"}, "Yes. I forgot: no.", False),
    ("validate_placeholders", {"N": 2}, "[a] [b]", True),
    ("validate_placeholders", {"N": 2}, "[a]", False),
    ("verify_bullet_points", {"N": 2}, "**List**\n* a\n* b", True),
    ("verify_bullet_points", {"N": 2}, "* a\n* b\n* c", False),
    ("validate_title", {}, "<<poem of joy>>\nRoses", True),
    ("validate_title", {}, "<<>>", False),
    ("validate_choice", {"options": "yes/no/maybe"}, "Maybe.", True),
    ("validate_choice", {"options": "yes/no/maybe"}, "I know nothing", False),
    ("validate_choice", {"options": "a), b), c), d)"}, "c) seven", True),
    ("validate_choice", {"options": "a), b), c), d)"}, "e) seven", False),
    ("validate_choice", {"options": "I know or I don't know"}, "I don't know", True),
    ("validate_choice", {"options": ["left", "right"]}, "copyright", False),
    ("validate_highlighted_sections", {"N": 1}, "*a*", True),
    ("validate_highlighted_sections", {"N": 1}, "**", False),
    ("validate_sections", {"N": 2, "section_splitter": "Chapter:"}, "Chapter: 1\na\nChapter: 2\nb", True),
    ("validate_sections", {"N": 2, "section_splitter": "Chapter:"}, "Chapter: 1\na", False),
    ("validate_json_format", {}, '{"a": 1}', True),
    ("validate_json_format", {}, "{a: 1}", False),
    (
        "validate_repeat_prompt",
        {"original_prompt": f"{REPEAT} Make up a poem."},
        "Make up a poem. Roses are red.",
        True,
    ),
    (
        "validate_repeat_prompt",
        {"original_prompt": f"Make up a poem.\n\n {REPEAT}"},
        "Make up a poem. Roses are red.",
        True,
    ),
    ("validate_repeat_prompt", {"original_prompt": f"{REPEAT} Make up a poem."}, "Roses are red.", False),
    ("validate_two_responses", {}, "a ****** b", True),
    ("validate_two_responses", {}, "a ****** a", False),
    ("validate_uppercase", {}, ENGLISH.upper(), True),
    ("validate_uppercase", {}, ENGLISH, False),
    ("validate_lowercase", {}, ENGLISH.lower(), True),
    ("validate_lowercase", {}, ENGLISH, False),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at most"}, "A BIG dog", True),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at most"}, "A BIG DOG", False),
    ("validate_end", {"end_phrase": "Oh no."}, "It fell. Oh no.", True),
    ("validate_end", {"end_phrase": "Oh no."}, "Oh no. It fell.", False),
    ("validate_quotation", {}, '"a"', True),
    ("validate_quotation", {}, '"a', False),
    ("validate_no_commas", {}, "a b", True),
    ("validate_no_commas", {}, "a, b", False),
]


@pytest.mark.parametrize(("instruction", "kwargs", "completion", "expected"), BENCHMARK)
def test_a_completion_is_checked_by_the_benchmarks_definition(instruction, kwargs, completion, expected):
    assert follows(instruction, kwargs, completion) is expected


@pytest.mark.parametrize(("function", "arguments", "completion", "expected"), TULU)
def test_a_tulu_row_is_checked_by_its_own_wording(function, arguments, completion, expected):
    assert follows_tulu(function, arguments, completion) is expected


def test_all_25_kinds_of_both_formats_are_tested_both_ways():
    for kinds, cases in [
        ({name for name in CHECKS if not name.startswith("rlvr:")}, BENCHMARK),
        (set(FUNCTIONS), TULU),
    ]:
        assert len(kinds) == 25
        assert {(name, expected) for name, _, _, expected in cases} == set(itertools.product(kinds, [True, False]))


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


MEGABYTE = 2**20
HOSTILE = {
    repr(unit): unit * (MEGABYTE // len(unit))
    for unit in ["(", "[", "[]", "{", "*", "* ", "***", "<", "<<", ">>", "<<a", "\x00", "\n", "\n*"]
}
HOSTILE |= {
    repr(unit): "x" + unit * (MEGABYTE // len(unit)) + "x"
    for unit in [" ", "\n", "\t\n", "\u2028", "a", "A", "a.", "1", "1.", ".", '"', "'"]
}
HOSTILE |= {
    "surrogates": "\ud800\udfff a" * 1000,
    "emoji": "👩‍👩‍👧 🏳️‍🌈" * 1000,
    "combining": "e\u0301\u0300" * 1000,
    "marks": "P. P. S " * 100_000,
}
HOSTILE |= {
    "deep json": "[" * 50_000 + "]" * 50_000,
    "long number": "9" * 10_000,
    "addresses": "a@" * 100_000,
    "links": "http://a " * 100_000,
}


def every_instruction():
    """One instruction of each entry of CHECKS, by way of the cases above."""
    read = [
        read_instructions("", {"instruction_id_list": [name], "kwargs": [kwargs]})[0]
        for name, kwargs, _, _ in BENCHMARK
    ]
    read += [read_instructions(json.dumps({"func_name": name} | arguments), {})[0] for name, arguments, _, _ in TULU]
    assert {name for name, _ in read} == set(CHECKS)
    return list(dict(read).items())


@pytest.mark.parametrize("name", HOSTILE)
def test_no_completion_makes_a_check_raise_or_answer_anything_but_yes_or_no(name):
    """A megabyte each, of what a regular expression with a nested or unanchored repeat would read millions of times.

    A check that takes more than linear time makes this test run for hours instead of seconds.
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
