"""Own files that change the loop: an optimizer, what follows a step, and functions that know the step."""

import copy
import math
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from algorithm import algorithm_of
from checkpoint import shards_of
from flags import AdamW, Memory
from fsdp_utils import World
from gate.describe import describe_policy
from grading.user_code import load_reference
from grpo import Tokens, k3
from helpers.distributed import Metrics, Tensors, kept_gradients, on_ranks, parsed, train, weights_of
from helpers.made_up import ALONE, build, flags, load_policy, make_rollout, train_once, whole_update
from helpers.runs import NO_EVAL, ROOT, copy_at, metrics_of, run_ranks, torchrun, training_flags, without_times
from model.optimizer import make_optimizer, set_rate
from run import Run
from runtime.rank import OwnCodeError, RunError
from watch.after_step import AfterStep

MUON = "docs/optimizers/muon.py:make"
OWN = """
from grpo import clip, dr_grpo

told = []


def noted(g):
    told.append(g.step)
    return dr_grpo(g) * g.step / g.total_steps


def hook(step, metrics):
    told.append(-step)
    print("told", told)
    return "stop" if step == 3 else None
"""


@pytest.fixture(scope="module")
def runs(policy, tmp_path_factory) -> tuple[str, object, object]:
    """What the second of two runs with own files says, after a kill; the first one's folder, and its own."""
    folder = tmp_path_factory.mktemp("own")
    adaptive = "docs/hooks/adaptive_kl.py"
    changes = {
        "optimizer": MUON, "policy_loss": "docs/hooks/entropy_schedule.py:clip_explores", "entropy_coef": 0.1,
        "kl_estimator": f"{adaptive}:scaled", "after_step": f"{adaptive}:adapt", "eval_before_training": None,
    }  # fmt: skip
    for name in ("whole", "parts"):
        if name == "parts":
            copy_at(2, folder / "whole", folder / "parts")
        done = torchrun(1, "train_grpo.py", *training_flags(policy, folder / name, **changes))
    return done.stdout, folder / "whole", folder / "parts"


def test_a_run_with_own_files_continues_bit_for_bit_after_a_kill(runs):
    """Also what a hook keeps comes back: the log is told to it again."""
    said, whole, parts = runs
    assert f"continues from {parts}/step_2" in said
    expected, found = metrics_of(whole), metrics_of(parts)
    assert list(found) == [1, 2, 3, 4]
    for step in found:
        assert without_times(found[step]) == without_times(expected[step]), step
    weights = [(run / "step_4" / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert weights[0] == weights[1]


@pytest.fixture(scope="module")
def stopped(policy, tmp_path_factory) -> list[str]:
    """What a run on two ranks says, whose hook ends it after step 3; the next start, and one after a kill."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "mine.py").write_text(OWN)
    changes = {"advantage": f"{folder}/mine.py:noted", "after_step": f"{folder}/mine.py:hook"} | NO_EVAL
    said = []
    for name in ("run", "run", "killed"):
        if name == "killed":
            copy_at(2, folder / "run", folder / name)
        said.append(torchrun(2, "train_grpo.py", *training_flags(policy, folder / name, **changes)).stdout)
        assert (folder / name / "final").resolve() == folder / name / "step_3"
        assert list(metrics_of(folder / name)) == [1, 2, 3]
    return said


def test_a_hook_ends_the_run_on_every_rank_and_shares_its_file_with_another_flag(stopped):
    assert all("done, step 3/4" in said for said in (stopped[0], stopped[2]))
    assert "is complete: it has a checkpoint of step 3. It was ended by --after_step" in stopped[1]
    assert stopped[0].count("1, -1, 2, -2, 3, -3]") == 2, "each rank"
    assert stopped[2].count("-1, -2, 3, -3]") == 2, "after a kill the hook gets steps 1 and 2 from the log"


FAILS = """
import os
from grpo import dr_grpo, reinforce

def loss(t):
    if t.step == 2 and os.environ["RANK"] == "1":
        raise KeyError("typo")
    return reinforce(t)

def advantage(g):
    return g.parts["typo"] if g.step == 2 else dr_grpo(g)
"""


@pytest.mark.parametrize(("flag", "said"), [
    ("policy_loss", r"the loss \(--policy_loss, --kl_estimator\) fails in step 2: KeyError: 'typo'; its input is"),
    ("advantage", "--advantage fails in step 2: KeyError: 'typo'; parts are exact; columns are problem, answer"),
])  # fmt: skip
def test_where_own_code_ends_the_run_the_steps_completions_are_kept(flag, said, policy, tmp_path):
    """Also where it fails on one rank alone, whose collectives the others wait for."""
    (tmp_path / "fails.py").write_text(FAILS)
    changes = {flag: f"{tmp_path}/fails.py:{flag.removeprefix('policy_')}"} | NO_EVAL
    done = run_ranks(2, "train_grpo.py", training_flags(policy, tmp_path / "run", **changes))
    file = tmp_path / "run" / "rollouts" / "step_2.parquet"
    *_, last = done.stderr.splitlines()
    assert done.returncode and "Traceback" not in done.stderr
    assert re.match(rf"error: {said}.* {file} holds the step's tokens", last), last
    assert len(pq.read_table(file)) == 32 and not [*file.parent.glob(".*")]


def test_a_hook_gives_metrics_to_the_line_and_ends_the_run_where_it_fails():
    hook = AfterStep(lambda step, metrics: metrics["eval/x/avg@1"] > 0.5)
    said = "--after_step fails after step 3: KeyError: 'eval/x/avg@1'; correct the function, and start"
    with pytest.raises(RunError, match=said):
        hook.step(3, {"reward/mean": 1.0})
    with pytest.raises(RunError, match="TypeError: it returned True, but may return None, a dict of metrics or"):
        hook.step(3, {"eval/x/avg@1": 1.0})
    with pytest.raises(RunError, match="could not convert string to float: 'high'"):
        AfterStep(lambda *_: {"mine/x": "high"}).step(1, {})

    def hook(step, metrics):
        metrics["reward/mean"] = 9.0
        return {"step": 7, "mine/x": step, 3: step}

    metrics = {"reward/mean": 1.0}
    assert AfterStep(hook).step(3, metrics) == {"mine/x": 3.0, "3": 3.0} and metrics == {"reward/mean": 1.0}
    assert AfterStep(hook).step(0, metrics) is None, "an evaluation before training"


def with_optimizer(world: World, path: str, optimizer: str) -> tuple[list[Metrics], Tensors]:
    """(metrics, weights) of three updates by an optimizer of the user's."""
    args = parsed(f"--model {path} --group_size 2 --optimizer {optimizer}", world.num_trainers)
    trained = build(args, world)
    return train(trained, args, world, 3), weights_of(trained[0])


@pytest.mark.parametrize("name", ["reward/mean", "time/step_s", "time/evaluate_s", "eval/x/avg@1", "eval/other"])
def test_a_hook_may_not_overwrite_a_metric(name, tmp_path):
    """Nor give one of evaluation, by which --keep_best chooses. Its own are there when a line comes again."""
    metrics, hook = {"reward/mean": 1.0}, AfterStep(lambda *_: {"mine/x": 2.0, name: 9.0})
    run = Run(tmp_path, None, ALONE, 3, {}, [hook])
    for step in run.steps(1, 1):
        with pytest.raises(RunError, match=f"--after_step returned {name}, a metric of the run's own; give it another"):
            run.log(step, metrics)
    with pytest.raises(RunError, match="--after_step returned eval/x, a metric"):  # as the line of a resume, too
        Run(tmp_path, None, ALONE, 3, {}, [AfterStep(lambda *_: {"eval/x": 1.0})]).log(1, metrics | {"eval/x": 0.5})
    again = Run(tmp_path, None, ALONE, 3, {}, [AfterStep(lambda *_: {"mine/x": 3.0})])
    again.log(1, metrics | {"mine/x": 2.0})
    again.recall(1)
    for step in again.steps(2, 2):
        again.log(step, metrics)
    assert [line["mine/x"] for line in metrics_of(tmp_path).values()] == [3.0, 3.0]


def test_an_own_optimizer_trains_on_two_ranks_as_on_one(policy):
    """Muon, whose matrices are sharded; it orthogonalises in bf16, whose rounding may fall another way."""
    (alone, weights), (together, sharded) = (on_ranks(n, with_optimizer, policy, MUON) for n in (1, 2))
    for a, b in zip(together, alone, strict=True):
        b["perf/update_idle_frac"] = a["perf/update_idle_frac"]
        assert a == pytest.approx(b, abs=1e-3)
    assert math.sqrt(sum((weights[name] - sharded[name]).square().sum() for name in weights)) < 0.02
    torch.testing.assert_close(sharded, weights, atol=5e-4, rtol=0)  # three updates of 1e-3


def test_the_entropy_bonus_falls_over_the_run_to_none():
    """What the total loss subtracts is given back, with its gradient, in the share of the run that is over."""
    own = algorithm_of(flags(policy_loss="docs/hooks/entropy_schedule.py:clip_explores", entropy_coef=0.2))
    entropies, zeros = torch.tensor([1.0, 3.0], requires_grad=True), torch.zeros(2)
    fields = dict.fromkeys(("logprobs", "old_logprobs", "rollout_logprobs", "advantages"), zeros)
    fields |= {"mask": zeros == 0, "sequence_ids": zeros.long(), "entropies": entropies}
    tokens = Tokens(**fields, step=4, total_steps=4)
    per_token = own.policy_loss(tokens).per_token
    assert per_token.tolist() == pytest.approx([0.75 * 0.2 * 1.0, 0.75 * 0.2 * 3.0])
    per_token.sum().backward()
    assert entropies.grad.tolist() == pytest.approx([0.15, 0.15])


def test_the_hooks_of_the_docs_follow_a_target_or_stop_at_an_accuracy():
    adapt = load_reference(f"{ROOT}/docs/hooks/adaptive_kl.py:adapt")
    x, scales = torch.tensor([0.5]), []
    plain = k3(x, kl_clamp=10.0).item()
    for step, kl in enumerate((0.2, 0.11, 0.0), start=1):
        adapt(step, {"policy/kl_ref": kl})
        scales.append(load_reference(f"{ROOT}/docs/hooks/adaptive_kl.py:scaled")(x, kl_clamp=10.0).item() / plain)
    assert scales == pytest.approx([1.002, 1.002 * 1.001, 1.002 * 1.001 * 0.998])
    stop_at = load_reference(f"{ROOT}/docs/hooks/stop_at.py:stop_at")
    high, low = {"eval/a/avg@1": 0.9, "eval/a/stderr": 0.1}, {"eval/b/avg@4": 0.89}
    assert (stop_at(1, high), stop_at(2, high | low), stop_at(3, {"reward/mean": 1.0})) == ("stop", None, None)


OPTIMIZERS = """
import torch

def make(named, adamw):
    rates = {"slow": adamw.learning_rate, "fast": 10 * adamw.learning_rate}
    return torch.optim.SGD([{"params": [named[name]], "lr": rate} for name, rate in rates.items()])

def stranger(named, adamw):
    return torch.optim.SGD([*named.values(), torch.nn.Parameter(torch.ones(5))], lr=1.0)

def none(named, adamw):
    make(named, adamw)

def part(named, adamw):
    return torch.optim.SGD([named["lm_head.weight"]])

def low(named, adamw):
    raise RuntimeError("out of memory slots")

def head(named, adamw):
    return torch.optim.SGD([named.pop("model.lm_head.weight")], lr=1.0)

def layer(named, adamw):
    return torch.optim.AdamW([p for name, p in named.items() if "layers.1." in name], lr=1.0)
"""


def make_own(folder: Path, name: str) -> torch.optim.Optimizer:
    (folder / "optimizers.py").write_text(OPTIMIZERS)
    named = {name: torch.nn.Parameter(torch.zeros(3)) for name in ("slow", "fast")}
    args = flags(learning_rate=0.1, optimizer=f"{folder}/optimizers.py:{name}")
    return make_optimizer(named, AdamW.from_flags(args), Memory.from_flags(args))


def test_groups_of_an_own_optimizer_keep_their_rates_relative_to_the_schedule(tmp_path):
    """Also after a resume, which brings the groups as the schedule had left them."""
    optimizer = make_own(tmp_path, "make")
    set_rate(optimizer, 0.05)
    resumed = make_own(tmp_path, "make")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (optimizer, resumed):
        set_rate(each, 0.02)
        assert [group["lr"] for group in each.param_groups] == pytest.approx([0.02, 0.2])


@pytest.mark.parametrize(("name", "words"), [
    ("stranger", r"made SGD \((.|\n)*; make a torch.optim.Optimizer of parameters that it was given, .*: those of a"),
    ("part", "optimizers.py:part fails: KeyError: 'lm_head.weight'; it gets parameters by name, of which the "
             r"first is 'slow', and AdamW\(.*learning_rate=0.1"),
    ("none", "made None; make a torch.optim.Optimizer"),
    ("low", "optimizers.py:low fails: RuntimeError: out of memory slots; it gets"),
])  # fmt: skip
def test_what_is_no_optimizer_of_the_policy_is_refused_when_it_is_made(name, words, tmp_path):
    with pytest.raises(OwnCodeError, match=words):
        make_own(tmp_path, name)


def norms_of(world: World, path: str, optimizer: str) -> tuple[list[float], str, list[str], list[str]]:
    """Three updates at the rate 0: their gradient norms, the log's line, what is frozen, and what a checkpoint has."""
    args = parsed(f"--model {path} --optimizer {optimizer} --max_grad_norm 1e9")
    policy, _, own = build(args, world)
    update = whole_update(make_rollout(), args, policy, world)
    norms = [train_once(policy, own, update, args, world)["optim/grad_norm"] for _ in range(3)]
    frozen = [name for name, parameter in policy.model.named_parameters() if not parameter.requires_grad]
    return norms, describe_policy(policy), frozen, sorted(shards_of(policy, own)["model"])


@pytest.mark.parametrize(("name", "kept"), [("head", ["lm_head."]), ("layer", ["layers.1."])])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_an_own_optimizer_leaves_out_is_frozen_and_said(num_ranks, name, kept, untied_policy, tmp_path):
    """Its gradients do not add up from update to update, in the norm; also where the dictionary is taken apart."""
    (tmp_path / "optimizers.py").write_text(OPTIMIZERS)
    optimizer = f"{tmp_path}/optimizers.py:{name}"
    norms, said, frozen, saved = on_ranks(num_ranks, norms_of, str(untied_policy), optimizer)
    model = load_policy(untied_policy)
    names = [name for name, _ in model.model.named_parameters()]
    left_out = [name for name in names if not any(part in name for part in kept)]
    assert frozen == left_out and saved == [f"model.{name}" for name in sorted(set(names) - {*left_out})]
    assert said.endswith(f"; frozen: {', '.join(left_out[:3])} and {len(left_out) - 3} more")
    args = flags(model=untied_policy, max_grad_norm=1e9)
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = kept_gradients(model, plain)
    train_once(model, plain, whole_update(make_rollout(), args, model, ALONE), args)
    squares = [gradients[f"model.{name}"].square().sum().item() for name in names if name not in left_out]
    assert norms == pytest.approx([math.sqrt(sum(squares))] * 3, rel=1e-4) and norms[0] > 0.01
