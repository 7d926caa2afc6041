"""Models that cannot be trained under these flags are refused before a weight is read."""

import json
import math
import os
import sys
from contextlib import nullcontext

import pytest
from transformers import (
    AutoConfig,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
)  # fmt: skip

import evaluate
from gate.load_inputs import load_inputs
from helpers.made_up import flags
from model.sizes import HYBRIDS, MIXTURES, check_config, check_cpu_kernels, check_path
from plan.dry_run import dry_run


def check(config: PretrainedConfig, tensor_parallel_size: int = 1) -> None:
    """1,024 tokens of prompt and 1,024 of completion."""
    check_config("m", config, (1024, 1024), tensor_parallel_size)


@pytest.mark.parametrize(("given", "saved", "words"), [
    ("mine", ["step_9", "final"], "--model 'mine' is the folder of a run, not of a model; its policy is mine/final."),
    ("mine/", ["step_9", "step_10"], "its policy is mine/step_10."),
    ("mine", [], "not of a model; it has saved no policy yet."),
    ("mine/step_9/trainer", ["step_9"], "is no folder with a model: it has no config.json."),
    ("mine/step_9/adapter", ["step_9"], "it has no config.json; an adapter alone is no model."),
    ("mine/step_8", ["step_9", "final"], "no such folder (FOLDER/mine/step_8)"),
    ("./absent", [], "no such folder (FOLDER/absent), and not of the form of a hub id (owner/name)."),
    ("mine/step_9", ["step_9"], None),
    ("Qwen/Qwen2.5-7B", [], None),
])  # fmt: skip
def test_the_folder_of_a_run_is_refused_and_its_model_named(given, saved, words, tmp_path, monkeypatch):
    """The folder of a run is no model, and the error names the model in it."""
    monkeypatch.chdir(tmp_path)
    for name, content in {"": {"out_dir": "x"}, **dict.fromkeys(saved, {"model_type": "qwen2"})}.items():
        (folder := tmp_path / "mine" / name).mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "trainer").mkdir()
        (folder / "adapter").mkdir()
        (folder / "adapter" / "adapter_config.json").touch()
        os.utime(folder, (len(name), len(name)))  # step_10 is newer than step_9
    with pytest.raises(FileNotFoundError) if words else nullcontext() as error:
        check_path(given)
    assert not words or words.replace("FOLDER", str(tmp_path)) in str(error.value)


NOT_COMPUTED = {  # words of the sentence -> config
    "2047 tokens; lower them by 1": Qwen2Config(max_position_embeddings=2047),
    "has attn_logit_softcapping = 50.0; needed is .*: use Gemma 3, Qwen3": Gemma2Config(),
    "has attention to tokens that follow": AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True),
    "has windows in some layers alone": Qwen2Config(use_sliding_window=True, max_window_layers=16),
    "has windows in some layers alone, ": MistralConfig(layer_types=["sliding_attention", "full_attention"] * 16),
    "has 128 experts; needed is .*: use OLMo 3, Qwen3-30B-A3B, Qwen3-0.6B": AutoConfig.for_model("gpt_oss"),
    "has use_sliding_window = True beside experts, where False alone is computed alike; needed .*: use Qwen3-30B-A3B": (
        AutoConfig.for_model("qwen2_moe", use_sliding_window=True)
    ),
    "has clip_qkv = 8.0 beside experts, where None alone is computed alike": AutoConfig.for_model(
        "olmoe", clip_qkv=8.0
    ),
    "has output_gate_type = sigmoid beside linear_attention, where swish .*: use Qwen3.5-0.8B": AutoConfig.for_model(
        "qwen3_5_text", output_gate_type="sigmoid"
    ),
    "has 256 experts and layers of the kind linear_attention; .* use Qwen3-30B-A3B, Qwen3.5-0.8B to 27B, Qwen3-0.6B": (
        AutoConfig.for_model("qwen3_5_moe_text")
    ),
    "has dual chunk attention": Qwen2Config(dual_chunk_attention_config={"chunk_size": 262144}),
    "has dropout = 0.1": OPTConfig(),
    "has latent attention": PretrainedConfig(kv_lora_rank=64, num_attention_heads=4),
    "has logits_scaling = 8.0": AutoConfig.for_model("hyperclovax", logits_scaling=8.0),  # it multiplies by it
    "has layers of different sizes; needed is .*: use Gemma 3, Qwen3": AutoConfig.for_model("gemma4_text"),
    "has quantized weights; needed ": Qwen2_5_VLConfig(quantization_config={"quant_method": "fp8"}),
}


@pytest.mark.parametrize("words", NOT_COMPUTED)
def test_a_model_beyond_the_packed_pass_is_refused(words):
    """A model that the packed pass does not compute is refused."""
    with pytest.raises(ValueError, match=words):
        check(NOT_COMPUTED[words])


def test_models_at_the_limits_pass():
    check(Qwen2Config(max_position_embeddings=2048))
    check(MistralConfig(sliding_window=16))
    check(Qwen2Config(sliding_window=16, use_sliding_window=False))
    check(Qwen2Config(sliding_window=16, use_sliding_window=True, max_window_layers=0))
    for name in ("llama", "qwen3", "qwen2_5_vl", "olmo2", "glm4", "smollm3", "phi3", "starcoder2"):
        check(AutoConfig.for_model(name))
    for name in ("gemma3_text", "olmo3", "ministral", "exaone4", "cwm", *MIXTURES, *HYBRIDS):
        check(AutoConfig.for_model(name))
    check(AutoConfig.for_model("granite", logits_scaling=8.0))


HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
DIVISIONS = [  # these sizes, and the sizes of an engine that vLLM can divide them among
    ((14, 2, 4864, 151936), [1, 2]),  # Qwen2.5-0.5B: 7 would divide the heads of queries alone
    ((6, 3, 96, 192), [1, 3, 6]),  # 6 ranks: two have each head of keys
    ((8, 8, 96, 60), [1, 2, 4, 8]),  # 60 rows are padded to 64
    ((6, 6, 96, 64), [1, 2]),  # 3 would not divide the rows
    ((8, 8, 100, 64), [1, 2, 4]),
    ((32, 8, 14336, 128256), [1, 2, 4, 8, 16, 32]),
]


@pytest.mark.parametrize(("sizes", "fitting"), DIVISIONS)
def test_an_engine_has_as_many_ranks_as_vllm_can_divide_it_among(sizes, fitting):
    """An engine has as many ranks as vLLM can divide the model among."""
    config = Qwen2Config(**dict(zip(HEADS, sizes, strict=True)))
    for size in range(1, sizes[0] + 2):
        if size in fitting:
            check(config, size)
            continue
        needed = f"--tensor_parallel_size {size} cannot divide {sizes[0]} attention heads, {sizes[1]} heads of keys and"
        with pytest.raises(ValueError, match=f"{needed}.*; use one of {', '.join(map(str, fitting))}[.]$"):
            check(config, size)


def test_the_heads_of_a_vision_tower_are_divided_too():
    tower = {"num_heads": 16, "intermediate_size": 3420}  # as in Qwen2.5-VL-3B
    text = {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 11008}
    config = Qwen2_5_VLConfig(vision_config=tower, text_config=text)
    check(config, 4)
    with pytest.raises(ValueError, match="--tensor_parallel_size 8 cannot divide .*; use one of 1, 2, 4[.]"):
        check(config, 8)


def rope(kind: str, **overrides: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0} | overrides


def mixed_config(name: str, length: int, angles: dict[str, object]) -> PretrainedConfig:
    """Layers without a window have these angles."""
    return AutoConfig.for_model(name, max_position_embeddings=length, rope_parameters={"full_attention": angles})


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXTS = [  # config, longest sequence, of 2,048 tokens or less by one
    (
        Qwen2Config(max_position_embeddings=512, rope_parameters=rope("yarn", original_max_position_embeddings=512)),
        2048,
    ),
    (
        Qwen2Config(max_position_embeddings=640, rope_parameters=rope("yarn", original_max_position_embeddings=512)),
        2048,
    ),
    (
        Qwen2Config(max_position_embeddings=4096, rope_parameters=rope("yarn", original_max_position_embeddings=256)),
        1024,
    ),
    (Qwen2Config(max_position_embeddings=512, rope_parameters=rope("yarn")), 2048),  # the original length is that
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
]


@pytest.mark.parametrize(("config", "longest"), CONTEXTS)
def test_the_context_is_the_one_that_the_engine_has(config, longest):
    for tokens in (512, 1024, 2048):
        with nullcontext() if tokens <= longest else pytest.raises(ValueError) as error:
            check_config("m", config, (tokens - 100, 100), 1)
        if error:
            said = f"= {tokens} is beyond the context of --model m, {longest} tokens; lower them by {tokens - longest}."
            assert said in str(error.value)


OTHERS = {  # architecture, one for each place in which a config tells it -> what the sentence says that it has
    "mixtral": "(mixtral) has 8 experts; needed is a dense model, Qwen3-MoE, Qwen2-MoE or OLMoE",
    "dbrx": "4 experts",
    "qwen3_vl_moe": "(qwen3_vl_moe_text) has 60 experts",
    "llama4": "16 experts and layers of the kind chunked_attention",
    "olmo_hybrid": "(olmo_hybrid) has layers of the kind linear_attention; needed is a dense model",
    "rwkv": "no attention heads",
}


@pytest.mark.parametrize("name", OTHERS)
def test_experts_and_hybrid_models_are_refused_in_one_sentence(name):
    """Mixtures of experts and hybrid models are refused in one sentence."""
    with pytest.raises(ValueError) as error:
        check(AutoConfig.for_model(name))
    said = str(error.value)
    assert OTHERS[name] in said and said.startswith("--model m (") and "Qwen3-0.6B to 32B" in said
    assert said.endswith(".") and ". " not in said


def test_experts_have_sizes_that_the_engine_takes():
    """An engine divides each expert among its ranks, on CPU into multiples of 32."""
    config = AutoConfig.for_model("qwen2_moe", moe_intermediate_size=1408, shared_expert_intermediate_size=5632)
    check(config, 16)  # 88 on a GPU
    check_cpu_kernels("m", config, "float32", 4)
    with pytest.raises(ValueError, match="multiples of 32, not 2048 and 176; use GPUs"):
        check_cpu_kernels("m", config, "float32", 8)
    with pytest.raises(ValueError, match="multiples of 32, not 2000 and 1024; use GPUs"):
        check_cpu_kernels("m", AutoConfig.for_model("olmoe", hidden_size=2000, intermediate_size=1024), "float32", 1)
    check_cpu_kernels("m", Qwen2Config(hidden_size=2000), "float32", 1)
    with pytest.raises(ValueError, match="5632 or 1408 units of an MLP and 151936 logits; use one of 1, 2, 4, 8, 16"):
        check(AutoConfig.for_model("qwen2_moe", num_attention_heads=32, num_key_value_heads=32), 3)


def test_linear_attention_has_heads_and_a_dtype_that_the_engine_takes():
    config = AutoConfig.for_model("qwen3_5_text", num_attention_heads=24, num_key_value_heads=4)
    check(config, 8)
    config.linear_num_key_heads = 6
    with pytest.raises(ValueError, match=r", 6 and \d+ heads of linear attention and 248320 logits; use one of 1, 2"):
        check(config, 4)
    check_cpu_kernels("m", config, "bfloat16", 1)
    for dtype, width in (("float32", 128), ("bfloat16", 32)):
        config.linear_key_head_dim = config.linear_value_head_dim = width
        with pytest.raises(ValueError, match=f"not in {dtype} for {width} and {width}; give that dtype, or use"):
            check_cpu_kernels("m", config, dtype, 1)


def test_rotary_angles_that_change_with_the_batch_are_refused():
    """By the sources: transformers takes the longest sequence of a batch, vLLM the longest that the engine allows."""
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    context = {"max_position_embeddings": 131072, "rope_parameters": rope}
    check(Phi3Config(original_max_position_embeddings=2048, **context))
    with pytest.raises(ValueError, match="longrope.* keep prompt and completion within 2047 tokens"):
        check(Phi3Config(original_max_position_embeddings=2047, **context))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for config in (Qwen2Config(max_position_embeddings=4096, rope_parameters=rope), mixed_config("olmo3", 4096, rope)):
        with pytest.raises(ValueError, match=r"rotary angles \(dynamic\)"):
            check(config)


def test_dry_run_training_and_evaluation_refuse_them_alike(tmp_path, monkeypatch, capsys):
    AutoConfig.for_model("mixtral").save_pretrained(tmp_path)
    args = flags(model=tmp_path)
    for attempt in (dry_run, load_inputs):
        with pytest.raises(ValueError, match=r"\(mixtral\) has 8 experts"):
            attempt(args)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--model", str(tmp_path), "--data", "d"])
    with pytest.raises(SystemExit):
        evaluate.main()
    assert "(mixtral) has 8 experts" in capsys.readouterr().err
