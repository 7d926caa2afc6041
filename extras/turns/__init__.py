"""Episodes of several turns: --environment, --tools. Seams: the engine's `play`, and fields of `grpo.Groups`."""
