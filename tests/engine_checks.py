"""On ranks: what the engine samples, checked against the trainer's own log-probs."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoTokenizer

from batch import Rollout, pack
from data import PromptData
from engine.options import Demand, stop_ids
from flags import EngineSettings, PromptFormat, Sampling
from fsdp_utils import World, gather_from_ranks, shard
from hidden_tensors import findings
from policies import load_policy
from policy import Policy
from rollout import Engine

TEMPERATURE = 0.7  # not 1, so that a temperature that only one side applies would show


def gap(policy: Policy, rollout: Rollout) -> float:
    """Mean absolute difference of token probabilities, sampler against trainer."""
    rollout = replace(rollout, loss_weights_B=np.zeros(len(rollout.texts), dtype=np.float32))
    batch = pack(rollout, list(range(len(rollout.texts)))).to(next(policy.parameters()).device)
    with torch.no_grad():
        logprobs = policy(batch, TEMPERATURE)[0]
    mask = batch.loss_mask_N
    return (logprobs[mask].exp() - batch.rollout_logprobs_N[mask].exp()).abs().mean().item()


def main(world: World, path: str, dtype: str, head_dtype: str) -> dict[str, object]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    policy = load_policy(path)
    policy.dtype, policy.head_dtype = getattr(torch, dtype), getattr(torch, head_dtype)
    shard(policy, policy.layers, world, policy.dtype)
    most_sequences = 32 if world.num_engines == 2 else None  # of the 64 that are sampled below
    settings = EngineSettings(64, dtype, head_dtype, gpu_memory_utilization=0.3, enforce_eager=True)
    engine = Engine(path, tokenizer, world, settings, Demand(most_sequences))
    engine.sync(policy.full_weights())
    rows = PromptData.load(f"{path}/heldout.jsonl", PromptFormat(max_prompt_tokens=8), tokenizer, seed=0).rows
    long_rows = [replace(row, ids=np.resize(row.ids, 45)) for row in rows]
    sampling, greedy = Sampling(4, TEMPERATURE, 12), Sampling(1, 0.0, 12)

    def sample(seed: tuple[int, ...] = (1, 1)) -> Rollout:
        return engine.sample(rows, sampling, seed)

    heard: dict[int, tuple[str, int, bool]] = {}
    still_running = []

    def on_finished(b: int, text: str, token_ids: Sequence[int], is_truncated: bool, grade: None) -> None:
        heard[b] = (text, len(token_ids), is_truncated)
        still_running.append(engine.llm.llm_engine.has_unfinished_requests())

    first = engine.sample(rows, sampling, (1, 1), on_finished=on_finished)
    completions = [completion.tolist() for completion in first.completions]
    told = list(zip(first.texts, first.completion_lengths_B.tolist(), first.is_truncated_B.tolist(), strict=True))
    found = {
        "prompts": [row.ids.tolist() for row in first.rows],
        "sequences_of_an_engine_at_once": most_sequences or 256 * world.tp_size,
        "sequences_its_cache_holds": engine.llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency,
        "dtype": dtype,
        "head_dtype": head_dtype,
        "num_tokens": int(first.completion_lengths_B.sum()),
        "mean_probability": float(np.exp(np.concatenate(first.rollout_logprobs)).mean()),
        "gap_before": gap(policy, first),
        "gap_of_long_prompts": gap(policy, engine.sample(long_rows, sampling, (1, 4))),
        "same_seed_same_completions": sample().texts == first.texts,
        "heard_what_is_returned": all(told[b] == heard[b] for b in heard),
        "heard_on_all_leaders": sum(gather_from_ranks(len(heard))),
        "heard_while_others_are_sampled": any(still_running),
        "other_seed_same_completions": sample((1, 2)).texts == first.texts,
        "greedy_twice_equal": engine.sample(rows, greedy, (1,)).texts == engine.sample(rows, greedy, (2,)).texts,
        "texts_are_the_tokens": first.texts == tokenizer.batch_decode(completions, skip_special_tokens=True),
        "truncated_are_the_long_ones": first.is_truncated_B.tolist()
        == [len(c) == 12 and c[-1] != tokenizer.eos_token_id for c in completions],
    }
    stop = completions[0][len(completions[0]) // 2]
    engine.stop_ids = stop_ids(tokenizer, [tokenizer.convert_ids_to_tokens(stop)])
    stopped = sample()
    engine.stop_ids = []
    found["passes_stop_token"] = any(stop in c[:-1] for c in stopped.completions)
    found["passed_it_before"] = any(stop in c[:-1] for c in completions)
    is_stopped_B = [c[-1] == stop for c in stopped.completions]
    found["stopped"] = stopped.is_truncated_B[is_stopped_B].tolist()
    greedy_before = engine.sample(rows, greedy, (1,)).texts
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    stale = sample((1, 3))
    found["gap_of_stale_engine"] = gap(policy, stale)
    engine.sync(policy.full_weights())
    found["gap_after"] = gap(policy, sample((1, 3)))
    found["sync_changes_greedy_output"] = engine.sample(rows, greedy, (1,)).texts != greedy_before
    found |= findings(engine)
    engine.close()
    return found
