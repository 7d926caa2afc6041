"""GiGPO: a turn is also compared with all turns of the group that began in the same state: --advantage gigpo

    --environment my_environment.py:Class    a list from its reward() rewards each turn; else the last turn has it all

Sources: arXiv 2505.10978, eq. 3 and 5 to 8, and its code (langfengQ/verl-agent, gigpo/core_gigpo.py, mode
"mean_std_norm"). There the mean of episodes counts one once for each of its turns; here, as in the paper, once.
A state is what the environment said before the turn.
"""

from collections import defaultdict

import torch

from grpo import centred, divided, grpo


def gigpo(g, *, advantage_ddof, advantage_eps, gamma=0.95, weight=1.0):
    """`grpo` of the episode + weight x `grpo` of the turn's discounted return among turns of the same state."""
    states_B = g.states_B or [[b""]] * len(g.lengths_B)  # None: every episode of the step is one turn
    if g.turn_rewards_PGK is None:
        returns_BK = torch.zeros(len(states_B), max(map(len, states_B)))
        for b, reward in enumerate(g.rewards_PG.flatten()):
            returns_BK[b, len(states_B[b]) - 1] = reward
    else:
        returns_BK = g.turn_rewards_PGK.nan_to_num().flatten(0, 1)
    for k in reversed(range(returns_BK.shape[1] - 1)):
        returns_BK[:, k] += gamma * returns_BK[:, k + 1]
    places = defaultdict(list)  # prompt, state -> its episodes and turns
    for b, states in enumerate(states_B):
        for k, state in enumerate(states):
            places[b // g.rewards_PG.shape[1], state].append((b, k))
    step_BK = torch.zeros_like(returns_BK)  # stays 0 for a turn that is alone
    for place in (place for place in places.values() if len(place) > 1):
        b, k = zip(*place, strict=True)
        values = returns_BK[b, k][None]
        step_BK[b, k] = divided(centred(values), values.std(correction=advantage_ddof) + advantage_eps)[0]
    episode_PG = grpo(g, advantage_ddof=advantage_ddof, advantage_eps=advantage_eps)
    b_T = torch.repeat_interleave(g.lengths_B)
    turns_T = torch.zeros_like(b_T) if g.turns_T is None else g.turns_T
    return episode_PG.flatten()[b_T] + weight * step_BK[b_T, turns_T]
