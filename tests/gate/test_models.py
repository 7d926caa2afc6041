"""Models that these flags cannot train are refused before a weight is read: by path, experts, heads and context."""

import json
import math
import re
import shutil
from contextlib import nullcontext

import pytest
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from gate.inputs import Inputs
from gate.models import check_compile, check_context, check_model, check_parallel, check_path
from helpers.made_up import flags
from model.weights import load_config
from plan.dry_run import config_of, setup_of


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
    ("phi", "has a head with a bias, which is not implemented"),
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


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
FP8 = {"quant_method": "fp8"}
REFUSED = "its config.json has a setting that transformers refuses: "
QUANTIZED = "is quantized ({}: {}), which is not implemented; give the model in bfloat16."


@pytest.mark.parametrize(("file", "content", "said"), [  # content: of a new file, or what is other than in the policy's
    ("tokenizer.json", POINTER, "git has not fetched its tokenizer.json; run `git lfs pull` there."),
    ("model.safetensors.index.json", POINTER, "git has not fetched its model.safetensors.index.json; run "),
    ("generation_config.json", POINTER, "git has not fetched its generation_config.json"),
    ("chat_template.jinja", POINTER, "git has not fetched its chat_template.jinja"),
    ("config.json", POINTER, "git has not fetched its config.json"),
    ("additional_chat_templates/tools.jinja", POINTER, "git has not fetched its tools.jinja"),
    ("README.md", POINTER, None),
    ("original.pth", POINTER, None),
    ("config.json", {"quantization_config": FP8}, QUANTIZED.format("quantization_config", FP8)),
    ("config.json", {"quantization_config": {}}, QUANTIZED.format("quantization_config", "{}")),  # a left-over one
    ("config.json", {"quantization_config": None}, None),
    ("config.json", {"text_config": {"compression_config": FP8}}, "is quantized (compression_config: "),
    ("config.json", {"quantization": {"bits": 4}}, QUANTIZED.format("quantization", "{'bits': 4}")),
    ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "is quantized (quantization: "),
    ("config.json", {"quantization_config": "int8"}, REFUSED),
    ("adapter_config.json", {"peft_type": "LORA"}, "has an adapter beside its weights; merge it"),
    ("config.json", {"eos_token_id": "<eos>"}, REFUSED),
    ("config.json", {"eos_token_id": [1, None]}, REFUSED),
    ("config.json", {"hidden_size": "64"}, REFUSED),
    ("config.json", {"rope_parameters": {"rope_type": "own"}}, REFUSED),
    ("config.json", {"rope_parameters": {"rope_type": "linear"}}, REFUSED),
    ("config.json", {"hidden_act": "own"}, REFUSED),
    ("config.json", {"head_dim": None}, REFUSED),
    ("config.json", {"_attn_implementation": "flash_attention_2"}, None),  # attention is ours, whatever stands there
    ("config.json", {"eos_token_id": 64}, "eos_token_id 64 in its config.json; use ids from 0 to 63."),
    ("config.json", {"pad_token_id": 64}, "pad_token_id 64 in its config.json; use ids from 0 to 63."),
    ("config.json", {"eos_token_id": None, "pad_token_id": 63}, None),
    ("generation_config.json", {"eos_token_id": "<eos>"}, "eos_token_id '<eos>' in its generation_config.json"),
    ("generation_config.json", {"eos_token_id": [1, None]}, "eos_token_id [1, None] in its generation_config.json"),
    ("generation_config.json", {"eos_token_id": [1, 64]}, "eos_token_id [1, 64] in its generation_config.json"),
    ("generation_config.json", {"eos_token_id": True}, "eos_token_id True in its generation_config.json"),
    ("generation_config.json", {"eos_token_id": [1, 63]}, None),
    ("generation_config.json", "[]", "its generation_config.json is damaged; download or copy it again."),
])  # fmt: skip
def test_files_that_would_end_a_run_later_are_refused(file, content, said, policy, tmp_path):
    """By the dry run, too, before a weight is read; --reference is named as itself."""
    model = shutil.copytree(policy, tmp_path / "model")
    (model / "model.safetensors").unlink()
    if isinstance(content, dict):
        before = json.loads((model / file).read_text()) if (model / file).exists() else {}
        content = json.dumps(before | content)
    (model / file).parent.mkdir(exist_ok=True)
    (model / file).write_text(content)
    limits = {"max_prompt_tokens": 8, "max_completion_tokens": 12}
    args, beside = flags(model=model, **limits), flags(model=policy, reference=model, kl_coef=0.1, **limits)
    for attempt, given, flag in (
        (lambda args: setup_of(args, config_of(args.model)), args, "--model"),
        (Inputs.load, args, "--model"), (Inputs.load, beside, "--reference"),
    )[: None if said else 1]:  # fmt: skip
        with pytest.raises(ValueError) if said else nullcontext() as error:
            attempt(given)
        assert not said or re.match(f"{flag} '?{model}'?:? {re.escape(said)}", str(error.value)), error.value
