"""Packing: every sequence once, never a micro-batch above the cap, the shift and the mask in the right place."""

from dataclasses import replace

import numpy as np
import pytest

from batch import Rollout, from_positions, pack, plan_micro_batches, to_positions, training_costs
from helpers import make_rollout as random_rollout

RAGGED = [12, 7, 3, 11, 5, 9, 2, 6]


def make_rollout(prompts: list[list[int]], completions: list[list[int]]) -> Rollout:
    return Rollout(
        prompts=[np.array(p, dtype=np.int32) for p in prompts],
        completions=[np.array(c, dtype=np.int32) for c in completions],
        rollout_logprobs=[-np.arange(1, len(c) + 1, dtype=np.float32) for c in completions],
        texts=[""] * len(prompts),
        is_truncated_B=np.zeros(len(prompts), dtype=bool),
        loss_weights_B=np.arange(1, len(prompts) + 1, dtype=np.float32) / 4,
    )


def test_the_label_is_the_next_token_and_only_completion_tokens_are_trained():
    eos = pad = 9  # a tokenizer whose padding token is its end-of-sequence token
    batch = pack(make_rollout([[1, 2, 3], [4]], [[5, eos], [6, 7, pad]]), [0, 1])
    assert batch.input_ids_N.tolist() == [1, 2, 3, 5, 4, 6, 7]
    assert batch.labels_N.tolist() == [2, 3, 5, 9, 6, 7, 9]
    assert batch.loss_mask_N.tolist() == [False, False, True, True, True, True, True]  # both end tokens are trained
    assert batch.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.loss_weights_N.tolist() == [0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5]
    assert batch.sequence_ids_N.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.rollout_logprobs_N.tolist() == [0, 0, -1, -2, -1, -2, -3]
    assert batch.lengths_S == (4, 3)
    assert batch.indices_S == (0, 1)


def test_values_per_completion_token_travel_to_their_positions_and_back():
    rollout = make_rollout([[1, 2, 3], [4], [8, 8]], [[5, 9], [6, 7, 9], [1]])
    values = [np.array([10, 11], dtype=np.float32), np.array([20, 21, 22], dtype=np.float32), np.array([30], dtype=np.float32)]
    batch = pack(rollout, [2, 0])
    packed = to_positions(rollout, batch.indices_S, values)
    assert packed.tolist() == [0, 30, 0, 0, 10, 11]
    assert {b: found.tolist() for b, found in from_positions(rollout, batch, packed).items()} == {2: [30], 0: [10, 11]}
    assert from_positions(rollout, pack(rollout, []), to_positions(rollout, (), values)) == {}


def test_a_batch_without_sequences_trains_nothing():
    batch = pack(make_rollout([[1]], [[2]]), [])
    assert {name: len(value) for name, value in vars(batch).items() if name.endswith("_N") and value is not None} == dict.fromkeys(
        ["input_ids_N", "position_ids_N", "labels_N", "loss_mask_N", "loss_weights_N", "sequence_ids_N", "rollout_logprobs_N"], 1
    )
    assert not batch.loss_mask_N.any()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [12, 13, 20, 1000])
def test_every_sequence_is_trained_once_and_no_micro_batch_exceeds_the_cap(num_ranks, max_tokens):
    rng = np.random.default_rng(0)
    for lengths in (np.array(RAGGED), rng.integers(1, 13, size=97), np.array([12]), np.full(9, 12)):
        plan = plan_micro_batches(lengths, num_ranks, max_tokens)
        assert len(plan) == num_ranks
        assert len({len(micros) for micros in plan}) == 1, "ranks must run the same number of micro-batches"
        assert sorted(i for micros in plan for micro in micros for i in micro) == list(range(len(lengths)))
        assert max(lengths[micro].sum() for micros in plan for micro in micros) <= max_tokens


def test_five_sequences_of_3000_under_a_cap_of_4096_make_five_micro_batches():
    (micros,) = plan_micro_batches(np.full(5, 3000), num_ranks=1, max_tokens=4096)
    assert [len(micro) for micro in micros] == [1, 1, 1, 1, 1]


def idle_share(plan: list[list[list[int]]], costs: np.ndarray) -> float:
    """Of the ranks' time, what they spend waiting for the costliest micro-batch of each micro step."""
    of_bins = np.array([[costs[micro].sum() for micro in micros] for micros in plan])
    return 1 - of_bins.sum() / (of_bins.max(axis=0).sum() * len(plan))


def test_micro_batches_of_the_same_step_are_of_similar_size_on_all_ranks():
    lengths = np.random.default_rng(1).lognormal(5, 0.6, size=512).astype(int).clip(1, 2048)
    assert idle_share(plan_micro_batches(lengths, num_ranks=4, max_tokens=4096), lengths) < 0.05


@pytest.mark.parametrize(
    "num_sequences, mean, sigma, longest, num_ranks, max_tokens",
    [
        (640, 600, 0.8, 2048, 8, 16_384),
        (640, 1500, 0.6, 4096, 8, 16_384),  # QwQ-32B's limits
        (2048, 1200, 0.9, 9216, 16, 9216),  # SimpleRL's, the smallest cap that holds a sequence
        (512, 8000, 0.8, 32_768, 8, 32_768),  # long reasoning
        (64, 1500, 0.6, 4096, 8, 8192),
    ],
)
def test_less_than_5_percent_of_the_update_is_waiting_by_cost(num_sequences, mean, sigma, longest, num_ranks, max_tokens):
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_sequences).astype(int).clip(8, longest)
    parity_length = 70_000.0  # Qwen2.5-7B: 7.07e9 numbers in matrices / (28 layers x 3,584)
    costs = training_costs(lengths, parity_length)
    plan = plan_micro_batches(lengths, num_ranks, max_tokens, parity_length)
    assert idle_share(plan, costs) < 0.03
    assert max(lengths[micro].sum() for micros in plan for micro in micros) <= max_tokens
    fewest = -(-lengths.sum() // (num_ranks * max_tokens))
    assert len(plan[0]) <= fewest + 1


def test_a_long_sequence_counts_for_more_than_its_tokens():
    lengths = np.array([1000, 600, 500])  # by tokens 1000 | 600 + 500; with attention's cost the long one alone is more than both others
    assert training_costs(lengths, 1000.0).tolist() == [2000, 960, 750]
    ranks = plan_micro_batches(np.array([1000, 500, 500, 100]), 2, 2000, parity_length=100.0)
    assert ranks == [[[0]], [[1, 2, 3]]]
    assert plan_micro_batches(np.array([1000, 500, 500, 100]), 2, 2000)[0][0] == [0, 3]


def test_a_sequence_above_the_cap_is_refused():
    with pytest.raises(AssertionError):
        plan_micro_batches(np.array([5, 13]), num_ranks=1, max_tokens=12)


def test_rollouts_are_concatenated_in_order():
    first, second = make_rollout([[1], [2]], [[3], [4, 5]]), make_rollout([[6]], [[7]])
    both = Rollout.concatenate([first, second])
    assert [p.tolist() for p in both.prompts] == [[1], [2], [6]]
    assert both.completion_lengths_B.tolist() == [1, 2, 1]
    assert both.sequence_lengths_B.tolist() == [1, 2, 1]
    assert both.rewards_B is None
    assert both.loss_weights_B.tolist() == [0.25, 0.5, 0.25]


def test_chosen_sequences_keep_all_that_is_known_of_them():
    rollout = replace(random_rollout(), rewards_B=np.arange(8, dtype=np.float32), is_trained_B=np.arange(8) != 2)
    taken = rollout.take(np.array([6, 2]))
    assert taken.rewards_B.tolist() == [6, 2]
    assert taken.is_trained_B.tolist() == [True, False]
    for name in ("prompts", "completions", "rollout_logprobs", "advantages"):
        assert [x.tolist() for x in getattr(taken, name)] == [getattr(rollout, name)[b].tolist() for b in (6, 2)], name
    assert taken.is_right_B is None


def test_a_sequence_that_is_left_out_of_the_loss_is_packed_but_masked():
    is_trained = np.arange(8) != 2
    rollout = replace(random_rollout(), is_trained_B=is_trained)
    batch = pack(rollout, list(range(8)))
    all_of_them = pack(random_rollout(), list(range(8)))
    assert batch.input_ids_N.equal(all_of_them.input_ids_N)
    lengths = np.array([12, 7, 3, 11, 5, 9, 2, 6])
    assert int(batch.loss_mask_N.sum()) == lengths.sum() - 3 == rollout.trained_lengths_B.sum()
    start = sum(batch.lengths_S[:2])
    assert not batch.loss_mask_N[start : start + batch.lengths_S[2]].any()
