"""What a completion's final answer is, and the rewards that read it."""

import pytest

from reward import exact, grade, load_reward, read_final_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("42", "42"),
        (" 42\n", "42"),
        ("<think>6*7=41</think>42", "42"),
        ("<think>a</think>1<think>b</think>2", "2"),
        ("the template opened it</think> 7", "7"),
        ("<think>never closed 42", None),
        ("<think>a</think>1<think>again", None),
        ("<think>\\boxed{1}</think><answer>2</answer>", "2"),
        ("<answer>1</answer> no, <answer> 2 </answer>", "2"),
        ("<answer>1", None),
        ("so \\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{1", None),
        ("", None),
        ("<think></think>", None),
    ],
)
def test_the_final_answer_is_read_by_the_documented_rules(completion, answer):
    assert read_final_answer(completion) == answer


def test_exact_compares_the_whole_final_answer():
    assert exact("<think>1+1=2</think>2", " 2 ", {}) == 1.0
    assert exact("<think>1+1=2</think>22", "2", {}) == 0.0
    assert exact("", "2", {}) == 0.0


def test_a_reward_of_ones_own_is_loaded_from_a_file(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text("def score(completion, answer, columns):\n    return float(answer in completion) + columns['bonus']\n")
    assert grade(load_reward(f"{file}:score"), "it is 5", "5", {"bonus": 0.5}) == 1.5


@pytest.mark.parametrize(
    ("spec", "words"),
    [("exakt", "exact"), ("missing.py:score", "does not exist"), ("{file}:absent", "it has score"), ("{file}", "my_reward.py:function")],
)
def test_a_reward_that_cannot_be_loaded_says_why(spec, words, tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text("def score(completion, answer, columns):\n    return 1.0\n")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load_reward(spec.format(file=file))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_a_reward_that_returns_no_finite_number_is_an_error_that_names_the_row(value):
    with pytest.raises(ValueError, match="of row {'problem': 'p17'}"):
        grade(lambda completion, answer, columns: value, "text", "1", {"problem": "p17"})
