"""Models that cannot be trained under these flags are refused before a weight is read."""

import pytest
from transformers import Gemma2Config, MistralConfig, PretrainedConfig, Qwen2Config

from model.sizes import check_config


def check(config: PretrainedConfig, tensor_parallel_size: int = 1) -> None:
    """1,024 tokens of prompt and 1,024 of completion."""
    check_config("m", config, (1024, 1024), tensor_parallel_size)


def test_limits_beyond_the_context_of_the_model_are_refused():
    check(Qwen2Config(max_position_embeddings=2048))
    with pytest.raises(ValueError, match="2047 tokens; lower them by 1"):
        check(Qwen2Config(max_position_embeddings=2047))


def test_models_that_the_packed_pass_does_not_compute_are_refused():
    check(MistralConfig(sliding_window=2048))
    with pytest.raises(ValueError, match="sliding-window attention of 2047 tokens"):
        check(MistralConfig(sliding_window=2047))
    check(Qwen2Config(sliding_window=16, use_sliding_window=False))
    with pytest.raises(ValueError, match="attn_logit_softcapping = 50.0 is not implemented"):
        check(Gemma2Config(sliding_window=8192))
    with pytest.raises(ValueError, match="--tensor_parallel_size 4 does not divide the model's 14 attention heads"):
        check(Qwen2Config(num_attention_heads=14), tensor_parallel_size=4)
