"""Partial rollouts: what is kept between steps, with an engine that only counts tokens, and with vLLM."""

import copy
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from batch import Completion
from data import PromptData
from engine.options import EngineDemand
from extras.samplers import partial
from extras.samplers.partial import PartialSampler, num_unfinished_prompts, shares_of
from flags import MOST_LAG, Sampling
from fsdp_utils import World
from helpers import made_up
from helpers.distributed import TEMPERATURE, on_ranks, sampler_logprobs, start_engine
from helpers.made_up import ALONE, Ear, flags, load, make_row
from helpers.runs import metrics_of, torchrun, training_flags
from schedule import make_plan
from warm_start import build_tokenizer

GROUP = 2


class CountingEngine:
    """Completions get a token a step: its number is the whole length, its log-prob tells the weights."""

    guard, seconds_E, world = None, np.zeros(1), ALONE
    tokenizer = build_tokenizer()

    def __init__(self, lengths) -> None:
        self.lengths = lengths  # those of the completions of row i: two numbers
        self.version = self.num_steps = self.num_tokens = self.next_id = 0
        self.running: dict[int, list[int]] = {}  # request -> [the length it will have, tokens so far, and now]
        self.begun: dict[str, int] = {}

    def prepare(self, seed) -> None:
        assert not self.running, "nothing is under way between two calls"

    def add(self, rows, so_far, limits, sampling) -> int:
        first = self.next_id
        for row, ids, limit in zip(rows, so_far, limits, strict=True):
            g = self.begun.get(row.where, 0)
            if not ids:
                self.begun[row.where] = (g + 1) % GROUP
            length = ids[0] if ids else min(self.lengths[int(row.where)][g], sampling.max_completion_tokens)
            assert len(ids) < length <= len(ids) + limit
            self.running[self.next_id] = [length, len(ids), 0]
            self.next_id += 1
        return first

    def step(self):
        self.num_steps += 1
        self.num_tokens += len(self.running)
        for request in self.running.values():
            request[2] += 1
        ended = [i for i, (length, before, now) in self.running.items() if before + now == length]
        return [(i, self.output(i)) for i in ended]

    def output(self, request_id) -> Completion:
        length, _, now = self.running.pop(request_id)
        return Completion([length] * now, [-1.0 - self.version] * now, [], "stop")

    def abort_unfinished(self):
        found = [(i, self.output(i)) for i in list(self.running)]
        return [(i, each.token_ids, each.logprobs) for i, each in found]

    def is_busy(self) -> bool:
        return bool(self.running)


@pytest.fixture(autouse=True)
def engines_abort(monkeypatch):
    monkeypatch.setattr(
        partial,
        "abort_unfinished",
        lambda engine, real=partial.abort_unfinished: getattr(engine, "abort_unfinished", lambda: real(engine))(),
    )


def long_tailed(count: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).geometric(1 / 30, size=(count, GROUP)).tolist()


def sampler_of(lengths, last_step, prompts_per_step=8, **changes) -> PartialSampler:
    args = flags(prompts_per_step=prompts_per_step, group_size=GROUP, partial_rollouts=True, **changes)
    run = SimpleNamespace(last_step=last_step, phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    settings = make_plan(args, len(lengths)), Sampling.from_flags(args, num_samples=GROUP)
    data = PromptData("data", [make_row([1, 2], where=str(i)) for i in range(len(lengths))])
    return PartialSampler(CountingEngine(lengths), Ear(), data, *settings, run)


def run_steps(sampler, first, last):
    found = []
    for step in range(first, last + 1):
        sampler.engine.version = step - 1
        found.append(sampler.collect(step))
    return found


def prompts_of(found) -> list[int]:
    return [int(row.where) for rollout, _ in found for row in rollout.rows[::GROUP]]


@pytest.mark.parametrize(("count", "prompts", "last"), [(64, 8, 8), (20, 8, 4), (9, 1, 9), (64, 5, 12)])
def test_every_prompt_is_used_once_and_no_token_is_lost(count, prompts, last):
    lengths = long_tailed(count)
    sampler = sampler_of(lengths, last, prompts)
    found, is_mixed = run_steps(sampler, 1, last), False
    drawn = [sampler.data.indices_of_step(step, prompts, sampler.plan.seed) for step in range(1, last + 1)]
    assert sorted(prompts_of(found)) == sorted(np.concatenate(drawn))
    for step, (rollout, metrics) in enumerate(found, start=1):
        assert [grade.where for grade in rollout.grades] == [row.where for row in rollout.rows], "graded as itself"
        for b, row in enumerate(rollout.rows):
            versions, lags = rollout.parts["versions"][b], rollout.parts["lags"][b]
            assert rollout.completion_lengths_B[b] == lengths[int(row.where)][b % GROUP]
            assert (rollout.rollout_logprobs[b] == -1.0 - versions).all(), "of the weights that made it"
            assert (lags == step - 1 - versions).all() and (lags >= 0).all() and (np.diff(versions) >= 0).all()
            is_mixed |= versions[0] < versions[-1]
        lags = np.concatenate(rollout.parts["lags"])
        means = metrics["rollout/lag_mean"], metrics["rollout/frac_old_tokens"]
        assert means == pytest.approx((lags.mean(), (lags > 0).mean()))
    if (count, last) == (64, 8):  # in the others it is left to chance
        assert is_mixed and found[1][1]["rollout/frac_old_tokens"] > 0
        assert found[0][1]["rollout/kept_tokens"] > 0 == found[-1][1]["rollout/kept_tokens"]
    num_tokens = sum(rollout.completion_lengths_B.sum() for rollout, _ in found)
    assert sampler.engine.num_tokens == num_tokens, "none was sampled twice, or for nothing"
    assert not sampler.groups and sampler.kept_tokens == 0


def test_prompts_that_are_solved_or_beyond_the_last_step_are_not_begun():
    sampler = sampler_of([[1, 1]] * 64, last_step=4, drop_solved=0.9)
    sampler.solved = {str(i): 0 for i in range(0, 64, 2)}
    assert sorted(prompts_of(run_steps(sampler, 1, 4))) == list(range(1, 64, 2))
    assert dict(sampler.state(4)["solved"]) == sampler.solved
    sampler = sampler_of(long_tailed(64), 8)
    sampler.restore({"prompts_drawn": 20, "in_the_air": list(range(8, 20))})
    sampler.run.last_step = 2
    run_steps(sampler, 2, 2)
    assert not sampler.groups and sampler.state(2) == {"prompts_drawn": 20, "in_the_air": [16, 17, 18, 19]}


@pytest.mark.parametrize("num_long", [1, 3])
def test_no_completion_is_carried_for_longer_than_the_bound(num_long):
    sampler = sampler_of([[5, 5]] * 80, 10, max_completion_tokens=1000)
    first = sampler.data.indices_of_step(1, 8, sampler.plan.seed)[:num_long]
    sampler.engine.lengths = [[5, 1000] if i in first else [5, 5] for i in range(80)]
    found = run_steps(sampler, 1, 10)
    assert max(metrics["rollout/lag_max"] for _, metrics in found) == MOST_LAG
    used = [step for step in range(1, 11) if {*first.tolist()} & {*prompts_of(found[step - 1 : step])}]
    assert used == [1 + MOST_LAG], "the step waits for them, and not before"


def test_a_long_tail_is_not_waited_for_and_groups_have_their_places_by_lot():
    """Short answers take no longer than without. Places are not in the order of finishing."""
    for lengths, bound in ((long_tailed(160), 0.8), ([[12, 12]] * 160, 1.0)):
        sampler = sampler_of(lengths, 20, max_completion_tokens=1000)
        found = run_steps(sampler, 1, 20)
        order = [sampler.data.indices_of_step(step, 8, sampler.plan.seed) for step in range(1, 21)]
        without = sum(max(max(lengths[i]) for i in indices) for indices in order)
        assert sampler.engine.num_steps <= bound * without, (sampler.engine.num_steps, without)
        longest = np.array([rollout.completion_lengths_B.reshape(-1, GROUP).max(axis=1) for rollout, _ in found])
        halves = longest[:, :4].mean(), longest[:, 4:].mean()
        assert max(halves) < 1.25 * min(halves), "updates of a step get about the same lengths"


@pytest.mark.parametrize("stops", [(3,), (1, 2, 5)])
@pytest.mark.parametrize("dynamic_sampling", ["off", "correct"])
def test_a_continued_run_samples_unfinished_prompts_anew_and_each_once(stops, dynamic_sampling):
    used, before, state = [], 0, None
    lengths = [[a, b if i % 3 else a] for i, (a, b) in enumerate(long_tailed(400))]  # some groups without signal
    for last in [*stops, 8]:
        sampler = sampler_of(lengths, 8, dynamic_sampling=dynamic_sampling)
        if state:
            sampler.restore(state)
        for step in range(before + 1, last + 1):
            run_steps(sampler, step, step)
            used += [int(row.where) for row in sampler.rollout.rows[::GROUP]]
        before, state = last, json.loads(json.dumps(sampler.state(last)))
        if last < 8:  # the next step has begun and is cut off
            assert state["in_the_air"]
            sampler.collect(last + 1)
            assert sampler.state(last) == state
    assert state == {"prompts_drawn": len(used), "in_the_air": []} and len(set(used)) == len(used)
    assert len(used) == 64 if dynamic_sampling == "off" else len(used) > 64, "groups were replaced"


def test_engines_share_the_groups_by_what_they_have_unfinished():
    assert [num_unfinished_prompts(*each) for each in ((8, 2), (8, 8), (3, 2))] == [12, 16, 6]
    assert [shares_of(*each) for each in ((8, [6, 6]), (3, [1, 4]), (5, [3, 4]))] == [[4, 4], [0, 3], [2, 3]]


def test_older_tokens_are_corrected():
    ahead = {"engine": "server", "steps_ahead": 1}
    for changes in ({}, ahead | {"rollout_correction": "none"}, ahead | {"old_logprobs": "rollout"}):
        assert flags(**changes).rollout_correction == "none"
    for changes in ({"partial_rollouts": True}, ahead):
        assert flags(**changes).rollout_correction == "token_truncate"


PROMPTS, LIMIT, STEPS = 8, 80, 4


def largest_gap(models, rollout):
    """Between recorded log-probs and those under the weights whose version the tokens have."""
    versions, found = torch.from_numpy(np.concatenate(rollout.parts["versions"])), []
    for version in versions.unique().tolist():
        with torch.no_grad():
            logprobs = made_up.unpacked_logprobs(models[version], rollout, TEMPERATURE)
        found.append((logprobs - sampler_logprobs(rollout)).abs()[versions == version].max().item())
    return max(found)


def partial_rollouts(world: World, path: str) -> None:
    """Each token has the log-prob of the weights that made it, every prompt is used once, each completion graded."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    at_once = num_unfinished_prompts(PROMPTS, world.num_engines) // world.num_engines * GROUP
    engine = start_engine(path, world, EngineDemand(at_once), dtype="float32", max_model_len=128)
    data = load(f"{path}/train.jsonl", engine.tokenizer, max_prompt_tokens=8)
    data.rows[:] = [replace(row, where=f"row {i}") for i, row in enumerate(data.rows[: PROMPTS * STEPS])]
    plan = make_plan(flags(prompts_per_step=PROMPTS, group_size=GROUP, partial_rollouts=True), PROMPTS)
    run = SimpleNamespace(last_step=STEPS, phase=lambda _: nullcontext(), reward_failures=lambda *_: None)
    sampler = PartialSampler(engine, Ear(), data, plan, Sampling(GROUP, TEMPERATURE, LIMIT), run)
    models, found = [], []
    for step in range(1, STEPS + 1):
        models.append(copy.deepcopy(model))
        engine.sync((name, tensor.detach()) for name, tensor in model.named_parameters())
        rollout, _ = sampler.collect(step)
        engine.sample(data.rows[:3], Sampling(1, 0.0, 5), (step,))  # as an evaluation between two steps
        where, ids = [row.where for row in rollout.rows], [ids.tolist() for ids in rollout.completions]
        assert [grade.where for grade in rollout.grades] == where == [x for x in where[::GROUP] for _ in range(GROUP)]
        assert [grade.reward for grade in rollout.grades] == rollout.completion_lengths_B.tolist()
        assert rollout.texts == engine.tokenizer.batch_decode(ids, skip_special_tokens=True)
        is_cut = [len(each) == LIMIT and each[-1] != engine.tokenizer.eos_token_id for each in ids]
        assert rollout.is_truncated_B.tolist() == is_cut
        versions, lags = (np.concatenate(rollout.parts[name]) for name in ("versions", "lags"))
        assert versions.min() >= 0 and lags.max() <= MOST_LAG and (lags == step - 1 - versions).all()
        assert largest_gap(models, rollout) < 5e-5
        found.append(rollout)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.04)
    assert largest_gap([*models[1:], model], found[-1]) > 0.01, "the log-probs of the next version would show"
    num_mixed = sum(len(np.unique(each)) > 1 for rollout in found for each in rollout.parts["versions"])
    assert num_mixed >= 3, "completions with tokens of several versions"
    assert any(rollout.is_truncated_B.any() for rollout in found)
    assert sorted(row.where for rollout in found for row in rollout.rows[::GROUP]) == sorted(x.where for x in data.rows)
    assert sampler.state(STEPS) == {"prompts_drawn": PROMPTS * STEPS, "in_the_air": []}
    engine.close()


@pytest.mark.parametrize("size", [1, 2], ids=["two engines", "one engine over two ranks"])
def test_an_epoch_with_vllm(policy, size):
    on_ranks(2, partial_rollouts, policy, tp_size=size)


def test_a_run_with_partial_rollouts_keeps_what_is_unfinished(policy, tmp_path):
    changes = {"partial_rollouts": True, "max_completion_tokens": 40, "total_steps": 3}
    torchrun(1, "train_grpo.py", *training_flags(policy, tmp_path, **changes, save_every=1, eval_every=1))
    metrics = metrics_of(tmp_path)
    assert metrics[1]["rollout/lag_max"] == 0 < metrics[2]["rollout/lag_max"]
    assert 0 < metrics[2]["policy/rollout_gap_lag_1"] < 1 and metrics[2]["policy/rollout_gap_lag_4"] is None
    states = [json.loads((tmp_path / f"step_{i}/trainer/progress.json").read_text()) for i in (1, 2, 3)]
    assert [(each["prompts_drawn"], len(each["in_the_air"])) for each in states] == [(12, 4), (20, 4), (24, 0)]
