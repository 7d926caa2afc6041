r"""Our advantages, losses, gradients and weights against TRL 1.16.0 and verl 0.9.1, on random ragged completions.

    # With the training environment active. Dependencies of TRL and verl stay out of it, but its packages are seen.
    python -m venv compare
    python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
        > compare/lib/python3.11/site-packages/training.pth
    compare/bin/pip install --no-deps trl==1.16.0 verl==0.9.1 accelerate==1.15.0 ray==2.60.0 msgpack==1.2.4 \
        tensordict==0.10.0 pyvers==0.2.3 omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0
    compare/bin/python benchmarks/compare_algorithms.py

Ours are `grpo.total_loss` on packed tokens and `update.compute_advantages`, under the flags of the table. TRL's loss is
its `_compute_loss`, verl's its `ppo_loss`: each is given our log-probs, padded, in place of a model, and what their
trainers hand to these functions. What TRL has only in the middle of a method (advantages, weights of the sampler's
mismatch) is run from there, the statements themselves. Nothing of either library is replaced.

Everything is float64, so that rounding hides and explains nothing. A difference is the largest of the loss (relative
where that is above 1) and of its gradients by log-prob and entropy (relative to the largest entry of ours), over all
seeds. Exit status 1 if a row is above the goal.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
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
from algorithm import algorithm_of
from batch import Rollout
from bench_common import parser_of
from command_line import parse_flags
from grading import Grade
from grpo import Algorithm
from packing import pack, to_positions

GOAL = 1e-5
P, G, PROMPT_TOKENS, CONSTANT = 4, 7, 3, 32  # prompts, completions of each, tokens of a prompt, Dr. GRPO's constant
B = P * G
Settings = dict[str, object]


@dataclass(frozen=True)
class Row:
    """One line of the table: our flags, and the settings with which TRL and verl should agree; None: no such choice."""

    flags: str
    trl: Settings | None
    verl: Settings | None
    note: str = ""
    kind: str = "plain"  # see `make_case`


def corrected(mode: str, low: float | None = None) -> tuple[str, Settings, Settings]:
    """Flags, TRL's and verl's settings of a correction with the largest weight 1.3."""
    least = f"smallest={low}," if low else ""
    flags = f"--rollout_correction {mode}:{least}largest=1.3"
    correction = (mode.partition("_")[0], f"{low}_1.3" if low else 1.3)
    return flags, {"correction": (mode, low, 1.3)}, {"correction": correction}


SEQ = "--loss_aggregation seq_mean_token_mean"
SUM = f"--loss_aggregation seq_mean_token_sum_norm:constant={CONSTANT}"
AGGREGATIONS = {  # flags -> settings of TRL and of verl, which a row may override
    SEQ: ({"loss_type": "grpo"}, {"loss_agg_mode": "seq-mean-token-mean"}),
    SUM: ({"loss_type": "dr_grpo"}, {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": CONSTANT}),
}
FILES = os.path.relpath(Path(__file__).parent.parent / "docs" / "losses")
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
MICROS, TRL_GSPO, LOW_VAR = {"micros": 4}, {"importance_sampling_level": "sequence"}, {"kl_loss_type": "low_var_kl"}
TIS, TRL_TIS, VERL_TIS = corrected("token_truncate")
ROWS = [
    Row("--advantage grpo", None, {"name": "grpo"}, "verl as it is: ddof 1, std + 1e-6"),
    Row("--advantage grpo --advantage_eps 1e-4", {"scale_rewards": "group"}, None, "TRL as it is: ddof 1, std + 1e-4"),
    Row("--advantage grpo_batch_std --advantage_eps 1e-4", {"scale_rewards": "batch"}, None),
    Row("--advantage dr_grpo", {"scale_rewards": "none"}, {"name": "grpo", "norm_adv_by_std_in_grpo": False}),
    Row("--advantage rloo", {"trainer": RLOOTrainer}, {"name": "rloo"}),
    # verl whitens by sqrt(var + 1e-8), ours by std + eps.
    Row("--advantage reinforce++ --advantage_eps 0", None, {"name": "reinforce_plus_plus"}),
    Row("--advantage reinforce++ --advantage_eps 0", None, {"name": "reinforce_plus_plus"}, kind="untrained"),
    Row("--advantage reinforce++_baseline --advantage_eps 0", None, {"name": "reinforce_plus_plus_baseline"}),
    Row("--advantage rloo --kl_in reward --kl_coef 0.1 --kl_estimator k1", {"trainer": RLOOTrainer, "beta": 0.1},
        {"name": "rloo", "kl": "k1"}),
    Row("--advantage grpo --kl_in reward --kl_coef 0.1", None, {"name": "grpo", "kl": "low_var_kl"}),
    Row("--advantage reinforce++ --kl_in reward --kl_coef 0.1 --kl_estimator k2 --advantage_eps 0", None,
        {"name": "reinforce_plus_plus", "kl": "k2"}, "return to go, token by token"),
    Row("--clip_low 0.1 --clip_high 0.3", {"epsilon_low": 0.1, "epsilon_high": 0.3},
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}),
    Row("--dual_clip 2", {"delta": 2.0}, {"clip_ratio_c": 2.0}, "TRL: for both signs of A"),
    Row(f"--policy_loss gspo {SEQ}", TRL_GSPO, {"mode": "gspo"}, "verl's is GSPO-token: the same here"),
    Row("--policy_loss gspo", TRL_GSPO, {"mode": "gspo"}),
    Row(f"--policy_loss gspo {SEQ}", TRL_GSPO, None, kind="per token"),
    Row(f"--policy_loss gspo_token {SEQ}", None, {"mode": "gspo"}, kind="per token"),
    Row("--policy_loss cispo --clip_low 1 --clip_high 0.5", {"loss_type": "cispo", "epsilon_high": 1.5},
        {"mode": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.5}, "TRL: epsilon_high is the cap"),
    Row("--policy_loss cispo", None, {"mode": "cispo"}, "with a lower bound"),
    Row(f"--policy_loss sapo:tau_neg=1.3 {SEQ}", {"loss_type": "sapo", "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.3}, {"mode": "sapo", "tau_neg": 1.3}),
    Row("--policy_loss dppo --clip_low 0.02 --clip_high 0.03", None,
        {"mode": "dppo_tv", "clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 20.0}),
    Row("--policy_loss dppo_kl --clip_low 2e-3 --clip_high 5e-3", None,
        {"mode": "dppo_kl", "clip_ratio_low": 2e-3, "clip_ratio_high": 5e-3, "clip_ratio_c": 20.0}),
    Row("--policy_loss dppo", None, {"mode": "dppo_tv", "clip_ratio_c": 20.0}, kind="wide"),
    Row(f"--policy_loss {FILES}/vespo.py:vespo", {"loss_type": "vespo", **VESPO}, None),
    Row(f"--policy_loss {FILES}/gmpo.py:gmpo --clip_low 0.4 --clip_high 0.4 {SEQ}", None,
        {"mode": "geo_mean", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    Row(f"--policy_loss {FILES}/off_policy_mask.py:masked_clip {SEQ}", {"off_policy_mask_threshold": 0.5}, None),
    Row(f"--policy_loss {FILES}/high_entropy.py:high_entropy", {"top_entropy_quantile": 0.2}, None),
    Row(f"--advantage {FILES}/opo.py:opo", None, {"name": "opo"}),
    Row("--policy_loss reinforce", None, {"mode": "gpg"}),
    Row("", {}, {}),
    Row("", MICROS, MICROS),
    Row("", MICROS, MICROS, kind="untrained"),
    Row(SEQ, MICROS, MICROS),
    Row(SEQ, None, {"global_batch_size": None}, "verl not told B", "untrained"),
    Row(SUM, MICROS, MICROS),
    Row("--kl_coef 0.5 --kl_estimator k1", None, {"kl_loss_type": "k1"}),
    Row("--kl_coef 0.5 --kl_estimator k2", None, {"kl_loss_type": "k2"}),
    Row("--kl_coef 0.5", None, LOW_VAR),
    Row("--kl_coef 0.5 --kl_clamp 0", {"beta": 0.5}, None, "TRL: k3 alone, without clamps"),
    Row("--kl_coef 0.5 --kl_estimator k3+", None, {"kl_loss_type": "k3+"}),
    Row("--entropy_coef 0.3", {"entropy_coef": 0.3}, {"entropy_coeff": 0.3}),
    Row(f"--entropy_coef 0.3 {SEQ}", None, {"entropy_coeff": 0.3}, "verl: aggregated as the loss is"),
    Row(TIS, TRL_TIS, VERL_TIS),
    Row(*corrected("sequence_truncate")),
    Row(*corrected("token_mask", 0.7), "IcePop"),
    Row(*corrected("sequence_mask", 0.7)),
    # KL and entropy are not weighted.
    Row(f"--kl_coef 0.5 --kl_clamp 0 --entropy_coef 0.3 {TIS}", {"beta": 0.5, "entropy_coef": 0.3, **TRL_TIS}, None),
    Row(f"--kl_coef 0.5 --entropy_coef 0.3 {TIS}", None, {"entropy_coeff": 0.3, **LOW_VAR, **VERL_TIS}),
    Row("--kl_coef 0.5 --rollout_correction token_truncate --dual_clip 3", None,
        {"correction": ("token", 2.0), "clip_ratio_c": 3.0, **LOW_VAR}, kind="wide"),
    Row("--kl_coef 0.5 --kl_estimator k3+ --dual_clip 3", None, {"kl_loss_type": "k3+", "clip_ratio_c": 3.0},
        kind="wide"),
]  # fmt: skip


# Cases ----------------------------------------------------------------------------------------------------------------


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

    def micro_batches(self, number: int) -> list[Case]:
        """The padded tensors in `number` equal parts. The rollout stays whole."""
        parts = {name: x.chunk(number) for name, x in vars(self).items() if name != "rollout"}
        return [replace(self, **{name: each[i] for name, each in parts.items()}) for i in range(number)]

    def unpadded(self, values_BT: Tensor) -> list[Tensor]:
        return [row[:length] for row, length in zip(values_BT, self.lengths_B.tolist(), strict=True)]


def make_case(seed: int, kind: str) -> Case:
    """A case; untrained: 2 completions are left out; per token: A differs within them; wide: log-ratios up to +-60."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(1, 25, (B,), generator=generator)
    longest = int(lengths_B.max())
    is_trained_B = torch.ones(B, dtype=torch.bool)
    if kind == "untrained":
        is_trained_B[[3, 11]] = False

    def noise(scale: float, width: int = longest) -> Tensor:  # rounded to float32, because a batch holds no more
        return (scale * torch.randn(B, width, generator=generator)).double()

    old = noise(0.5) - 3.0
    logprobs, ref, sampled = (old + noise(20.0 if kind == "wide" else scale) for scale in (1.0, 0.7, 0.2))
    sampled = sampled.float()
    logprobs = logprobs + noise(0.4, width=1)  # so that ratios of sequences differ, too
    logprobs = logprobs if kind == "wide" else logprobs.clamp(max=-0.01)  # as of probabilities
    advantages = noise(1.0, longest if kind == "per token" else 1).expand(B, longest)
    rewards_B = torch.rand(B, generator=generator, dtype=torch.float64)
    mask_BT = (torch.arange(longest) < lengths_B[:, None]) & is_trained_B[:, None]
    entropies = noise(1.0).abs()
    rollout = Sampled(
        rows=[SimpleNamespace(ids=np.zeros(PROMPT_TOKENS, dtype=np.int32), images=None)] * B,
        completions=[np.zeros(length, dtype=np.int32) for length in lengths_B.tolist()],
        rollout_logprobs=[row[:n].numpy() for row, n in zip(sampled, lengths_B.tolist(), strict=True)],
        texts=[""] * B,
        is_truncated_B=~is_trained_B.numpy(),
        grades=[Grade(reward, "ok") for reward in rewards_B.numpy()],
        is_sampled=[np.ones(length, dtype=bool) for length in lengths_B.tolist()],
        is_trained_B=is_trained_B.numpy(),
        advantages=[row[:n].numpy() for row, n in zip(advantages, lengths_B.tolist(), strict=True)],
    )
    return Case(rollout, lengths_B, mask_BT, logprobs, old, ref, sampled.double(), entropies, advantages)


# Ours -----------------------------------------------------------------------------------------------------------------


def parse(flags: str) -> Algorithm:
    args = parse_flags(f"--model m --train_data d --out_dir o --total_steps 1 --group_size {G} {flags}".split())
    return algorithm_of(args)


def our_advantages(case: Case, flags: str) -> Tensor:
    algorithm, penalties = parse(flags), None
    if algorithm.has_penalties:
        kl_BT = algorithm.kl_coef * algorithm.kl_estimator(case.ref_logprobs_BT - case.old_logprobs_BT)
        penalties = [penalty.numpy() for penalty in case.unpadded(kl_BT)]
    pieces = update.compute_advantages(case.rollout, penalties, algorithm)
    longest = case.mask_BT.shape[1]
    return torch.stack([pad(torch.tensor(piece), (0, longest - len(piece))) for piece in pieces]) * case.mask_BT


def our_loss(case: Case, flags: str) -> Tensor:
    algorithm = parse(flags)
    weights_B = algorithm.loss_aggregation(torch.from_numpy(case.rollout.trained_lengths_B))
    rollout = replace(case.rollout, loss_weights_B=weights_B.numpy())
    batch = pack(rollout, list(range(B)))
    batch = replace(batch, advantages_N=to_positions(rollout, batch.segments_S, rollout.advantages))

    def packed(values_BT: Tensor) -> Tensor:
        tokens = torch.cat(case.unpadded(values_BT))
        is_completion_N = batch.position_ids_N >= PROMPT_TOKENS - 1
        return torch.zeros(len(is_completion_N), dtype=tokens.dtype).masked_scatter(is_completion_N, tokens)

    if algorithm.kl_coef:
        batch = replace(batch, ref_logprobs_N=packed(case.ref_logprobs_BT))
    logprobs_N, old_logprobs_N = packed(case.logprobs_BT), packed(case.old_logprobs_BT)
    t = grpo.tokens_of(batch, logprobs_N, old_logprobs_N, packed(case.entropies_BT))
    return grpo.masked_sum(grpo.total_loss(batch, t, algorithm).per_token * batch.loss_weights_N, batch.loss_mask_N)


# TRL ------------------------------------------------------------------------------------------------------------------


def run_statements(method: Callable, first: str, last: str, **names: object) -> dict[str, object]:
    """All names after running TRL's own statements, from the one that begins with `first` to its sibling `last`."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))):
        body = getattr(node, "body", [])
        texts = [ast.unparse(statement) for statement in body] if isinstance(body, list) else []
        start = next((i for i, text in enumerate(texts) if text.startswith(first)), None)
        if start is not None:
            end = next(i for i, text in enumerate(texts) if i >= start and text.startswith(last))
            names = {**vars(sys.modules[method.__module__]), **names}
            exec(compile(ast.Module(body[start : end + 1], []), method.__qualname__, "exec"), names)
            return names
    raise LookupError(f"{method.__qualname__} has no statement that begins with {first!r}: is this TRL 1.16.0?")


def trl_advantages(case: Case, trainer: type = GRPOTrainer, **settings: object) -> Tensor:
    defaults = {"multi_objective_aggregation": "sum_then_normalize", "num_generations": G}
    defaults |= {"reward_clip_range": None, "normalize_advantages": False, "beta": 0.0}  # its RLOO has them
    rewards = torch.from_numpy(case.rollout.rewards_B)
    names = run_statements(
        trainer._generate_and_score_completions, "num_generations = self.num_generations",
        "advantages = torch.nan_to_num(", mode="train", device=rewards.device, gather=lambda x: x,
        self=SimpleNamespace(reward_weights=torch.ones(1), **(defaults | settings)),
        rewards_per_func=rewards[:, None], completion_mask=case.mask_BT,
        old_per_token_logps=case.old_logprobs_BT, ref_per_token_logps=case.ref_logprobs_BT,
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
    case: Case, micros: int = 1, correction: tuple[str, float | None, float] | None = None, **settings: object
) -> Tensor:
    """The sum of the micro-batches' losses."""
    reduce = {"gather": lambda x: x, "reduce": lambda x, reduction: x, "pad_across_processes": lambda x, **_: x}
    trainer = SimpleNamespace(
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token", beta=0.0,
        use_bias_correction_kl=False, loss_type="dapo", epsilon_low=0.2, epsilon_high=0.2, delta=None,
        use_vllm=correction is not None, vllm_importance_sampling_correction=True,
        accelerator=SimpleNamespace(num_processes=1, sync_gradients=False, **reduce),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=micros, steps_per_generation=micros,
        max_completion_length=CONSTANT, _entropy_bonus_enabled="entropy_coef" in settings, use_adaptive_entropy=False,
        aux_loss_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)),
        get_gamma_weights=GRPOTrainer.get_gamma_weights, get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
    )  # fmt: skip
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    vars(trainer).update(settings)
    trainer.args = trainer
    total = torch.zeros((), dtype=torch.float64)
    for micro in case.micro_batches(micros):
        outputs = (micro.logprobs_BT, micro.entropies_BT, None)
        trainer._get_per_token_logps_and_entropies = lambda *_, outputs=outputs, **__: outputs
        mask = micro.mask_BT.long()
        inputs = {
            "prompt_ids": mask[:, :1], "prompt_mask": mask[:, :1], "completion_ids": mask, "completion_mask": mask,
            "advantages": micro.advantages_BT, "old_per_token_logps": micro.old_logprobs_BT,
            "ref_per_token_logps": micro.ref_logprobs_BT, "num_items_in_batch": case.mask_BT.sum(),
            "sampling_per_token_logps": micro.rollout_logprobs_BT,
        }  # fmt: skip
        if correction:
            inputs["importance_sampling_ratio"] = trl_weights(micro, *correction)
        total = total + GRPOTrainer._compute_loss(trainer, None, inputs)
    return total


# verl -----------------------------------------------------------------------------------------------------------------


def verl_advantages(case: Case, name: str, kl: str | None = None, **settings: object) -> Tensor:
    rewards_B = torch.from_numpy(case.rollout.rewards_B)
    rewards_BT = torch.zeros_like(case.old_logprobs_BT, dtype=rewards_B.dtype)
    rewards_BT[torch.arange(B), case.lengths_B - 1] = rewards_B
    if kl:  # as verl's `apply_kl_penalty` does
        rewards_BT -= 0.1 * core_algos.kl_penalty(case.old_logprobs_BT, case.ref_logprobs_BT, kl) * case.mask_BT
    given = {"response_mask": case.mask_BT.long(), "index": np.repeat(np.arange(P), G), "config": AlgoConfig()}
    return core_algos.get_adv_estimator_fn(name)(rewards_BT, **given, **settings)[0]


def verl_loss(
    case: Case, micros: int = 1, mode: str = "vanilla", correction: tuple[str, float | str] | None = None,
    global_batch_size: int | None = B, **settings: object,
) -> Tensor:  # fmt: skip
    """Sum of `ppo_loss` over micro-batches, with the counts of the update that verl's trainer and engine give it."""
    config = ActorConfig(**{
        "strategy": "fsdp", "rollout_n": G, "use_dynamic_bsz": True, "policy_loss": PolicyLossConfig(loss_mode=mode),
        "clip_ratio_c": 1e9, "use_kl_loss": "kl_loss_type" in settings, "kl_loss_coef": 0.5, **settings,
    })  # fmt: skip
    counts = {"batch_num_tokens": int(case.mask_BT.sum()), "global_batch_size": global_batch_size}
    total = torch.zeros((), dtype=torch.float64)
    for micro in case.micro_batches(micros):
        mask, size = micro.mask_BT.long(), len(micro.lengths_B)
        fields = {
            "responses": mask, "response_mask": mask, "old_log_probs": micro.old_logprobs_BT,
            "advantages": micro.advantages_BT, "ref_log_prob": micro.ref_logprobs_BT,
        }  # fmt: skip
        if correction:
            given = (micro.old_logprobs_BT - micro.rollout_logprobs_BT, mask, *correction)
            fields["rollout_is_weights"], _ = compute_rollout_correction_weights(*given)
        pieces = {name: micro.unpadded(x) for name, x in fields.items()}
        pieces["prompts"] = list(torch.zeros(size, PROMPT_TOKENS))
        nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in pieces.items()}
        data = TensorDict(nested, batch_size=[size])
        tensordict_utils.assign_non_tensor(data, dp_size=1, **counts)
        # What the model gives: sequences end to end, prompts included; position n predicts token n + 1.
        outputs = {
            name: torch.cat([pad(x, (PROMPT_TOKENS - 1, 1)) for x in micro.unpadded(values_BT)])
            for name, values_BT in (("log_probs", micro.logprobs_BT), ("entropy", micro.entropies_BT))
        }
        total = total + ppo_loss(config, outputs, data)[0]
    return total


# Comparison -----------------------------------------------------------------------------------------------------------

ADVANTAGES, LOSSES = (our_advantages, trl_advantages, verl_advantages), (our_loss, trl_loss, verl_loss)


def with_gradients(case: Case, loss: Callable[..., Tensor], **settings: object) -> list[Tensor]:
    """[the loss, its gradients by log-prob and by entropy]."""
    leaves = [x.clone().requires_grad_() for x in (case.logprobs_BT, case.entropies_BT)]
    value = loss(replace(case, logprobs_BT=leaves[0], entropies_BT=leaves[1]), **settings)
    return [value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest, relative to the largest entry of ours (scalars: where that is above 1)."""
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        size = a.abs().max().item()
        differences.append((a - b).abs().max().item() / (size if a.dim() and size else max(size, 1.0)))
    return np.max(differences).item()  # nan if one is


def compare(row: Row, case: Case) -> dict[str, float]:
    """The differences of TRL and of verl from ours, of those that have such a choice."""
    is_advantage = "--advantage " in row.flags
    aggregations = (both for flags, both in AGGREGATIONS.items() if flags in row.flags)
    trl_aggregation, verl_aggregation = next(aggregations, ({}, {}))
    settings = {"ours": {"flags": row.flags}}
    settings["TRL"] = None if row.trl is None else trl_aggregation | row.trl
    settings["verl"] = None if row.verl is None else verl_aggregation | row.verl
    results = {}
    for (name, given), function in zip(settings.items(), ADVANTAGES if is_advantage else LOSSES, strict=True):
        if given is not None:
            results[name] = [function(case, **given)] if is_advantage else with_gradients(case, function, **given)
    ours = results.pop("ours")
    return {name: difference(ours, theirs) for name, theirs in results.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="how many random batches each row is compared on")
    args = parser.parse_args()
    everything = []
    for row in ROWS:
        seeds = [compare(row, make_case(seed, row.kind)) for seed in range(args.seeds)]
        largest = {name: np.max([seed[name] for seed in seeds]).item() for name in seeds[0]}  # nan if one is
        text = ", ".join(f"{name} {value:.1e}" for name, value in largest.items())
        print(f"{row.flags or '(defaults)':112}| {row.kind:9} | {text:26} | {row.note}")
        everything += largest.values()
    worst = np.max(everything).item()
    summary = {"max_difference": float(f"{worst:.3g}"), "goal": GOAL, "compared": len(everything), "seeds": args.seeds}
    print(json.dumps(summary | {"trl": trl.__version__, "verl": verl.__version__}))
    sys.exit(0 if worst <= GOAL else 1)  # nan is not


if __name__ == "__main__":
    main()
