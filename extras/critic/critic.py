"""The critic: a model of the value of each prefix, sharded and trained as the policy, never sampled from.

It is a SequenceClassification of transformers: the decoder of --critic with a head of one number
(`score.weight`), that of a reward model, else 0 at the start. In each update it is trained before the
policy, on the same micro-batches, towards returns whose lambda is its own. Dimensions: `batch.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as VALUE_MODELS

import update as without_critic
from batch import Batch, Metrics, Rollout, Update
from checkpoint import gather_weights, restore, shards_of
from extras.critic.gae import gae
from extras.critic.settings import path_of, settings_of
from extras.losses.reinforce_pp import whitened
from flags import AdamW, Memory
from fsdp_utils import (
    World,
    begin_micro_batch,
    clip_grad_norm,
    gather_from_ranks,
    release_gathered,
    sum_over_trainers,
)
from grpo import Algorithm, Groups, masked_sum
from model.optimizer import make_optimizer, set_rate
from model.weights import load_tokenizer
from packing import to_positions
from policy import Policy, empty_policy, shard_and_fill
from run import own_values
from runtime.rank import beat
from schedule import UpdateStep
from update import UpdateGuard


def value_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The classifier of this architecture. Raises ValueError if there is none, or for several labels."""
    path = f"--critic {config.name_or_path}"
    if type(config) not in VALUE_MODELS:
        raise ValueError(f"{path}: transformers has no SequenceClassification of {config.model_type!r}; use another.")
    if "SequenceClassification" in "".join(config.architectures or ()) and config.num_labels != 1:
        raise ValueError(f"{path} has {config.num_labels} labels; use a reward model of one label.")
    return VALUE_MODELS[type(config)]


def value_model(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """The classifier of this architecture with one label, whose head is 0 if the files have none."""

    class ValueModel(value_class(config)):
        _keys_to_ignore_on_load_missing = ("^score",)
        _keys_to_ignore_on_load_unexpected = ("^lm_head",)

        def __init__(self, config: PretrainedConfig) -> None:
            config.num_labels = 1
            super().__init__(config)

        def get_output_embeddings(self) -> nn.Module:  # what `Policy` calls the head
            return self.score

        def _init_weights(self, module: nn.Module) -> None:  # from_pretrained asks for what no file has
            super()._init_weights(module)
            if module is self.score:
                nn.init.zeros_(module.weight)

    ValueModel.__name__ = ValueModel.__base__.__name__  # which config.json of an export names
    return ValueModel._from_config(config, **options)


class Critic:
    """The value model with its optimizer, and the verbs of `update.py` with it."""

    def __init__(self, written: str, policy_path: str, memory: Memory, adamw: AdamW, world: World) -> None:
        self.path, (_, self.settings) = path_of(written, policy_path), settings_of(written)
        self.memory, self.world = memory, world
        dtypes = getattr(torch, memory.param_dtype), getattr(torch, memory.dtype)
        self.model = empty_policy(self.path, *dtypes, memory.gradient_checkpointing, value_model)
        shard_and_fill(self.model, self.path, world, memory.offload == "all", memory.communicate_once)
        self.optimizer = make_optimizer(dict(self.model.named_parameters()), adamw, memory)
        self.relative_rate, rate = 1.0, self.settings.rate
        if rate is not None:  # the gate refuses one beside a policy without a rate
            self.relative_rate = rate / (adamw.learning_rate or 1.0)
        self.rollout: Rollout | None = None  # of the step, with the parts "values" and "targets"

    def add_advantages(
        self, rollout: Rollout, updates: list[Update], algorithm: Algorithm, step: int = 1, total_steps: int = 1
    ) -> tuple[Rollout, list[Update]]:
        """As in `update.py`, but by the values of the tokens: `algorithm.advantage` is not asked."""
        with torch.no_grad():
            own = own_values(rollout, updates, self.values)
        release_gathered(self.model)
        gathered = {b: values for part in gather_from_ranks(own) for b, values in part.items()}
        values = [gathered[b] for b in range(len(gathered))]
        targets: list[np.ndarray] = []

        def advantage(g: Groups) -> Tensor:
            settings, values_T = self.settings, torch.from_numpy(np.concatenate(values))
            targets_T = gae(g, values_T, settings.critic_lam) + values_T
            targets.extend(piece.float().numpy() for piece in targets_T.split(g.lengths_B.tolist()))
            advantages_T = gae(g, values_T, settings.lam, settings.alpha).float()
            return whitened(advantages_T, g.mask_T, ddof=1, eps=1e-8) if settings.whiten else advantages_T

        changed = replace(algorithm, advantage=advantage)
        # What could not be graded is compared with nothing here, and its tokens are not trained.
        compared = replace(rollout, grades=[replace(grade, is_compared=True) for grade in rollout.grades])
        compared, updates = without_critic.add_advantages(compared, updates, changed, step, total_steps)
        self.rollout = rollout.with_parts(values=values, targets=targets)
        return replace(rollout, advantages=compared.advantages), updates

    def update_policy(
        self,
        policy: Policy,
        optimizer: Optimizer,
        update: Update,
        algorithm: Algorithm,
        step: UpdateStep,
        memory: Memory,
        guard: UpdateGuard,
    ) -> Metrics:
        """As in `update.py`, after the critic's own updates. In its warm-up the policy's rate is 0."""
        learnt = [self.learn(update, step) for _ in range(self.settings.passes)]
        if step.step <= self.settings.warmup:
            step = step._replace(rate=0.0)
        return without_critic.update_policy(policy, optimizer, update, algorithm, step, memory, guard) | learnt[0]

    def values(self, batch: Batch) -> Tensor:
        """values_N, float32: of the text before each trained label; 0 elsewhere."""
        hidden_KD, weight_1D = self.model.hidden_states(batch)
        values_K = F.linear(hidden_KD.float(), weight_1D.float())[:, 0]
        return torch.zeros(len(batch.labels_N), device=values_K.device).index_copy(0, batch.trained_K, values_K)

    def learn(self, update: Update, step: UpdateStep) -> Metrics:
        """Makes one optimizer step on this rank's micro-batches; its metrics are the same on every rank.

        An update whose loss or gradient is not finite leaves the critic untouched.
        """
        sums = torch.zeros(5, device=self.world.device)  # the loss, and what metrics average
        for i, batch in enumerate(update):
            begin_micro_batch(self.model, self.memory.communicate_once, is_last=i == len(update) - 1)
            total, means = self.loss(batch)
            beat()
            (total * self.world.num_trainers).backward()  # FSDP averages gradients; weights are global
            sums += torch.stack([total.detach(), *means])
        if self.memory.communicate_once:
            release_gathered(self.model)  # they are from before the optimizer step
        norm = clip_grad_norm(self.model, step.max_grad_norm).item()
        loss, square, target_square, target, clip_frac = sum_over_trainers(sums).tolist()
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            set_rate(self.optimizer, step.rate * self.relative_rate)
            self.optimizer.step()
        self.model.zero_grad()
        variance = target_square - target**2
        return {
            "critic/loss": loss,
            "critic/explained": 1.0 - square / variance if variance > 0 else 0.0,
            "critic/clip_frac": clip_frac,
            "critic/grad_norm": norm,
            "critic/skipped_updates": float(not is_finite),
        }

    def loss(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """The micro-batch's part of the loss, with gradient, and of four means over the update's tokens.

        0.5 x (value - target)^2, or that of the value held within `clip` of the one at the step's start,
        whichever is larger (PPO's reference code, openai/baselines). Tokens have the policy loss's weights.
        """
        values_N, parts = self.values(batch), self.rollout.parts
        read = [to_positions(self.rollout, batch.segments_S, parts[name]) for name in ("values", "targets")]
        old_N, targets_N = (each.to(values_N.device) for each in read)
        squares_N = larger_N = (values_N - targets_N).square()
        if bound := self.settings.clip:
            held_N = old_N + (values_N - old_N).clamp(-bound, bound)
            larger_N = torch.maximum(squares_N, (held_N - targets_N).square())
        total = masked_sum(0.5 * larger_N * batch.loss_weights_N, batch.loss_mask_N)
        found = squares_N.detach(), targets_N.square(), targets_N, (larger_N > squares_N).float()
        return total, [masked_sum(each, batch.loss_mask_N) / batch.update_tokens for each in found]

    def save(self, folder: Path, world: World) -> None:
        """Writes the value model, with a tokenizer, as --critic reads it again. All ranks call it."""
        weights = gather_weights(self.model, world)
        if world.is_main:
            self.model.model.save_pretrained(folder, state_dict=weights)
            load_tokenizer(self.path).save_pretrained(folder)

    def state_dict(self) -> dict[str, object]:
        """For `dcp`, which fills it and gives it back to `load_state_dict`."""
        return shards_of(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, object]) -> None:
        restore(self.model, self.optimizer, state)
