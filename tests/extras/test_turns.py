"""Episodes of several turns: tokens are never made again, only what was sampled is trained, no episode is lost."""

import base64
import json
import sys
import time
import zlib
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from algorithm import algorithm_of
from batch import Completion, Rollout
from data import render
from extras.turns.credit import states_of
from extras.turns.episode import EpisodeWorker, Turn
from extras.turns.schemas import tool_schemas
from extras.turns.tools import Toolbox, read_calls
from extras.turns.turns import Episode, Template, Turns
from flags import Grading, PromptFormat, Sampling, TurnLimits
from gate.inputs import check_template
from gate.own import guarded
from grading import Grade
from grading.user_code import load_reference
from helpers.fake_servers import FakeServer, engine_of, synced
from helpers.made_up import ALONE, flags, make_rollout, make_row, policy_of, train_once, unpacked_logprobs, whole_update
from helpers.runs import NO_EVAL, copy_at, lines, metrics_of, torchrun, training_flags, without_times
from helpers.user_code import DEEDS
from reports.samples import UNKNOWN, pack_samples
from run import describe_completion
from runtime.rank import OwnCodeError, RunError
from update import compute_advantages
from warm_start import build_tokenizer

LONG = Sampling(1, 1.0, 200)
FILE = "tests/helpers/user_code.py"
TOKENIZER = build_tokenizer()
ROW = make_row([3, 20, 4])
QWEN = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}[user]<tool>{{ m.content }}</tool>[end]\n"
    "{% else %}[{{ m.role }}]{{ m.content }}[end]\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def turns_of(
    environment: str | None, tools: str | None = None, num_workers: int = 2, file: object = FILE,
    max_turn_tokens: int | None = None, **grading: object,
) -> Turns:  # fmt: skip
    limits = TurnLimits(environment and f"{file}:{environment}", tools, 3, max_turn_tokens)
    tokenizer = templated(QWEN) if tools else build_tokenizer()
    options = Grading(**{"reward_timeout": 3.0} | grading), PromptFormat(tools=tools), tokenizer, num_workers
    return Turns(limits, *options)


def templated(chat_template: str):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


# The chat template --------------------------------------------------------------------------------------------------

STRIPS = QWEN.replace("m.content }}[end]", "m.content | trim }} <eos>")
STRIPS = STRIPS.replace("{{ m.content }}</tool>", "{{ m.content | tojson }}</tool>")


@pytest.mark.parametrize(("template", "messages", "said"), [
    (QWEN, [("user", "up")], "[end]\n[user]up[end]\n[assistant]"),
    (QWEN, [("tool", "up")], "[end]\n[user]<tool>up</tool>[end]\n[assistant]"),
    # Llama 3 and Gemma strip contents, Llama 3 writes those of tools as JSON, Llama 2 a space before the end.
    (STRIPS, [("user", " up\n"), ("tool", 'a"b')],
     ' <eos>\n[user]up <eos>\n[user]<tool>"a\\"b"</tool>[end]\n[assistant]'),
])  # fmt: skip
def test_a_reply_is_what_the_template_writes_between_two_turns(template, messages, said):
    tokenizer = templated(template)
    messages = [{"role": role, "content": content} for role, content in messages]
    for last_id, rest in ((None, said), (tokenizer.eos_token_id, said.partition("<eos>")[2] or said)):
        ids, text = Template(PromptFormat(), tokenizer).suffix(messages, last_id)
        assert (text, ids) == (said, tokenizer(rest, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("template", "said"), [
    (QWEN.replace("[end]\n{% endif", "{{ '!' if loop.last else '?' }}[end]\n{% endif"), "cannot continue"),
    ("{% for m in messages[:2] %}{{ m.content }}{% endfor %}", "cannot continue"),
    (QWEN.replace("m.content }}[end]", "m.content | upper }}[end]"), "cannot continue"),
    ("{% for m in messages %}{{ raise_exception('no') if loop.index > 2 else m.content }}{% endfor %}", "refuses it"),
])  # fmt: skip
def test_a_template_that_cannot_be_continued_is_refused(template, said):
    with pytest.raises(ValueError, match=f"{said}.*give --template_args, or another template"):
        Template(PromptFormat(), templated(template))


# Episodes, without a model --------------------------------------------------------------------------------------------


class StubEngine:
    """Finishes each request after a few steps, with tokens that name the turn; keeps what it was asked."""

    def __init__(self, steps: int = 3) -> None:
        self.asked, self.left, self.steps, self.first = [], {}, steps, 0

    def add(self, rows, so_far, limits, sampling):
        first, self.first = self.first, self.first + len(rows)
        for i, given in enumerate(zip(rows, so_far, limits, strict=True)):
            self.asked.append(given)
            self.left[first + i] = (1 + (first + i) % self.steps, given)
        return first

    def step(self):
        finished = []
        for number, (steps, given) in list(self.left.items()):
            self.left[number] = (steps - 1, given)
            if steps == 1:
                row, so_far, limit = self.left.pop(number)[1]
                ids = [30 + len(so_far) % 7, 31, TOKENIZER.eos_token_id][:limit]
                finished.append((number, Completion(ids, [-1.0] * len(ids), [], "stop" if limit > 2 else "length")))
        return finished

    def is_abandoned(self):
        return False

    def from_leader(self, value):
        return value


def played(turns: Turns, rows: list, sampling: Sampling = LONG, engine: StubEngine | None = None) -> list[Episode]:
    """The episodes, in the order of the rows; each comes once."""
    found = list(turns.play(engine or StubEngine(), rows, sampling, "test"))
    turns.close()
    assert sorted(i for i, _ in found) == list(range(len(rows)))
    return [episode for _, episode in sorted(found, key=lambda pair: pair[0])]


def test_an_episode_keeps_sampled_tokens_and_replies_in_turn():
    engine = StubEngine()
    (episode,) = played(turns_of("Counts"), [ROW], engine=engine)
    eos, reply = TOKENIZER.eos_token_id, TOKENIZER("turn 1", add_special_tokens=False)["input_ids"]
    user, assistant = TOKENIZER.convert_tokens_to_ids(["<user>", "<assistant>"])
    first, between = [30, 31, eos], [user, *reply, assistant]
    assert episode.token_ids[: len(first + between)] == first + between
    assert episode.is_sampled[:12] == [True] * 3 + [False] * 8 + [True]
    lengths = (0, 3 + len(between), 2 * (3 + len(between)))
    assert [so_far for _, so_far, _ in engine.asked] == [episode.token_ids[:n] for n in lengths]
    assert np.array(episode.logprobs)[~np.array(episode.is_sampled)].tolist() == [0.0] * (2 * len(between))
    assert len(episode.turns) == 3 and episode.finish_reason == "stop"
    assert episode.transcript.count("<user>turn") == 2 and episode.transcript.startswith(episode.turns[0])


@pytest.mark.parametrize(("environment", "limit", "turn_limit", "turns", "reason"), [
    ("Counts", 200, None, 3, "stop"),
    ("Counts", 200, 2, 3, "length"),  # each turn is cut, and the last one, too
    ("Counts", 11, None, 1, "length"),  # the reply fits, but no token after it
    ("Counts", 12, None, 2, "length"),
    ("Counts", 3, None, 1, "length"),
    ("Once", 3, None, 1, "stop"),  # it is over when there is no room left
])  # fmt: skip
def test_limits_end_an_episode_as_truncated(environment, limit, turn_limit, turns, reason):
    (episode,) = played(turns_of(environment, max_turn_tokens=turn_limit), [ROW], Sampling(1, 1.0, limit))
    assert (len(episode.turns), episode.finish_reason) == (turns, reason)
    assert len(episode.token_ids) <= limit
    rewarded = ["Counts", *(f"turn_{k + 1}" for k in range(turns))]
    assert episode.grade is None if environment == "Once" else list(episode.grade.parts) == rewarded


def test_workers_are_loaded_before_they_are_asked_for_a_reply(tmp_path):
    """Each has loaded a module that takes long when the trainer's side is made: no reply waits for that."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\ntime.sleep(0.5)\nclass Slow:\n def reply(self, text): 0\nopen(__file__ + '.log', 'a').write('+')"
    )
    turns = turns_of("Slow", file=slow)
    loaded = Path(f"{slow}.log").read_text()
    turns.close()
    assert loaded == "++"


def test_a_thousand_episodes_with_hostile_ones_lose_none():
    """2 % hang, exit, raise, reply with 10 MB, with what is no text or cannot be written, or with control tokens."""
    deeds = [list(DEEDS)[i // 50 % len(DEEDS)] if i % 50 == 7 else "fine" for i in range(1000)]
    turns = turns_of("Hostile", reward_timeout=1.0)
    refuses = "{% if messages[-1].role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
    turns.template.tokenizer.chat_template += refuses
    rows = [make_row([3, i % 60, 4], columns={"answer": deed}) for i, deed in enumerate(deeds)]
    statuses = {
        "hang": "timeout", "exit": "error: it ended its process (exit status 3)",
        "raise": "error: KeyError: 'no such luck' (user_code.py",
        "no text": "error: WrongReturn: Hostile.reply returned <module",
        "surrogate": "error: WrongReturn: Hostile.reply returned 'half \\ud800'",
        "odd role": "error: the chat template refuses it (who?)",
    }  # fmt: skip
    for episode, deed in zip(played(turns, rows), deeds, strict=True):
        grade, is_failed = episode.grade, deed in statuses
        assert grade.is_compared != is_failed, "whoever wrote the environment is to blame, not the completion"
        assert grade.status.startswith(statuses.get(deed, "ok")) and (grade.reward == 0.0 or not is_failed), deed
        is_cut = is_failed or deed == "10 MB"
        assert len(episode.turns) == 3 - is_cut and (episode.finish_reason == "length") == (deed == "10 MB"), deed
        assert episode.transcript.count("turn 1") == 1 and episode.transcript.count("turn 2") == (deed == "fine")
        assert all(type(name) is str for name in grade.parts), "of a class of the user's, which the trainer cannot load"
        special = [i for i, is_own in zip(episode.token_ids, episode.is_sampled, strict=True) if not is_own]
        assert special.count(TOKENIZER.eos_token_id) == 0
        assert special.count(TOKENIZER.convert_tokens_to_ids("<user>")) == 2 - is_cut


def test_an_environment_that_waits_holds_nobody_up():
    turns = turns_of("Waits", num_workers=1, reward_timeout=5.0, reward_in_flight=50)
    seconds = []
    for count in (1, 50):
        begin = time.monotonic()
        episodes = played(turns, [make_row([3, i % 60, 4]) for i in range(count)])
        seconds.append(time.monotonic() - begin)
        assert all(len(each.turns) == 3 and each.grade.parts["turns"] == 3 for each in episodes)
    assert seconds[1] < 25 * seconds[0], "one after the other they take 50 times as long"


def test_replies_enter_the_engine_at_the_same_step():
    asked = []
    for seconds in (0.0, 0.05):
        turns, engine = turns_of("Counts"), StubEngine()
        take = turns.environments.pop_replies
        turns.environments.pop_replies = lambda wait, take=take, seconds=seconds: time.sleep(seconds) or take(wait)
        played(turns, [make_row([3, i, 4]) for i in range(20)], engine=engine)
        asked.append([(row.ids.tolist(), so_far) for row, so_far, _ in engine.asked])
    assert asked[0] == asked[1]


# Tools ----------------------------------------------------------------------------------------------------------------


class Says(StubEngine):
    """Samples these texts, one a turn."""

    def __init__(self, *texts: str) -> None:
        super().__init__(1)
        self.texts = iter(texts)

    def step(self):
        ids = [TOKENIZER(next(self.texts))["input_ids"] for _ in self.left]
        return [(n, Completion(x, [-1.0] * len(x), [], "stop")) for (n, _), x in zip(super().step(), ids, strict=True)]


def test_a_tools_result_is_the_next_turn():
    engine = Says("add(2,3) add(1,1) sub(1,1)", "so 5 and 2")
    (episode,) = played(turns_of(None, f"{FILE}:add"), [ROW], engine=engine)
    assert episode.turns == ["add(2,3) add(1,1) sub(1,1)", "so 5 and 2"] and episode.grade is None
    assert episode.transcript.count("<tool>") == 3
    assert "<tool>5</tool>" in episode.transcript and "<tool>2</tool>" in episode.transcript
    assert "there is no tool 'sub'; there are add" in episode.transcript


def called(completion: str, functions: dict) -> list[str] | None:
    replies = Toolbox(functions, read_calls, {}).reply(completion)
    return replies and [each["content"] for each in replies]


def test_calls_in_the_format_of_hermes_are_run():
    """Malformed ones are answered with what is wrong; what a tool returns is written as JSON."""
    functions = {"add": lambda a, b: a + b, "fail": lambda: 1 / 0, "join": lambda words: {"text": " ".join(words)}}
    form = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    two = form % ("add", '{"a": 1, "b": 2}') + form % ("join", '{"words": ["a", "b"]}')
    assert called(two, functions) == ["3", '{"text": "a b"}']
    assert called(form % ("add", '"{\\"a\\": 1, \\"b\\": 2}"'), functions) == ["3"]  # arguments as a text
    assert called("no call", functions) is None
    assert called(form % ("join", '{"words": ["\\ud800"]}'), functions) == ['{"text": "?"}'], "half a surrogate pair"
    assert called(f"<think>{form % ('add', '{}')}</think> none", functions) is None, "a thought calls nothing"
    for wrong, said in {
        "<tool_call>{": "is not closed", "<tool_call>{]</tool_call>": "Expecting",
        form % ("fail", "{}"): "ZeroDivisionError",
        form % ("add", '{"a": 1}'): "missing a required", "<tool_call>[1]</tool_call>": "TypeError",
    }.items():  # fmt: skip
        (reply,) = called(wrong, functions)
        assert reply.startswith("error: ") and said in reply
    values = [np.float32(1.5), np.arange(2), make_dataclass("Place", ["x"])(3), Path("a")]
    for value, written in zip(values, ["1.5", "[0, 1]", '"Place(x=3)"', '"a"'], strict=True):
        assert called('<tool_call>{"name": "tool"}</tool_call>', {"tool": Mock(return_value=value)}) == [written]


@pytest.mark.parametrize(("limit", "count"), [(400, 3.0), (30, 1.0)])  # in the second the first reply has no room
def test_a_tool_that_fails_is_counted_and_named_once(limit, count, capsys):
    """A call that the model has made wrongly is none, and a reply that is asked for again counts once."""
    turns = turns_of(None, f"{FILE}:divide")
    engine = Says("divide(2,0) divide(2,1) sub(2,0)", "divide(1,0)", "divide(3,0)")
    played(turns, [ROW], Sampling(1, 1.0, limit), engine=engine)
    said = "warning: the tool divide raised ZeroDivisionError: "
    assert capsys.readouterr().out.count(said) == 1
    assert [turns.step(step, {}) for step in (1, 2)] == [{"tools/errors": count}, {"tools/errors": 0.0}]


def test_the_chat_template_is_given_the_tools():
    tools = f"{FILE}:add"
    with pytest.raises(ValueError, match="--tools .*: the chat template of --model shows no tools"):
        check_template(PromptFormat(tools=tools), TOKENIZER)
    check_template(PromptFormat(tools=tools), templated(QWEN))
    prompt = render([{"role": "user", "content": "1+2"}], PromptFormat(tools=tools), templated(QWEN))
    assert prompt.startswith("<|tools|>add[user]1+2")
    with pytest.raises(ValueError, match="--tools .*Cannot generate JSON schema for NoReply"):
        tool_schemas(f"{FILE}:NoReply")


def test_the_tools_of_the_docs_work_things_out_within_limits():
    calculator = load_reference("docs/environments/calculator.py:calculator")
    assert (calculator("(3 + 4) * 2"), calculator("1,000 / -8")) == (14, -125)
    with pytest.raises(ValueError, match="only numbers"):
        calculator("().__class__")
    python = load_reference("docs/environments/python_tool.py:python")
    assert python("print(6 * 7)") == "42\n"
    assert "MemoryError" in python("x = bytearray(2 << 30)")
    assert "File too large" in python("open('/tmp/x', 'w').write('x' * 9999)")
    assert "not finished after 3 s" in python("import time; time.sleep(9)")


def test_environments_of_other_libraries_are_ours_by_an_adapter(monkeypatch):
    handler = EpisodeWorker("docs/environments/gym_adapter.py:Adapter", None)
    reply = handler(Turn(1, {"answer": ""}, ("right",), is_last=False))
    assert reply.messages == [{"role": "user", "content": "you are at 1"}]
    reply = handler(Turn(1, {"answer": ""}, ("right", "right"), is_last=False))
    assert (reply.messages, reply.grade.reward) == ([], 1.0)
    assert reply.grade.parts == {"Adapter": 1.0, "turn_1": 0.0, "turn_2": 1.0}
    assert reply.grade.turn_rewards == (0.0, 1.0)
    assert len(Path("docs/environments/gym_adapter.py").read_text().partition("class Adapter")[2].splitlines()) <= 25
    client = Mock()  # of OpenEnv: a session of its server is an episode
    client.sync.return_value = client
    client.step.side_effect = [SimpleNamespace(observation={"echo": "hi"}, reward=0.5, done=x) for x in (False, True)]
    library = SimpleNamespace(GenericEnvClient=Mock(return_value=client))
    monkeypatch.setitem(sys.modules, "openenv", SimpleNamespace(core=library))
    monkeypatch.setitem(sys.modules, "openenv.core", library)
    for name, value in {"URL": "http://x", "ACTION": "message", "OBSERVATION": "echo"}.items():
        monkeypatch.setenv(f"OPENENV_{name}", value)
    handler, row = EpisodeWorker("docs/environments/openenv_adapter.py:OpenEnv", None), {"answer": "", "seed": "3"}
    assert handler(Turn(1, row, ("a",), is_last=False)).messages == [{"role": "user", "content": "hi"}]
    reply = handler(Turn(1, row, ("a", "b"), is_last=False))
    assert (reply.messages, reply.grade.reward) == ([], 1.0)
    steps = [call.step({"message": text}) for text in "ab"]
    assert client.mock_calls == [call.sync(), call.reset(seed=3), *steps, call.close()]
    library.GenericEnvClient.assert_called_once_with(base_url="http://x")


# Training on them -----------------------------------------------------------------------------------------------------


def three_turns(lengths: list[int], seed: int = 0) -> Rollout:
    """Completions of random tokens of which the middle ones of each third were not sampled."""
    rollout = make_rollout(lengths, seed=seed, group_size=2)
    is_sampled = [np.arange(n) % (n // 3) < n // 6 + 1 for n in lengths]
    logprobs = [x * mask for x, mask in zip(rollout.rollout_logprobs, is_sampled, strict=True)]
    weights = np.full(len(lengths), 1 / sum(map(sum, is_sampled)), dtype=np.float32)
    return replace(rollout, is_sampled=is_sampled, rollout_logprobs=logprobs, loss_weights_B=weights)


@pytest.mark.parametrize("share_prompts", [None, True])
def test_three_turns_train_like_a_plain_implementation(policy, share_prompts):
    """In float64; the first update of a step, whose ratios are 1; tolerance 1e-6."""
    rollout = three_turns([12, 18, 15, 12])
    args = flags(model=policy, prompts_per_step=2, group_size=2, micro_batch_tokens=64, max_prompt_tokens=4,
                 max_completion_tokens=20, share_prompts=share_prompts)  # fmt: skip
    ours = policy_of(args)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    found = train_once(ours, optimizer, whole_update(rollout, args, ours, ALONE), args, rate=1.0, max_grad_norm=1e9)
    plain = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    logprobs_T = unpacked_logprobs(plain, rollout, 1.0)
    mask_T = torch.from_numpy(np.concatenate(rollout.is_sampled))
    advantages_T = torch.from_numpy(np.concatenate(rollout.advantages)).double()
    loss = (-advantages_T * (logprobs_T - logprobs_T.detach()).exp())[mask_T].mean()
    loss.backward()
    assert found["policy/loss"] == pytest.approx(loss.item(), abs=1e-6)
    names = dict(plain.named_parameters())
    for (name, now), old in zip(ours.model.named_parameters(), policy_of(args).parameters(), strict=True):
        assert (old - now - names[name].grad).abs().max() < 1e-6, name


def test_rewards_of_turns_become_returns_to_go():
    """And mt_grpo compares each turn. A group of two episodes: of two turns and of one."""
    rollout = Rollout(
        rows=[make_row([1, 2])] * 2, completions=[np.arange(5), np.arange(2)],
        rollout_logprobs=[np.zeros(5), np.zeros(2)], texts=["", ""], is_truncated_B=np.zeros(2, bool),
        is_sampled=[np.array([1, 1, 0, 0, 1], bool), np.array([1, 1], bool)], is_trained_B=np.ones(2, bool),
        grades=[Grade(3.0, "ok", turn_rewards=(1.0, 2.0)), Grade(0.5, "ok", turn_rewards=(0.5,))],
    )  # fmt: skip

    def advantages(rollout: Rollout, name: str, **more: object) -> np.ndarray:
        """Those of the sampled tokens."""
        found = compute_advantages(rollout, None, guarded(algorithm_of(flags(advantage=name, group_size=2, **more))))
        return np.concatenate([values[kept] for values, kept in zip(found, rollout.is_sampled, strict=True)])

    named = replace(rollout, grades=[Grade(3.0, "ok", {"turn_1": 9.0}), Grade(0.5, "ok", {"turn_1": 0.0})])
    for each, returns in ((rollout, [3.0, 3.0, 2.0, 0.5, 0.5]), (named, [3.0, 3.0, 3.0, 0.5, 0.5])):
        wanted = (returns - np.mean(returns)) / (np.std(returns, ddof=1) + 1e-6)
        assert advantages(each, "reinforce++") == pytest.approx(wanted, abs=1e-6), "a sub-score's name makes no turn"
    one, played_by = 0.5**0.5, {"environment": f"{FILE}:Counts"}
    by_turns = [one, one, 0.0, -one, -one]  # (1 - 0.75) / std of 1 and 0.5; the second turn is compared with nothing
    assert advantages(rollout, "mt_grpo", advantage_eps=0, **played_by) == pytest.approx(by_turns, abs=1e-6)
    assert states_of(rollout) == [[b"", np.array([2, 3]).tobytes()], [b""]], "the tokens between the turns"
    failed = replace(rollout, grades=[Grade(0.0, "truncated"), Grade(0.0, "timeout")])
    assert not advantages(failed, "mt_grpo", **played_by).any(), "no reward, and no end of it"
    mixed = replace(rollout, grades=[rollout.grades[0], Grade(1.0, "ok")])
    with pytest.raises(OwnCodeError, match="mt_grpo needs an --environment whose reward"):
        advantages(mixed, "mt_grpo", **played_by)


# Whole runs -----------------------------------------------------------------------------------------------------------

SHORT = {"max_completion_tokens": 100, "max_turn_tokens": 6, "micro_batch_tokens": 512, "total_steps": 2,
         "kl_coef": 0, "max_rollout_gap": 1e-5} | NO_EVAL  # fmt: skip


@pytest.mark.parametrize(("turns", "num_ranks", "changes"), [
    (2, 2, {"share_prompts": True}),
    (5, 2, {"share_prompts": True, "tensor_parallel_size": 2}),
    (5, 1, {"share_prompts": True, "lora_rank": 4, "learning_rate": 1e-2}),
])  # fmt: skip
def test_sampler_and_trainer_agree_in_float32_however_many_turns(turns, num_ranks, changes, policy, tmp_path):
    game = "docs/environments/guess_number.py:GuessNumber" if turns == 2 else f"{FILE}:Counts"
    given = SHORT | {"environment": game, "max_turns": turns, "dtype": "float32"} | changes
    torchrun(num_ranks, "train_grpo.py", *training_flags(policy, tmp_path, **given))
    metrics = metrics_of(tmp_path)
    assert [metrics[step]["completion/turns_mean"] for step in (1, 2)] == [turns, turns]
    assert all(metrics[step]["policy/rollout_gap_max"] < 1e-5 for step in (1, 2))
    assert metrics[1]["optim/grad_norm"] > 0 or turns == 2, "nobody may win the game"


def test_an_environment_that_ends_at_once_changes_no_bit(policy, reward, tmp_path):
    found = []
    for name, changes in (("without", {}), ("with", {"environment": f"{FILE}:Once"})):
        torchrun(1, "train_grpo.py", *training_flags(policy, tmp_path / name, reward=reward, total_steps=2, **changes))
        found.append({step: without_times(line) for step, line in metrics_of(tmp_path / name).items()})
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def game(policy, tmp_path_factory):
    """A run with evaluation on two ranks: its flags in any folder, and its own folder."""
    out_dir = tmp_path_factory.mktemp("game") / "run"
    given = {"environment": f"{FILE}:Counts", "max_turns": 3, "advantage": "mt_grpo"}
    evaluated = {"total_steps": 4, "eval_every": 2, "eval_data": policy / "heldout.jsonl"}
    flags_in = partial(training_flags, policy, **SHORT | given | evaluated)
    torchrun(2, "train_grpo.py", *flags_in(out_dir))
    return flags_in, out_dir


def test_a_run_from_a_checkpoint_and_a_replay_have_the_same_turns(game, tmp_path):
    flags_in, out_dir = game
    copy, again = copy_at(2, out_dir, tmp_path / "copy"), tmp_path / "again"
    torchrun(2, "train_grpo.py", *flags_in(copy))
    torchrun(2, "train_grpo.py", *flags_in(again), "--replay", out_dir, "--stop_after", 2)
    expected, resumed, replayed = map(metrics_of, (out_dir, copy, again))
    assert all(without_times(resumed[step]) == without_times(expected[step]) for step in (3, 4))
    names = ("policy/loss", "policy/entropy", "optim/grad_norm", "completion/tokens_mean", "reward/mean")
    assert [[replayed[s][n] for n in names] for s in (1, 2)] == [[expected[s][n] for n in names] for s in (1, 2)]


def test_evaluation_plays_the_same_episodes(game):
    _, out_dir = game
    rows = lines(out_dir / "eval" / "step_4" / "heldout.jsonl")
    assert all(row["completion"].count("<user>turn") == 2 and "turn_3" in row["reward_parts"] for row in rows)
    assert metrics_of(out_dir)[4]["eval/heldout/avg@1"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    raw = zlib.decompress(base64.b64decode(pack_samples(out_dir, 10**6)[1][4]))  # what the report's page has
    length = int.from_bytes(raw[:4], "little")
    (_, _, num_bytes), (_, _, sizes), (_, _, codes) = json.loads(raw[4 : 4 + length])["arrays"]
    text, codes = raw[4 + length :][:num_bytes].decode(), np.frombuffer(raw[-codes:], np.uint8)
    ends = np.cumsum(np.frombuffer(raw[4 + length + num_bytes :][:sizes], "<u2"))
    said = "".join(text[end - 1] for end, code in zip(ends, codes, strict=True) if code == UNKNOWN)
    assert said.count("turn 1") == said.count("turn 2") == 32, "a letter each"


def test_servers_play_turns():
    """Each turn is asked for with all tokens before it, whichever server samples it."""
    turns, rows = turns_of("Counts", max_turn_tokens=4), [make_row([3, 20 + i, 4], where=f"row {i}") for i in range(4)]
    servers, heard, sampling = (FakeServer(0.001), FakeServer(0.005)), [], Sampling(2, 1.0, 100)
    with engine_of(*servers, turns=turns) as engine:
        rollout = synced(engine).sample(rows, sampling, (1, 1), on_finished=lambda *given: heard.append(given))
    turns.close()
    assert [each.max() + 1 for each in rollout.turns] == [3] * 8
    assert rollout.completion_lengths_B.tolist() == [12] * 8 and rollout.is_truncated_B.all(), "the last turn was cut"
    graded = replace(rollout, grades=[Grade(1.0, "ok")] * 8)
    assert describe_completion(graded, 7)["num_tokens"] == 12, "of what was sampled"
    assert sorted(b for b, *_ in heard) == list(range(8)) and all(grade.parts["Counts"] >= 0 for *_, grade in heard)
    prompts = [prompt for server in servers for prompt in server.prompts]
    assert len(prompts) == 8 * 3 and all(server.prompts for server in servers)
    whole = [[*row.ids.tolist(), *ids] for row, ids in zip(rollout.rows, rollout.completions, strict=True)]
    assert all(any(all_of[: len(prompt)] == prompt for all_of in whole) for prompt in prompts)


@pytest.mark.parametrize("name", ["end_turn", "end_reply"])
def test_an_exception_amid_turns_ends_the_run_at_once(name, monkeypatch, capsys):
    turns = turns_of("Counts", max_turn_tokens=4)
    monkeypatch.setattr(turns, name, lambda *_: {}["no such token"])
    with engine_of(FakeServer(), turns=turns) as engine:
        synced(engine)
        with pytest.raises(RunError, match="sampling failed: KeyError.'no such token'"):
            engine.sample([ROW], Sampling(2, 1.0, 100), (1, 1))
    turns.close()
    assert "Traceback" in capsys.readouterr().err
