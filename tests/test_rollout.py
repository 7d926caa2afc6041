"""The real vLLM engine samples from the policy, before and after a sync, alone and tensor-parallel."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from batch import Rollout
from engine.options import EngineDemand, stop_ids
from flags import Sampling
from fsdp_utils import World, gather_from_ranks
from helpers.distributed import TEMPERATURE, findings, gaps, on_ranks, sharded, start_engine
from helpers.made_up import load, load_policy

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


def samples(world: World, path: str, dtype: str, head_dtype: str) -> dict[str, object]:
    policy = load_policy(path)
    policy.dtype, policy.head_dtype = getattr(torch, dtype), getattr(torch, head_dtype)
    sharded(policy, world, policy.dtype)
    most_sequences = 32 if world.num_engines == 2 else None  # 64 are sampled below
    engine = start_engine(path, world, EngineDemand(most_sequences), dtype=dtype, head_dtype=head_dtype)
    engine.sync(policy.full_weights())
    tokenizer = engine.tokenizer
    rows = load(f"{path}/heldout.jsonl", tokenizer, max_prompt_tokens=8).rows
    long_rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows]
    sampling = Sampling(4, TEMPERATURE, 12)
    sample = functools.partial(engine.sample, rows, sampling)
    heard, still_running = {}, []

    def gap(rollout: Rollout) -> float:
        return gaps(policy, rollout).mean().item()

    def greedy(number: int) -> list[str]:
        return engine.sample(rows, Sampling(1, 0.0, 12), (number,)).texts

    def on_finished(b: int, text: str, token_ids: Sequence[int], is_truncated: bool, grade: None) -> None:
        heard[b] = (text, len(token_ids), is_truncated)
        still_running.append(engine.llm.llm_engine.has_unfinished_requests())

    first = sample((1, 1), on_finished=on_finished)
    completions = [completion.tolist() for completion in first.completions]
    is_cut = first.is_truncated_B.tolist()
    returned = list(zip(first.texts, map(len, completions), is_cut, strict=True))
    is_long = [len(ids) == 12 and ids[-1] != tokenizer.eos_token_id for ids in completions]
    greedy_before = greedy(1)
    found = {
        "prompts": [row.ids.tolist() for row in first.rows],
        "sequences_of_an_engine_at_once": most_sequences or 256 * world.tp_size,
        "sequences_its_cache_holds": engine.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency,
        "num_tokens": int(first.completion_lengths_B.sum()),
        "mean_probability": float(np.exp(np.concatenate(first.rollout_logprobs)).mean()),
        "gap_before": gap(first),
        "gap_of_long_prompts": gap(engine.sample(long_rows, sampling, (1, 4))),
        "same_seed_same_completions": sample((1, 1)).texts == first.texts,
        "heard_what_is_returned": all(returned[b] == heard[b] for b in heard),
        "heard_on_all_leaders": sum(gather_from_ranks(len(heard))),
        "heard_while_others_are_sampled": any(still_running),
        "other_seed_same_completions": sample((1, 2)).texts == first.texts,
        "greedy_twice_equal": greedy(2) == greedy_before,
        "texts_are_the_tokens": first.texts == tokenizer.batch_decode(completions, skip_special_tokens=True),
        "truncated_are_the_long_ones": is_cut == is_long,
    }
    stop = completions[0][len(completions[0]) // 2]
    engine.stop_ids = stop_ids(tokenizer, [tokenizer.convert_ids_to_tokens(stop)])
    stopped = sample((1, 1))
    engine.stop_ids = []
    found["passes_stop_token"] = any(stop in c[:-1] for c in stopped.completions)
    found["passed_it_before"] = any(stop in c[:-1] for c in completions)
    found["stopped"] = stopped.is_truncated_B[[c[-1] == stop for c in stopped.completions]].tolist()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    found["gap_of_stale_engine"] = gap(sample((1, 3)))
    engine.sync(policy.full_weights())
    found["gap_after"] = gap(sample((1, 3)))
    found["sync_changes_greedy_output"] = greedy(1) != greedy_before
    found |= findings(engine)
    engine.close()
    return found


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def found(request):
    folder, num_ranks, tp_size, gaps, *dtypes = request.param
    found = on_ranks(num_ranks, samples, request.getfixturevalue(folder), *dtypes, tp_size=tp_size)
    return found | {"largest_gaps": gaps}


def test_sampler_and_trainer_agree_before_and_after_a_sync(found):
    before, after = found["largest_gaps"]
    assert found["gap_before"] < before and found["gap_after"] < after
    assert found["gap_of_long_prompts"] < before, "completions share a first block of the cache"
    assert found["mean_probability"] > 0.025, "a nearly uniform one, 1 / 64, would agree with anything"
    assert found["gap_of_stale_engine"] > max(4 * found["gap_before"], 4 * found["gap_after"], 0.01)
    assert found["sync_changes_greedy_output"]
    assert found["hidden"] == [], "an engine loses nothing in its sleep for good"
    assert len(found["planted"]) == 1, "the scan finds what there is"


def test_completions_depend_on_the_seed_and_are_whole_and_handed_over_early(found):
    assert found["same_seed_same_completions"] and not found["other_seed_same_completions"]
    assert found["greedy_twice_equal"]
    prompts = found["prompts"]
    assert len(prompts) == 16 * 4 and all(prompts[b] == prompts[b // 4 * 4] for b in range(64))
    assert found["texts_are_the_tokens"] and found["truncated_are_the_long_ones"] and found["num_tokens"] > 200
    assert found["passed_it_before"] and not found["passes_stop_token"]
    assert found["stopped"] and not any(found["stopped"]), "it is there, and the completion is not a truncated one"
    assert found["heard_what_is_returned"] and found["heard_on_all_leaders"] == 16 * 4
    assert found["heard_while_others_are_sampled"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA the cache takes what --gpu_memory_utilization leaves it")
def test_the_cache_holds_what_runs_at_once_and_little_more(found):
    assert 0 <= found["sequences_its_cache_holds"] - found["sequences_of_an_engine_at_once"] <= 16
