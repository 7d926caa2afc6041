"""Other ways to fill a step: --partial_rollouts, --replay, --drop_solved. Seam: `Sampler.collect`."""
