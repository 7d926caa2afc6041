"""Values of all groups of a step, for an advantage that compares over more than the group. docs/rewards.md"""

from collections.abc import Callable

import torch
from torch import Tensor

from grpo import Groups


def over_step(g: Groups, values_of: Callable[[Groups], Tensor]) -> Tensor:
    """The values of these groups and of the step's others, in one dimension.

    Others are there where some completions could not be graded: groups of another size are another `Groups`.
    """
    return torch.cat([values_of(each).flatten() for each in (g, *g.other_groups)])
