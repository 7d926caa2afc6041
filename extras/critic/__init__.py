"""PPO's critic: a value model that is trained beside the policy, and advantages made of its values.

The seam: a `Critic` has the two verbs of `update.py` that it changes, `add_advantages` and
`update_policy`, and is saved with the policy (`Policy.beside`). --critic asks for it. docs/algorithm.md
"""
