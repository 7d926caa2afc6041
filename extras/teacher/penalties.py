"""--kl_in reward: the KL of each token, which is taken off the rewards before the advantage is computed.

`update.add_advantages` asks for it.
"""

import numpy as np
from torch import Tensor

from batch import Batch, Rollout, Update
from fsdp_utils import gather_from_ranks
from grpo import Algorithm
from run import own_values


def gather_penalties(rollout: Rollout, updates: list[Update], algorithm: Algorithm) -> list[np.ndarray]:
    """Coefficient x KL of each token of all completions, gathered from the ranks that hold them.

    It is the KL of the policy that sampled, by the trainer's log-probs; 0 where a completion is left out of the loss.
    """

    def penalties(batch: Batch) -> Tensor:
        return algorithm.kl_coef * algorithm.kl_estimator(batch.ref_logprobs_N - batch.old_logprobs_N)

    own = own_values(rollout, updates, penalties)
    parts = gather_from_ranks(own)
    gathered = {b: values for part in parts for b, values in part.items()}
    return [gathered[b] for b in range(len(gathered))]
