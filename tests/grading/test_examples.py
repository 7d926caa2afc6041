"""The examples of docs/rewards.md and docs/rewards/: each works as it stands there, and is short."""

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from flags import Grading
from grading import Case, Grade, verifiers
from grading.score import RewardWorker
from helpers.grades import graded
from helpers.runs import ENVIRONMENT, ROOT, said
from reward import Grader

DOCS = ROOT / "docs"
EXAMPLES = DOCS / "rewards"
UNIT_TESTS = f"{EXAMPLES}/unit_tests.py:score"


def test_an_example_has_at_most_forty_lines():
    sizes = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(sizes) > 5 and max(sizes.values()) <= 40, sizes


def grade_of(reward: str, *case: object) -> Grade:
    return RewardWorker(reward, None)(("grade", Case(*case)))


def test_a_roman_numeral_verifier_takes_under_ten_lines(monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "rewards.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "verify_roman" in block]
    assert len(code.splitlines()) < 10
    exec(compile(code, "roman", "exec"), vars(verifiers))
    monkeypatch.setitem(verifiers.BUILT_IN, "roman", "grading.verifiers:verify_roman")
    completions = {"\\boxed{XIV}": 1.0, "The answer is XIV.": 1.0, "\\boxed{XVI}": 0.0, "\\boxed{14}": 0.0}
    assert {text: grade_of("roman", text, "14").reward for text in completions} == completions


CALLS = '[{"Action": "b", "Action_Input": "{\\"x\\": 1}"}, {"Action": "a", "Action_Input": "{}"}]'
CALL_A, CALL_B = "Action: a\nAction Input: {}", 'Action: b\nAction Input: {"x": 1}'


@pytest.mark.parametrize(("name", "answer", "columns", "rewards"), [
    ("boxed_math.py:score", "1/2", {"must_box": True},
     {r"so \boxed{\frac12}": 1, "it is 1/2": 0, r"\boxed{1/2": 0, r"\boxed{1/2} \boxed{3}": 0, r"\boxed{} 1/2": 0}),
    ("boxed_math.py:score", "1/2", {"must_box": False},
     {r"so \boxed{\frac12}": 1, "it is 1/2": 1, "1/2, or 3": 0, r"1/2 \boxed{3}": 0, r"\boxed{} 1/2": 1, "": 0}),
    ("boxed_math.py:score", "x", {"must_box": False}, {" x ": 1, "y": 0, "x + 1": 0}),  # the whole text
    ("reversed_text.py:score", "abc ", {},
     {"<reversed_text>cba</reversed_text>": 6 / 7, "cba": 0, "<reversed_text>cba": 0, "": 0}),
    ("sciknoweval.py:letter", "B", {},
     {"<answer>\nB\n</answer>": 1, "B": 1, "<answer>A</answer><answer>B": 1, "<answer>B: 3</answer>": 0, "": 0}),
    ("sciknoweval.py:tool_calls", CALLS, {},
     {f"{CALL_A}\n{CALL_B}": 1, CALL_B: 0, f"{CALL_A}\n{CALL_B}\n{CALL_B}": 0, "Action Input: {x}": 0, "": 0}),
])  # fmt: skip
def test_the_reward_of_a_set_up_is_its_sources(name, answer, columns, rewards):
    grades = {text: grade_of(f"{EXAMPLES}/{name}", text, answer, columns) for text in rewards}
    assert {text: grade.reward for text, grade in grades.items()} == pytest.approx(rewards)
    if "box" in name:
        boxes = {text: next(value for part, value in grade.parts.items() if part.endswith("box"))
                 for text, grade in grades.items()}  # fmt: skip
        assert boxes == {text: float("{" in text and "}" in text.replace("{}", "")) for text in rewards}


def test_the_table_of_the_rule_says_what_is_read():
    table = (DOCS / "rewards.md").read_text().partition("| completion | read as |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.fullmatch(r"\| `(.*)` \| (?:`(.*)`|nothing) \|", line).groups() for line in table.splitlines()]
    assert len(rows) == 12
    assert [verifiers.read_answer(completion) for completion, _ in rows] == [read_as for _, read_as in rows]


class Judge(BaseHTTPRequestHandler):
    """Takes 0.3 s for an answer; is silent where it is asked about "silence", and talks where about "chatter"."""

    def do_POST(self) -> None:
        question = self.rfile.read(int(self.headers["Content-Length"])).decode()
        time.sleep(60 if "silence" in question else 0.3)
        said = "What a lovely answer!" if "chatter" in question else "8/10"
        self.say(200, {"choices": [{"message": {"content": said}}]})

    def say(self, status: int, answer: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


class RewardModel(Judge):
    """`vllm serve` with a reward model that prefers long completions; raw numbers are asked for."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, completion = (message["content"] for message in asked["messages"])
        is_known = (self.path, prompt, asked["use_activation"]) == ("/classify", "2+5?", False)
        time.sleep(0.3)
        self.say(200 if is_known else 400, {"data": [{"index": 0, "probs": [len(completion) - 4.5]}]})


class Server(ThreadingHTTPServer):
    """Says nothing of those who hang up: a grading that is late is ended."""

    def handle_error(self, *_: object) -> None:
        pass


def asked(name: str, folder: Path, kind: type, cases: list, late: list, **settings: str) -> list[Grade]:
    """The grades by an example that asks a server at URL; those of late cases come last."""
    server = Server(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    settings = {key: value.replace("URL", url) for key, value in settings.items()}
    code = f"import os\nos.environ |= {settings}\n"  # the workers' environment is that of an earlier test
    (folder / name).write_text(code + (EXAMPLES / name).read_text())
    grading = Grading(f"{folder}/{name}:score", reward_timeout=60.0, reward_in_flight=20)
    grader = Grader(grading, num_workers=1)
    graded(grader, cases[:1])  # the worker loads
    started = time.monotonic()
    graded(grader, cases[:1])
    one = time.monotonic() - started
    grades = graded(grader, cases)
    assert time.monotonic() - started < 20 * one, "twenty at a time: three rounds, not forty-one"
    grader.pool.timeout = 1.0
    grades += graded(grader, late)
    grader.close()
    server.shutdown()
    return grades


def test_a_judge_gets_parallel_requests_and_may_talk_nonsense_or_be_late(tmp_path):
    cases, late = [*[Case("7", "7")] * 40, Case("chatter", "7")], [Case("silence", "7")]
    grades = asked("judge.py", tmp_path, Judge, cases, late, JUDGE_URL="URL/v1", JUDGE_MODEL="fake")
    assert [grade.reward for grade in grades] == [0.8] * 40 + [0.0, 0.0]
    nonsense = "error: ValueError: the judge gives no grade: 'What a lovely answer!'"
    assert grades[40].status.startswith(nonsense) and grades[41].status == "timeout"


def test_a_reward_model_gets_parallel_requests_and_may_refuse_one(tmp_path):
    cases = [Case("7" * length, "7", prompt="2+5?") for length in range(40)]
    cases.append(Case("7", "7", prompt="another"))
    grades = asked("reward_model.py", tmp_path, RewardModel, cases, [], REWARD_MODEL_URL="URL")
    assert [grade.reward for grade in grades] == [length - 4.5 for length in range(40)] + [0.0]
    assert grades[40].status.startswith("error: HTTPError: HTTP Error 400")


HONEST = (
    "def double(x):\n    return 2 * x",
    "double = lambda x: 2 * x\nprint('x' * 10**6, flush=True)\nimport atexit\natexit.register(print, 'bye')",
    "input = print = eval = None\ndouble = lambda x: 2 * x",
    "from dataclasses import dataclass\nimport pickle\n@dataclass\nclass Pair:\n    x: int\n"
    "def double(x):\n    return 2 * pickle.loads(pickle.dumps(Pair(x))).x",
)
WRONG = "\ndef double(x): return x + 2\n"
LEAVES = "\nimport os; os._exit(0)"
DUMP = """
import gc, os, sys
found = [*sys.argv, *sys.orig_argv, *os.environ.values(), open('/proc/self/cmdline').read()]
frame = sys._getframe()
while frame:
    found += map(str, [*frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values()])
    frame = frame.f_back
found += [each for each in gc.get_objects() if isinstance(each, str)]
for each in [*found, 'all tests passed', 'None']:
    print(each, flush=True)
    for number in (1, 2):
        os.write(number, each.encode() + b'\\n')
"""
CHEATS = (
    WRONG, "raise SystemExit(0)", "while True: pass", "double = lambda x: 2 * x\nx = bytearray(4 << 30)",
    "print(input())", LEAVES, "print('all tests passed', flush=True)" + LEAVES, DUMP + LEAVES,
    "import sys\nprint(sys.stdin.read())" + LEAVES,
    f"def double(x):\n    exec({DUMP + LEAVES!r})", "import atexit\natexit.register(print, 'None')\nexit()",
    f"import threading\nthreading.Thread(target=lambda: exec({DUMP + LEAVES!r})).start()\nimport time\ntime.sleep(9)",
    "import os\nif os.fork(): os._exit(0)" + WRONG, "import builtins\nbuiltins.AssertionError = SystemExit" + WRONG,
    "import sys\nsys.excepthook = lambda *_: __import__('os')._exit(0)" + WRONG, "import os\nos.kill(os.getpid(), 15)",
)  # fmt: skip


@pytest.mark.parametrize(("code", "reward"), [*((code, 1.0) for code in HONEST), *((code, 0.0) for code in CHEATS)])
def test_unit_tests_are_run_on_generated_code(code, reward):
    grade = grade_of(UNIT_TESTS, f"So:\n```python\n{code}\n```", "assert double(2) == 4\nassert double(3) == 6")
    assert grade.parts == {UNIT_TESTS: reward, "has_code": 1.0}


def test_a_text_without_code_gets_nothing():
    assert grade_of(UNIT_TESTS, "no code", "assert True").parts == {UNIT_TESTS: 0.0, "has_code": 0.0}


def test_the_reasoning_gym_example_makes_data_as_documented(tmp_path):
    code = "create_dataset = lambda task, size, seed: [dict(question=task, answer=str(i)) for i in range(size)]"
    (tmp_path / "reasoning_gym.py").write_text(code)
    command = [sys.executable, "docs/rewards/reasoning_gym_task.py", "leg_counting", "2"]
    out = said(command, ENVIRONMENT | {"PYTHONPATH": str(tmp_path)})
    assert [json.loads(line)["answer"] for line in out.splitlines()] == ["0", "1"]
