"""Answer keys that are lists: what they say, which completions meet them, which of them cannot be met."""

import pytest

from grading import Case, key_text
from grading.score import Handler

ANY = '["7", "0.5"]'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("7", "7"),
        (7, "7"),
        (0.5, "0.5"),
        (["7"], "7"),
        ([7], "7"),
        (["7", None], "7"),
        ([float("nan"), "7"], "7"),
        (["7", " ", "7"], "7"),
        ('["7"]', "7"),
        ('["7", null]', "7"),
        ("[7]", "7"),
        ("['7' '0.5']", ANY),  # NumPy's print
        ("['7'\n '0.5']", ANY),
        (["7", "0.5"], ANY),
        ([7, 0.5], ANY),
        ("['7', '0.5']", ANY),
        ("['\\frac12']", "\\frac12"),
        (r"['\\frac12']", r"\frac12"),
        (r'["\sqrt{2}"]', r"\sqrt{2}"),
        (r'["\\sqrt{2}"]', r"\sqrt{2}"),
        (r'["x = 1\ny = 2"]', "x = 1\ny = 2"),
        (r'["no\nnot so"]', "no\nnot so"),
        (r'["\nabla f"]', r"\nabla f"),
        (r'["x \neq \nu"]', r"x \neq \nu"),
        ("[1, 2]", "[1, 2]"),  # an interval
        ("[x, y]", "[x, y]"),
        ('["7"', '["7"'),  # no list
        ({"a": 1}, '{"a": 1}'),
        ([{"a": 1}], '[{"a": 1}]'),  # instructions, say
        ([], None),
        ([None], None),
        ([""], None),
        ("['']", None),
    ],
)
def test_a_key_that_is_a_list_says_the_answers_in_it(value, text):
    if text is None:
        with pytest.raises(ValueError, match="a list without an answer"):
            key_text(value)
    else:
        assert key_text(value) == text


@pytest.mark.parametrize(
    ("verifier", "several", "key", "completion", "reward"),
    [
        ("math", "any", ["7", "0.5"], "\\boxed{1/2}", 1.0),
        ("math", "any", ["7", "0.5"], "\\boxed{9}", 0.0),
        ("exact", "any", ["7", "0.5"], "<answer>0.5</answer>", 1.0),
        ("exact", "any", ["7", "0.5"], "<answer>1/2</answer>", 0.0),
        ("gsm8k", "any", ["7", "8"], "it is 8", 1.0),
        ("gsm8k", "any", ["7", "8"], "it is 78", 0.0),
        ("gsm8k_strict", "any", ["#### 7", "8"], "#### 8", 1.0),
        ("gsm8k_strict", "any", ["#### 7", "8"], "#### 78", 0.0),
        ("math", "any", ["\\frac{1}{", "7"], "\\boxed{7}", 1.0),  # one that can be read is enough
        ("math", "all", ["7", "-7"], "\\boxed{-7, 7}", 1.0),
        ("math", "all", ["7", "-7"], "\\boxed{7}", 0.0),
        ("math", "all", ["7"], "\\boxed{7}", 1.0),
        ("exact", "all", ["7", "8"], "<answer>7, 8</answer>", 1.0),
        ("exact", "all", ["7", "8"], "<answer>8, 7</answer>", 0.0),
    ],
)
def test_any_or_all_of_several_answers_are_required(verifier, several, key, completion, reward):
    handle, key = Handler(verifier, None), key_text(key, several)
    assert handle(("check", Case("", key))) is None
    assert handle(("grade", Case(completion, key))).reward == reward


@pytest.mark.parametrize(
    ("verifier", "key", "words"),
    [
        *((verifier, [["7"]], "an object or a nested list") for verifier in ("math", "gsm8k", "gsm8k_strict")),
        *((verifier, [True], "an object or a nested list") for verifier in ("math", "gsm8k", "gsm8k_strict")),
        *((verifier, {"a": 1}, "an object or a nested list") for verifier in ("math", "gsm8k", "gsm8k_strict")),
        *((verifier, [{"a": 1}], "an object or a nested list") for verifier in ("math", "gsm8k", "gsm8k_strict")),
        ("math", ["7", True], "an object or a nested list"),
        ("math", " ", "no answer in the key"),
        ("math", ["\\frac{1}{", "\\frac{2}{"], "cannot read"),
        ("gsm8k", " ", "no number in the answer"),
        ("gsm8k", ["7", "8"], "several numbers in the answer '7, 8', but one is read; give --list_answers any"),
        ("gsm8k", ["#### 7", "#### 1,000"], "give --list_answers any"),
        ("gsm8k_strict", ["7", "-8.5"], "give --list_answers any"),
        ("gsm8k_strict", " ", "no number in the answer"),
        ("exact", " ", "the answer is blank"),
        *((verifier, [[1, 2], [3, 4]], None) for verifier in ("math", "exact")),  # can be given in this notation
        *((verifier, "[1, 2]", None) for verifier in ("math", "exact")),
        ("exact", {"a": 1}, None),
        ("exact", "[True]", None),
        ("gsm8k", "It is 1,000. #### 1,000", None),
        ("ifeval", {"func_name": "validate_no_commas"}, None),
        *((verifier, "", None) for verifier in ("format", "think_format", "length")),  # which read no key
    ],
)
def test_a_key_that_no_completion_can_meet_is_reported(verifier, key, words):
    problem = Handler(verifier, None)(("check", Case("", key_text(key, "all"))))
    assert problem is None if words is None else words in problem
