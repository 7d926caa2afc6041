"""What the test files share.

    made_up        flags, tiny models, rollouts, data files and run folders
    runs           programs, started as a user would, or in a second as forks of a warm process; what they have written
    distributed    work on several ranks: `on_ranks`, and what the trainer is asked to do there
    engines        on ranks, too: what vLLM's engine is asked to do, and faults between it and the trainer
    fake_servers   generation servers without a model, and an engine and a sampler over them
    programs       what `on_ranks` cannot start, because it needs another world than the program's, or none
    user_code      rewards, environments and tools of a user: runs load it by its path
    warm           imports of the warm process

No file has the name of one of the program: a script finds what stands beside it first.
"""
