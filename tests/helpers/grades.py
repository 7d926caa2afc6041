"""Grades of cases, by the workers of a grader."""

from grading import Case, Grade
from reward import Grader


def graded(grader: Grader, cases: list[Case], group_size: int = 1) -> list[Grade]:
    for b, case in enumerate(cases):
        grader.submit(b, case, group_size)
    grades = grader.collect()
    return [grades[b] for b in range(len(cases))]
