"""The real vLLM engine samples from the policy, before and after a sync, alone and tensor-parallel."""

import pytest
import torch

from helpers.distributed import on_ranks

# Gaps: before and after all weights are made larger. With logits in bf16 the last would be 0.007 and 0.011.
CASES = {  # policy, ranks, ranks of an engine, largest gaps, --dtype, --head_dtype
    "tied": ("policy", 1, 1, (0.005, 0.005), "bfloat16", "bfloat16"),
    "untied, two engines": ("untied_policy", 2, 1, (0.005, 0.005), "bfloat16", "bfloat16"),
    "tied, one engine over two ranks": ("policy", 2, 2, (0.005, 0.005), "bfloat16", "bfloat16"),
    "untied Qwen3 in fp32": ("untied_qwen3_policy", 1, 1, (1e-5, 1e-5), "float32", "float32"),
    "Qwen3 with logits in fp32, one engine over two ranks": (
        "qwen3_policy", 2, 2, (0.004, 0.008), "bfloat16", "float32",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def found(request):
    folder, num_ranks, tp_size, gaps, *dtypes = request.param
    found = on_ranks(num_ranks, "engines:samples", request.getfixturevalue(folder), *dtypes, tp_size=tp_size)
    return found | {"largest_gaps": gaps}


def test_sampler_and_trainer_agree_before_and_after_a_sync(found):
    """A sync changes what is sampled, and a stale engine would show."""
    before, after = found["largest_gaps"]
    assert found["gap_before"] < before and found["gap_after"] < after
    assert found["gap_of_long_prompts"] < before, "completions share a first block of the cache"
    assert found["mean_probability"] > 0.025, "a nearly uniform one, 1 / 64, would agree with anything"
    assert found["gap_of_stale_engine"] > max(4 * found["gap_before"], 4 * found["gap_after"], 0.01)
    assert found["sync_changes_greedy_output"]
    assert found["hidden"] == [], "an engine loses nothing in its sleep for good"
    assert len(found["planted"]) == 1, "the scan finds what there is"


def test_sampling_is_a_function_of_the_seed(found):
    assert found["same_seed_same_completions"] and not found["other_seed_same_completions"]
    assert found["greedy_twice_equal"]


def test_completions_are_prompt_major_end_with_a_stop_token_and_describe_themselves(found):
    prompts = found["prompts"]
    assert len(prompts) == 16 * 4 and all(prompts[b] == prompts[b // 4 * 4] for b in range(64))
    assert found["texts_are_the_tokens"] and found["truncated_are_the_long_ones"] and found["num_tokens"] > 200
    assert found["passed_it_before"] and not found["passes_stop_token"]
    assert found["stopped"] and not any(found["stopped"]), "it is there, and the completion is not a truncated one"


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the cache takes what --gpu_memory_utilization leaves it")
def test_the_cache_holds_what_runs_at_once_and_little_more(found):
    assert 0 <= found["sequences_its_cache_holds"] - found["sequences_of_an_engine_at_once"] <= 16


def test_completions_are_handed_over_before_all_are_sampled(found):
    assert found["heard_what_is_returned"] and found["heard_on_all_leaders"] == 16 * 4
    assert found["heard_while_others_are_sampled"]
