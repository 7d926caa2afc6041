"""MATH as rasbt's reasoning-from-scratch reads it (chapters 3 and 6): --reward docs/rewards/boxed_math.py:score

In training only the last \\boxed{} is an answer. In evaluation a completion without one is read as its last number, or
as a whole: so the data of scripts/math_speedrun.py say, in their column `must_box`. Whether it equals the key decides
our `math`, which takes fewer forms for equal than the source's SymPy. `box`: the share of completions with a box.
"""

import re

NUMBER = re.compile(r"-?\d+(?:/\d+|\.\d+)?")


def score(completion, answer, columns):
    from grading.answer import last_box
    from grading.equality import equal, key_content

    box = (last_box(completion) or "").strip(" $")
    said = box
    if not box and not columns["must_box"]:
        said = (NUMBER.findall(completion) or [completion])[-1]
    return {"reward": float(equal(key_content(answer), said)), "box": float(box != "")}
