"""The inputs of a run, and all that refuses: flags, functions of the user, models, the machine, ranks that differ.

The programs and the dry run call it before a weight is read, and the loop in each step (`check_same_step`).
"""
