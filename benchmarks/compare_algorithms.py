r"""Our advantages, losses, gradients and weights against TRL 1.16.0 and verl 0.9.1, on random ragged completions.

    # With the training environment active. TRL's and verl's dependencies stay out of it, but its packages are seen, and
    # its .pth files are run.
    python -m venv compare
    python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
        > compare/lib/python3.11/site-packages/training.pth
    compare/bin/pip install --no-deps trl==1.16.0 verl==0.9.1 accelerate==1.15.0 ray==2.60.0 msgpack==1.2.4 \
        tensordict==0.10.0 pyvers==0.2.3 omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0
    compare/bin/python benchmarks/compare_algorithms.py

Ours are `grpo.total_loss` on packed tokens and `update.compute_advantages`, under the flags of the table. TRL's loss is
its `_compute_loss`, verl's its `ppo_loss`: each is given our log-probs, padded, in place of a model. What TRL has only
in the middle of a method (advantages, weights of the sampler's mismatch) is run from there, the statements themselves.
Nothing of either library is replaced; what their trainers and engines hand to these functions (counts of the update,
configuration) is given.

Everything is float64, so that rounding hides nothing and explains nothing. A difference is the largest of the loss
(relative where that is above 1) and of its gradients by log-prob and entropy (relative to the largest entry of ours),
over all seeds. Rows under "differs" show definitions that are not the same; they do not count. Exit status 1 if a row
that counts is above the goal.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import math
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import trl
import verl
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer, RLOOTrainer
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

import grpo
import update
from batch import Batch, Rollout, pack, to_positions
from grpo import Algorithm
from inputs.checks import check_flags
from inputs.choices import algorithm_of
from inputs.command_line import parse_flags

GOAL = 1e-5
P, G, PROMPT_TOKENS, CONSTANT = 4, 7, 3, 32  # prompts, completions of each, tokens of a prompt, Dr. GRPO's constant
LEFT_OUT = f"2 of {P * G}"
VERSIONS = {"trl": trl.__version__, "verl": verl.__version__}
Settings = dict[str, object]


@dataclass(frozen=True)
class Row:
    """One line of the table: our flags, and the settings with which TRL and verl should agree; None: no such choice."""

    choice: str
    flags: str
    trl: Settings | None
    verl: Settings | None
    note: str = ""
    kind: str = "plain"  # of case: see `make_case`
    is_same: bool = True  # by definition


WHITEN = "verl: sqrt(var + 1e-8), ours std + eps"
ADVANTAGES = [
    Row("advantage", "grpo", None, {"name": "grpo"}, "verl as it is: ddof 1, std + 1e-6"),
    Row("advantage", "grpo --advantage_eps 1e-4", {"scale_rewards": "group"}, None, "TRL as it is: ddof 1, std + 1e-4"),
    Row("advantage", "grpo_batch_std --advantage_eps 1e-4", {"scale_rewards": "batch"}, None),
    Row("advantage", "dr_grpo", {"scale_rewards": "none"}, {"name": "grpo", "norm_adv_by_std_in_grpo": False}),
    Row("advantage", "rloo", {"trainer": RLOOTrainer}, {"name": "rloo"}, "TRL: its RLOOTrainer"),
    Row("advantage", "reinforce++ --advantage_eps 0", None, {"name": "reinforce_plus_plus"}, WHITEN),
    Row("advantage", "reinforce++_baseline --advantage_eps 0", None, {"name": "reinforce_plus_plus_baseline"}, WHITEN),
    Row("advantage", "reinforce++ --advantage_eps 0", None, {"name": "reinforce_plus_plus"}, f"{LEFT_OUT} left out",
        "untrained"),
    Row("KL in reward", "rloo --kl_in reward --kl_coef 0.1 --kl_estimator k1",
        {"trainer": RLOOTrainer, "beta": 0.1}, {"name": "rloo", "kl": "k1"}, "TRL: k1 alone"),
    Row("KL in reward", "grpo --kl_in reward --kl_coef 0.1", None, {"name": "grpo", "kl": "low_var_kl"}),
    Row("KL in reward", "reinforce++ --kl_in reward --kl_coef 0.1 --kl_estimator k2 --advantage_eps 0",
        None, {"name": "reinforce_plus_plus", "kl": "k2"}, "return to go, token by token"),
    Row("advantage", "grpo", {"scale_rewards": "group"}, None, "eps 1e-6 against TRL's fixed 1e-4", is_same=False),
    Row("advantage", "reinforce++", None, {"name": "reinforce_plus_plus"}, WHITEN, is_same=False),
    Row("advantage", "grpo", {"scale_rewards": "group"}, {"name": "grpo"},
        "float32, groups of 7 rewards 0.1: ours is 0, theirs up to this", "equal", is_same=False),
]  # fmt: skip

SEQ = "--loss_aggregation seq_mean_token_mean"
SUM = f"--loss_aggregation seq_mean_token_sum_norm --loss_constant_tokens {CONSTANT}"
VERL_SEQ = {"loss_agg_mode": "seq-mean-token-mean"}
VERL_SUM = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": CONSTANT}
VERL_GSPO = VERL_SEQ | {"mode": "gspo"}
TRUNCATE, MASK = "--rollout_correction_max 1.3", "--rollout_correction_min 0.7 --rollout_correction_max 1.3"
LOSSES = [
    Row("clip", "--clip_low 0.1 --clip_high 0.3", {"epsilon_low": 0.1, "epsilon_high": 0.3},
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, "verl's clip_ratio_c set out of reach"),
    Row("dual clip", "--dual_clip 2", {"delta": 2.0}, {"clip_ratio_c": 2.0},
        "TRL: for both signs of A; no matter above 1 + epsilon_high"),
    Row("gspo", f"--policy_loss gspo {SEQ}", {"importance_sampling_level": "sequence", "loss_type": "grpo"}, VERL_GSPO,
        "verl's is GSPO-token: the same where A is one per sequence"),
    Row("gspo", "--policy_loss gspo", {"importance_sampling_level": "sequence"}, {"mode": "gspo"}),
    Row("gspo", f"--policy_loss gspo {SEQ}", {"importance_sampling_level": "sequence", "loss_type": "grpo"}, None,
        "A differs from token to token", "per token"),
    Row("gspo_token", f"--policy_loss gspo_token {SEQ}", None, VERL_GSPO, "A differs from token to token", "per token"),
    Row("cispo", "--policy_loss cispo --clip_low 1 --clip_high 0.5", {"loss_type": "cispo", "epsilon_high": 1.5},
        {"mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.5},
        "TRL: no lower bound, epsilon_high is the cap"),
    Row("cispo", "--policy_loss cispo", None, {"mode": "cispo"}, "with a lower bound"),
    Row("sapo", f"--policy_loss sapo --sapo_tau_neg 1.3 {SEQ}",
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.3},
        {"mode": "sapo", "tau_neg": 1.3}, "both: seq-mean-token-mean whatever is set"),
    Row("reinforce", "--policy_loss reinforce", None, {"mode": "gpg"}, "verl: gpg"),
    Row("token_mean", "", {}, {}),
    Row("token_mean", "", {"micros": 4}, {"micros": 4}, "4 micro-batches"),
    Row("token_mean", "", {"micros": 4}, {"micros": 4}, f"4 micro-batches, {LEFT_OUT} left out", "untrained"),
    Row("seq_mean_token_mean", SEQ, {"loss_type": "grpo", "micros": 4}, VERL_SEQ | {"micros": 4}, "4 micro-batches"),
    Row("seq_mean_token_mean", SEQ, None, VERL_SEQ | {"global_batch_size": None},
        f"{LEFT_OUT} left out; verl not told B", "untrained"),
    Row("seq_mean_token_sum_norm", SUM, {"loss_type": "dr_grpo", "micros": 4}, VERL_SUM | {"micros": 4},
        "4 micro-batches"),
    Row("KL k1", "--kl_coef 0.5 --kl_estimator k1", None, {"kl_loss_type": "k1"}),
    Row("KL k2", "--kl_coef 0.5 --kl_estimator k2", None, {"kl_loss_type": "k2"}),
    Row("KL k3", "--kl_coef 0.5", None, {"kl_loss_type": "low_var_kl"}),
    Row("KL k3, no clamps", "--kl_coef 0.5 --kl_clamp 0", {"beta": 0.5}, None, "TRL: k3 alone"),
    Row("KL k3+", "--kl_coef 0.5 --kl_estimator k3+", None, {"kl_loss_type": "k3+"}),
    Row("entropy bonus", "--entropy_coef 0.3", {"entropy_coef": 0.3}, {"entropy_coeff": 0.3}),
    Row("entropy bonus", f"--entropy_coef 0.3 {SEQ}", None, VERL_SEQ | {"entropy_coeff": 0.3},
        "verl: aggregated as the loss is"),
    Row("rollout weights", f"--rollout_correction token_truncate {TRUNCATE}",
        {"correction": ("token_truncate", None, 1.3)},
        {"correction": ("token", 1.3)}, "TIS"),
    Row("rollout weights", f"--rollout_correction sequence_truncate {TRUNCATE}",
        {"correction": ("sequence_truncate", None, 1.3)},
        {"correction": ("sequence", 1.3)}),
    Row("rollout weights", f"--rollout_correction token_mask {MASK}", {"correction": ("token_mask", 0.7, 1.3)},
        {"correction": ("token", "0.7_1.3")}, "IcePop"),
    Row("rollout weights", f"--rollout_correction sequence_mask {MASK}", {"correction": ("sequence_mask", 0.7, 1.3)},
        {"correction": ("sequence", "0.7_1.3")}),
    Row("all terms", f"--kl_coef 0.5 --kl_clamp 0 --entropy_coef 0.3 --rollout_correction token_truncate {TRUNCATE}",
        {"beta": 0.5, "entropy_coef": 0.3, "correction": ("token_truncate", None, 1.3)}, None,
        "KL and entropy are not weighted"),
    Row("all terms", f"--kl_coef 0.5 --entropy_coef 0.3 --rollout_correction token_truncate {TRUNCATE}", None,
        {"kl_loss_type": "low_var_kl", "entropy_coeff": 0.3, "correction": ("token", 1.3)},
        "KL and entropy are not weighted"),
    Row("limits", "--kl_coef 0.5 --rollout_correction token_truncate --dual_clip 3", None,
        {"kl_loss_type": "low_var_kl", "correction": ("token", 2.0), "clip_ratio_c": 3.0}, "log-ratios beyond +-20",
        "wide"),
    Row("limits", "--kl_coef 0.5 --kl_estimator k3+ --dual_clip 3", None, {"kl_loss_type": "k3+", "clip_ratio_c": 3.0},
        "log-ratios beyond +-20", "wide"),
    Row("dual clip", "--dual_clip 1.1", {"delta": 1.1}, None,
        "TRL below 1 + clip_high: at 1.1 for A > 0, not for A < 0", is_same=False),
    Row("gspo", f"--policy_loss gspo {SEQ}", None, VERL_GSPO, "A differs from token to token", "per token",
        is_same=False),
    Row("gspo", f"--policy_loss gspo {SEQ}", None, VERL_GSPO, "log-ratio: ours within +-20, verl's below 10", "wide",
        is_same=False),
    Row("token_mean", "", {"loss_type": "bnpo", "micros": 4}, None, "TRL bnpo: mean of micro-batches' token means",
        is_same=False),
    Row("token_mean", "", {"steps_per_generation": 2, "num_items": 1.5}, None,
        "TRL: tokens of the generation batch / its updates", is_same=False),
    Row("seq_mean_token_mean", SEQ, {"loss_type": "grpo"}, VERL_SEQ, f"{LEFT_OUT} left out: both count them",
        "untrained", is_same=False),
    Row("seq_mean_token_sum_norm", SUM, None, VERL_SUM | {"loss_scale_factor": None},
        "verl unset: width of the padding", is_same=False),
    Row("entropy bonus", f"--entropy_coef 0.3 {SEQ}", {"entropy_coef": 0.3, "loss_type": "grpo"}, None,
        "TRL: token mean", is_same=False),
    Row("KL k3", "--kl_coef 0.5 --dual_clip 3", {"beta": 0.5, "delta": 3.0}, None, "TRL: no clamps", "wide",
        is_same=False),
]  # fmt: skip


# Cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled(Rollout):
    """A rollout whose rewards keep all their digits."""

    @property
    def rewards_B(self) -> np.ndarray:
        return np.array([grade.reward for grade in self.grades])


@dataclass(frozen=True)
class Case:
    """B completions of random lengths: packed from `rollout` for ours, padded to the longest, T tokens, for theirs."""

    rollout: Rollout
    lengths_B: Tensor
    mask_BT: Tensor  # bool, true at trained tokens
    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor
    rollout_logprobs_BT: Tensor
    entropies_BT: Tensor
    advantages_BT: Tensor

    @property
    def rewards_B(self) -> Tensor:
        return torch.from_numpy(self.rollout.rewards_B)

    def micro_batches(self, number: int) -> list[tuple[slice, Case]]:
        """The padded tensors in `number` equal parts, and which rows they are. The rollout stays whole."""
        size = P * G // number
        parts = [slice(i * size, (i + 1) * size) for i in range(number)]
        return [
            (rows, replace(self, **{name: value[rows] for name, value in vars(self).items() if name != "rollout"}))
            for rows in parts
        ]

    def unpadded(self, values_BT: Tensor) -> list[Tensor]:
        return [row[:length] for row, length in zip(values_BT, self.lengths_B.tolist(), strict=True)]


def make_case(seed: int, kind: str) -> Case:
    """Of kind plain; untrained: two completions are left out of the loss; per token: advantages differ from token to
    token; wide: log-ratios up to +-60; equal: all rewards are 0.1, in float32.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(1, 25, (P * G,), generator=generator)
    longest = int(lengths_B.max())
    is_trained_B = torch.ones(P * G, dtype=torch.bool)
    if kind == "untrained":
        is_trained_B[[3, 11]] = False

    def noise(scale: float, *shape: int) -> Tensor:  # rounded to float32, because a batch holds no more
        return (scale * torch.randn(*shape, generator=generator)).double()

    old = noise(0.5, P * G, longest) - 3.0
    spread = (20.0, 20.0, 20.0) if kind == "wide" else (1.0, 0.7, 0.2)
    logprobs, ref, sampled = (old + noise(scale, P * G, longest) for scale in spread)
    logprobs = logprobs + noise(0.4, P * G, 1)  # so that ratios of sequences differ, too
    advantages = noise(1.0, P * G, longest if kind == "per token" else 1).expand(P * G, longest)
    is_token = torch.arange(longest) < lengths_B[:, None]
    rewards_B = torch.rand(P * G, generator=generator, dtype=torch.float64)
    if kind == "equal":
        rewards_B = torch.full((P * G,), 0.1)
    rollout = Sampled(
        rows=[SimpleNamespace(ids=np.zeros(PROMPT_TOKENS, dtype=np.int32), images=None)] * P * G,
        completions=[np.zeros(length, dtype=np.int32) for length in lengths_B.tolist()],
        rollout_logprobs=[
            row[:length].numpy() for row, length in zip(sampled.float(), lengths_B.tolist(), strict=True)
        ],
        texts=[""] * P * G,
        is_truncated_B=~is_trained_B.numpy(),
        grades=[SimpleNamespace(reward=reward) for reward in rewards_B.numpy()],
        is_trained_B=is_trained_B.numpy(),
        advantages=[row[:length].numpy() for row, length in zip(advantages, lengths_B.tolist(), strict=True)],
    )
    entropies = noise(1.0, P * G, longest).abs()
    return Case(
        rollout,
        lengths_B,
        is_token & is_trained_B[:, None],
        logprobs,
        old,
        ref,
        sampled.float().double(),
        entropies,
        advantages,
    )


# Ours -----------------------------------------------------------------------------------------------------------------


def parse(flags: str) -> Algorithm:
    required = f"--model m --train_data d --out_dir o --total_steps 1 --group_size {G}"
    args = parse_flags(f"{required} {flags}".split())
    check_flags(args)
    return algorithm_of(args)


def our_advantages(case: Case, flags: str) -> Tensor:
    algorithm = parse(f"--advantage {flags}")
    penalties = None
    if algorithm.has_penalties:
        kl_BT = algorithm.kl_coef * algorithm.kl_estimator(case.ref_logprobs_BT - case.old_logprobs_BT)
        penalties = [penalty.numpy() for penalty in case.unpadded(kl_BT)]
    pieces = update.compute_advantages(case.rollout, penalties, algorithm)
    longest = case.mask_BT.shape[1]
    return torch.stack([pad(torch.tensor(piece), (0, longest - len(piece))) for piece in pieces]) * case.mask_BT


def our_loss(case: Case, flags: str, logprobs_BT: Tensor, entropies_BT: Tensor) -> Tensor:
    algorithm = parse(flags)
    weights_B = algorithm.loss_aggregation(torch.from_numpy(case.rollout.trained_lengths_B))
    rollout = replace(case.rollout, loss_weights_B=weights_B.numpy())
    batch = pack(rollout, list(range(P * G)))
    batch = replace(batch, advantages_N=to_positions(rollout, batch.segments_S, rollout.advantages))

    def packed(values_BT: Tensor) -> Tensor:
        tokens = torch.cat(case.unpadded(values_BT))
        is_completion_N = batch.position_ids_N >= PROMPT_TOKENS - 1
        return torch.zeros(len(is_completion_N), dtype=tokens.dtype).masked_scatter(is_completion_N, tokens)

    if algorithm.kl_coef:
        batch = replace(batch, ref_logprobs_N=packed(case.ref_logprobs_BT))
    logprobs_N, old_logprobs_N = packed(logprobs_BT), packed(case.old_logprobs_BT)
    loss_N, means, _ = grpo.total_loss(batch, logprobs_N, old_logprobs_N, packed(entropies_BT), algorithm)
    check_takes_part(batch, means, algorithm)
    return grpo.masked_sum(loss_N * batch.loss_weights_N, batch.loss_mask_N)


def check_takes_part(batch: Batch, means: dict[str, Tensor], algorithm: Algorithm) -> None:
    """A clip that no token meets would be compared with nothing."""
    values = algorithm.policy_loss.keywords
    needed = {
        "clip_frac_low": values.get("clip_low", 1) < 1,
        "clip_frac_high": "clip_high" in values,
        "rollout_clip_frac": algorithm.is_corrected,
    }
    for name in (name for name, is_needed in needed.items() if is_needed):
        assert means[f"policy/{name}"][batch.loss_mask_N].any(), (
            f"{name} is 0: other seeds, or a wider spread of the log-probs"
        )


# TRL ------------------------------------------------------------------------------------------------------------------


def run_statements(method: Callable, first: str, last: str, **names: object) -> dict[str, object]:
    """All names after running TRL's own statements, from the one that begins with `first` to its sibling `last`."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        block = [
            (ast.unparse(statement), statement)
            for statement in getattr(node, "body", [])
            if isinstance(statement, ast.stmt)
        ]
        start = next((i for i, (text, _) in enumerate(block) if text.startswith(first)), None)
        if start is not None:
            end = next(i for i, (text, _) in enumerate(block) if i >= start and text.startswith(last))
            names = {**vars(sys.modules[method.__module__]), **names}
            exec(
                compile(
                    ast.Module([statement for _, statement in block[start : end + 1]], []), method.__qualname__, "exec"
                ),
                names,
            )
            return names
    raise LookupError(f"{method.__qualname__} has no statement that begins with {first!r}: is this TRL 1.16.0?")


def trl_advantages(case: Case, trainer: type = GRPOTrainer, **settings: object) -> Tensor:
    defaults = {
        "multi_objective_aggregation": "sum_then_normalize",
        "num_generations": G,
        "reward_weights": torch.ones(1),
    }
    rloo = {"reward_clip_range": None, "normalize_advantages": False, "beta": 0.0}
    rewards = case.rewards_B.clone()
    names = run_statements(
        trainer._generate_and_score_completions, "num_generations = self.num_generations",
        "advantages = torch.nan_to_num(",
        self=SimpleNamespace(**defaults, **(rloo | settings)), mode="train", device=rewards.device,
        rewards_per_func=rewards[:, None],
        old_per_token_logps=case.old_logprobs_BT, ref_per_token_logps=case.ref_logprobs_BT,
        completion_mask=case.mask_BT,
        gather=lambda x: x,
    )  # fmt: skip
    return names["advantages"][:, None] * case.mask_BT


def trl_weights(case: Case, mode: str, low: float | None, high: float) -> Tensor:
    name = "vllm_importance_sampling"
    settings = {f"{name}_correction": True, f"{name}_mode": mode, f"{name}_clip_min": low, f"{name}_clip_max": high}
    first = "if self.use_vllm and self.vllm_importance_sampling_correction:\n    mask ="
    names = run_statements(
        GRPOTrainer._generate_and_score_completions, first, first, self=SimpleNamespace(use_vllm=True, **settings),
        completion_mask=case.mask_BT.long(), tool_mask=None, old_per_token_logps=case.old_logprobs_BT,
        sampling_per_token_logps=case.rollout_logprobs_BT,
    )  # fmt: skip
    return names["vllm_importance_sampling_ratio"]


def trl_loss(
    case: Case, logprobs_BT: Tensor, entropies_BT: Tensor, micros: int = 1, num_items: float = 1.0,
    correction: tuple[str, float | None, float] | None = None, **settings: object,
) -> Tensor:  # fmt: skip
    """The sum of the micro-batches' losses. `num_items`: tokens of the generation batch over those of this update."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=False
    )
    trainer = SimpleNamespace(
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
        use_bias_correction_kl=False,
        loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, delta=None, use_vllm=correction is not None,
        vllm_importance_sampling_correction=True, model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=micros,
        steps_per_generation=micros, max_completion_length=CONSTANT, _entropy_bonus_enabled="entropy_coef" in settings,
        use_adaptive_entropy=False, aux_loss_enabled=False, accelerator=accelerator,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    vars(trainer).update(settings)
    trainer.args = trainer
    total = torch.zeros((), dtype=torch.float64)
    for rows, micro in case.micro_batches(micros):
        outputs = (logprobs_BT[rows], entropies_BT[rows], None)
        trainer._get_per_token_logps_and_entropies = lambda *_, outputs=outputs, **__: outputs
        mask = micro.mask_BT.long()
        inputs = {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": micro.advantages_BT, "old_per_token_logps": micro.old_logprobs_BT,
            "ref_per_token_logps": micro.ref_logprobs_BT,
            "num_items_in_batch": case.mask_BT.sum() * num_items,
        }  # fmt: skip
        if correction:
            inputs["importance_sampling_ratio"] = trl_weights(micro, *correction)
        total = total + GRPOTrainer._compute_loss(trainer, None, inputs)
    return total


# verl -----------------------------------------------------------------------------------------------------------------


def verl_advantages(case: Case, name: str, kl: str | None = None, **settings: object) -> Tensor:
    rewards_BT = torch.zeros_like(case.old_logprobs_BT, dtype=case.rewards_B.dtype)
    rewards_BT[torch.arange(len(rewards_BT)), case.lengths_B - 1] = case.rewards_B
    if kl:  # as verl's `apply_kl_penalty` does
        rewards_BT -= 0.1 * core_algos.kl_penalty(case.old_logprobs_BT, case.ref_logprobs_BT, kl) * case.mask_BT
    estimator = core_algos.get_adv_estimator_fn(name)
    return estimator(
        rewards_BT, response_mask=case.mask_BT.long(), index=np.repeat(np.arange(P), G), config=AlgoConfig(), **settings
    )[0]


def verl_loss(
    case: Case, logprobs_BT: Tensor, entropies_BT: Tensor, micros: int = 1, mode: str = "vanilla",
    correction: tuple[str, float | str] | None = None, global_batch_size: int | None = P * G, **settings: object,
) -> Tensor:  # fmt: skip
    """Sum of `ppo_loss` over micro-batches, with the counts of the update that verl's trainer and engine give it."""
    config = ActorConfig(**{
        "strategy": "fsdp", "rollout_n": G, "use_dynamic_bsz": True, "policy_loss": PolicyLossConfig(loss_mode=mode),
        "clip_ratio_c": 1e9, "use_kl_loss": "kl_loss_type" in settings, "kl_loss_coef": 0.5, **settings,
    })  # fmt: skip
    weights_BT = None
    if correction:
        log_ratio_BT = case.old_logprobs_BT - case.rollout_logprobs_BT
        weights_BT, _ = compute_rollout_correction_weights(log_ratio_BT, case.mask_BT.long(), *correction)
    total = torch.zeros((), dtype=torch.float64)
    for rows, micro in case.micro_batches(micros):
        fields = {
            "prompts": list(torch.zeros(len(micro.lengths_B), PROMPT_TOKENS)),
            "responses": micro.unpadded(micro.mask_BT),
            "response_mask": micro.unpadded(micro.mask_BT.long()),
            "old_log_probs": micro.unpadded(micro.old_logprobs_BT),
            "advantages": micro.unpadded(micro.advantages_BT), "ref_log_prob": micro.unpadded(micro.ref_logprobs_BT),
        }  # fmt: skip
        if weights_BT is not None:
            fields["rollout_is_weights"] = micro.unpadded(weights_BT[rows])
        fields = {name: torch.nested.as_nested_tensor(pieces, layout=torch.jagged) for name, pieces in fields.items()}
        data = TensorDict(fields, batch_size=[len(micro.lengths_B)])
        tensordict_utils.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=int(case.mask_BT.sum()), global_batch_size=global_batch_size
        )
        outputs = {"log_probs": logprobs_BT[rows], "entropy": entropies_BT[rows]}
        # What the model gives: sequences end to end, prompts included; position n predicts token n + 1.
        outputs = {
            name: torch.cat([pad(x, (PROMPT_TOKENS - 1, 1)) for x in micro.unpadded(values)])
            for name, values in outputs.items()
        }
        total = total + ppo_loss(config, outputs, data)[0]
    return total


# Comparison -----------------------------------------------------------------------------------------------------------


def with_gradients(case: Case, loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """[the loss, its gradients by log-prob and by entropy]."""
    leaves = [case.logprobs_BT.clone().requires_grad_(), case.entropies_BT.clone().requires_grad_()]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)]


def largest(values: Iterable[float | None]) -> float | None:
    """None if there is nothing to compare; nan if one is."""
    values = [value for value in values if value is not None]
    return None if not values else math.nan if any(map(math.isnan, values)) else max(values)


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest, relative to the largest entry of ours (scalars: where that is above 1)."""
    found = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        size = a.abs().max().item()
        found.append((a - b).abs().max().item() / (size if a.dim() and size else max(size, 1.0)))
    return largest(found)


def compare(row: Row, case: Case) -> tuple[float | None, float | None]:
    """The differences of TRL and of verl from ours; None where there is no such choice."""
    if row in ADVANTAGES:
        ours = [our_advantages(case, row.flags)]
        of_trl = None if row.trl is None else difference(ours, [trl_advantages(case, **row.trl)])
        return of_trl, None if row.verl is None else difference(ours, [verl_advantages(case, **row.verl)])
    ours = with_gradients(case, partial(our_loss, case, row.flags))
    of_trl = None if row.trl is None else difference(ours, with_gradients(case, partial(trl_loss, case, **row.trl)))
    return of_trl, None if row.verl is None else difference(
        ours, with_gradients(case, partial(verl_loss, case, **row.verl))
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=8, help="how many random batches each row is compared on")
    args = parser.parse_args()
    table = []
    for row in ADVANTAGES + LOSSES:
        found = [compare(row, make_case(seed, row.kind)) for seed in range(args.seeds)]
        table.append((row, *(largest(column) for column in zip(*found, strict=True))))
    for is_same, title in ((True, "the same by definition"), (False, "differs by definition: does not count")):
        print(f"\n{title}\n{'choice':24}| {'ours':112}| {'TRL max diff':13}| {'verl max diff':14}| note")
        for row, of_trl, of_verl in table:
            if row.is_same == is_same:
                flags = f"--advantage {row.flags}" if row in ADVANTAGES else row.flags or "(defaults)"
                print(f"{row.choice:24}| {flags:112}| {cell(of_trl):13}| {cell(of_verl):14}| {row.note}")
    counted = [value for row, *values in table for value in values if row.is_same and value is not None]
    worst = largest(counted)
    print(
        json.dumps(
            {
                "max_difference": float(f"{worst:.3g}"),
                "goal": GOAL,
                "compared": len(counted),
                "seeds": args.seeds,
                **VERSIONS,
            }
        )
    )
    sys.exit(0 if worst <= GOAL else 1)  # nan is not


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    main()
