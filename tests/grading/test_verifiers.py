"""What each built-in verifier says of a completion."""

import json

import pytest

from grading import Case
from grading.verifiers import BUILT_IN


def scored(verifier: str, completion: str, answer: str = "", **more: object) -> float:
    return BUILT_IN[verifier].score(Case(completion, answer, **more))[0]


# Verifiers ------------------------------------------------------------------------------------------------------------


def test_exact_compares_the_whole_final_answer():
    assert scored("exact", "<think>1+1=2</think>2", " 2 ") == 1.0
    assert scored("exact", "<think>1+1=2</think>22", "2") == 0.0
    assert scored("exact", "", "2") == 0.0


@pytest.mark.parametrize(
    ("completion", "key", "right"),
    [
        ("She pays 2 * 9 = $18 a day.\n#### 18", "9 * 2 = <<9*2=18>>18\n#### 18", 1.0),
        ("That makes 1,234 in all", "#### 1234", 1.0),
        ("The answer is \\boxed{18.00}", "18", 1.0),
        ("First 18, then 20", "#### 18", 0.0),
        ("\\boxed{0}. Check: Step 4", "#### 0", 1.0),
        ("\\boxed{\\frac{1}{2}}", "#### 2", 0.0),
        ("\\boxed{3} or \\boxed{4}", "#### 4", 1.0),
        ("so 10-5", "#### 5", 1.0),
        ("-18", "18", 0.0),
        ("none", "18", 0.0),
        ("#### 18 (since 9 - 5)", "18", 1.0),
        ("#### 18 (since 9 - 5)", "5", 0.0),
        ("#### 18 eggs left over from 20", "18", 1.0),
        ("#### 18 eggs left over from 20", "20", 0.0),
        ("#### 9*2 = 18", "18", 1.0),
        ("#### 18 = 9*2", "18", 1.0),
        ("#### 18 or 19", "18", 0.0),
        ("#### 3 dozen eggs", "3", 0.0),
        ("She has 3 eggs and sells 2.", "2", 1.0),
        ("\\boxed{18}. No, that is wrong.", "18", 1.0),
        ("\\boxed{18", "18", 0.0),
        ("\\boxed{18 \\text{ or } 19}", "18", 0.0),
        ("#### " + "1" * 5000, "18", 0.0),
        ("<think>18", "18", 0.0),
    ],
)
def test_gsm8k_compares_the_last_number(completion, key, right):
    assert scored("gsm8k", completion, key) == right


@pytest.mark.parametrize(
    ("completion", "key", "right"),
    [
        ("She makes $18 a day.\n#### 18", "9 * 2 = <<9*2=18>>18\n#### 18", 1.0),
        ("#### 7\nno, wait\n#### 18", "#### 18", 1.0),
        ("#### 18\nno, wait\n#### 7", "#### 18", 0.0),
        ("#### 12%", "#### 12", 1.0),
        ("#### 1,234", "#### 1,234", 1.0),
        ("#### -3", "-3", 1.0),
        ("The answer is 18.", "#### 18", 0.0),  # `gsm8k` takes it
        ("#### $18", "#### 18", 0.0),
        ("####18", "#### 18", 0.0),
        ("#### 18.", "#### 18", 0.0),
        ("#### 18.0", "#### 18", 0.0),
        ("#### 18" + "x" * 293, "#### 18", 1.0),
        ("#### 18" + "x" * 294, "#### 18", 0.0),  # its beginning is one of more than 300 characters
        ("", "#### 18", 0.0),
    ],
)
def test_gsm8k_strict_takes_only_the_number_after_four_hashes(completion, key, right):
    assert scored("gsm8k_strict", completion, key) == right


THINKS = "<think>a</think>\n<answer>b</answer>"


@pytest.mark.parametrize(
    ("completion", "prompt", "both", "think"),
    [
        (THINKS, "<user>?<assistant>", 1.0, 1.0),
        (THINKS, "<assistant><think>\n", 0.0, 0.0),  # the template has opened it: twice is wrong
        (THINKS.removeprefix("<think>"), "<assistant><think>\n", 1.0, 1.0),
        (THINKS.removeprefix("<think>"), "", 0.0, 0.0),
        ("<think>a</think> b", "", 0.0, 1.0),
        ("<think>a</think>", "", 0.0, 0.0),
        ("<think></think><answer>b</answer>", "", 0.0, 0.0),
        ("<think>a</think><answer></answer>", "", 0.0, 1.0),
        ("<think>a</think><answer>b</answer> c", "", 0.0, 1.0),
        ("<think>a<answer>b</answer>", "", 0.0, 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", "", 0.0, 1.0),
        ("<think>a</think><think>b</think><answer>c</answer>", "", 0.0, 0.0),
        ("<think><think>a</think></think><answer>c</answer>", "", 0.0, 0.0),
        ("<think>a</think>b</think>c", "", 0.0, 0.0),
        ("<think>a</think></think>", "", 0.0, 0.0),
        ("<think> </think><answer>b</answer>", "", 0.0, 0.0),
        ("<think>a</think><answer> \n</answer>", "", 0.0, 1.0),
        ("<think>a</think><answer>\u200b</answer>", "", 0.0, 1.0),
        ("<think>a</think>\u200b", "", 0.0, 0.0),
        ("<think>an <answer></think><answer>b</answer>", "", 0.0, 1.0),
        ("", "", 0.0, 0.0),
    ],
)
def test_format_knows_whether_the_prompt_has_opened_the_thinking(completion, prompt, both, think):
    assert scored("format", completion, prompt=prompt) == both
    assert scored("think_format", completion, prompt=prompt) == think


def test_the_soft_overlong_punishment_is_dapos():
    punishments = {1: 0.0, 16384: 0.0, 18432: -0.5, 20480: -1.0, 20481: -1.0}
    for length, punishment in punishments.items():
        limits = {"num_tokens": length, "max_tokens": 20480}
        assert scored("length", "", **limits, overlong_cache_tokens=4096) == punishment
        assert scored("length", "", **limits) == punishment, "by default the last fifth of the limit"
    with pytest.raises(ValueError, match="needs num_tokens and max_tokens"):
        scored("length", "")


def test_ifeval_reads_both_formats_and_leaves_the_thinking_aside():
    columns = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    assert scored("ifeval", "<think>a, b</think>no commas here", columns=columns) == 1.0
    assert scored("ifeval", "some, commas", columns=columns) == 0.0
    key = json.dumps({"func_name": "validate_lowercase", "N": None})
    assert scored("ifeval", "all of this is lower case", key) == 1.0
    assert scored("ifeval", "All of this is lower case", key) == 0.0


@pytest.mark.parametrize(
    ("verifier", "key", "problem"),
    [
        ("math", "\\frac{1}{2}", None),
        ("math", "\\text{Monday}", None),
        ("math", "We add both and get \\boxed{12}.", None),
        ("math", "\\text{ }", "no answer"),
        ("math", "\\frac{1}{", "cannot read"),
        ("math", "The proof goes by induction over the number of the edges and vertices of the graph.", "a sentence"),
        ("gsm8k", "#### 18", None),
        ("gsm8k", "#### many", "no number"),
        ("gsm8k_strict", "<<9*2=18>>18 eggs\n#### 1,018", None),
        ("gsm8k_strict", "#### 18 eggs", "not a number alone"),
        ("ifeval", '{"func_name": "no_such"}', "no_such"),
        ("exact", "?", None),
    ],
)
def test_an_answer_key_that_cannot_be_used_is_told(verifier, key, problem):
    found = BUILT_IN[verifier].key_problem(Case("", key))
    assert found is None if problem is None else problem in found
