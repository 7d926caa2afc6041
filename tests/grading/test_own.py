"""Functions of one's own: three forms, told apart by the names of their parameters."""

import sys
from pathlib import Path

import pytest

from extras.turns import episode
from gate.digests import digests_of_files
from grading import Case, Grade
from grading.own import OwnReward
from grading.score import RewardWorker
from grading.user_code import files_of, load_own, load_reference
from helpers.runs import ROOT

EXTRAS = {"prompt": "<user>", "token_ids": (7, 8), "num_tokens": 2, "max_tokens": 9, "is_truncated": True}
CASES = [Case("ab", "4", {"level": 2, "answer": "four"}, **EXTRAS), Case("abc", "5", {"level": 3})]


def own(folder: Path, code: str) -> OwnReward:
    (folder / "my_reward.py").write_text(code)
    return OwnReward(f"{folder}/my_reward.py:score")


@pytest.mark.parametrize(("signature", "result", "rewards"), [
    ("completion, answer, columns", "len(completion) + int(answer) + columns['level']", [2 + 4 + 2]),
    ("completion, **kw", "int(kw['answer']) + kw['level'] + kw['columns']['level'] + kw['num_tokens']", [4 + 3 * 2]),
    ("num_tokens, is_truncated, *, max_tokens, completion", "num_tokens + is_truncated + max_tokens", [2 + 1 + 9]),
    ("completion, prompt, token_ids", "len(prompt) + sum(token_ids)", [6 + 15]),
    ("data_source, solution_str, ground_truth, extra_info=None", "len(solution_str) + len(ground_truth)", [2 + 1]),
    ("solution_str, extra_info", "len(extra_info)", [0]),
    ("level, completions, missing=None", "level if missing is None else None", [2, 3]),
    ("completions, answer", "[2.0 + (a is None) for a in answer]", [2, 3]),  # a column of the data
    ("prompts, completions, answers, columns", "[2 * (a == '4') + 3 * (a == '5') for a in answers]", [2, 3]),
    ("completions, completion_ids", "[2 + (ids == ()) for ids in completion_ids]", [2, 3]),
    ("completions, **columns", "map(int, columns['level'])", [2, 3]),
    ("data_sources, solution_strs, ground_truths, extra_infos", "[len(s) for s in solution_strs]", [2, 3]),
])  # fmt: skip
def test_the_signature_names_what_a_function_gets(signature, result, rewards, tmp_path):
    """That of a group gets lists, and the columns of the data."""
    reward = own(tmp_path, f"def score({signature}):\n    return {result}\n")
    assert reward(CASES[: len(rewards)]) == [Grade(value) for value in rewards]
    assert reward.takes_group == (len(rewards) == 2) and reward.takes_token_ids == ("_ids" in signature)


def test_verls_key_is_the_one_of_its_data(tmp_path):
    code = "def score(solution_str, ground_truth, extra_info):\n    return ground_truth + extra_info['x']\n"
    case = Case("", "no", {"reward_model": {"ground_truth": 3}, "extra_info": {"x": 4}})
    assert own(tmp_path, code)([case]) == [Grade(7.0)]


def test_imports_from_a_reward_files_folder_belong_to_it(tmp_path):
    """But the program's own modules do not."""
    folder = tmp_path / "with space"
    (folder / "parts").mkdir(parents=True)
    texts = {
        "my.py": "import json, near\nfrom parts import inner\nfrom grpo import clip\n", "near.py": "import my, no",
        "parts/__init__.py": "", "parts/inner.py": "def f():\n    import late\n", "late.py": "", "other.py": "",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    assert {str(file.relative_to(folder)) for file in files_of(folder / "my.py")} == texts.keys() - {"other.py"}
    (folder / "grpo.py").symlink_to(ROOT / "grpo.py")  # as if it stood in the repository
    named = digests_of_files(["math", f"{folder}/my.py:score:power=3", "clip"])
    assert {Path(file).name for file in named} == {Path(name).name for name in texts.keys() - {"other.py"}}


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """What a test adds to the path ends with it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("name", ["shared_state", "math", "with-dash", "data"])
def test_one_load_serves_every_spelling_of_a_files_path(name, tmp_path, monkeypatch):
    """An advantage writes a global that a loss reads. Also a file whose name another module has."""
    monkeypatch.chdir(tmp_path)
    code = "COUNT = []\ndef f(_):\n    COUNT.append(1)\n    return len(COUNT)\ng = lambda _: len(COUNT)\n"
    for folder in (tmp_path / "other", tmp_path / "own"):
        folder.mkdir()
        (folder / f"{name}.py").write_text(code)
    (folder / "link.py").symlink_to(f"{name}.py")
    spellings = [f"own/{name}.py", f"{folder}/{name}.py", f"own/../own/{name}.py", "own/link.py"]
    assert [load_reference(f"{path}:f")("") for path in spellings] == [1, 2, 3, 4]
    assert [load_own(f"{path}:g")[0]("") for path in spellings] == [4] * 4
    if name == "shared_state":
        (folder / "importer.py").write_text("import shared_state\ndef h(completion):\n    return shared_state.f('')\n")
        assert load_reference("own/importer.py:h")("") == 5
    assert load_reference(f"other/{name}.py:f")("") == 1, "another file of this name"


@pytest.mark.parametrize(("neighbour", "statement"), [
    ("near_own.py", "import near_own"), ("near_kit/__init__.py", "from near_kit import VALUE"),
    ("near_late.py", "def late():\n    import near_late"),
])  # fmt: skip
def test_a_file_that_gets_another_files_neighbour_is_refused(neighbour, statement, tmp_path):
    """Two versions of a reward, each with its helper: the second would use the first one's."""
    for i, version in enumerate(("v1", "v2")):
        (place := tmp_path / version / neighbour).parent.mkdir(parents=True)
        place.write_text(f"VALUE = {i}\n")
        (tmp_path / version / "my.py").write_text(f"{statement}\ndef f():\n    return 1\n")
    for _ in "twice":
        assert load_reference(f"{tmp_path}/v1/my.py:f")() == 1
    name, *_ = neighbour.removesuffix(".py").split("/")
    words = rf"v2/my\.py imports its neighbour {name}, but gets .*/v1/{name}"
    pytest.raises(ValueError, load_reference, f"{tmp_path}/v2/my.py:f").match(words)


def test_installed_modules_win_over_neighbours_of_their_name(tmp_path):
    for name in ("json", "math", "datasets"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "my.py").write_text("import json, math\ndef f():\n    import datasets\n    return json.dumps(1)\n")
    assert load_reference(f"{tmp_path}/my.py:f")() == "1"


def test_a_file_that_raises_is_loaded_anew_and_one_that_another_has_imported_is_not(tmp_path):
    (file := tmp_path / "raises_once.py").write_text("1 / 0\n")
    pytest.raises(ZeroDivisionError, load_reference, f"{file}:f")
    file.write_text("def f():\n    return 10\n")
    (tmp_path / "second_own.py").write_text("from raises_once import f\n")
    (tmp_path / "first_own.py").write_text("import second_own\nf = second_own.f\n")
    first = load_reference(f"{tmp_path}/first_own.py:f")
    assert load_reference(f"{tmp_path}/second_own.py:f") is load_reference(f"{file}:f") is first
    assert first() == 10


def test_async_functions_are_awaited_and_share_one_event_loop(tmp_path):
    code = "import asyncio\nLOOPS = set()\nasync def score(completion):\n    await asyncio.sleep(0)\n"
    reward = own(tmp_path, code + "    LOOPS.add(asyncio.get_running_loop())\n    return len(LOOPS)\n")
    assert [reward(CASES[:1])[0].reward for _ in range(3)] == [1.0] * 3


@pytest.mark.parametrize(("result", "value", "parts"), [
    ("{'reward': 1, 'brevity': 0.5, 'no': float('nan'), 'text': 'x', 3: 1}", 1.0, {"brevity": 0.5}),
    ("{'score': True, 'acc': False}", 1.0, {"acc": 0.0}),
    ("__import__('numpy').float32(0.5)", 0.5, {}),
])  # fmt: skip
def test_a_dict_gives_sub_scores_and_a_number_may_be_of_any_kind(result, value, parts, tmp_path):
    assert own(tmp_path, f"def score(completion):\n    return {result}\n")(CASES[:1]) == [Grade(value, parts=parts)]


@pytest.mark.parametrize(("parameter", "result", "words"), [
    ("completion", "'1'", "score returned '1', not a finite number"),
    ("completion", "1e39", r"score returned 1e\+39, not a finite number of 32 bits"),
    ("completion", "{'acc': 1}", "a dict needs the key 'reward' or 'score'"),
    ("completions", "[1]", "for 2 completions, not a list of that many"),
    ("completions", "'ab'", "score returned 'ab' for 2 completions"),
])  # fmt: skip
def test_a_wrong_result_says_what_was_returned(parameter, result, words, tmp_path):
    reward = own(tmp_path, f"def score({parameter}):\n    return {result}\n")
    pytest.raises(ValueError, reward, CASES).match(words)


@pytest.mark.parametrize(("code", "words"), [
    ("def score(text, answer):\n    return 1\n", r"it takes \(text, answer\), but none of completion, completions"),
    ("def score(completion, key):\n    return 1\n", "nothing is known of its parameter 'key'"),
    ("def other():\n    return 1\n", "no function or class 'score'; it has other"),
])  # fmt: skip
def test_a_function_that_cannot_be_called_is_refused_at_loading(code, words, tmp_path):
    pytest.raises(ValueError, own, tmp_path, code).match(words)


def test_a_row_without_a_column_that_the_function_takes_is_named(tmp_path):
    own(tmp_path, "def score(completions, solution):\n    return [1.0 for _ in completions]\n")
    rows = [Case("", "", {"solution": "4"}), CASES[0]]
    problems = RewardWorker(f"{tmp_path}/my_reward.py:score", None)(("check", rows))
    assert problems == [None, "score takes 'solution', but the row's columns are level, answer"]


@pytest.mark.parametrize(("signature", "bound"), [("completion, level", "level=7"), ("completion, answer", "answer=7")])
def test_what_the_user_has_bound_stays_bound(signature, bound, tmp_path):
    """Neither a column of the row nor an answer takes its place."""
    code = f"from functools import partial\ndef other({signature}):\n    return {bound.removesuffix('=7')}\n"
    assert own(tmp_path, f"{code}score = partial(other, {bound})\n")(CASES[:1]) == [Grade(7)]


CHANGES = """
def takes(completion, columns):
    columns['tests'].pop()
    del columns['answer']
    return 1.0

def left(completion, columns):
    return len(columns['tests']) + ('answer' in columns)

class Game:
    def __init__(self, row):
        self.words = row['words']

    def reply(self, completion):
        return self.words.pop()
"""


def test_changes_of_a_row_are_seen_by_no_one_else(tmp_path):
    """By a function, of another one or another completion; by an environment, of the next one."""
    (tmp_path / "my.py").write_text(CHANGES)
    handler = RewardWorker(",".join(f"{tmp_path}/my.py:{name}" for name in ("takes", "left")), None)
    shared = Case("", "4", {"tests": ["a", "b"], "answer": "4"})
    for case in (shared, shared):  # two completions of one prompt, which --reward_in_flight brings together
        assert handler(("grade", case)).reward == 1.0 + 3.0
    handler, row = episode.EpisodeWorker(f"{tmp_path}/my.py:Game", None), {"words": ["last", "first"]}
    replies = [handler(episode.Turn(number, row, ("text",), False)) for number in (1, 2)]
    assert [reply.messages[0]["content"] for reply in replies] == ["first", "first"]


def test_an_unreadable_neighbour_stops_only_its_own_import(tmp_path):
    """Python 2, UTF-16, a folder of data with the name of a library, no `__init__.py`."""
    tried = "try:\n    import old, wide\nexcept (SyntaxError, ValueError):\n    pass\n"
    (tmp_path / "my.py").write_text(f"import datasets\nfrom kit.util import x\n{tried}")
    for folder in ("datasets", "kit"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kit" / "util.py").write_text("x = 1\n")
    (tmp_path / "old.py").write_text('print "text"\n')
    (tmp_path / "wide.py").write_text("x = 1\n", "utf-16")
    assert files_of(tmp_path / "my.py") == [tmp_path / f"{name}.py" for name in ("my", "kit/util", "old", "wide")]
