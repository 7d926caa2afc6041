"""What a function of the user's cannot grade: it is not trained, moves no comparison, and is counted.

The rest of its group has the advantages of a group in which it was never sampled, whatever the advantage; a step of
which less than half was graded ends the run before its update, and the same command continues. What a built-in
verifier cannot read is wrong, as ever.
"""

import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pyarrow.parquet import read_table, write_table

from algorithm import algorithm_of
from batch import Rollout
from extras.samplers.replay import read_rounds
from extras.turns.turns import Turns
from flags import Grading, Memory
from gate.own import guarded
from grading import Case, Grade
from grpo import Groups
from helpers.grades import graded as grades_of
from helpers.made_up import ALONE, flags, make_rollout, make_row
from helpers.runs import NO_EVAL, ROOT, Done, lines, metrics_of, run_ranks, succeeded, training_flags, without_times
from reward import Grader
from run import StepRecord
from runtime.files import rollouts_file
from runtime.rank import RunError
from sampling import Sampler, has_signal_P, prompts_to_sample
from schedule import make_plan
from step_metrics import rollout_metrics
from update import add_advantages, compute_advantages, pack_updates
from watch.rollouts import Keeper

COUNTS = f"{ROOT}/tests/helpers/user_code.py:Counts"
LOST = Grade(0.0, "error: ValueError: no such luck", is_compared=False)
# Four prompts of four completions, in the order of the step; None: it could not be graded.
GROUPS = [[1.0, 0.0, None, 0.5], [0.0, 1.0, 1.0, 0.0], [None, 1.0, 0.0, None], [None, 1.0, 1.0, 1.0]]
LENGTHS = [3, 1, 7, 2, 2, 2, 1, 3, 5, 1, 4, 2, 3, 3, 1, 1]
LEFT = [[x for x in group if x is not None] for group in GROUPS]  # what is left, in plain lists
KEPT = [i for i, x in enumerate(sum(GROUPS, [])) if x is not None]
GROUP = [i // 4 for i in KEPT]
ALL = sum(LEFT, [])
EPS = 1e-6


def step_of(groups: list[list[float | None]] = GROUPS, lost: Grade = LOST, lengths: list[int] = LENGTHS) -> Rollout:
    rollout = make_rollout(lengths, group_size=len(groups[0]))
    grades = [lost if x is None else Grade(x, "ok", {"a": x, "b": float(i % 3)}) for i, x in enumerate(sum(groups, []))]
    return replace(rollout, advantages=[]).graded(grades)


def advantages(given: str | Callable, rollout: Rollout, group_size: int = 4, **changes: object) -> list[np.ndarray]:
    name = {"advantage": given} if isinstance(given, str) else {}
    algorithm = algorithm_of(flags(group_size=group_size, environment=COUNTS, **name | changes))
    if not isinstance(given, str):
        algorithm = replace(algorithm, advantage=given)
    return compute_advantages(rollout, None, algorithm if isinstance(given, str) else guarded(algorithm))


def each(formula: Callable[[float, list[float]], float]) -> list[float]:
    """A number of each graded completion, from its reward and what is left of its group."""
    return [formula(x, group) for group in LEFT for x in group]


def by_subsets(group: list[float], k: int = 2) -> list[float]:
    """Of each completion, by listing all subsets: mean value of those that it is in, standardised."""
    values = {subset: float(max(group[i] for i in subset) == 1.0) for subset in combinations(range(len(group)), k)}
    mean, std = fmean(values.values()), pstdev(values.values())
    means = [fmean(value for subset, value in values.items() if i in subset) for i in range(len(group))]
    return [(value - mean) / std if std else 0.0 for value in means]


def by_length(values: list[float], groups: list[int]) -> list[float]:
    """The reward minus the mean that is weighted by length, over what is left of the group."""
    found = []
    for x, group in zip(values, groups, strict=True):
        own = [(LENGTHS[j], y) for j, y, other in zip(KEPT, values, groups, strict=True) if other == group]
        found.append(x - sum(n * y for n, y in own) / sum(n for n, _ in own))
    return found


def whitened(values: list[float]) -> list[float]:
    """Over the tokens of what is left of the step."""
    tokens = [x for i, x in zip(KEPT, values, strict=True) for _ in range(LENGTHS[i])]
    return [(x - fmean(tokens)) / (stdev(tokens) + EPS) for x in values]


def gdpo() -> list[float]:
    sums = [0.0] * len(KEPT)
    for part in (ALL, [float(i % 3) for i in KEPT]):
        for group in range(4):
            places = [n for n, other in enumerate(GROUP) if other == group]
            own = [part[n] for n in places]
            for n in places:
                sums[n] += (part[n] - fmean(own)) / (stdev(own) + EPS)
    return [(x - fmean(sums)) / (stdev(sums) + EPS) for x in sums]


CENTRED = each(lambda x, group: x - fmean(group))
EXPECTED = {
    "grpo": each(lambda x, group: (x - fmean(group)) / (stdev(group) + EPS)),
    "grpo --advantage_ddof 0": each(lambda x, group: (x - fmean(group)) / (pstdev(group) + EPS)),
    "grpo_batch_std": [x / (stdev(ALL) + EPS) for x in CENTRED],
    "dr_grpo": CENTRED,
    "rloo": each(lambda x, group: x - (sum(group) - x) / (len(group) - 1)),
    "none": ALL,
    "zero": [0.0] * len(ALL),
    "maxrl": each(lambda x, group: (x - fmean(group)) / fmean(group)),
    "opo": by_length(ALL, GROUP),
    "gpg": [x / 0.75 for x in CENTRED],  # three of four groups have a signal
    "pass_at_k:k=2": sum(map(by_subsets, LEFT), []),
    "gdpo": gdpo(),
    "reinforce++": whitened(ALL),
    "reinforce++_baseline": whitened(CENTRED),
    "gigpo": each(lambda x, group: 2 * (x - fmean(group)) / (stdev(group) + EPS)),
}


@pytest.mark.parametrize("given", EXPECTED)
def test_every_advantage_is_that_of_groups_without_what_could_not_be_graded(given):
    """By its formula in plain floats, over lists that are as long as what is left. Tolerance 1e-5."""
    name, *ddof = given.split(" --advantage_ddof ")
    changes = {"advantage_ddof": ddof[0]} if ddof else {}
    found = advantages(name, step_of(), **changes)
    assert [len(values) for values in found] == LENGTHS
    assert [found[i][0] for i in KEPT] == pytest.approx(EXPECTED[given], abs=1e-5)
    assert all((values == values[0]).all() for values in found)
    assert [i for i in range(16) if i not in KEPT and found[i].any()] == [], "what could not be graded has 0"


def test_an_advantage_of_the_users_sees_groups_without_it():
    """One that knows nothing of it; and one that compares over the step, by the helper. To the last bit."""

    def own(g: Groups) -> torch.Tensor:
        assert not g.rewards_PG.isnan().any() and set(g.parts) == {"a", "b"}
        best = g.rewards_PG.topk(2, dim=1).values[:, 1:] if g.rewards_PG.shape[1] > 1 else g.rewards_PG
        return (g.rewards_PG - best) / (g.rewards_PG.std(dim=1, keepdim=True) + 0.1)

    found = advantages(own, step_of())
    for p, group in enumerate(LEFT):
        alone = [i for i in KEPT if i // 4 == p]
        rollout = step_of([group], lengths=[LENGTHS[i] for i in alone])
        expected = advantages(own, rollout, group_size=len(group))
        assert [found[i].tolist() for i in alone] == [values.tolist() for values in expected]

    from extras.losses.whole_step import over_step

    found = advantages(lambda g: g.rewards_PG - over_step(g, lambda each: each.rewards_PG).mean(), step_of())
    assert [found[i][0] for i in KEPT] == pytest.approx([x - fmean(ALL) for x in ALL], abs=1e-6)


@pytest.mark.parametrize("given", [name for name in EXPECTED if " " not in name])
def test_what_stands_in_its_place_enters_nothing(given):
    """Another reward, other parts, another verdict: not a bit of any advantage changes."""
    other = Grade(77.0, "timeout", {"a": 1.0, "c": -9.0}, is_compared=False)
    for found, expected in zip(advantages(given, step_of(lost=other)), advantages(given, step_of()), strict=True):
        assert found.tobytes() == expected.tobytes()


def test_where_all_were_graded_each_advantage_is_one_call_with_the_step():
    calls = []
    advantages(lambda g: calls.append(g) or g.rewards_PG, step_of([[1.0, 0.0], [0.0, 0.0]], lengths=[1, 2, 1, 1]), 2)
    assert [tuple(g.rewards_PG.shape) for g in calls] == [(2, 2)] and calls[0].other_groups == ()


ALONE_LEFT = [[None] * 4, [1.0, 0.0, 1.0, 1.0], [None, None, 0.5, None]]


@pytest.mark.parametrize("given", [name for name in EXPECTED if " " not in name])
def test_a_group_that_failed_has_no_advantage_and_one_that_is_left_alone_has_nobody_to_compare_with(given):
    """Nothing is nan. What compares over the step, or not at all, still has a value for the one that is left."""
    found = advantages(given, step_of(ALONE_LEFT, lengths=LENGTHS[:12]))
    whole = advantages(given, step_of(ALONE_LEFT[1:2], lengths=LENGTHS[4:8]))
    assert not any(values.any() for values in found[:4])
    over_the_step = ("none", "reinforce++", "grpo_batch_std", "gdpo", "gpg", "reinforce++_baseline")
    if given.partition(":")[0] not in over_the_step:
        assert [x[0] for x in found[4:8]] == pytest.approx([x[0] for x in whole], abs=1e-6)
    tokens = [1.0] * 2 + [0.0] * 2 + [1.0] * 4 + [0.5] * 4
    alone = {"none": 0.5, "reinforce++": (0.5 - fmean(tokens)) / stdev(tokens)}
    centred = [0.25] * 2 + [-0.75] * 2 + [0.25] * 4 + [0.0] * 4
    alone["reinforce++_baseline"] = -fmean(centred) / stdev(centred)
    # Both parts of the group in the middle: 1, 0, 1, 1 and 1, 2, 0, 1. Of the one that is left both are 0.
    parts = ([1.0, 0.0, 1.0, 1.0], [1.0, 2.0, 0.0, 1.0])
    sums = [sum((part[i] - fmean(part)) / (stdev(part) + EPS) for part in parts) for i in range(4)] + [0.0]
    alone["gdpo"] = -fmean(sums) / (stdev(sums) + EPS)
    assert found[10][0] == pytest.approx(alone.get(given, 0.0), abs=1e-5)
    own = advantages(lambda g: (g.rewards_PG - g.rewards_PG.mean()) / g.rewards_PG.std(dim=1), step_of(ALONE_LEFT[2:],
                     lengths=[2] * 4))  # fmt: skip
    assert not np.concatenate(own).any(), "nan for one of one: in the place of a number that does not exist"


def test_penalties_and_turns_go_with_their_completions():
    """--kl_in reward takes off the KL of the completions that are left; turns are compared with turns of theirs."""
    algorithm = algorithm_of(flags(advantage="dr_grpo", group_size=4))
    penalties = [np.full(n, 0.1 * i, np.float32) for i, n in enumerate(LENGTHS)]
    found = compute_advantages(step_of(), penalties, algorithm)
    rewards = [x - 0.1 * i * LENGTHS[i] for i, x in zip(KEPT, ALL, strict=True)]
    means = [fmean(x for x, other in zip(rewards, GROUP, strict=True) if other == group) for group in GROUP]
    assert [found[i][0] for i in KEPT] == pytest.approx(np.subtract(rewards, means), abs=1e-5)

    turns = {2: (1.0, 2.0), 0: (0.0, 0.5), 1: (3.0,)}
    grades = [Grade(sum(turns[i]), "ok", turn_rewards=turns[i]) if i in turns else LOST for i in range(4)]
    sampled = [np.array(flags, bool) for flags in ([1, 0, 1], [1, 1], [1, 0, 1], [1, 0, 1, 0, 1])]
    rollout = replace(make_rollout([3, 2, 3, 5], group_size=4), is_sampled=sampled, advantages=[]).graded(grades)
    found = advantages("mt_grpo", rollout)
    left = advantages("mt_grpo", rollout.select([0, 1, 2]), group_size=3)
    assert [x.tolist() for x in found] == [*(x.tolist() for x in left), [0.0] * 5] and found[0].any()


# What is trained, and how a step is chosen ----------------------------------------------------------------------------


def test_it_is_not_trained_and_counts_in_no_denominator():
    args = flags(prompts_per_step=4, group_size=4, micro_batch_tokens=1000, loss_aggregation="seq_mean_token_mean")
    algorithm, policy = algorithm_of(args), SimpleNamespace(parity_length=math.inf)
    rollout = step_of()
    assert np.flatnonzero(rollout.is_trained_B).tolist() == KEPT
    (update,) = pack_updates(rollout, make_plan(args, 4), algorithm, Memory.from_flags(args), policy, ALONE)
    _, ((batch,),) = add_advantages(rollout, [update], algorithm)
    assert batch.update_tokens == sum(LENGTHS[i] for i in KEPT)
    pieces = [values.split(batch.lengths_S) for values in (batch.loss_mask_N, batch.loss_weights_N)]
    for x, mask, weights in zip(batch.segments_S, *pieces, strict=True):
        length = LENGTHS[x.index] if x.index in KEPT else 0
        assert int(mask.sum()) == length
        assert weights[mask].tolist() == pytest.approx([1 / len(KEPT) / max(length, 1)] * length)


@pytest.mark.parametrize("by", ["correct", "reward"])
def test_a_group_that_failed_has_no_signal(by):
    plan = make_plan(flags(prompts_per_step=5, prompts_per_update=5, group_size=2, dynamic_sampling=by), 5)
    groups = [[1.0, None], [None, None], [0.0, None], [1.0, 0.0], [None, -1.0]]
    rollout = step_of(groups, lengths=[1] * 10)
    assert has_signal_P(rollout, plan).tolist() == [False, False, False, True, False]
    assert prompts_to_sample([rollout], plan) == 5, "5 of 10 were graded: it goes on"
    worse = step_of([[1.0, 0.0], *[[None, None]] * 4], lengths=[1] * 10)
    assert prompts_to_sample([worse], plan) == 0, "2 of 10: the run ends before more is sampled for nothing"


def test_metrics_are_of_what_was_graded_and_say_how_many_were_not():
    metrics = rollout_metrics(step_of(ALONE_LEFT, lengths=LENGTHS[:12]), 4)
    rewards = [1.0, 0.0, 1.0, 1.0, 0.5]
    expected = {
        "reward/mean": fmean(rewards), "reward/std": pstdev(rewards), "reward/left_out": 7.0, "reward/errors": 7.0,
        "reward/frac_groups_all_right": 0.0, "reward/frac_groups_all_wrong": 1 / 3, "reward/part/a": fmean(rewards),
        "reward/frac_groups_with_signal": 1 / 3, "completion/tokens_right_mean": 2.0,
        "completion/tokens_wrong_mean": 3.0, "completion/tokens_mean": fmean(LENGTHS[:12]),
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert "reward/left_out" not in rollout_metrics(step_of([[1.0, 0.0]], lengths=[1, 2]), 2)
    nothing = rollout_metrics(step_of([[1.0, None, 1.0]], lengths=[1, 2, 1]), 3)
    assert nothing["reward/frac_groups_all_right"] == 1.0


class Steps:
    """An engine and a grader whose completions have these grades, round after round."""

    seconds_E = np.ones(1)

    def __init__(self, *rounds: list[list[float | None]], reward: str = "judge.py:score") -> None:
        self.rounds, self.grading = list(rounds), SimpleNamespace(truncated="mask", reward=reward)

    def sample(self, *_: object) -> Rollout:
        self.groups = self.rounds.pop(0)
        rollout = make_rollout([2] * sum(map(len, self.groups)), group_size=len(self.groups[0]))
        return replace(rollout, advantages=[])

    def callback_for(self, *_: object) -> None: ...

    def collect_from_ranks(self) -> list[Grade]:
        return [LOST if x is None else Grade(x, "ok", {"a": x}) for x in sum(self.groups, [])]


def collected(steps: Steps, **changes: object) -> tuple[Sampler, list]:
    """The sampler after a step, and the records that the run has shown with an end."""
    records = []

    @contextmanager
    def shown(record, is_complete):
        try:
            yield
        except RunError:
            records.append(record())
            raise

    @contextmanager
    def phase(_):
        yield

    args = flags(prompts_per_step=2, prompts_per_update=2, group_size=2, **changes)
    rows = [make_row([i], where=f"row {i}") for i in range(99)]
    data = SimpleNamespace(
        rows=rows, indices_of_step=lambda step, count, *_: range(count),
        indices_from=lambda first, count, _: range(first, first + count),
    )  # fmt: skip
    run = SimpleNamespace(phase=phase, shown=shown)
    return Sampler(steps, steps, data, make_plan(args, 99), None, run), records


def test_less_than_half_ends_the_run_before_the_update_and_keeps_what_was_sampled():
    sampler, records = collected(Steps([[None, 1.0], [None, None]]))
    with pytest.raises(RunError) as end:
        sampler.collect(step=7)
    assert str(end.value) == (
        "step 7 is not trained: --reward 'judge.py:score' has graded 1 of 4 completions, less than half; "
        "the last error: error: ValueError: no such luck. Mend that; the same command continues from the last "
        "checkpoint."
    )
    (record,) = records
    assert (record.step, len(record.rollout.rows), record.advantages, record.logprobs) == (7, 4, [], {})
    for groups in ([[None, 1.0], [None, 0.0]], [[1.0, 1.0], [0.0, 0.0]]):  # half is enough
        sampler, records = collected(Steps(groups))
        rollout, _ = sampler.collect(step=7)
        assert rollout.is_trained_B.tolist() == [x is not None for x in sum(groups, [])] and not records


def test_rounds_of_dynamic_sampling_count_together():
    """A round that fails amid a step costs its groups; a judge that is gone ends the run at the first round."""
    sampler, records = collected(Steps([[1.0, 0.0], [1.0, 1.0]], [[None, None]], [[0.0, 1.0]] * 2),
                                 dynamic_sampling="reward")  # fmt: skip
    rollout, metrics = sampler.collect(step=1)
    assert rollout.rewards_B.tolist() == [1.0, 0.0, 0.0, 1.0] and metrics["sampling/rounds"] == 3
    sampler, records = collected(Steps([[None, None]] * 2), dynamic_sampling="reward")
    with pytest.raises(RunError, match="graded 0 of 4"):
        sampler.collect(step=1)
    assert len(records) == 1


# Whose fault it is ----------------------------------------------------------------------------------------------------

OWN = """import time
def one(completion):
    if "late" in completion:
        time.sleep(60)
    if "bad" in completion:
        raise OSError("no judge")
    return 0.5

def all(completions):
    return [one(" ".join(completions))] * len(completions)
"""
HANGS = """
from grading import verifiers
verify = verifiers.verify_exact
def hang(case):
    if "math" in case.completion:
        time.sleep(60)
    return verify(case)
verifiers.verify_exact = hang
"""  # a built-in verifier that hangs at the will of the completion


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN + HANGS)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize("spec", ["{}:one", "@kind,{}:one", "{}:all", "exact:2,{}:all"])
def test_in_a_sum_it_is_found_out_who_has_failed(spec, own):
    """The user's function: nobody knows the reward. A built-in verifier: it is 0, whatever the user's would say."""
    reward = spec.format(own)
    texts = ["4", "late", "bad", "math", "math late"]
    grader = Grader(Grading(reward, reward_timeout=0.5), num_workers=2)
    cases = [Case(text, "4", {"kind": "exact"}, num_tokens=1, max_tokens=2) for text in texts]
    grades = grades_of(grader, cases)
    grader.close()
    assert [grade.is_failed for grade in grades] == [False, True, True, "," in spec, True]
    is_built_in = ["," in spec] * 2
    assert [grade.is_compared for grade in grades] == [True, False, False, True, *is_built_in[1:]]
    assert [grade.reward for grade in grades[1:3]] == [0.0, 0.0] and "no judge" in grades[2].status
    assert grades[0].reward > 0.4


def test_a_group_function_that_fails_costs_its_group_alone(own):
    grader = Grader(Grading(f"{own}:all,exact", reward_timeout=5.0), num_workers=2)
    grades = grades_of(grader, [Case(text, "4") for text in ("4", "5", "4", "bad")], group_size=2)
    grader.close()
    assert [grade.is_compared for grade in grades] == [True, True, False, False]
    assert [grade.reward for grade in grades] == [1.5, 0.5, 0.0, 0.0]


def test_an_environment_that_fails_is_left_out_and_a_tool_that_fails_is_wrong():
    """The model has written the call that hangs a tool. A truncated completion that nobody grades is no failure."""
    for limits, is_compared in (("environment", False), ("tools", True)):
        names = {"environment": None, "tools": None} | {limits: "x.py:f"}
        turns = SimpleNamespace(limits=SimpleNamespace(**names))
        grade = Turns.failed(turns, "timeout")
        assert grade == Grade(0.0, "timeout", is_compared=is_compared) and grade.is_failed
    grader = Grader(Grading("none"), num_workers=0)
    grader.submit(0, Case("", ""), 2, Grade(0.0, "timeout", is_compared=False))
    grader.submit(1, Case("", ""), 2, Grade(1.0, "ok"))
    assert [grade.is_compared for grade in grader.collect_from_ranks()] == [False, True]


def test_a_replay_leaves_out_what_its_run_has(tmp_path):
    """The file of a step says what could not be graded; one of an older run says of nothing."""
    rows = [make_row([i], where=f"row {i}") for i in range(2)]
    rollout = replace(step_of([[1.0, None], [0.0, 1.0]], lengths=[1, 2, 3, 1]), rows=[rows[b // 2] for b in range(4)])
    keeper = Keeper(tmp_path, 1.0, None)
    keeper.rollout(StepRecord(1, 2, rollout, np.zeros(4), np.arange(4)))
    keeper.wait()
    file = rollouts_file(tmp_path, 1)
    by_place = {row.where: row for row in rows}
    (found,) = read_rounds(tmp_path, 1, by_place)
    assert found.grades == rollout.grades and found.is_trained_B.tolist() == [True, False, True, True]
    write_table(read_table(file).drop_columns(["is_compared"]), file)
    (older,) = read_rounds(tmp_path, 1, by_place)
    assert older.is_compared_B.all() and older.is_trained_B.all()


# Whole runs -----------------------------------------------------------------------------------------------------------

JUDGE = """import os
from pathlib import Path
HERE = Path(__file__).parent

def score(completion):
    kind = sum(map(ord, completion)) % 16
    if (HERE / "is_away").exists():
        raise OSError("the judge is away")
    if kind == 3 and (HERE / "is_moody").exists():
        raise OSError("the judge is in a mood")
    return float(kind % 2)
"""
AWAY = """from pathlib import Path
def leave(step, metrics):
    if step == 1 and not (Path(__file__).parent / "was_away").exists():
        (Path(__file__).parent / "is_away").touch()
        (Path(__file__).parent / "was_away").touch()
"""


def kind_of(completion: str) -> int:
    return sum(map(ord, completion)) % 16


@pytest.fixture(scope="module")
def moody(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """The folder of a run on two ranks whose judge fails for some, with its judge and hook; and its flags."""

    def prepared(name: str, **more: object) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp(name)
        (folder / "judge.py").write_text(JUDGE)
        (folder / "hook.py").write_text(AWAY)
        (folder / "is_moody").touch()
        changes = {"reward": f"{folder}/judge.py:score", "total_steps": 2, "save_every": 1} | NO_EVAL
        changes["after_step"] = f"{folder}/hook.py:leave"
        return folder, training_flags(policy, folder / "run", **changes | more)

    return prepared


@pytest.fixture(scope="module")
def undisturbed(moody: Callable) -> tuple[Path, Done]:
    """The folder of a run whose judge is never away, and what it has said."""
    folder, given = moody("undisturbed")
    (folder / "was_away").touch()
    return folder / "run", succeeded(run_ranks(2, "train_grpo.py", given))


def test_a_judge_that_fails_for_some_moves_no_other_advantage(undisturbed):
    """The parquet file has the advantages of a run; they are those of the groups without what failed."""
    run, done = undisturbed
    rows = read_table(rollouts_file(run, 1)).to_pylist()
    num_lost = sum(kind_of(row["completion"]) == 3 for row in rows)
    assert 0 < num_lost < 16, "of 32"
    for group in range(8):
        own = [row for row in rows if row["group"] == group]
        left = [row for row in own if kind_of(row["completion"]) != 3]
        rewards = [kind_of(row["completion"]) % 2 for row in left]
        for row in own:
            assert row["is_compared"] == row["is_trained"] == (row in left)
            expected = 0.0
            if row in left and len(set(rewards)) > 1:
                expected = (kind_of(row["completion"]) % 2 - fmean(rewards)) / (stdev(rewards) + EPS)
            assert row["advantages"] == pytest.approx([expected] * len(row["token_ids"]), abs=1e-5)
    metrics = metrics_of(run)[1]
    assert metrics["reward/left_out"] == metrics["reward/errors"] == num_lost
    assert f"NOT GRADED: {num_lost} left out" in done.stdout and "the judge is in a mood" in done.stdout


def test_a_judge_that_dies_ends_the_run_before_the_update_and_the_same_command_continues(undisturbed, moody):
    """Two ranks. Bit for bit the run whose judge was never away."""
    folder, given = moody("disturbed")
    ended, run = run_ranks(2, "train_grpo.py", given), folder / "run"
    said = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    assert "step 2 is not trained" in said and "graded 0 of 32 completions" in said
    assert "the last error: error: OSError: the judge is away (judge.py" in said
    assert f"{rollouts_file(run, 2)} holds the step's tokens" in said
    assert len(read_table(rollouts_file(run, 2))) == 32
    assert sorted(metrics_of(run)) == [1] and [x.name for x in run.glob("step_*")] == ["step_1"]
    (folder / "is_away").unlink()
    succeeded(run_ranks(2, "train_grpo.py", given))
    found, expected = metrics_of(run), metrics_of(undisturbed[0])
    assert [without_times(found[step]) for step in (1, 2)] == [without_times(expected[step]) for step in (1, 2)]
    files = [each / "final" / "model.safetensors" for each in (run, undisturbed[0])]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert json.loads((run / "status.json").read_text())["now"] == "done"
    num_lost = sum(metrics.get("reward/left_out", 0) for metrics in found.values())
    assert len(lines(run / "reward_failures.jsonl")) == 32 + num_lost


def test_minimal_leaves_it_out_too(undisturbed, moody):
    """The same loss and gradient as train_grpo.py, with a judge that fails for some."""
    _, given = moody("minimal", after_step=None)
    said = succeeded(run_ranks(2, "minimal.py", given)).stdout
    metrics = metrics_of(undisturbed[0])[1]
    assert metrics["reward/left_out"] > 0
    assert f"loss {metrics['policy/loss']} | grad {metrics['optim/grad_norm']} " in said
