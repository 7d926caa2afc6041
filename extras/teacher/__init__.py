"""A teacher: a reference that is followed over the whole vocabulary (--kl_over), or that reads hints (--hint_column).

The seams: `algorithm.py` reads `NAMES`, and the head computes the divergence; `Hints.add` changes a step's rollout
before it is packed.
"""

NAMES: dict[str, dict[str, str]] = {  # flag -> name -> module:function
    "--kl_direction": {
        "reverse": "extras.teacher.divergences:reverse",
        "forward": "extras.teacher.divergences:forward",
        "jsd": "extras.teacher.divergences:jsd",
    },
}
