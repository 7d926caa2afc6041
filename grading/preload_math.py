"""`preload.py`, and what the LaTeX parser and SymPy set up at their first use."""

import contextlib

import grading.preload  # noqa: F401

with contextlib.suppress(Exception):  # it fails again in a worker, which tells why
    from grading.score import check_math

    check_math()
