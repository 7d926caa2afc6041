"""Packing: every sequence once, never a micro-batch above the cap, the shift and the mask in the right place."""

import doctest
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

from batch import Rollout
from helpers.made_up import make_grade, make_row
from helpers.made_up import make_rollout as random_rollout
from model.layout import Segment
from packing import cost_of, pack, plan_micro_batches, to_positions, training_costs
from run import from_positions


def make_rollout(prompts: list[list[int]], completions: list[list[int]]) -> Rollout:
    return replace(
        random_rollout([len(c) for c in completions]),
        rows=[make_row(p) for p in prompts],
        completions=[np.array(c, dtype=np.int32) for c in completions],
        rollout_logprobs=[-np.arange(1, len(c) + 1, dtype=np.float32) for c in completions],
        loss_weights_B=np.arange(1, len(prompts) + 1, dtype=np.float32) / 4,
    )


def test_labels_are_next_tokens_and_only_completions_are_trained():
    eos = pad = 9  # a tokenizer whose padding token is its end-of-sequence token
    batch = pack(make_rollout([[1, 2, 3], [4]], [[5, eos], [6, 7, pad]]), [0, 1])
    assert batch.input_ids_N.tolist() == [1, 2, 3, 5, 4, 6, 7]
    assert batch.labels_N.tolist() == [2, 3, 5, 9, 6, 7, 9]
    assert batch.loss_mask_N.tolist() == [False, False, True, True, True, True, True]  # both end tokens are trained
    assert batch.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.loss_weights_N.tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5]
    assert batch.sequence_ids_N.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.rollout_logprobs_N.tolist() == [0, 0, -1, -2, -1, -2, -3]
    assert batch.segments_S == (Segment(0, 0, 4), Segment(1, 0, 3))
    assert batch.lengths_S == (4, 3)


def test_values_travel_to_packed_positions_and_back():
    rollout = make_rollout([[1, 2, 3], [4], [8, 8]], [[5, 9], [6, 7, 9], [1]])
    values = [np.array(each, dtype=np.float32) for each in ([10, 11], [20, 21, 22], [30])]
    batch, empty = pack(rollout, [2, 0]), pack(rollout, [])
    packed = to_positions(rollout, batch.segments_S, values)
    assert packed.tolist() == [0, 30, 0, 0, 10, 11]
    assert {b: found.tolist() for b, found in from_positions(rollout, batch, packed).items()} == {2: [30], 0: [10, 11]}
    assert empty.labels_N.shape == (1,) and not empty.loss_mask_N.any(), "one position that trains nothing"
    assert from_positions(rollout, empty, to_positions(rollout, empty.segments_S, values)) == {}


def test_completions_in_a_batch_share_their_prompt():
    """But for its last token. Sequence 2, which is left out of the loss, is packed but masked."""
    prompts, completions = [[1, 2, 3]] * 3 + [[4, 5]] * 3, [[11, 12], [13], [14, 15, 16], [17], [18, 19], [20]]
    rollout = replace(make_rollout(prompts, completions), is_trained_B=np.arange(6) != 2)
    batch = pack(rollout, [4, 0, 2, 1], group_size=3)  # only one of the second prompt
    assert batch.segments_S == (Segment(4, 0, 3), Segment(0, 0, 4), Segment(2, 2, 5, 1), Segment(1, 2, 3, 1))
    assert batch.input_ids_N.tolist() == [4, 5, 18] + [1, 2, 3, 11] + [3, 14, 15] + [3]
    assert batch.labels_N.tolist() == [5, 18, 19] + [2, 3, 11, 12] + [14, 15, 16] + [13]
    assert batch.position_ids_N.tolist() == [0, 1, 2] + [0, 1, 2, 3] + [2, 3, 4] + [2]
    assert batch.loss_mask_N.tolist() == [False, True, True] + [False, False, True, True] + [False] * 3 + [True]
    assert batch.loss_weights_N[batch.loss_mask_N].tolist() == [1.25, 1.25, 0.25, 0.25, 0.5]
    assert batch.sequence_ids_N.tolist() == [0] * 3 + [1] * 4 + [2] * 3 + [3]
    assert batch.rollout_logprobs_N.tolist() == [0, -1, -2] + [0, 0, -1, -2] + [-1, -2, -3] + [-1]
    returned = from_positions(rollout, batch, batch.rollout_logprobs_N)
    assert {b: x.tolist() for b, x in returned.items()} == {4: [-1, -2], 0: [-1, -2], 2: [-1, -2, -3], 1: [-1]}
    assert cost_of(batch, parity_length=10.0) == pytest.approx(3.9 + (4 + 1.6) + (5 + 2.5) + (3 + 0.9) - 2 * (2 + 0.4))
    alone = pack(rollout, [4, 0, 2, 1])
    assert alone.lengths_S == (3, 4, 5, 3) and not alone.loss_mask_N.split(alone.lengths_S)[2].any()
    assert rollout.trained_lengths_B.tolist() == [2, 1, 0, 1, 2, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [55, 70, 200, 100_000])
@pytest.mark.parametrize("prompt_length", [1, 40])
@pytest.mark.parametrize("group_size", [1, 8])
def test_micro_batches_hold_every_sequence_once_within_the_cap(group_size, prompt_length, max_tokens, num_ranks):
    completions = np.append(np.random.default_rng(0).integers(1, 16, size=47), 16)  # the last one fills the lowest cap
    lengths, shared = completions + prompt_length - 1, np.full(48, prompt_length - 1)
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, 1000.0, group_size, shared)
    assert len(plan) == num_ranks
    assert len({len(micros) for micros in plan}) == 1, "each rank must run as many"
    assert sorted(i for micros in plan for micro in micros for i in micro) == list(range(48))
    rollout = random_rollout(completions.tolist(), prompt_length, group_size=group_size)
    sizes = [sum(pack(rollout, micro, group_size=group_size).lengths_S) for micros in plan for micro in micros]
    assert max(sizes) <= max_tokens
    if prompt_length == 1:
        assert len(plan[0]) <= len(plan_micro_batches(lengths, num_ranks, max_tokens, 1000.0)[0])
    elif max_tokens >= 200 and group_size > 1:
        assert sum(sizes) < 0.4 * lengths.sum()
    with pytest.raises(AssertionError):
        plan_micro_batches(np.array([5, max_tokens + 1]), num_ranks, max_tokens)


PARITY_LENGTH = 70_000.0  # Qwen2.5-7B: 7.07e9 numbers in matrices / (28 layers x 3,584)


def waiting(plan: list[list[list[int]]], lengths: np.ndarray, shared: int = 0, group_size: int = 1):
    """(the cost of all micro-batches, that of the slowest rank of each micro step times the ranks)."""

    def cost(micro: list[int]) -> float:
        num_sharing = len(micro) - len({i // group_size for i in micro})
        return training_costs(lengths[micro], PARITY_LENGTH).sum() - num_sharing * training_costs(shared, PARITY_LENGTH)

    costs = np.array([[cost(micro) for micro in micros] for micros in plan])
    return costs.sum(), costs.max(axis=0).sum() * len(plan)


@pytest.mark.parametrize("count, group_size, prompt_length, mean, sigma, longest, num_ranks, max_tokens, most", [
    (640, 1, 1, 1500, 0.6, 4096, 8, 16_384, 1),  # QwQ-32B's limits
    (2048, 1, 1, 1200, 0.9, 9216, 16, 9216, 1),  # SimpleRL's, the smallest cap that holds a sequence
    (512, 1, 1, 8000, 0.8, 32_768, 8, 32_768, 1),  # long reasoning
    (512, 1, 1, 178, 0.6, 2048, 4, 4096, 1),  # so short that the cost is that of the tokens
    (640, 5, 300, 1500, 0.7, 4096, 8, 16_384, 0.9),  # of QwQ-32B's 1,800 positions 0.8 x 300 can be shared
    (512, 8, 1500, 300, 0.7, 1024, 8, 8192, 0.28),  # an image in each prompt: 7/8 of 1,500 in 1,800
    (64, 8, 300, 600, 0.7, 2048, 8, 8192, 0.8),  # if a rank had a whole group, all would wait for one: 1.09
])  # fmt: skip
def test_little_of_an_update_is_waiting_and_shared_prompts_cost_less(
    count, group_size, prompt_length, mean, sigma, longest, num_ranks, max_tokens, most
):
    """By cost. `most`: with waiting, as a share of that without sharing."""
    rng, mu, shared = np.random.default_rng(0), np.log(mean) - sigma**2 / 2, np.full(count, prompt_length - 1)
    lengths = rng.lognormal(mu, sigma, count).astype(int).clip(8, longest) + shared
    alone = plan_micro_batches(lengths, num_ranks, max_tokens, PARITY_LENGTH)
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, PARITY_LENGTH, group_size, shared)
    computed, slowest = waiting(plan, lengths, shared[0], group_size)
    assert 1 - computed / slowest < (0.03 if group_size == 1 else 0.05)
    assert slowest <= most * waiting(alone, lengths)[1]
    assert len(plan[0]) <= -(-lengths.sum() // (num_ranks * max_tokens)) + 1


def test_a_long_sequence_counts_for_more_than_its_tokens():
    # By tokens 1000 | 600 + 500; with attention's cost the long one alone is more than both others.
    assert training_costs(np.array([1000, 600, 500]), 1000.0).tolist() == [2000, 960, 750]
    ranks = plan_micro_batches(np.array([1000, 500, 500, 100]), 2, 2000, parity_length=100.0)
    assert ranks == [[[0]], [[1, 2, 3]]]
    assert plan_micro_batches(np.array([1000, 500, 500, 100]), 2, 2000)[0][0] == [0, 3]


def test_rollouts_are_concatenated_and_selected_with_all_fields():
    both = Rollout.concatenate([make_rollout([[1], [2]], [[3], [4, 5]]), make_rollout([[6]], [[7]])])
    assert [row.ids.tolist() for row in both.rows] == [[1], [2], [6]]
    assert both.completion_lengths_B.tolist() == both.sequence_lengths_B.tolist() == [1, 2, 1] and both.grades == []
    assert both.loss_weights_B.tolist() == [0.25, 0.5, 0.25]
    grades = [make_grade(b, is_correct=b > 4) for b in range(8)]
    rollout = replace(random_rollout(), grades=grades, is_trained_B=np.arange(8) != 2)
    taken = rollout.select(np.array([6, 2]))
    assert taken.rewards_B.tolist() == [6, 2] and taken.rewards_B.dtype == np.float32
    assert taken.is_correct_B.tolist() == taken.is_trained_B.tolist() == [True, False]
    assert [row is rollout.rows[b] for row, b in zip(taken.rows, (6, 2), strict=True)] == [True, True]
    for name in ("completions", "rollout_logprobs", "advantages"):
        assert [x.tolist() for x in getattr(taken, name)] == [getattr(rollout, name)[b].tolist() for b in (6, 2)], name


@pytest.mark.parametrize("name", ["batch", "model.layout", "packing"])
def test_the_examples_in_docstrings_are_true(name):
    """Those of a file share their names, from the top down."""
    module, runner = import_module(name), doctest.DocTestRunner()
    names = dict(vars(module))
    examples = sorted(doctest.DocTestFinder().find(module, globs=names), key=lambda each: each.lineno or 0)
    for each in examples:
        each.globs = names
        assert runner.run(each, clear_globs=False).failed == 0
    assert runner.summarize().attempted > 0
