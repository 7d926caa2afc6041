"""Bad updates: which they are, what --on_bad_update does, what is kept of them, and that it can be replayed."""

import copy
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from batch import Pass, Update, pack
from checkpoint import Writer
from data import PromptData
from flags import AdamW, Lora, Memory, Saving, UpdateStep, take
from forked import run_ranks
from guards.evidence import MOST_MICRO_BATCHES, MOST_UPDATES, write_passes
from guards.updates import BadUpdate, Bounds, UpdateGuard, find_fault
from helpers import ALONE, ROOT, flags, make_rollout, metrics_of, torchrun, train_once, training_flags, whole_update
from inputs.choices import algorithm_of
from model.lora import add_adapter
from model.optimizer import make_optimizer
from policy import Policy, load_policy
from replay_update import to_batch
from train_grpo import undo
from update import update_policy, with_advantages
from vision_models import make_vision_model, pack_with_images, vision_data, vision_flags, vision_rollout

GOOD = {"policy/loss": 0.5, "optim/grad_norm": 1.0, "policy/approx_kl": 0.01, "policy/ratio_max": 1.5}
ALL_BOUNDS = Bounds(max_kl=0.1, max_ratio=10.0, max_grad_norm_factor=5.0)
NORMS = [1.0, 2.0, 3.0] * 4


# Which updates are bad ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "bounds", "words"),
    [
        ({}, ALL_BOUNDS, None),
        ({"policy/loss": math.nan}, Bounds(), "the loss is nan"),
        ({"policy/loss": -math.inf}, Bounds(), "the loss is -inf"),
        ({"optim/grad_norm": math.inf}, Bounds(), "the loss is finite, but the gradient norm is inf"),
        ({"policy/approx_kl": 0.11}, ALL_BOUNDS, "the KL to the policy that sampled is 0.11; --max_kl 0.1"),
        ({"policy/approx_kl": math.nan}, ALL_BOUNDS, "is nan; --max_kl 0.1"),
        ({"policy/approx_kl": 1e9, "policy/ratio_max": 1e9, "optim/grad_norm": 1e9}, Bounds(), None),
        ({"policy/ratio_max": 10.5}, ALL_BOUNDS, "the largest ratio pi / pi_old is 10.5; --max_ratio 10"),
        ({"policy/ratio_max": 10.0, "policy/approx_kl": 0.1, "optim/grad_norm": 10.0}, ALL_BOUNDS, None),
        ({"policy/ratio_min": 1e-9}, ALL_BOUNDS, None),
        (
            {"optim/grad_norm": 30.0},
            ALL_BOUNDS,
            "the gradient norm 30 is 15 times the median of the last 12 updates, 2; --max_grad_norm_factor 5",
        ),
    ],
)
def test_what_is_wrong_with_an_update_is_said_with_its_bound(changes, bounds, words):
    fault = find_fault(GOOD | changes, NORMS, bounds)
    assert (fault is None) == (words is None)
    assert fault is None or words in fault.reason


def at(step: int, number: int = 1) -> UpdateStep:
    return UpdateStep(0, 1e-3, number == 1, 1.0, 1, step, number)


def test_norms_are_compared_when_enough_are_known_and_bad_ones_and_zeros_are_none_of_them():
    guard = UpdateGuard(ALONE, ALL_BOUNDS)
    for i in range(9):
        assert guard.judge(GOOD | {"optim/grad_norm": 1.0 + i}, at(i)) is None
        assert guard.judge(GOOD | {"optim/grad_norm": 0.0}, at(i, 2)) is None, "no group has a signal"
    assert guard.judge(GOOD | {"optim/grad_norm": 1e6}, at(10)) is None, "only 9 are known"
    assert guard.judge(GOOD | {"optim/grad_norm": 1e6}, at(11)) is not None
    assert guard.grad_norms == [*[1.0 + i for i in range(9)], 1e6]
    for i in range(100):
        guard.judge(GOOD | {"optim/grad_norm": 7.0 + i % 2}, at(12 + i))
    assert guard.grad_norms == [7.0, 8.0] * 25
    resumed = UpdateGuard(ALONE, ALL_BOUNDS)
    resumed.restore(json.loads(json.dumps(guard.state() | {"prompts_drawn": 3})))
    assert (resumed.grad_norms, resumed.num_skipped) == (guard.grad_norms, 0)
    assert resumed.restore({"prompts_drawn": 3}) == {"prompts_drawn": 3}, "a checkpoint of before has no history"


def deal_with(guard: UpdateGuard, metrics: dict[str, float], step: UpdateStep) -> bool:
    fault = guard.judge(metrics, step)
    return fault is not None and guard.handle(fault, step, metrics, [])


def test_updates_skipped_in_a_row_end_the_run_but_not_those_of_a_rollout_that_is_too_old(capsys):
    guard, nan = UpdateGuard(ALONE, Bounds(max_kl=0.1, max_skipped_updates=3)), GOOD | {"policy/loss": math.nan}
    for number, metrics in enumerate((nan, nan, GOOD, nan, *[GOOD | {"policy/approx_kl": 1.0}] * 5, nan), start=1):
        assert not deal_with(guard, metrics, at(2, number))
    assert capsys.readouterr().out.count("; it is left out") == 9
    with pytest.raises(BadUpdate, match=r"step 3, update 1 is bad: .*3 in a row \(--max_skipped_updates 3\)"):
        deal_with(guard, nan, at(3))


def test_a_rollback_leaves_out_the_rest_of_its_step_and_they_are_counted_from_checkpoint_to_checkpoint(tmp_path):
    there = [tmp_path / "step_2"]
    bounds = Bounds(on_bad_update="rollback", max_skipped_updates=3)
    guard = UpdateGuard(ALONE, bounds, way_back=lambda: (there[0], {"grad_norms": [3.0], "skipped_in_a_row": 0}))
    nan = GOOD | {"policy/loss": math.nan}
    assert not deal_with(guard, GOOD, at(3, 1)) and guard.grad_norms == [1.0]
    assert deal_with(guard, nan, at(3, 2)) and guard.grad_norms == [3.0]
    assert guard.judge(GOOD, at(3, 3)) is not None and not deal_with(guard, nan, at(3, 4))
    assert guard.judge(GOOD, at(4, 1)) is None and deal_with(guard, nan, at(4, 2))
    there[0] = tmp_path / "step_4"
    assert deal_with(guard, nan, at(5)) and deal_with(guard, nan, at(6))
    with pytest.raises(BadUpdate, match=r"3 since .*step_4 \(--max_skipped_updates 3\)"):
        deal_with(guard, nan, at(7))
    guard = UpdateGuard(ALONE, bounds, way_back=lambda: (None, {}))
    with pytest.raises(BadUpdate, match="no checkpoint yet to go back to; to go on, give --on_bad_update skip"):
        deal_with(guard, nan, at(1))


# What is done with them -----------------------------------------------------------------------------------------------


def make_update(policy: Policy, changes: dict[int, float]) -> Update:
    """Four micro-batches of two sequences; these positions' old log-probs of the third one are lower by so much."""
    rollout = make_rollout()
    batches = [with_advantages(rollout, pack(rollout, [2 * i, 2 * i + 1])) for i in range(4)]
    with torch.no_grad():
        batches = [replace(batch, old_logprobs_N=policy(batch, 1.0)[0]) for batch in batches]
    old_N = batches[2].old_logprobs_N.clone()
    for place, change in changes.items():
        old_N[batches[2].trained_K[place]] -= change
    batches[2] = replace(batches[2], old_logprobs_N=old_N)
    return Update(batches, sum(rollout.completion_lengths_B), len(rollout.rows))


@pytest.mark.parametrize(
    ("bounds", "changes", "num_kept"),
    [
        (Bounds(max_ratio=20.0), {1: 4.0}, 1),
        (Bounds(max_kl=0.05), {1: -4.0}, 1),
        (Bounds(max_grad_norm_factor=5.0), {}, 4),
        (Bounds(), {0: math.nan}, 1),
    ],
    ids=["ratio", "kl", "norm", "loss"],
)
def test_a_bad_update_changes_no_bit_and_its_micro_batches_are_kept(bounds, changes, num_kept, policy, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    model = load_policy(str(policy), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = UpdateGuard(ALONE, bounds, tmp_path, AutoTokenizer.from_pretrained(policy))
    algorithm, memory = algorithm_of(flags()), take(Memory, flags())

    def train(update: Update, step: UpdateStep) -> dict[str, float]:
        return update_policy(model, optimizer, update, algorithm, step, memory, guard)

    assert train(make_update(model, {}), at(1, 2))["optim/skipped_updates"] == 0
    guard.grad_norms = [guard.grad_norms[0] / 100] * 10
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    metrics = train(make_update(model, changes), at(2, 2))
    assert (metrics["optim/skipped_updates"], metrics["optim/rollbacks"]) == (1, 0)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, atol=0, rtol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    folder = tmp_path / "bad_updates" / "step_2_update_2"
    assert {path.name for path in folder.iterdir()} == {"update.json", "config.json", "rank_0.pt", "rank_0.json"}
    kept = torch.load(folder / "rank_0.pt", weights_only=True)
    texts = json.loads((folder / "rank_0.json").read_text())
    assert len(kept) == len(texts) == num_kept
    sizes = [(x["advantages_N"] * x["loss_weights_N"])[x["loss_mask_N"]].abs().sum().item() for x in kept]
    assert sizes == sorted(sizes, reverse=True), "the likeliest first"
    culprit = make_update(model, changes).batches[2]
    at_fault = [x for x in kept if x["input_ids_N"].equal(culprit.input_ids_N)]
    assert len(at_fault) == 1
    torch.testing.assert_close(at_fault[0]["old_logprobs_N"], culprit.old_logprobs_N, atol=0, rtol=0, equal_nan=True)
    assert at_fault[0]["segments_S"].tolist() == [[4, 0, 8, -1], [5, 0, 12, -1]]
    record = json.loads((folder / "update.json").read_text())
    assert record["metrics"]["optim/grad_norm"] == "nan" or record["metrics"]["optim/grad_norm"] > 0
    rollout, tokenizer = make_rollout(), AutoTokenizer.from_pretrained(policy)
    for sequence in texts[0]["sequences"]:
        b = sequence["sequence"]
        assert sequence["prompt"] == tokenizer.decode(rollout.rows[b].ids)
        assert sequence["completion"] == tokenizer.decode(rollout.completions[b])
    guard.bounds = Bounds()
    assert train(make_update(model, {}), at(3, 2))["optim/skipped_updates"] == 0
    assert not any(new.equal(old) for new, old in zip(model.state_dict().values(), before[0].values(), strict=True))


def test_only_so_much_is_kept_and_a_full_disk_does_not_end_the_run(policy, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    model = load_policy(str(policy), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = UpdateGuard(ALONE, Bounds(max_skipped_updates=99), tmp_path, AutoTokenizer.from_pretrained(policy))
    update = make_update(model, {0: math.nan})
    update = replace(update, batches=[update.batches[2]] * (MOST_MICRO_BATCHES + 3))

    def train(step: int) -> str:
        update_policy(model, optimizer, update, algorithm_of(flags()), at(step, 2), take(Memory, flags()), guard)
        return capsys.readouterr().out

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert "step_1_update_2: No space left on device); it is left out" in train(1)
    for step in range(1, MOST_UPDATES + 1):
        assert f"(kept in {tmp_path}/bad_updates/step_{step}_update_2); it is left out" in train(step)
    assert "(not kept: " in train(MOST_UPDATES + 1)
    assert "(kept in" in train(1), "a resumed run meets an update again"
    assert len(list((tmp_path / "bad_updates").iterdir())) == MOST_UPDATES
    kept = torch.load(tmp_path / "bad_updates" / "step_1_update_2" / "rank_0.pt", weights_only=True)
    assert len(kept) == MOST_MICRO_BATCHES


def test_images_and_shared_prompts_are_kept_and_come_back(tmp_path):
    folder = make_vision_model(tmp_path / "model")
    data = vision_data(vision_flags(folder))
    rollout = vision_rollout(data).take(np.array([0, 0, 2, 2, 3]))
    batch, model = pack_with_images(rollout, [0, 1, 2, 3, 4], group_size=2), load_policy(str(folder), torch.float32)
    assert len(batch.images.pixels) == 4 and [x.prefix for x in batch.segments_S] == [None, 0, None, 2, None]
    batch = replace(with_advantages(rollout, batch), old_logprobs_N=torch.randn(len(batch.labels_N)))
    logprobs_N, _ = model(batch, 1.0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    write_passes(tmp_path / "rank_0", [Pass(batch, logprobs_N, batch.old_logprobs_N, {}, {}, {})], tokenizer)
    (saved,) = torch.load(tmp_path / "rank_0.pt", weights_only=True)
    assert to_batch(saved, torch.device("cpu")).segments_S == batch.segments_S
    assert model(to_batch(saved, torch.device("cpu")), 1.0)[0].equal(logprobs_N) and saved["logprobs_N"].equal(
        logprobs_N
    )
    texts = json.loads((tmp_path / "rank_0.json").read_text())[0]["sequences"]
    assert [text["prompt"] for text in texts] == [tokenizer.decode(row.ids) for row in rollout.rows]
    assert [text["completion"] for text in texts] == [tokenizer.decode(ids) for ids in rollout.completions]


@pytest.mark.parametrize("changes", [{}, {"param_dtype": "bfloat16"}, {"lora_rank": 4}], ids=str)
def test_the_way_back_is_the_state_of_the_checkpoint_to_the_bit_and_training_goes_on_from_it(changes, policy, tmp_path):
    args = flags(model=policy, **changes)
    model = load_policy(args.model, getattr(torch, args.param_dtype))
    if args.lora_rank:
        add_adapter(model.model, take(Lora, args), args.seed, args.model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained, take(AdamW, args), take(Memory, args))
    writer = Writer(tmp_path, [], Saving(keep_checkpoints=0), ALONE, print)

    def state() -> tuple[dict, dict]:
        return copy.deepcopy((dict(model.named_parameters()), optimizer.state_dict()["state"]))

    def train() -> tuple[dict, dict]:
        train_once(model, optimizer, whole_update(make_rollout(), args, model, ALONE), args, rate=1e-3)
        return state()

    assert undo(writer, model, optimizer) == (None, {})
    saved = train()
    writer.save(1, model, optimizer, {"grad_norms": [0.5]})
    after = train()
    train()
    assert undo(writer, model, optimizer) == (tmp_path / "step_1", {"grad_norms": [0.5]})
    torch.testing.assert_close(state(), saved, atol=0, rtol=0)
    torch.testing.assert_close(train(), after, atol=0, rtol=0)
    assert any(not old.equal(new) for old, new in zip(saved[0].values(), after[0].values(), strict=True))


# Whole runs -----------------------------------------------------------------------------------------------------------

REWARD = """
def score(completion, answer, columns):
    return float(len(completion) % 3 == 0) + 1000.0 * len(completion) * columns["is_special"]
"""
LOSS = """
import torch

def spiky(t):
    loss = -t.advantages * (t.logprobs - t.old_logprobs).exp()
    return torch.where(t.advantages.abs() > 100, torch.nan, loss)
"""


@pytest.fixture(scope="module")
def options(policy, tmp_path_factory) -> dict[str, object]:
    """Flags of a run whose loss is nan in the first update of step 4, and only there: by one row of the data."""
    folder = tmp_path_factory.mktemp("own")
    rows = [json.loads(line) for line in (policy / "train.jsonl").read_text().splitlines()]
    data = PromptData("", [SimpleNamespace() for _ in rows])
    special = int(data.indices_of_step(4, 8, seed=1)[0])
    lines = [json.dumps(row | {"is_special": i == special}) + "\n" for i, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(REWARD)
    (folder / "loss.py").write_text(LOSS)
    return {
        "train_data": folder / "train.jsonl", "reward": f"{folder}/reward.py:score", "advantage": "dr_grpo",
        "policy_loss": f"{folder}/loss.py:spiky", "kl_coef": 0, "eval_every": 0, "eval_before_training": None,
        "eval_data": None, "total_steps": 6, "save_every": 2, "keep_checkpoints": 0, "on_bad_update": "rollback",
    }  # fmt: skip


@pytest.fixture(scope="module")
def rolled_back(policy, options, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = torchrun(2, "train_grpo.py", *training_flags(policy, out_dir, **options))
    assert done.stdout.count("is bad") == 1
    assert "step 4, update 1 is bad: the loss is nan (kept in" in done.stdout
    assert f"policy and optimizer go back to {out_dir}/step_2, the rest of the step is left out" in done.stdout
    return out_dir


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_after_a_rollback_steps_go_on_from_the_state_of_the_checkpoint(rolled_back):
    """Step 4 is bad from its first update on: its checkpoint is that of step 2."""
    metrics = metrics_of(rolled_back)
    assert [metrics[step]["optim/rollbacks"] for step in range(1, 7)] == [0, 0, 0, 1, 0, 0]
    assert [metrics[step]["optim/skipped_updates"] for step in range(1, 7)] == [0, 0, 0, 2, 0, 0]
    of_steps = [weights_of(rolled_back / f"step_{step}") for step in (2, 4, 6)]
    for name, weight in of_steps[0].items():
        assert of_steps[1][name].equal(weight) and not of_steps[2][name].equal(weight), name
    folders = [rolled_back / f"step_{step}" / "trainer" for step in (2, 4)]
    norms = [json.loads((folder / "progress.json").read_text())["grad_norms"] for folder in folders]
    assert norms[0] == norms[1] and len(norms[0]) == 4


@pytest.mark.parametrize("last", [2, 4])
def test_a_run_that_is_killed_after_a_rollback_continues_as_if_it_had_not_been(
    last, rolled_back, policy, options, tmp_path
):
    """Killed before the next checkpoint it meets the bad update again; killed after it, it does not."""
    out_dir = tmp_path / "killed"
    shutil.copytree(rolled_back, out_dir, symlinks=True)
    (out_dir / "final").unlink()
    for step in range(last + 2, 7, 2):
        shutil.rmtree(out_dir / f"step_{step}")
    lines = (out_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out_dir / "metrics.jsonl").write_text("".join(lines[: last + 1]))
    done = torchrun(2, "train_grpo.py", *training_flags(policy, out_dir, **options))
    assert done.stdout.count("is bad") == (last == 2)
    expected, found = metrics_of(rolled_back), metrics_of(out_dir)
    for step in range(1, 7):
        for name in (name for name in expected[step] if not name.startswith(("time/", "perf/", "memory/"))):
            assert found[step][name] == expected[step][name], f"step {step}: {name}"
    for name, weight in weights_of(rolled_back / "step_6").items():
        assert weight.equal(weights_of(out_dir / "step_6")[name]), name
    progress = Path("step_6") / "trainer" / "progress.json"
    assert (out_dir / progress).read_text() == (rolled_back / progress).read_text()


@pytest.fixture(scope="module")
def stopped(rolled_back, policy, options, tmp_path_factory) -> Path:
    """The run, continued from step 2 with a checkpoint at every step and --on_bad_update stop."""
    out_dir = tmp_path_factory.mktemp("runs") / "stopped"
    shutil.copytree(rolled_back / "step_2", out_dir / "step_2")
    shutil.copy(rolled_back / "config.json", out_dir)
    changes = {"on_bad_update": "stop", "save_every": 1}
    done = run_ranks(2, str(ROOT / "train_grpo.py"), training_flags(policy, out_dir, **options | changes), timeout=300)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "error: step 4, update 1 is bad: the loss is nan (kept in" in done.stderr
    assert "to go on, give --on_bad_update skip." in done.stderr
    return out_dir


def test_stop_ends_the_run_with_its_checkpoints_as_they_were_and_the_evidence(stopped, rolled_back):
    assert sorted(path.name for path in stopped.glob("step_*")) == ["step_2", "step_3"]
    for path in (path for path in (rolled_back / "step_2").rglob("*") if path.is_file()):
        assert (stopped / path.relative_to(rolled_back)).read_bytes() == path.read_bytes()
    assert max(metrics_of(stopped)) == 3
    assert (stopped / "bad_updates" / "step_4_update_1" / "update.json").exists()


def test_a_replay_under_the_weights_of_the_moment_shows_the_culprit(stopped):
    folder = stopped / "bad_updates" / "step_4_update_1"
    done = torchrun(1, "scripts/replay_update.py", folder)
    assert f"step_4_update_1: the loss is nan\nweights: {stopped}/step_3\n" in done.stdout
    of_batches = done.stdout.split("rank_")[1:]
    assert len(of_batches) == sum(len(torch.load(file, weights_only=True)) for file in folder.glob("rank_*.pt")) > 0
    for text in of_batches:
        assert "loss nan | KL 0 | ratio 1 to 1 |" in text and "off those of the moment by up to 0\n" in text
        assert re.search(r"gradient norms: all [0-9.]+, embed_tokens [0-9.]+, layers.0 [0-9.]+, layers.1 ", text)
        advantages = re.findall(r"token 1, '.+': loss nan, advantage (-?[0-9.e+]+), log-prob -", text)
        assert advantages and min(abs(float(each)) for each in advantages) > 100
    others = torchrun(1, "scripts/replay_update.py", folder, "--checkpoint", stopped / "step_2", "--show", 1)
    assert "off those of the moment by up to 0\n" not in others.stdout, "these are other weights, and it shows"
    assert others.stdout.count("  sequence ") == len(of_batches)
