"""Models that these flags cannot train are refused before a weight is read: by path, experts, heads and context."""

import json
import math
import sys
from contextlib import nullcontext

import pytest
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config

import evaluate
from gate.inputs import Inputs
from gate.models import check_compile, check_context, check_model, check_parallel, check_path
from helpers.made_up import flags
from model.weights import load_config
from plan.dry_run import dry_run


def test_the_folder_of_a_run_is_refused_and_its_models_named(tmp_path):
    for name, content in {"": {"out_dir": "x"}, "step_9": {"model_type": "qwen2"}}.items():
        (tmp_path / "mine" / name).mkdir()
        (tmp_path / "mine" / name / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="mine' is the folder of a run, not of a model; give its final, or one of"):
        check_path(str(tmp_path / "mine"))
    check_path(str(tmp_path / "mine" / "step_9"))
    for no_model in (tmp_path / "mine" / "step_8", tmp_path):
        with pytest.raises(ValueError, match=f"--model '{no_model}' is n"):
            load_config(str(no_model))


@pytest.mark.parametrize(("heads", "kv", "fitting"), [  # fitting: sizes of an engine
    (14, 2, [1, 2, 14]),
    (6, 3, [1, 3, 6]),  # 6 ranks: two have each head of keys
    (8, 8, [1, 2, 4, 8]),
    (32, 8, [1, 2, 4, 8, 16, 32]),
])  # fmt: skip
def test_an_engine_has_as_many_ranks_as_vllm_can_divide_the_heads_among(heads, kv, fitting):
    config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=kv)
    for size in range(1, heads + 2):
        if size in fitting:
            check_parallel(config, size)
            continue
        needed = f"--tensor_parallel_size {size} cannot divide {heads} attention heads and {kv} heads of keys and"
        with pytest.raises(ValueError, match=f"{needed} values; use a smaller one"):
            check_parallel(config, size)


def rope(kind: str, **overrides: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | overrides


def yarn(length: int, **original: int) -> Qwen2Config:
    return Qwen2Config(max_position_embeddings=length, rope_parameters=rope("yarn", **original))


def mixed_config(name: str, length: int, angles: dict[str, object]) -> PretrainedConfig:
    """Layers without a window have these angles."""
    return AutoConfig.for_model(name, max_position_embeddings=length, rope_parameters={"full_attention": angles})


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(("config", "longest"), [
    (yarn(512, original_max_position_embeddings=512), 2048),
    (yarn(640, original_max_position_embeddings=512), 2048),
    (yarn(4096, original_max_position_embeddings=256), 1024),
    (yarn(512), 2048),  # the original length is that
    (Qwen2Config(max_position_embeddings=512, rope_scaling={"type": "yarn", "factor": 4.0}), 2048),  # as in older files
    (Qwen2Config(max_position_embeddings=512, rope_parameters=rope("linear")), 2048),
    (LlamaConfig(max_position_embeddings=512, rope_parameters=rope("llama3", **LLAMA3)), 512),
    (Qwen2Config(max_position_embeddings=512), 512),
    # Angles of each kind of layer. In Gemma 3's files the length is the one after scaling.
    (mixed_config("gemma3_text", 1024, rope("linear")), 1024),
    (mixed_config("olmo3", 2048, rope("yarn", original_max_position_embeddings=256)), 1024),
    (mixed_config("olmo3", 512, {"rope_type": "default"}), 512),
    (LlamaConfig(max_position_embeddings=512, model_max_length=2048), 2048),
    (PretrainedConfig(num_attention_heads=4, vocab_size=64, intermediate_size=64), math.inf),
])  # fmt: skip
def test_the_context_is_the_one_that_the_engine_has(config, longest):
    for tokens in (512, 1024, 2048):
        with nullcontext() if tokens <= longest else pytest.raises(ValueError) as error:
            check_context("m", config, (tokens - 100, 100))
        if error:
            said = f"= {tokens} is beyond the context of --model m, {longest} tokens; lower them by {tokens - longest}."
            assert said in str(error.value)


@pytest.mark.parametrize(("name", "said"), [
    ("mixtral", "has experts; use one of the types qwen3_moe, qwen2_moe, olmoe."),
    ("gpt_oss", "has experts; use one of the types"),
    ("rwkv", "has no attention; use a family that docs/data.md lists."),
    ("gpt2", "has layers or attention outside the interface of transformers; use a family"),
    ("falcon", "has layers or attention outside the interface of transformers"),
    ("stablelm", "has layers or attention outside the interface of transformers"),
])  # fmt: skip
def test_what_would_end_amid_the_start_is_refused(name, said):
    with pytest.raises(ValueError) as error:
        check_model("m", AutoConfig.for_model(name), (32, 32), 1)
    assert str(error.value).startswith(f"--model m ({name}) {said}")


def test_experts_are_compiled_in_bfloat16_and_needed_for_router_replay():
    for kind, dtype in (("qwen3", "float32"), ("qwen3_moe", "bfloat16")):
        check_compile("m", AutoConfig.for_model(kind), dtype)
    with pytest.raises(ValueError, match=r"--compile with --dtype float32: the experts of --model m \(qwen3_moe\) are"):
        check_compile("m", AutoConfig.for_model("qwen3_moe"), "float32")
    with pytest.raises(ValueError, match=r"--router_replay: --model m \(qwen3\) has no experts .*; leave it out\.$"):
        check_model("m", AutoConfig.for_model("qwen3"), (32, 32), 1, router_replay=True)
    check_model("m", AutoConfig.for_model("qwen3"), (32, 32), 1)
    check_model("m", AutoConfig.for_model("qwen3_moe"), (32, 32), 1, router_replay=True)


def test_dry_run_training_and_evaluation_refuse_them_alike(tmp_path, monkeypatch, capsys):
    AutoConfig.for_model("mixtral").save_pretrained(tmp_path)
    args = flags(model=tmp_path)
    for attempt in (dry_run, Inputs.load):
        with pytest.raises(ValueError, match=r"\(mixtral\) has experts"):
            attempt(args)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--model", str(tmp_path), "--data", "d"])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "(mixtral) has experts" in capsys.readouterr().err
