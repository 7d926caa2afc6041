"""Closed form and trace: the formula of a pass against the storages of the real model, few layers and little width."""

import pytest
from transformers import AutoConfig

from batch import pack
from helpers import flags, make_rollout
from model.attention import varlen_packing
from planner.dry_run import setup_of
from planner.memory import logprobs_peak, resident, update_peak
from planner.setup import shape_of
from planner.trace import trace_update

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
}
QWEN = {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": False} | SIZES
LLAMA = {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": False} | SIZES
TIED = QWEN | {"tie_word_embeddings": True, "num_hidden_layers": 12}
MANY_KV_HEADS = LLAMA | {"num_key_value_heads": 8}
# Heads of 128, twice as wide in all as the model, and norms of queries and keys: as Qwen3-0.6B.
QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True} | SIZES
QWEN3 |= {"num_attention_heads": 16}

VISION = {"depth": 2, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 1024}
QWEN_VL = {"model_type": "qwen2_5_vl", "text_config": QWEN | {"model_type": "qwen2_5_vl_text"}, "vision_config": VISION}


@pytest.mark.parametrize(
    ("config", "tokens", "tolerance", "policy"),
    [
        (QWEN, 16384, 0.01, {"gradient_checkpointing": True}),
        (QWEN, 2048, 0.01, {"gradient_checkpointing": True}),
        (QWEN, 8192, 0.01, {"gradient_checkpointing": True, "param_dtype": "bfloat16"}),
        (QWEN, 4096, 0.01, {"gradient_checkpointing": True, "entropy_coef": 0.01}),
        (QWEN, 8192, 0.01, {"gradient_checkpointing": True, "entropy_coef": 0.01}),
        (LLAMA, 8192, 0.01, {"gradient_checkpointing": True}),
        (LLAMA, 8192, 0.01, {"gradient_checkpointing": False}),
        (LLAMA, 8192, 0.01, {"gradient_checkpointing": True, "communicate_once": True}),
        (LLAMA, 512, 0.03, {"gradient_checkpointing": True, "communicate_once": True}),
        (QWEN, 512, 0.01, {"gradient_checkpointing": True, "shard_ranks": 2, "param_dtype": "bfloat16"}),
        (LLAMA, 512, 0.01, {"gradient_checkpointing": True, "shard_ranks": 4, "communicate_once": True}),
        (TIED, 512, 0.01, {"gradient_checkpointing": True, "shard_ranks": 4}),
        (TIED, 512, 0.01, {"gradient_checkpointing": True}),
        (TIED, 512, 0.02, {"gradient_checkpointing": True, "plan_gpus": 1}),
        (QWEN, 16384, 0.03, {"gradient_checkpointing": True, "lora_rank": 8}),
        (QWEN, 16384, 0.03, {"gradient_checkpointing": True, "lora_rank": 64, "lora_dropout": 0.05}),
        (QWEN, 8192, 0.03, {"gradient_checkpointing": False, "lora_rank": 8}),
        (QWEN, 8192, 0.03, {"gradient_checkpointing": True, "lora_rank": 8, "communicate_once": True}),
        (QWEN_VL, 8192, 0.03, {"gradient_checkpointing": True, "lora_rank": 8, "lora_dropout": 0.05}),
        (QWEN_VL, 8192, 0.01, {"gradient_checkpointing": True}),
        (QWEN3, 8192, 0.03, {"gradient_checkpointing": True, "share_prompts": True}),
        (QWEN3, 8192, 0.01, {"gradient_checkpointing": False}),
        (QWEN3 | {"tie_word_embeddings": False}, 8192, 0.01, {"gradient_checkpointing": True}),
        (QWEN3, 8192, 0.03, {"gradient_checkpointing": False, "lora_rank": 8}),
        (QWEN, 8192, 0.01, {"gradient_checkpointing": True, "share_prompts": True}),
        (LLAMA, 8192, 0.01, {"gradient_checkpointing": False, "share_prompts": True}),
        (
            LLAMA,
            32768,
            0.01,
            {"gradient_checkpointing": True, "share_prompts": True, "group_size": 16, "max_prompt_tokens": 1024},
        ),
        (
            LLAMA,
            32768,
            0.01,
            {"gradient_checkpointing": False, "share_prompts": True, "group_size": 64, "max_prompt_tokens": 1024},
        ),
        (
            MANY_KV_HEADS,
            32768,
            0.01,
            {"gradient_checkpointing": True, "share_prompts": True, "max_prompt_tokens": 1024},
        ),
        (
            QWEN_VL,
            8192,
            0.03,
            {"gradient_checkpointing": True, "lora_rank": 8, "share_prompts": True, "max_prompt_tokens": 2048},
        ),
    ],
)
def test_the_formula_agrees_with_the_trace(config, tokens, tolerance, policy):
    config = AutoConfig.for_model(**config)
    args = flags(max_prompt_tokens=256, max_completion_tokens=256, micro_batch_tokens=tokens)
    vars(args).update(policy)
    setup = setup_of(args, config)
    assert setup.model == shape_of(config, "m")
    peaks = trace_update(setup, config)
    static = sum(resident(setup).values())
    if "param_dtype" not in policy:  # the trace has torch's AdamW: two moments, and no third number for bf16 parameters
        assert static == pytest.approx(peaks["static"], rel=tolerance)
    static = peaks["static"]
    assert static + sum(update_peak(setup).values()) == pytest.approx(peaks["update"], rel=tolerance)
    assert static + sum(logprobs_peak(setup).values()) == pytest.approx(peaks["logprobs"], rel=tolerance)


def test_the_planner_knows_how_many_keys_attention_copies_at_most():
    setup = setup_of(
        flags(share_prompts=True, group_size=16, max_prompt_tokens=50, max_completion_tokens=20),
        AutoConfig.for_model(**QWEN),
    )
    found = []
    for length in (1, 2, 20):
        batch = pack(make_rollout([length] * 32, 50, group_size=16), list(range(32)), 16)
        found.append(len(varlen_packing(batch.segments_S).positions_M) / len(batch.labels_N))
    assert setup.keys_per_position == pytest.approx(found[0], rel=0.02) and found == sorted(found, reverse=True)
