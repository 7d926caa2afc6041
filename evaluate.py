"""Accuracy on held-out sets: sample every problem k times, grade, average."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from batch import Rollout
from data import PromptData
from fsdp_utils import map_over_ranks
from reward import RewardFunction, grade

if TYPE_CHECKING:  # importing vLLM takes seconds; the checks of bad input come first
    from rollout import Engine


def grade_rollout(score: RewardFunction, rollout: Rollout, data: PromptData, indices: np.ndarray, group_size: int) -> np.ndarray:
    """rewards_B, float32: the score of each completion against the row it answers; each rank grades its share."""
    cases = [(text, data.rows[indices[b // group_size]]) for b, text in enumerate(rollout.texts)]
    rewards = map_over_ranks(lambda case: grade(score, case[0], case[1].answer, case[1].columns), cases)
    return np.array(rewards, dtype=np.float32)


def evaluate(
    engine: Engine,
    data: PromptData,
    score: RewardFunction,
    num_samples: int,
    seed: tuple[int, ...],
    temperature: float,
    top_p: float,
    max_tokens: int,
) -> dict[str, float]:
    """Metrics `eval/<set>/...`: avg@k (mean score of k samples a problem), its stderr over problems, tokens_mean, frac_truncated."""
    rollout = engine.sample(data.prompts, num_samples, seed, temperature, max_tokens, top_p, description=f"evaluate {data.name}")
    rewards_B = grade_rollout(score, rollout, data, np.arange(len(data.rows)), num_samples)
    per_problem = rewards_B.reshape(-1, num_samples).mean(axis=1)
    name = f"eval/{data.name}"
    return {
        f"{name}/avg@{num_samples}": float(per_problem.mean()),
        f"{name}/stderr": float(per_problem.std(ddof=1) / math.sqrt(len(per_problem))) if len(per_problem) > 1 else 0.0,
        f"{name}/tokens_mean": float(rollout.completion_lengths_B.mean()),
        f"{name}/frac_truncated": float(rollout.is_truncated_B.mean()),
    }
