"""PPO's critic: what it computes, that packing and ranks do not enter it, what it reads and leaves, what is refused.

Numbers that two ways of computing share agree to the bit, or to the tolerance that a test names.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim import SGD
from transformers import AutoModel

from algorithm import algorithm_of
from batch import Rollout, Update
from command_line import parse_flags
from extras.critic.critic import Critic
from extras.critic.gae import gae
from flags import Memory
from fsdp_utils import World
from gate.checks import check_flags
from gate.inputs import Inputs
from grading import Grade
from grpo import Groups
from helpers.distributed import Result, kept_gradients, on_ranks, weights_of
from helpers.made_up import ALONE, RAGGED, byte_tokenizer, flags, load_policy, make_rollout
from helpers.runs import NO_EVAL, ROOT, metrics_of, run_ranks, torchrun, training_flags, without_times
from schedule import make_plan
from update import UpdateGuard, add_advantages, add_logprobs, pack_updates, update_policy

SIZES = {"prompts_per_step": 2, "prompts_per_update": 2, "group_size": 4, "micro_batch_tokens": 1000}


def graded() -> Rollout:
    """Two prompts x 4 completions with the rewards 0, 0.5 and 1."""
    grades = [Grade(b % 3 / 2) for b in range(8)]
    return replace(make_rollout(RAGGED, group_size=4), grades=grades, advantages=[])


def with_critic(
    policy: Path, written: str, world: World = ALONE, **changes: object
) -> tuple[Critic, Rollout, list[Update]]:
    """A critic whose head is not 0, and a step as it has made it."""
    args = flags(**SIZES | {"model": policy, "critic": written, "learning_rate": 1e-3} | changes)
    plan, memory, algorithm = make_plan(args, 2), Memory.from_flags(args), algorithm_of(args)
    critic = Critic(args.critic, args.model, memory, plan.adamw, world)
    critic.args = args
    updates = pack_updates(graded(), plan, algorithm, memory, critic.model, world)
    return critic, *critic.add_advantages(graded(), updates, algorithm)


def naive(returns, values, mask, lam, alpha):
    """The advantages of one completion, token by token from its end; what an environment said does not exist."""
    places = [t for t in range(len(mask)) if mask[t]]
    found, last, value_after, return_after = np.zeros(len(mask)), 0.0, 0.0, 0.0
    lam = 1 - 1 / max(alpha * len(places), 1) if alpha else lam
    for t in reversed(places):
        error = (returns[t] - return_after) + value_after - values[t]
        found[t] = last = error + lam * last
        value_after, return_after = values[t], returns[t]
    return found


@pytest.mark.parametrize(("lam", "alpha"), [(0.0, 0), (0.5, 0), (0.95, 0), (1.0, 0), (0.0, 0.05), (0.0, 0.5)])
def test_gae_is_the_sum_by_hand(lam, alpha):
    """In float64 to 1e-12; rewards at every token, as with penalties and turns; one completion is not trained."""
    rng, lengths = np.random.default_rng(0), [7, 1, 33, 12]
    returns, values, mask = rng.normal(size=53), rng.normal(size=53), rng.random(53) > 0.25
    mask[41:] = False
    tensors = map(torch.from_numpy, (returns, values, mask))
    returns_T, values_T, mask_T = tensors
    g = Groups(rewards_PG=torch.zeros(4, 1), returns_T=returns_T, lengths_B=torch.tensor(lengths), mask_T=mask_T)
    pieces = zip(*(np.split(x, np.cumsum(lengths)[:-1]) for x in (returns, values, mask)), strict=True)
    expected = np.concatenate([naive(*each, lam, alpha) for each in pieces])
    assert gae(g, values_T, lam, alpha).numpy() == pytest.approx(expected, abs=1e-12)


def test_the_documented_example_is_what_is_computed():
    """docs/algorithm.md, A critic: three tokens, reward 1."""
    lengths, mask_T = torch.tensor([3]), torch.ones(3, dtype=torch.bool)
    g = Groups(rewards_PG=torch.ones(1, 1), returns_T=torch.ones(3), lengths_B=lengths, mask_T=mask_T)
    assert gae(g, torch.tensor([0.2, 0.5, 0.6]), 0.95).tolist() == pytest.approx([0.756, 0.48, 0.4], abs=1e-6)
    page = (ROOT / "docs" / "algorithm.md").read_text()
    assert all(each in page for each in ("0.3 + 0.95 x 0.48 = 0.756", "0.1 + 0.95 x 0.4 = 0.48"))


def reward_model(policy: Path, folder: Path, **config: object) -> Path:
    """The policy with the head of a reward model, and no other."""
    shutil.copytree(policy, folder)
    weights = {name: x for name, x in load_file(policy / "model.safetensors").items() if name != "lm_head.weight"}
    weights["score.weight"] = torch.linspace(-1, 1, 64)[None]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    stored = json.loads((policy / "config.json").read_text())
    stored |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}} | config
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


@pytest.mark.parametrize("name", ["policy", "untied_policy"])
def test_the_head_of_a_reward_model_is_read_and_is_0_without_one(name, request, tmp_path):
    """Its values are those of the decoder's last hidden states at the trained positions, to 1e-5."""
    policy = request.getfixturevalue(name)
    critic, rollout, _ = with_critic(policy, "policy")
    assert not any(values.any() for values in critic.rollout.parts["values"])
    critic, rollout, ((batch,),) = with_critic(policy, str(reward_model(policy, tmp_path / "rm")))
    decoder, head = AutoModel.from_pretrained(policy, dtype=torch.float32), torch.linspace(-1, 1, 64)
    for b, values in enumerate(critic.rollout.parts["values"]):
        ids = torch.tensor([*rollout.rows[b].ids, *rollout.completions[b]])[None]
        with torch.no_grad():
            hidden = decoder(ids).last_hidden_state[0, 3:-1]
        assert values == pytest.approx((hidden @ head).numpy(), abs=1e-5) and len(values) == len(rollout.completions[b])
    lam_1 = with_critic(policy, f"{tmp_path}/rm:lam=1,whiten=0")
    for b, (value, advantage) in enumerate(zip(lam_1[0].rollout.parts["values"], lam_1[1].advantages, strict=True)):
        assert advantage == pytest.approx(b % 3 / 2 - value, abs=1e-6)
        assert lam_1[0].rollout.parts["targets"][b] == pytest.approx(np.full(len(value), b % 3 / 2), abs=1e-6)


def test_a_critic_that_stays_0_trains_as_reinforce_plus_plus_to_the_bit(policy):
    trained = []
    for given in ({"critic": "policy:rate=0,lam=1"}, {"advantage": "reinforce++", "advantage_eps": 1e-8}):
        args = flags(**SIZES | {"model": policy, "prompts_per_update": 1, "learning_rate": 1e-3} | given)
        plan, memory, algorithm = make_plan(args, 2), Memory.from_flags(args), algorithm_of(args)
        model, verbs = load_policy(policy), (add_advantages, update_policy)
        if args.critic:
            critic = Critic(args.critic, args.model, memory, plan.adamw, ALONE)
            verbs = critic.add_advantages, critic.update_policy
        optimizer = torch.optim.AdamW(model.parameters())
        updates = add_logprobs(pack_updates(graded(), plan, algorithm, memory, model, ALONE), model, None, algorithm)
        _, updates = verbs[0](graded(), updates, algorithm)
        for i, update in enumerate(updates):
            verbs[1](model, optimizer, update, algorithm, plan.update(1, i), memory, UpdateGuard(ALONE))
        trained.append(weights_of(model))
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def learnt(world: World, path: str, *changes: str) -> Result:
    """The metrics and whole gradients of the critic's update."""
    options = {name: value == "True" or value for name, value in (each.split("=") for each in changes)}
    critic, _, (update,) = with_critic(Path(path), f"{path}:clip=0.3", world, **options | {"max_grad_norm": 1e9})
    critic.optimizer = SGD(critic.model.parameters())
    critic.rollout = critic.rollout.with_parts(values=[x + 0.5 for x in critic.rollout.parts["values"]])  # some clip
    gradients = kept_gradients(critic.model, critic.optimizer)
    return critic.learn(update, make_plan(critic.args, 2).update(1, 0)), gradients


def test_packing_shared_prompts_micro_batches_and_ranks_do_not_enter_loss_or_gradient(policy, tmp_path):
    """Loss and metrics to 1e-5 of their size, the gradient to 1e-5 of its norm."""
    path = str(reward_model(policy, tmp_path / "rm"))
    metrics, gradients = learnt(ALONE, path)
    assert 0 < metrics["critic/clip_frac"] < 1 and metrics["critic/grad_norm"] > 0.1
    others = [learnt(ALONE, path, *each) for each in (["micro_batch_tokens=20"], ["share_prompts=True"])]
    others.append(on_ranks(2, learnt, path, "micro_batch_tokens=20", "communicate_once=True", "offload=all"))
    for other, other_gradients in others:
        assert other == pytest.approx(metrics, rel=1e-5)
        gap = sum((other_gradients[name] - gradients[name]).square().sum() for name in gradients) ** 0.5
        assert other_gradients.keys() == gradients.keys() and gap < 1e-5 * metrics["critic/grad_norm"]


def test_an_update_that_is_not_finite_is_left_out_and_a_warm_up_moves_the_critic_alone(policy):
    critic, rollout, (update,) = with_critic(policy, "policy:warmup=1")
    plan, model = make_plan(critic.args, 2), load_policy(policy)
    before, policy_before, good = weights_of(critic.model), weights_of(model), critic.rollout
    critic.rollout = good.with_parts(targets=[x * np.nan for x in good.parts["targets"]])
    assert critic.learn(update, plan.update(1, 0))["critic/skipped_updates"] == 1
    assert all(torch.equal(x, before[name]) for name, x in weights_of(critic.model).items())
    critic.rollout, optimizer = good, torch.optim.AdamW(model.parameters())
    given = update, algorithm_of(critic.args), plan.update(1, 0), critic.memory, UpdateGuard(ALONE)
    metrics = critic.update_policy(model, optimizer, *given)
    assert (metrics["critic/skipped_updates"], metrics["optim/lr"]) == (0, 0) and metrics["policy/loss"] != 0
    assert all(torch.equal(x, policy_before[name]) for name, x in weights_of(model).items())
    assert not torch.equal(weights_of(critic.model)["score.weight"], before["score.weight"])


def test_what_could_not_be_graded_is_not_trained_on_and_changes_no_other_advantage(policy):
    """It is taken out before anything is compared, as in tests/test_ungraded.py; here nothing is but by whitening."""
    args = flags(**SIZES | {"model": policy, "critic": "policy:whiten=0,lam=1"})
    plan, memory, algorithm = make_plan(args, 2), Memory.from_flags(args), algorithm_of(args)
    critic = Critic(args.critic, args.model, memory, plan.adamw, ALONE)
    lost = replace(graded(), grades=[]).graded([Grade(b % 3 / 2, is_compared=b != 2) for b in range(8)])
    rollout, _ = critic.add_advantages(
        lost, pack_updates(lost, plan, algorithm, memory, critic.model, ALONE), algorithm
    )
    assert [x[0] for x in rollout.advantages] == [0, 0.5, 0, 0, 0.5, 1, 0, 0.5] and rollout.grades == lost.grades


@pytest.mark.parametrize(("config", "content", "said"), [
    ({}, None, None),
    ({"id2label": {"0": "bad", "1": "good"}}, None, "has 2 labels; use a reward model of one label."),
    ({"quantization_config": {"bits": 4}}, None, "is quantized (quantization_config: {'bits': 4}), which is"),
    ({"vocab_size": 32}, None, "32"),
    ({}, "tokenizer", "it or --model has"),
    ({"max_position_embeddings": 8}, None, "is beyond the context of --critic"),
])  # fmt: skip
def test_a_critic_that_does_not_fit_is_refused_before_a_weight_is_read(config, content, said, policy, tmp_path):
    critic = reward_model(policy, tmp_path / "rm", **config)
    (critic / "model.safetensors").unlink()
    if content:
        byte_tokenizer().save_pretrained(critic)
    args = flags(model=policy, critic=f"{critic}:lam=1", max_prompt_tokens=8, max_completion_tokens=12)
    loaded = patch("gate.inputs.PromptData.load", side_effect=KeyboardInterrupt)  # what comes after these checks
    with loaded, pytest.raises(ValueError if said else KeyboardInterrupt) as error:
        Inputs.load(args)
    assert not said or (said in str(error.value) and f"--critic {critic}" in str(error.value)), error.value


KILLS = """import os, pathlib, signal
MARK = pathlib.Path(__file__).with_name("killed")
def loss(t):
    if t.step == 3 and len(t.mask) > 1 and not MARK.exists():
        MARK.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return -t.advantages * (t.logprobs - t.old_logprobs).exp()
"""


def test_a_kill_in_an_update_changes_no_bit_and_what_is_exported_begins_a_critic(policy, reward, tmp_path):
    """On two ranks. The second run replays the first; it is killed when the critic has moved and the policy has not."""
    (own := tmp_path / "own.py").write_text(KILLS)
    (tmp_path / "killed").touch()
    changes = {"critic": "policy:lam=0.9,rate=3e-3,passes=2,warmup=1", "group_size": 1, "save_every": 1}
    changes |= NO_EVAL | {
        "total_steps": 3,
        "policy_loss": f"{own}:loss",
        "kl_in": "reward",
        "kl_estimator": "k1",
        "reward": reward,
    }
    whole, killed = tmp_path / "whole", tmp_path / "replayed"
    torchrun(2, "train_grpo.py", *training_flags(policy, whole, **changes))
    (tmp_path / "killed").unlink()
    replayed = training_flags(policy, killed, **changes, replay=whole)
    assert run_ranks(2, "train_grpo.py", replayed).returncode != 0 and (tmp_path / "killed").exists()
    assert sorted(metrics_of(killed)) == [1, 2]
    assert "continues from" in torchrun(2, "train_grpo.py", *replayed).stdout
    names = ("critic/", "policy/", "optim/", "reward/")
    expected, found = metrics_of(whole), metrics_of(killed)
    for step in (1, 2, 3):
        kept = {name: x for name, x in without_times(expected[step]).items() if name.startswith(names)}
        assert {name: found[step][name] for name in kept} == kept and len(kept) > 20
    assert (expected[1]["optim/lr"], expected[2]["optim/lr"] > 0) == (0, True)
    for file in ("model.safetensors", "critic/model.safetensors"):
        assert (whole / "final" / file).read_bytes() == (killed / "final" / file).read_bytes()
    args = flags(model=policy, critic=whole / "final" / "critic", max_prompt_tokens=8, max_completion_tokens=12)
    critic = Critic(args.critic, args.model, Memory.from_flags(args), make_plan(args, 32).adamw, ALONE)
    exported = load_file(whole / "final" / "critic" / "model.safetensors")
    assert {name: x.tolist() for name, x in weights_of(critic.model).items()} == {
        name: x.tolist() for name, x in exported.items()
    }
    assert exported["score.weight"].any()
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"critic": None}))
    with pytest.raises(ValueError, match="this checkpoint holds no critic"):
        check_flags(parse_flags(training_flags(policy, killed, **changes, replay=whole / "step_1")), 1)
