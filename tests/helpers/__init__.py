"""What the test files share.

    made_up        flags, tiny models, rollouts, data files and run folders
    runs           programs, started as a user would, or in a second as forks of a warm process; what they have written
    distributed    `on_ranks`, which starts a function of a test on several ranks, and what such works share
    fake_servers   generation servers without a model, and an engine and a sampler over them
    call           starts a function of a test in a process of its own
    grades         the grades of cases, by the workers of a grader
    user_code      rewards, environments and tools of a user: runs load it by its path
    warm           imports of the warm process

No file has the name of one of the program: a script finds what stands beside it first.
"""
