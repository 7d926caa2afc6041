"""Reward functions of one's own: which are called, with what, and what their results become."""

from pathlib import Path

import pytest

from grading.score import Handler, Needs
from grading.verifiers import Case

ROW = {
    "solution": "4",
    "data_source": "lighteval/MATH",
    "reward_model": {"ground_truth": ["4"]},
    "extra_info": {"i": 7},
}


def handler(tmp_path: Path, code: str, name: str = "score", more: str = "") -> Handler:
    """Of the function `name` in a file with this code."""
    (tmp_path / "my_reward.py").write_text(code)
    return Handler(f"{tmp_path}/my_reward.py:{name}{more}", None)


def case(completion: str, **others: object) -> Case:
    return Case(completion, "4", ROW, "2+2=", tuple(range(len(completion))), len(completion), 8, **others)


def test_parameters_are_filled_by_their_names_in_any_order_and_only_those_that_are_there(tmp_path):
    code = "def score(answer, completion, *, max_tokens, is_truncated=None, scale=10):\n"
    code += "    return scale * (completion == answer) + max_tokens + is_truncated\n"
    assert handler(tmp_path, code)(("grade", case("4", is_truncated=True))).reward == 10 + 8 + 1
    assert (
        handler(tmp_path, "def score(completion):\n    return len(completion)\n")(("grade", case("four"))).reward == 4
    )
    code = "def score(completion, **others):\n    return sorted(others)[:2] == ['answer', 'columns']\n"
    assert handler(tmp_path, code)(("grade", case("4"))).reward == 1.0


def test_verls_form_gets_verls_arguments(tmp_path):
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "lighteval/MATH" and extra_info == {"i": 7}, (data_source, extra_info)
    return {"score": float(solution_str in ground_truth), "acc": solution_str == "4", "pred": solution_str}
"""
    grade = handler(tmp_path, code, "compute_score")(("grade", case("4")))
    assert grade.reward == grade.score == 1.0 and grade.parts["acc"] == 1.0 and "pred" not in grade.parts
    code = (
        "def compute_score(model_output, ground_truth, timeout_score=0):\n    return model_output == '4', 'correct'\n"
    )
    assert handler(tmp_path, code, "compute_score")(("grade", case("4"))).reward == 1.0


def test_verls_batch_form_gets_lists(tmp_path):
    code = """
def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s in t) + e["i"] for s, t, e in zip(solution_strs, ground_truths, extra_infos, strict=True)]
"""
    handle = handler(tmp_path, code, "compute_score_batched")
    assert [grade.reward for grade in handle(("compare", [case("4"), case("5")]))] == [8.0, 7.0]


def test_trls_form_gets_lists_of_texts_and_of_the_datas_columns(tmp_path):
    code = """
def score(prompts, completions, solution, data_source, **kwargs):
    assert kwargs["extra_info"] == [{"i": 7}] * 2 and prompts == ["2+2="] * 2
    return [float(c == s) if d else None for c, s, d in zip(completions, solution, data_source)]
"""
    handle = handler(tmp_path, code)
    assert handle(("needs", None)) == Needs(cases=False, groups=True, token_ids=False)
    assert [grade.reward for grade in handle(("compare", [case("4"), case("5")]))] == [1.0, 0.0]


def test_trls_functions_for_conversations_get_messages(tmp_path):
    code = """
def score(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [float(content.startswith("<think>")) for content in contents]
"""
    assert [grade.reward for grade in handler(tmp_path, code)(("compare", [case("<think>"), case("5")]))] == [1.0, 0.0]


def test_messages_are_found_out_also_in_what_the_function_calls(tmp_path):
    code = """
import functools

def read(completions):
    return [completion[0]["content"] for completion in completions]

class Lengths:
    def __call__(self, completions, **kwargs):
        return [float(len(text)) for text in read(completions)]

def lengths(completions, scale, **kwargs):
    return Lengths()(completions) if scale else [0.0 for each in read(completions)]

by_class, by_partial = Lengths(), functools.partial(lengths, scale=1)
"""
    for name in ("by_class", "by_partial"):
        handle = handler(tmp_path, code, name)
        assert [grade.reward for grade in handle(("compare", [case("4"), case("four")]))] == [1.0, 4.0], name


@pytest.mark.parametrize("name", ["completion_ids", "completions_ids"])
def test_token_ids_are_asked_for_by_name_also_by_an_object_that_can_be_called(name, tmp_path):
    code = f"""
class Penalty:
    def __call__(self, {name}, **kwargs):
        return [-float(len(ids)) for ids in {name}]

penalty = Penalty()
"""
    handle = handler(tmp_path, code, "penalty")
    assert handle(("needs", None)) == Needs(cases=False, groups=True, token_ids=True)
    assert [grade.reward for grade in handle(("compare", [case("4"), case("four")]))] == [-1.0, -4.0]


def test_async_functions_are_awaited(tmp_path):
    code = "import asyncio\nasync def score(completion):\n    await asyncio.sleep(0)\n    return completion == '4'\n"
    assert handler(tmp_path, code)(("grade", case("4"))).reward == 1.0
    code = "async def score(prompts, completions, **kwargs):\n    return [len(each) for each in completions]\n"
    assert [grade.reward for grade in handler(tmp_path, code)(("compare", [case("4"), case("four")]))] == [1.0, 4.0]


def test_what_trls_functions_log_becomes_sub_scores(tmp_path):
    code = """
def score(completions, log_extra, log_metric, **kwargs):
    log_extra("length", [len(each) for each in completions])
    log_extra("text", completions)
    log_metric("mean", 2.5)
    return [1.0 for _ in completions]
"""
    grades = handler(tmp_path, code)(("compare", [case("4"), case("four")]))
    assert [{key: grade.parts[key] for key in grade.parts if ":" not in key} for grade in grades] == [
        {"length": 1.0, "mean": 2.5},
        {"length": 4.0, "mean": 2.5},
    ]


def test_a_group_is_compared_and_added_to_what_each_completion_gets(tmp_path):
    code = """
def score(completions, answers, columns, num_tokens):
    assert answers == ["4"] * 3 and columns[0]["solution"] == "4" and num_tokens == [1, 1, 4]
    best = min(completions, key=len)
    return [{"reward": len(each) == len(best), "length": len(each)} for each in completions]
"""
    handle = handler(tmp_path, code, more=":0.5,exact")
    cases = [case("4"), case("5"), case("four")]
    assert handle(("needs", None)) == Needs(cases=True, groups=True, token_ids=False)
    assert [grade.reward for grade in handle(("compare", cases))] == [0.5, 0.5, 0.0]
    assert [grade.parts["length"] for grade in handle(("compare", cases))] == [1.0, 1.0, 4.0]
    assert handle(("grade", cases[0])).reward == 1.0, "of `exact` alone"


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("[1.0]", "returned 1 rewards for 2 completions"),
        ("[1.0, float('nan')]", "returned nan, not a finite number"),
        ("[1.0, 'one']", "returned 'one', not a finite number"),
        ("[{'brevity': 1.0}] * 2", "a dict needs the key 'reward'"),
        ("[{'reward': 1.0, 'brevity': float('inf')}] * 2", "returned inf as 'brevity', not a finite number"),
    ],
)
def test_a_wrong_result_says_what_was_returned(result, words, tmp_path):
    handle = handler(tmp_path, f"def score(completions):\n    return {result}\n")
    with pytest.raises(ValueError, match=words):
        handle(("compare", [case("4"), case("5")]))


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("(c, a)", r"it takes \(c, a\)"),
        ("(text, key, row)", r"it takes \(text, key, row\)"),
        ("(**kwargs)", r"it takes \(\*\*kwargs\)"),
        ("(completion, answer, level)", "nothing is known of its parameter 'level'"),
        ("(completion, answer, columns, /)", r"it takes \(completion, answer, columns\)"),
        ("(completions, trainer_state)", "nothing is known of its parameter 'trainer_state'"),
        ("(data_source, solution_str, reward_router)", "nothing is known of its parameter 'reward_router'"),
    ],
)
def test_a_function_that_nobody_knows_how_to_call_is_refused_when_it_is_loaded(signature, words, tmp_path):
    with pytest.raises(ValueError, match=f"score cannot be called: {words}"):
        handler(tmp_path, f"def score{signature}:\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"score\(completion, answer, columns\), or verl's or TRL's parameters"):
        handler(tmp_path, f"def score{signature}:\n    return 1.0\n")


def test_a_row_without_a_column_that_the_function_takes_is_named(tmp_path):
    handle = handler(tmp_path, "def score(completions, level, **kwargs):\n    return [0.0 for _ in completions]\n")
    assert "takes 'level', but the row's columns are solution, data_source" in handle(("check", case("")))
    assert handle(("check", Case("", "4", {"level": 2}))) is None
