"""Reward functions of one's own: which are called, with what, and what their results become."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from grading.pool import Limits, Pool
from grading.score import Handler, Needs
from grading.verifiers import Case

ROOT = Path(__file__).parent.parent.parent
ROW = {
    "solution": "4",
    "data_source": "lighteval/MATH",
    "reward_model": {"ground_truth": ["4"]},
    "extra_info": {"i": 7},
}


@pytest.fixture(autouse=True)
def neighbours_end_with_their_test(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("neighbour", None)


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


def test_verls_extra_info_that_is_no_dict_is_passed_as_it_is(tmp_path):
    handle = handler(tmp_path, "def score(solution_str, extra_info):\n    return len(extra_info)\n")
    for extra, reward in ((["a", "b"], 2.0), ("abc", 3.0), (None, 0.0)):
        assert handle(("grade", Case("", "4", {"extra_info": extra}))).reward == reward


def test_verls_batch_form_gets_lists(tmp_path):
    code = """
def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(s in t) + e["i"] for s, t, e in zip(solution_strs, ground_truths, extra_infos, strict=True)]
"""
    handle = handler(tmp_path, code, "compute_score_batched")
    assert [grade.reward for grade in handle(("compare", [case("4"), case("5")]))] == [8.0, 7.0]
    code = "def score(solution_strs, ground_truths):\n    return [(float(s == '4'), 'read') for s in solution_strs]\n"
    grades = handler(tmp_path, code)(("compare", [case("4"), case("5")]))
    assert [grade.reward for grade in grades] == [1.0, 0.0], "of a tuple the first, as for one completion"


def test_trls_form_gets_lists_of_texts_and_of_the_datas_columns(tmp_path):
    code = """
def score(prompts, completions, solution, data_source, **kwargs):
    assert kwargs["extra_info"] == [{"i": 7}] * 2 and prompts == ["2+2="] * 2
    return [float(c == s) if d else None for c, s, d in zip(completions, solution, data_source)]
"""
    handle = handler(tmp_path, code)
    assert handle(("needs", None)) == Needs(cases=False, groups=True, token_ids=False)
    assert [grade.reward for grade in handle(("compare", [case("4"), case("5")]))] == [1.0, 0.0]


MESSAGES = """
import functools, operator
from neighbour import reward as imported

KEY = "content"
get_content = operator.itemgetter("content")

def read(completions):
    return [completion[0]["content"] for completion in completions]

def by_subscript(completions, **kwargs):
    return [float(len(completion[-1]['content'])) for completion in completions]

def by_get(completions, **kwargs):
    return [float(len(completion[0].get("content"))) for completion in completions]

def by_helper(completions, **kwargs):
    return [float(len(text)) for text in read(completions)]

def by_constant(completions, **kwargs):
    return [float(len(completion[0][KEY])) for completion in completions]

def by_itemgetter(completions, **kwargs):
    return [float(len(get_content(completion[0]))) for completion in completions]

def by_default(completions, key="content", **kwargs):
    return [float(len(completion[0][key])) for completion in completions]

def by_argument(completions, key, **kwargs):
    return by_default(completions, key)

def by_annotation(completions: list[list[dict[str, str]]], **kwargs):
    return [float(len(list(message.values())[-1])) for (message,) in completions]

def by_import(completions, **kwargs):
    return imported(completions)

class Lengths:
    def lengths(self, completions, **kwargs):
        return self(completions)

    def __call__(self, completions, **kwargs):
        return [float(len(self.text(completion))) for completion in completions]

    def text(self, completion):
        return completion[0]["content"]

by_object, by_method, by_partial = Lengths(), Lengths().lengths, functools.partial(by_argument, key="content")
"""
TEXTS = """
def not_by_writing(completions, **kwargs):
    sent = [{"role": "user", "content": text} for text in completions]
    return [float(len(each["role"])) - 4 + len(text) for each, text in zip(sent, completions)]

def not_by_membership(completions, **kwargs):
    return [float(len(text)) if "content" not in text else 0.0 for text in completions]

def not_by_annotation(completions: list[str], **kwargs):
    answer = {"message": {"content": "of a judge"}}
    return [float(len(text)) if answer["message"]["content"] else 0.0 for text in completions]

def not_by_others_of_the_file(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""


@pytest.mark.parametrize("name", [line.split("(")[0][4:] for line in TEXTS.splitlines() if line.startswith("def ")])
def test_functions_of_texts_get_texts_whatever_stands_beside_them(name, tmp_path):
    (tmp_path / "neighbour.py").write_text("def reward(completions):\n    return 1.0\n")
    grades = handler(tmp_path, MESSAGES + TEXTS, name)(("compare", [case("4"), case("four")]))
    assert [grade.reward for grade in grades] == [1.0, 4.0]


@pytest.mark.parametrize(
    "name",
    [
        "by_subscript",
        "by_get",
        "by_helper",
        "by_constant",
        "by_itemgetter",
        "by_default",
        "by_annotation",
        "by_import",
        "by_object",
        "by_method",
        "by_partial",
    ],  # fmt: skip
)
def test_functions_of_conversations_get_messages(name, tmp_path):
    (tmp_path / "neighbour.py").write_text(
        "def reward(completions):\n    return [float(len(each[0]['content'])) for each in completions]\n"
    )
    grades = handler(tmp_path, MESSAGES, name)(("compare", [case("4"), case("four")]))
    assert [grade.reward for grade in grades] == [1.0, 4.0]


def test_prompts_are_messages_where_completions_are(tmp_path):
    code = "def score(prompts, completions):\n    return [len(p[-1]['content'] + c[0]['content']) for p, c in "
    handle = handler(tmp_path, code + "zip(prompts, completions)]\n")
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "2+2"}]
    assert handle(("compare", [case("4")]))[0].reward == 4 + 1, "the text as the user's message"
    assert handle(("compare", [Case("4", "4", {"prompt": asked})]))[0].reward == 3 + 1, "the data's own"
    assert handle(("compare", [Case("4", "4", {"prompt": "2"})]))[0].reward == 1 + 1


def test_a_parameter_with_a_default_is_filled_by_the_column_of_its_name(tmp_path):
    handle = handler(tmp_path, "def score(completions, level=1):\n    return [level if level == 1 else level[0]]\n")
    assert handle(("compare", [case("")]))[0].reward == 1.0
    assert handle(("compare", [Case("", "", {"level": 3})]))[0].reward == 3.0


def test_what_a_partial_has_bound_stays_bound(tmp_path):
    code = """
from functools import partial
def group(completions, level, answers, **kwargs):
    return [level + answers + len(kwargs["other"])] * len(completions)
score = partial(group, level=1, answers=2, other="abc")
one = partial(lambda scale, completion, answer: scale + answer, 4, answer=5)
"""
    row = {"level": 10, "other": 20}
    assert handler(tmp_path, code)(("compare", [Case("", "4", row)]))[0].reward == 6.0
    assert handler(tmp_path, code, "one")(("grade", Case("", "4", row))).reward == 9.0


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


def test_async_functions_of_many_threads_share_one_event_loop(tmp_path):
    """A semaphore of the file belongs to the loop that first waits for it: in a loop for each call, all others fail."""
    code = """
import asyncio
few = asyncio.Semaphore(2)

async def score(completion):
    async with asyncio.timeout(20), few:
        await asyncio.sleep(0.01)
        return len(completion)
"""
    handle = handler(tmp_path, code)
    with ThreadPoolExecutor(8) as threads:
        grades = list(threads.map(handle, [("grade", case("x" * i)) for i in range(16)]))
    assert [grade.reward for grade in grades] == list(range(16))


def test_an_async_function_that_exits_fails_alone(tmp_path):
    """It would end the event loop, and every later completion would time out."""
    code = "import sys\nasync def score(completion):\n    return sys.exit(3) if completion == 'exit' else 1.0\n"
    (tmp_path / "my_reward.py").write_text(code)
    limits = Limits(num_workers=1, timeout=20.0, memory_gib=4.0)
    pool = Pool("grading.score:Handler", (f"{tmp_path}/my_reward.py:score", None), limits, "grading.preload")
    for key, completion in enumerate(("exit", "stay")):
        pool.submit(key, ("grade", case(completion)))
    outcomes = pool.collect()
    pool.close()
    assert outcomes[0].status == "error: RuntimeError: SystemExit: 3" and outcomes[1].value.reward == 1.0


def test_what_trls_functions_log_becomes_sub_scores(tmp_path):
    code = """
def score(completions, log_extra, log_metric, **kwargs):
    log_extra("length", [len(each) for each in completions])
    log_extra("half", tuple(len(each) / 2 for each in completions))
    log_extra("text", completions)
    log_extra("one too few", [1.0])
    log_metric("mean", 2.5)
    return [1.0 for _ in completions]
"""
    grades = handler(tmp_path, code)(("compare", [case("4"), case("four")]))
    assert [{key: grade.parts[key] for key in grade.parts if ":" not in key} for grade in grades] == [
        {"length": 1.0, "half": 0.5, "mean": 2.5},
        {"length": 4.0, "half": 2.0, "mean": 2.5},
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
        ("[{'reward': float('nan'), 'brevity': 1.0}] * 2", "returned nan, not a finite number"),
        ("[1.0, 1j]", "returned 1j, not a finite number"),
        ("[1.0, b'1']", "returned b'1', not a finite number"),
        ("[1.0, 10 ** 400]", "returned 1000"),
        ("1.0", "must return a list with one for each, not 1.0"),
        ("{'reward': 1.0, 'brevity': 1.0}", "must return a list with one for each, not {'reward'"),
        ("{0.5, 1.0}", "must return a list with one for each, not {"),
    ],
)
def test_a_wrong_result_says_what_was_returned(result, words, tmp_path):
    handle = handler(tmp_path, f"def score(completions):\n    return {result}\n")
    with pytest.raises(ValueError, match=words):
        handle(("compare", [case("4"), case("5")]))


def test_a_sub_score_is_a_finite_number_of_any_kind_and_others_are_left_out(tmp_path):
    code = """
import fractions, numpy, torch
class Name(str):
    pass
def score(completion):
    kept = {"bool": True, "fraction": fractions.Fraction(1, 2), "numpy": numpy.float32(2), "torch": torch.tensor(3)}
    more = {"array": numpy.array([4.0]), Name("name"): 5, "\\ud800": 6}
    left = {"nan": float("nan"), "inf": float("inf"), "list": [1.0], "dict": {}, "none": None, "text": "1", 7: 7.0}
    also = {"complex": 1j, "numpy complex": numpy.complex64(1), "two": torch.zeros(2), "bytes": b"1"}
    return {"reward": numpy.float64(1)} | kept | more | left | also
"""
    parts = handler(tmp_path, code)(("grade", case(""))).parts
    del parts[next(iter(parts))]  # the function's own
    assert parts == {
        "bool": 1.0, "fraction": 0.5, "numpy": 2.0, "torch": 3.0, "array": 4.0, "name": 5.0, "\\ud800": 6.0
    }  # fmt: skip
    assert {type(name) for name in parts} == {str} and {type(value) for value in parts.values()} == {float}


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ("(answer)", r"it takes \(answer\), but by name none of completion, completions"),
        ("(c, a)", r"it takes \(c, a\)"),
        ("(text, key, row)", r"it takes \(text, key, row\)"),
        ("(**kwargs)", r"it takes \(\*\*kwargs\)"),
        ("(completion, answer, level)", "nothing is known of its parameter 'level'"),
        ("(completion, answer, columns, /)", r"it takes \(completion, answer, columns, /\), but by name none of"),
        ("(completion, log_extra)", "nothing is known of its parameter 'log_extra'"),
        ("(completions, trainer_state)", "nothing is known of its parameter 'trainer_state'"),
        ("(data_source, solution_str, reward_router)", "nothing is known of its parameter 'reward_router'"),
    ],
)
def test_a_function_that_nobody_knows_how_to_call_is_refused_when_it_is_loaded(signature, words, tmp_path):
    with pytest.raises(ValueError, match=f"score cannot be called: {words}"):
        handler(tmp_path, f"def score{signature}:\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"score\(completion, answer, columns\), or verl's or TRL's parameters"):
        handler(tmp_path, f"def score{signature}:\n    return 1.0\n")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("score = max", "no signature found for builtin <built-in function max>"),
        ("class score:\n    def __init__(self, completion): pass", "it is a class; name an object of it"),
        ("def score(completions):\n    yield 1.0", "it is a generator; it must return what it yields"),
        (
            "class Score:\n    def __call__(self, completions):\n        yield 1.0\nscore = Score()",
            "it is a generator; it must return what it yields",
        ),
        (
            "import functools\n@functools.singledispatch\ndef score(completion):\n    return 1.0",
            "it is made by singledispatch, which takes nothing by name",
        ),
    ],
)
def test_what_cannot_be_called_by_names_is_refused_when_it_is_loaded(code, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        handler(tmp_path, code)


def test_a_decorator_may_make_a_list_of_a_generator_and_code_may_have_no_file(tmp_path):
    code = """
import functools
def listed(function):
    return functools.wraps(function)(lambda **arguments: list(function(**arguments)))

@listed
def score(completions):
    for completion in completions:
        yield len(completion[0]["content"])

exec("def from_text(completions):\\n    return [len(each) for each in completions]")
"""
    for name in ("score", "from_text"):
        assert handler(tmp_path, code, name)(("compare", [case("four")]))[0].reward == 4.0


def test_a_row_without_a_column_that_the_function_takes_is_named(tmp_path):
    handle = handler(tmp_path, "def score(completions, level, **kwargs):\n    return [0.0 for _ in completions]\n")
    assert "takes 'level', but the row's columns are solution, data_source" in handle(("check", case("")))
    assert handle(("check", Case("", "4", {"level": 2}))) is None


# Functions of TRL and verl, as they stand there -----------------------------------------------------------------------

TRL = """
import re

def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

def get_soft_overlong_punishment(max_completion_len, soft_punish_cache):
    def soft_overlong_punishment_reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
        rewards = []
        for ids in completion_ids:
            completion_length = len(ids)
            if completion_length <= max_completion_len - soft_punish_cache:
                rewards.append(0.0)
            elif max_completion_len - soft_punish_cache < completion_length <= max_completion_len:
                rewards.append((max_completion_len - soft_punish_cache - completion_length) / soft_punish_cache)
            else:
                rewards.append(-1.0)
        return rewards

    return soft_overlong_punishment_reward

soft_overlong_punishment = get_soft_overlong_punishment(10, 4)

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            rewards.append(1.0 if "4" in completion else -1.0)
        else:
            rewards.append(None)
    return rewards

async def async_reward(prompts, completions, ground_truth, **kwargs):
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
"""
VERL = """
import re

def extract_solution(solution_str, method="strict"):
    assert method in ["strict", "flexible"]
    solutions = re.findall("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    return solutions[-1].replace(",", "").replace("$", "") if solutions else None

def compute_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    answer = extract_solution(solution_str=solution_str, method=method)
    if answer is None:
        return 0
    else:
        if answer == ground_truth:
            return score
        else:
            return format_score

def default_compute_score(
    data_source, solution_str, ground_truth, extra_info=None, sandbox_fusion_url=None, concurrent_semaphore=None,
    memory_limit_mb=None, **kwargs,
):
    if data_source == "openai/gsm8k":
        return float(compute_score(solution_str, ground_truth))
    raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
"""


@pytest.mark.parametrize(
    ("name", "completion", "reward"),
    [
        ("think_format_reward", "<think>2+2</think>4", 1.0),
        ("think_format_reward", "4", 0.0),
        ("soft_overlong_punishment", "1234567", -0.25),
        ("reward_len", "1234", -16.0),
        ("math_reward_func", "4", 1.0),
        ("async_reward", "\\boxed{4}", 1.0),
    ],
)
def test_trls_own_functions_run_unchanged(name, completion, reward, tmp_path):
    handle = handler(tmp_path, TRL, name)
    row = {"task": "math", "ground_truth": "4", "prompt": [{"role": "user", "content": "2+2="}]}
    one = replace(case(completion), columns=row)
    assert handle(("check", one)) is None
    assert [grade.reward for grade in handle(("compare", [one, one]))] == [reward] * 2
    if name == "math_reward_func":
        other = replace(one, columns=row | {"task": "code"})
        assert handle(("compare", [other]))[0].reward == 0.0, "None: it does not apply"


@pytest.mark.parametrize("name", ["compute_score", "default_compute_score"])
def test_verls_own_functions_run_unchanged(name, tmp_path):
    handle = handler(tmp_path, VERL, name)
    row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72", "style": "rule"}, "extra_info": {}}
    rewards = [handle(("grade", Case(text, "", row))).reward for text in ("#### 72", "#### 7", "72")]
    assert rewards == [1.0, 0.0, 0.0]


# What a user's file changes for others --------------------------------------------------------------------------------


def test_a_users_loss_hides_no_module_of_the_trainer(tmp_path):
    """It stands beside a data.py, and a package is installed that is called like a module of ours."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "evaluate.py").write_text("")
    (tmp_path / "data.py").write_text("")
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    (tmp_path / "my_loss.py").write_text("import neighbour\ndef loss():\n    return neighbour.ONE\n")
    code = f"""
import sys
sys.path.append({str(tmp_path / "installed")!r})
from importlib.util import find_spec
from grading.own import load_function
assert [load_function({str(tmp_path / "my_loss.py")!r}, "loss")() for _ in range(2)] == [1, 1]
print(find_spec("data").origin, find_spec("evaluate").origin, sys.path.count({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(ROOT / "data.py"), str(ROOT / "evaluate.py"), "1"], done.stderr


def test_a_users_reward_finds_installed_packages_then_its_neighbours_then_our_modules(tmp_path):
    (tmp_path / "data.py").write_text("ONE = 1\n")
    (tmp_path / "math_verify.py").write_text("")
    (tmp_path / "my_reward.py").write_text(
        "import data, math_verify\ndef score(completion):\n    return data.ONE + hasattr(math_verify, 'parse')\n"
    )
    code = f"""
from grading.score import Handler
from grading.verifiers import Case
print(Handler({str(tmp_path / "my_reward.py")!r} + ":score", None)(("grade", Case("", ""))).reward)
"""
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "2.0\n", done.stderr
