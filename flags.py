"""The frozen objects that the flags become."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grading:  # --reward and what belongs to it
    reward: str
    reward_timeout: float = 5.0
    reward_memory_gib: float = 4.0
    reward_workers: int = 0
    truncated: str = "score"
    overlong_cache_tokens: int | None = None


@dataclass(frozen=True)
class Sampling:  # how a set of prompts is sampled: training, or one held-out set
    num_samples: int
    temperature: float
    max_completion_tokens: int
    top_p: float = 1.0
