"""Models that cannot be trained under these flags are refused before a weight is read."""

import json
import os
import sys
from contextlib import nullcontext

import pytest
from transformers import (
    AutoConfig,
    Gemma2Config,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
)  # fmt: skip

import evaluate
from helpers import flags
from inputs.load import load_inputs
from model.sizes import check_config, check_path
from planner.dry_run import dry_run


def check(config: PretrainedConfig, tensor_parallel_size: int = 1) -> None:
    """1,024 tokens of prompt and 1,024 of completion."""
    check_config("m", config, (1024, 1024), tensor_parallel_size)


@pytest.mark.parametrize(("given", "saved", "words"), [
    ("mine", ["step_9", "final"], "--model 'mine' is the folder of a run, not of a model; its policy is mine/final."),
    ("mine/", ["step_9", "step_10"], "its policy is mine/step_10."),
    ("mine", [], "not of a model; it has saved no policy yet."),
    ("mine/step_9/trainer", ["step_9"], "has no config.json; its policy is mine/step_9."),
    ("mine/checkpoints/step_9", ["step_9"], "; its policy is mine/step_9."),
    ("mine/step_8", ["step_9", "final"], "; its policy is mine/final."),
    ("mine/final", ["step_9"], "; its policy is mine/step_9."),
    ("./absent", [], "no such folder (FOLDER/absent), and not of the form of a hub id (owner/name)."),
    ("mine/step_9", ["step_9"], None),
    ("Qwen/Qwen2.5-7B", [], None),
])  # fmt: skip
def test_the_folder_of_a_run_is_no_model_and_the_one_in_it_is_named(given, saved, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in {"": {"out_dir": "x"}, **dict.fromkeys(saved, {"model_type": "qwen2"})}.items():
        (folder := tmp_path / "mine" / name).mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "trainer").mkdir()
        os.utime(folder, (len(name), len(name)))  # step_10 is newer than step_9
    with pytest.raises(FileNotFoundError) if words else nullcontext() as error:
        check_path(given)
    assert not words or words.replace("FOLDER", str(tmp_path)) in str(error.value)


NOT_COMPUTED = {  # words of the sentence -> config
    "2047 tokens; lower them by 1": Qwen2Config(max_position_embeddings=2047),
    "sliding-window attention of 2047 tokens": MistralConfig(sliding_window=2047),
    "has attn_logit_softcapping = 50.0": Gemma2Config(sliding_window=8192),
    "has dropout = 0.1": OPTConfig(),
    "has quantized weights; needed ": Qwen2_5_VLConfig(quantization_config={"quant_method": "fp8"}),
}


@pytest.mark.parametrize("words", NOT_COMPUTED)
def test_a_model_that_the_packed_pass_does_not_compute_is_refused(words):
    with pytest.raises(ValueError, match=words):
        check(NOT_COMPUTED[words])


def test_models_at_the_limits_pass():
    check(Qwen2Config(max_position_embeddings=2048))
    check(MistralConfig(sliding_window=2048))
    check(Qwen2Config(sliding_window=16, use_sliding_window=False))
    for name in ("llama", "qwen3", "qwen2_5_vl", "olmo2", "glm4", "smollm3", "phi3", "gemma3_text"):
        check(AutoConfig.for_model(name))
    with pytest.raises(ValueError, match="--tensor_parallel_size 4 does not divide the model's 14 attention heads"):
        check(Qwen2Config(num_attention_heads=14), tensor_parallel_size=4)


OTHERS = {  # architecture, one for each place in which a config tells it -> what the sentence says that it has
    "qwen3_moe": "(qwen3_moe) has 128 experts; needed is a dense model",
    "dbrx": "4 experts",
    "qwen3_vl_moe": "(qwen3_vl_moe_text) has 60 experts",
    "llama4": "16 experts and layers of the kind chunked_attention",
    "qwen3_5": "(qwen3_5_text) has layers of the kind linear_attention; needed is a dense model with attention in all",
    "rwkv": "no attention heads",
}


@pytest.mark.parametrize("name", OTHERS)
def test_mixtures_of_experts_and_hybrid_models_are_refused_in_one_sentence(name):
    with pytest.raises(ValueError) as error:
        check(AutoConfig.for_model(name))
    said = str(error.value)
    assert OTHERS[name] in said and said.startswith("--model m (") and "use Qwen3-0.6B to 32B" in said
    assert said.endswith(".") and ". " not in said


def test_rotary_angles_that_change_with_the_batch_are_refused():
    """By the sources: transformers takes the longest sequence of a batch, vLLM the longest that the engine allows."""
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    context = {"max_position_embeddings": 131072, "rope_parameters": rope}
    check(Phi3Config(original_max_position_embeddings=2048, **context))
    with pytest.raises(ValueError, match="longrope.* keep prompt and completion within 2047 tokens"):
        check(Phi3Config(original_max_position_embeddings=2047, **context))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=r"rotary angles \(dynamic\)"):
        check(Qwen2Config(max_position_embeddings=4096, rope_parameters=rope))


def test_dry_run_training_and_evaluation_refuse_them_alike(tmp_path, monkeypatch):
    AutoConfig.for_model("qwen3_moe").save_pretrained(tmp_path)
    args = flags(model=tmp_path)
    for attempt in (dry_run, load_inputs):
        with pytest.raises(ValueError, match=r"\(qwen3_moe\) has 128 experts"):
            attempt(args)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--model", str(tmp_path), "--data", "d"])
    with pytest.raises(SystemExit, match=r"\(qwen3_moe\) has 128 experts"):
        evaluate.main()
