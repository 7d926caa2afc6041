"""The fields of `Groups` about turns: the state in which each began, and what it earned.

Episodes with a reply, or with a reward for each turn, ask for it; `update.compute_advantages` puts it into `Groups`.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from batch import Rollout


def by_turn(rollout: Rollout, group_size: int) -> dict[str, Tensor | list[list[bytes]]]:
    """The fields of `Groups` about turns. A completion without replies is one turn; not all turns have rewards."""
    is_by_turn = [bool(grade.turn_rewards) for grade in rollout.grades if grade.status == "ok"]
    turns = rollout.turns
    fields = {"turns_T": torch.from_numpy(np.concatenate(turns)), "states_B": states_of(rollout)}
    if not all(is_by_turn or [rollout.has_replies]):  # no rewards for each turn
        return fields
    rewards_B = []
    for grade, turns_of_tokens in zip(rollout.grades, turns, strict=True):
        num_turns = turns_of_tokens.max(initial=0) + 1
        rewards_B.append(torch.tensor([*grade.turn_rewards, *[0.0] * num_turns][:num_turns]))
    rewards_BK = pad_sequence(rewards_B, batch_first=True, padding_value=torch.nan)
    return fields | {"turn_rewards_PGK": rewards_BK.unflatten(0, (-1, group_size))}


def states_of(rollout: Rollout) -> list[list[bytes]]:
    """For each turn, what the environment said before it, as the bytes of its tokens; b"" before the first."""
    states = []
    for ids, is_sampled, turns in zip(rollout.completions, rollout.is_sampled, rollout.turns, strict=True):
        replies = [ids[~is_sampled & (turns == k)].tobytes() for k in range(turns.max(initial=0))]
        states.append([b"", *replies])
    return states
