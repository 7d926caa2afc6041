"""The rewards: which verifier is run on what, what a failing one costs, and the command."""

import json
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

import reward
from grading.answer import read_answer, read_final_answer
from grading.verifiers import BUILT_IN, Case, key_problem, soft_overlong
from helpers import ROOT
from reward import Grader, parse_reward

FAILING = f"{Path(__file__).parent}/rewards_that_fail.py:score"


def scored(verifier: str, completion: str, answer: str = "", **more: object) -> float:
    return BUILT_IN[verifier](Case(completion, answer, **more))[0]


def graded(spec: str, *cases: Case, **options: object) -> list[reward.Grade]:
    grader = Grader(spec, **options)
    grades = grader.grade(list(cases))
    grader.close()
    return grades


# What is read ----------------------------------------------------------------------------------------------------------------------


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
        ("<answer>1</answer> and <answer>2", None),
        ("so \\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right."),
        ("\\boxed{1", None),
        ("\\boxed{1} and \\boxed{2", None),
        ("", None),
        ("<think></think>", None),
    ],
)
def test_the_final_answer_is_read_by_the_documented_rules(completion, answer):
    assert read_final_answer(completion) == answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>\\boxed{5}</think>So <answer>the result is \\boxed{4}</answer>", "4"),
        ("First \\boxed{3}. Then, doubling it, \\boxed{6}.", "6"),
        ("$x=\\boxed{2}$ or $x=\\boxed{-3}$", "2, -3"),
        ("It is \\boxed{3}, or maybe 4.", "3, 4"),
        ("\\boxed{3}. Wait, no: \\boxed{4}.", "4"),
        ("\\fbox{7}", "7"),
        ("I am not sure. <answer>7</answer>I hope it is right", "7"),
        ("the answer is not <answer>7</answer>", None),
        ("The answer is 12 because 3*4 = 12.", "12"),
        ("We add.\n**Answer:** $\\frac{1}{2}$", "$\\frac{1}{2}$"),
        ("18 apples.\n#### 18", "18"),
        ("x = 5", "x = 5"),
        ("Adding both sides we get $a = 3$ and finally $b = 4$.", "b = 4"),
        ("The sum of all the numbers is 3 + 4 = 7.", "7."),
        ("There are 12 dozens, that makes 144 eggs", "144"),
        ("\\boxed{", None),
        ("<answer>\\boxed{4</answer>", None),
        ("I do not know the solution to this problem.", None),
    ],
)
def test_a_mathematical_answer_is_read_by_the_documented_rules(completion, answer):
    assert read_answer(completion) == answer


# Verifiers --------------------------------------------------------------------------------------------------------------------------


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
        ("\\boxed{3} or \\boxed{4}", "#### 4", 0.0),
        ("so 10-5", "#### 5", 1.0),
        ("-18", "18", 0.0),
        ("none", "18", 0.0),
        ("<think>18", "18", 0.0),
    ],
)
def test_gsm8k_compares_the_last_number(completion, key, right):
    assert scored("gsm8k", completion, key) == right


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
        ("", "", 0.0, 0.0),
    ],
)
def test_format_knows_whether_the_prompt_has_opened_the_thinking(completion, prompt, both, think):
    assert scored("format", completion, prompt=prompt) == both
    assert scored("think_format", completion, prompt=prompt) == think


def test_the_soft_overlong_punishment_is_dapos():
    assert [soft_overlong(length, 20480, 4096) for length in (1, 16384, 18432, 20480, 20481)] == [
        0.0,
        0.0,
        -0.5,
        -1.0,
        -1.0,
    ]


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
        ("ifeval", '{"func_name": "no_such"}', "no_such"),
        ("exact", "?", None),
    ],
)
def test_an_answer_key_that_cannot_be_used_is_told(verifier, key, problem):
    found = key_problem(verifier, key, {})
    assert found is None if problem is None else problem in found


# The sum ----------------------------------------------------------------------------------------------------------------------------


def test_a_weighted_sum_adds_up_and_names_its_parts():
    (grade,) = graded(
        "math:2,format:0.5,length", Case(THINKS.replace("b", "1/2"), "0.5", num_tokens=95, max_tokens=100)
    )
    assert grade.parts == {"math": 1.0, "format": 1.0, "length": -0.75}
    assert grade.reward == 2 + 0.5 - 0.75
    assert grade.status == "ok" and grade.is_correct and grade.answer == "1/2"


def test_the_verifier_of_a_row_is_the_one_that_its_column_names():
    rows = [{"dataset": "gsm8k"}, {"dataset": "MATH"}, {"dataset": "ifeval"}, {"dataset": "poems"}]
    keys = ["#### 4", "(x+1)^2", json.dumps({"func_name": "validate_no_commas"}), "4"]
    cases = [
        Case(text, key, row)
        for text, key, row in zip(["2+2 is 4", "\\boxed{x^2+2x+1}", "a, b", "4"], keys, rows, strict=True)
    ]
    grader = Grader("@dataset")
    bad = grader.check_keys(cases)
    assert list(bad) == [3] and "'poems', which names no verifier" in bad[3]
    assert [grade.reward for grade in grader.grade(cases[:3])] == [1.0, 1.0, 0.0]
    grader.close()


def test_a_reward_of_ones_own_gets_the_row_and_what_it_asks_for_by_name(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(
        "import neighbour\n"
        "def score(completion, answer, columns):\n"
        "    return float(answer in completion) + columns['bonus'] + neighbour.ZERO\n"
    )
    (tmp_path / "neighbour.py").write_text("ZERO = 0.0\n")
    (grade,) = graded(f"{file}:score:2", Case("it is 5", "5", {"bonus": 0.5}))
    assert grade.reward == 3.0 and grade.score == 1.5
    everything = FAILING.replace(":score", ":with_everything")
    assert (
        graded(everything, Case("", "", {"level": 2}, prompt="abc", num_tokens=7, is_truncated=True))[0].reward
        == 2173.0
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("exakt", "neither built in .math, gsm8k"),
        ("math:x", "weight 'x' of math"),
        ("math:0", "weight '0' of math"),
        ("math:nan", "weight 'nan'"),
        ("math,,format", "'' is none of"),
        ("math,math:2", "twice"),
        ("missing.py:score", "does not exist"),
        ("{file}", "is none of|does not exist|neither"),
    ],
)
def test_a_reward_text_that_is_wrong_says_why_before_anything_is_loaded(spec, words, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        parse_reward(spec.format(file=tmp_path / "my_reward.py"))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(a, b, c):\n    return 1.0\n", "no function 'score'; it has other"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
        ("def score(:\n", "SyntaxError"),
        ("import os\nos._exit(5)\n", "ended while it was loading .exit status 5"),
    ],
)
def test_a_reward_file_that_cannot_be_loaded_says_why(code, words, tmp_path):
    (tmp_path / "my_reward.py").write_text(code)
    with pytest.raises(ValueError, match=f"--reward .*{words}"):
        Grader(f"{tmp_path}/my_reward.py:score")


# Failing rewards --------------------------------------------------------------------------------------------------------------------


def left_behind() -> bool:
    return (
        subprocess.run(["pgrep", "-f", "left behind by a [r]eward"], check=False, capture_output=True).returncode == 0
    )


def test_a_reward_that_misbehaves_costs_one_completion_and_the_others_are_graded():
    deeds = {
        "loop": "timeout",
        "allocate": "error: MemoryError",
        "allocate and keep": "error: MemoryError",
        "raise": "error: ValueError: no such luck",
        "nan": "error: ValueError: score returned nan",
        "text": "error: ValueError: score returned '1'",
        "exit": "error: SystemExit: 3",
        "hard exit": "error: it ended its process (exit status 0)",
        "crash": "error: it ended its process (signal 11)",
        "stop": "timeout",
        "leave a child and exit": "error: it ended its process",
    }
    cases = [case for deed in deeds for case in (Case(deed, "x"), Case("fine x", "x"))]
    grader = Grader(FAILING, timeout=1.0, memory_gib=0.5, num_workers=2)
    start = time.monotonic()
    grades = grader.grade(cases)
    seconds = time.monotonic() - start
    for grade, wanted in zip(grades[::2], deeds.values(), strict=True):
        assert grade.status.startswith(wanted) and grade.reward == 0.0 and grade.is_failed
    assert all(grade.status == "ok" and grade.reward == 1.0 for grade in grades[1::2])
    assert seconds < 10, "two time-outs of 1 s on two workers, and what it takes to fill 0.5 GiB twice"
    (grade,) = grader.grade([Case("leave a child", "x")])
    assert grade.status == "ok" and left_behind()
    grader.close()
    assert not left_behind()


def test_what_a_completion_leaves_behind_does_not_touch_the_next_one(tmp_path):
    (tmp_path / "my_reward.py").write_text(
        "import signal\n"
        "class Silent(Exception):\n"
        "    def __str__(self):\n"
        "        raise RuntimeError('no text either')\n"
        "def ring(*_):\n"
        "    raise TimeoutError('late')\n"
        "def score(completion, answer, columns):\n"
        "    if completion == 'alarm':\n"
        "        signal.signal(signal.SIGALRM, ring)\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "    if completion == 'silent':\n"
        "        raise Silent\n"
        "    if completion == 'slow':\n"
        "        import time; time.sleep(0.5)\n"
        "    return 1\n"
    )
    grader = Grader(f"{tmp_path}/my_reward.py:score", num_workers=1)
    grades = grader.grade([Case(text, "") for text in ("alarm", "slow", "silent", "slow")])
    assert [grade.status for grade in grades] == ["ok", "ok", "error: Silent", "ok"]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        grader.submit(0, Case("", "", {"function": lambda: None}))
    assert grader.grade([Case("fine", "")])[0].reward == 1.0, "what cannot be sent is not waited for"
    grader.close()


def test_ten_thousand_gradings_with_one_in_a_hundred_failing_lose_nothing_and_leak_nothing():
    deeds = ["loop", "allocate", "hard exit", "raise"]
    cases = [Case(deeds[i // 100 % 4] if i % 100 == 50 else f"the answer {i} is x{i % 2}", "x1") for i in range(10_000)]
    grader = Grader(FAILING, timeout=0.3, memory_gib=0.25, num_workers=2)
    server = grader.pool.server.pid

    def used() -> tuple[int, int]:
        status = Path(f"/proc/{server}/status").read_text()
        return len(list(Path(f"/proc/{server}/fd").iterdir())), int(status.partition("VmRSS:")[2].split()[0])

    grader.grade(cases[:100])
    files_before, kib_before = used()
    grades = grader.grade(cases)
    for i, grade in enumerate(grades):
        assert grade.is_failed == (i % 100 == 50), (i, grade)
        assert grade.reward == (0.0 if i % 100 == 50 else float(i % 2))
    files_after, kib_after = used()
    assert files_after == files_before
    assert kib_after < kib_before + 20_000, "KiB of the server"
    children = subprocess.run(["pgrep", "-P", str(server)], check=False, capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    grader.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [server, *children])


def test_a_server_that_is_killed_is_replaced_and_its_work_done_again():
    grader = Grader(FAILING, timeout=5.0)
    for i in range(50):
        grader.submit(i, Case(f"fine {i}", "fine"))
    grader.pool.server.kill()
    for i in range(50, 100):
        grader.submit(i, Case(f"fine {i}", "fine"))
    grades = grader.collect()
    assert sorted(grades) == list(range(100)) and all(grade.reward == 1.0 for grade in grades.values())
    grader.close()


def test_nothing_is_left_when_the_caller_is_killed():
    code = "import reward, time; g = reward.Grader('math', num_workers=2); print(g.pool.server.pid, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as caller:
        server = int(caller.stdout.readline())
        workers = subprocess.run(
            ["pgrep", "-P", str(server)], check=False, capture_output=True, text=True
        ).stdout.split()
        assert workers
        caller.kill()
    deadline = time.monotonic() + 10
    while any(
        Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()
        for pid in [server, *workers]
    ):
        assert time.monotonic() < deadline, "server or workers outlive their caller"
        time.sleep(0.05)


def test_truncated_completions_are_graded_or_get_zero_as_the_flag_says():
    cut = Case("\\boxed{4} and so on", "4", is_truncated=True)
    assert graded("math", cut, truncated="score")[0].reward == 1.0
    assert graded("math", cut, truncated="mask")[0].reward == 1.0
    (grade,) = graded("math", cut, truncated="zero")
    assert grade.reward == 0.0 and grade.status == "truncated" and not grade.is_failed


def test_a_broken_dependency_is_found_at_the_start(monkeypatch):
    monkeypatch.setattr(reward, "SELF_TEST", [*reward.SELF_TEST, ("4", "\\boxed{5}", True)])
    with pytest.raises(RuntimeError, match=r"the math grader is broken.*must be right.*sympy \d"):
        Grader("format:0.1,math")


# The command ------------------------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "reward.py", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_command_grades_a_file_in_order(tmp_path):
    rows = [
        {"id": 1, "completion": "\\boxed{0.5}", "answer": "\\frac12"},
        {"id": 2, "completion": "\\boxed{2}", "answer": 3, "more": {"nested": [1, None]}},
        {"id": 3, "completion": "\\boxed{2}", "answer": "\\frac{1}{"},
        {"id": 4, "completion": "\\boxed{\\prod_{k=1}^{1000000000} k}", "answer": "0"},
        {"id": 5, "completion": "é <answer>7</answer>", "answer": "7"},
    ]
    (tmp_path / "in.jsonl").write_text("\ufeff" + "\r\n".join(json.dumps(row) for row in rows) + "\n\n")
    done = command(
        "--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", "--reward_timeout", 1
    )
    assert done.returncode == 0, done.stderr
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in row if not key.startswith("reward")} for row in out] == rows
    assert [row["reward"] for row in out] == [1.0, 0.0, None, 0.0, 1.0]
    assert [row["reward_status"].partition(":")[0] for row in out] == ["ok", "ok", "bad key", "timeout", "ok"]
    assert "5 rows: 3 graded, mean reward 0.6667; 1 failed, 1 with an answer key that cannot be used" in done.stdout
    assert "line 4: timeout" in done.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"completion": "1", "answer": "1"}\n{"completion": "1", "ans', "line 2: not valid JSON"),
        ('{"completion": 1, "answer": "1"}', "line 1: needs an object with a text `completion`"),
        ('["1"]', "line 1: needs an object"),
        ('{"completion": "1"}', "line 1: needs an object with a text `completion` and an `answer`"),
    ],
)
def test_the_command_names_the_line_it_cannot_read_and_writes_nothing(content, words, tmp_path):
    (tmp_path / "in.jsonl").write_text(content)
    (tmp_path / "out.jsonl").write_text("precious")
    done = command("--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_the_command_does_not_write_over_its_input(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"completion": "1", "answer": "1"}\n')
    done = command("--reward", "math", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "in.jsonl")
    assert done.returncode == 1 and "is the input" in done.stderr
