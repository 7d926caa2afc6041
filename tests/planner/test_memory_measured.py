"""Predicted against measured memory: the formulas against the storages of real updates, on one and two ranks."""

import json

import pytest
from transformers import AutoConfig

from bench_memory import POLICIES
from helpers import torchrun


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_update_takes_what_the_planner_says_within_10_percent_under_every_policy(num_ranks, tmp_path):
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    AutoConfig.for_model("qwen2", **sizes).save_pretrained(tmp_path)
    batch = ("--micro_batch_tokens", 256, "--length", 32)
    done = torchrun(num_ranks, "benchmarks/bench_memory.py", "--model", tmp_path, *batch)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == num_ranks and found["ratios"].keys() == POLICIES.keys()
    assert all(0.9 <= ratio <= 1.1 for ratio in found["ratios"].values()), found["ratios"]
