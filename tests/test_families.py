"""Families of models: the engine's log-probs are the trainer's, and both are those of plain transformers.

Each is a tiny random model of the architecture, in fp32, trained for a step: the table in docs/data.md names them.
"""

import platform
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import checkpoint
from batch import Rollout
from engine.options import EngineDemand
from flags import Sampling
from fsdp_utils import World
from gate.models import check_model
from helpers import made_up
from helpers.distributed import TEMPERATURE, Trial, hidden_tensors, on_ranks, sampler_logprobs, trainer_logprobs
from helpers.made_up import make_hybrid, make_model_of_family, unpacked_logprobs
from model.sizes import HYBRIDS
from model.weights import load_config

WINDOW = 8  # tokens; sequences have up to 57
KINDS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def angles(kind: str, factor: float = 4.0) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, "original_max_position_embeddings": 16}


def kinds(kind: str) -> dict[str, object]:
    """Layers of two kinds; rotary angles are scaled in those without a window."""
    return KINDS | {"rope_parameters": {"full_attention": angles(kind)}}


GEMMA = {"initializer_range": 0.03, "query_pre_attn_scalar": 16}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.5, "logits_scaling": 8.0}
MIXTURES = ("Qwen3-MoE", "Qwen2-MoE", "OLMoE")
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
MLP_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")
FAMILIES = {  # as docs/data.md names them -> type, and what differs from the sizes of `make_model_of_family`
    "Qwen2": ("qwen2", {}), "Qwen3": ("qwen3", {}), "Llama": ("llama", {}), "GLM-4": ("glm4", {}), "GLM": ("glm", {}),
    "ERNIE 4.5": ("ernie4_5", {}), "OLMo 2": ("olmo2", {}), "OLMo 1": ("olmo", {"clip_qkv": 1.0}),
    "Mistral": ("mistral", {"sliding_window": WINDOW}), "Phi-3": ("phi3", {"sliding_window": WINDOW}),
    "StarCoder 2": ("starcoder2", {"sliding_window": WINDOW}), "Gemma 1": ("gemma", {"initializer_range": 0.03}),
    "Granite": ("granite", GRANITE), "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "GPT-NeoX": ("gpt_neox", {"num_key_value_heads": None, "head_dim": None}),
    "Seed-OSS": ("seed_oss", {"residual_dropout": 0.1}),
    # As Gemma 3 from 4B on, and as OLMo 3.
    "Gemma 3": ("gemma3_text", GEMMA | kinds("linear")), "OLMo 3": ("olmo3", {"head_dim": None} | kinds("yarn")),
    "EXAONE 4": ("exaone4", KINDS), "Ministral": ("ministral", KINDS), "OLMoE": ("olmoe", EXPERTS),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS | {"moe_intermediate_size": 64, "norm_topk_prob": True}),
    # One layer of two has no experts but a plain MLP.
    "Qwen2-MoE": ("qwen2_moe", EXPERTS | {"mlp_only_layers": [0]} | dict.fromkeys(MLP_SIZES, 64)),
}  # fmt: skip


def rope(kind: str, factor: float = 4.0, **overrides: object) -> dict[str, object]:
    return {"max_position_embeddings": 16, "rope_parameters": angles(kind, factor) | overrides}


FACTORS = {"short_factor": np.linspace(1, 2, 16).tolist(), "long_factor": np.linspace(3, 4, 16).tolist()}
LONG = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
ROPES = {  # rotary angles that are scaled: sequences are up to 57 tokens long
    "yarn": ("qwen2", rope("yarn")),
    "yarn of Qwen3's card": ("qwen3", rope("yarn") | {"max_position_embeddings": 20}),
    "yarn in transformers' own code": ("smollm3", rope("yarn", attention_factor=1.3, beta_fast=16, truncate=False)),
    "linear": ("llama", rope("linear")),
    "llama3": ("llama", rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0) | {"max_position_embeddings": 64}),
    "longrope": ("phi3", rope("longrope", **FACTORS) | LONG),
}
MODELS = FAMILIES | ROPES
LARGEST_GAP = 1e-5  # between two log-probs of a token


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    for name, (model_type, changes) in MODELS.items():
        make_model_of_family(folder / name, model_type, **changes)
    return folder


def families(world: World, folder: str, *names: str) -> dict[str, dict[str, object]]:
    """Name of a model in the folder -> findings. Trainers come before engines, as in a run."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # which takes 6 s the first time
    sizes, trials = {"prompts_per_step": 4, "prompts_per_update": 4, "learning_rate": 1e-2}, {}
    for name in names:
        path = f"{folder}/{name}"
        dtype = "bfloat16" if load_config(path).model_type in HYBRIDS else "float32"  # on CPUs
        pair = [Trial(world, path, **sizes, dtype=dtype, lora_rank=rank) for rank in (0, 3)]
        # As in a run: before the first engine, which changes classes of transformers.
        trials[name] = *pair, checkpoint.files_of(path, getattr(torch, dtype))
    return {name: step_of_family(*each) for name, each in trials.items()}


def step_of_family(trial: Trial, adapted: Trial, files: checkpoint.Companions) -> dict[str, object]:
    """`adapted`: the same model with an adapter, which steps on the rollout of the first. `files`: of exports."""
    policy, sampling = trial.policy, Sampling(4, TEMPERATURE, 12)

    def gaps_of(rollout: Rollout, when: str = "") -> dict[str, Tensor]:
        """The largest and the mean difference of sampled log-probs, trainer against sampler."""
        found = (trainer_logprobs(policy, rollout) - sampler_logprobs(rollout)).abs()
        return {f"gap{when}": found.max(), f"mean gap{when}": found.mean()}

    trial.begin(demand=EngineDemand(16))
    engine = trial.engine
    (hidden,) = engine.llm.apply_model(hidden_tensors)
    engine.sync(policy.full_weights())
    rng = np.random.default_rng(0)
    rows = [made_up.make_row(rng.integers(0, 64, length)) for length in (3, 45, 9, 20)]
    rollout = engine.sample(rows, sampling, (1, 1))
    found = gaps_of(rollout) | {"rollout": replace(rollout, texts=[]), "logprobs": trainer_logprobs(policy, rollout)}
    found |= {"hidden": hidden, "not compared": trial.comparison.not_compared}
    found["load"] = trial.train(rollout, rate=1e-2).get("moe/load_max")
    found |= gaps_of(rollout, " of a stale engine") | {"logprobs after": trainer_logprobs(policy, rollout)}
    with patch("rollout.renew_copies", lambda model: None):
        engine.sync(policy.full_weights())
    found["unpacked"] = trial.comparison.different_tensors()
    engine.sync(policy.full_weights())
    found |= gaps_of(engine.sample(rows, sampling, (1, 2)), " after")
    adapted.train(rollout, rate=1e-2)
    found["logprobs with LoRA"] = trainer_logprobs(adapted.policy, rollout)
    for trained, name in ((policy, "exported"), (adapted.policy, "with LoRA exported")):
        weights = checkpoint.gather_weights(trained, trial.world)
        checkpoint.export(trained, weights, files, Path(f"{trial.path} {name}"))
    engine.sync(load_file(f"{trial.path} exported/model.safetensors").items())  # as vLLM reads them
    found["not exported"] = trial.comparison.different_tensors()
    return found


@pytest.fixture(scope="module")
def found(folder):
    # The first engine of a process makes vLLM's groups of ranks, and one for experts only if it has some.
    return on_ranks(1, families, folder, *sorted(MODELS, key=lambda name: name not in MIXTURES))


@pytest.mark.parametrize("name", MODELS)
def test_trainer_sampler_and_plain_transformers_agree(name, folder, found):
    check_model(name, AutoConfig.from_pretrained(folder / name), (52, 12), 1)
    measured = found[name]
    assert measured["gap"] < LARGEST_GAP and measured["gap after"] < LARGEST_GAP
    assert measured["gap of a stale engine"] > 0.1, "a nearly uniform distribution would agree with anything"
    changed = (measured["logprobs with LoRA"] - measured["logprobs"]).abs().max()
    assert changed > 0.1, "an adapter that changes nothing would agree with anything"
    assert measured["hidden"] == [], "a sleep of level 2 would lose it"
    fused = re.compile(r"layers\.\d\.(self_attn\.qkv_proj|mlp\.gate_up_proj)\.weight")  # in both models
    assert all(fused.fullmatch(each) for each in measured["not compared"])
    assert measured["not exported"] == [], "vLLM reads the exported files"
    exported = {f"{name} exported": "logprobs after", f"{name} with LoRA exported": "logprobs with LoRA"}
    for path, logprobs in ({name: "logprobs"} | exported).items():
        plain = AutoModelForCausalLM.from_pretrained(folder / path, dtype=torch.float32)
        with torch.no_grad():
            expected = unpacked_logprobs(plain, measured["rollout"], 0.7)
        rtol = 1e-6 if "LoRA" in path else 0  # an adapter makes some tokens very unlikely, down to -20
        torch.testing.assert_close(measured[logprobs], expected, atol=LARGEST_GAP, rtol=rtol)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="vLLM's linear attention was tried on AVX2 alone")
def test_the_text_part_of_a_hybrid_is_trained_sampled_and_exported(tmp_path):
    """vLLM has linear attention for CPUs in bf16 alone, so what is compared is rounded to 3 digits: the mean gap is as
    large as that of either side to plain transformers in fp32, 0.04 to 0.05.
    """
    make_hybrid(path := tmp_path / "Qwen3.5")
    measured = on_ranks(1, families, tmp_path, "Qwen3.5")["Qwen3.5"]
    assert measured["hidden"] == measured["not compared"] == measured["not exported"] == []
    assert measured["mean gap"] < 0.06 and measured["mean gap after"] < 0.06
    assert measured["mean gap of a stale engine"] > 2 * measured["mean gap"]
    measured["of the engine"] = torch.from_numpy(np.concatenate(measured["rollout"].rollout_logprobs))
    kinds = [("", "of the engine"), ("", "logprobs"), (" exported", "logprobs after")]
    for suffix, logprobs in [*kinds, (" with LoRA exported", "logprobs with LoRA")]:
        plain = AutoModelForCausalLM.from_pretrained(f"{path}{suffix}", dtype=torch.float32)
        assert type(plain).__name__ == "Qwen3_5ForCausalLM"
        with torch.no_grad():
            expected = unpacked_logprobs(plain, measured["rollout"], 0.7)
        assert (measured[logprobs] - expected).abs().mean() < 0.07, logprobs


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_packed_again_and_their_load_is_counted(name, folder, found):
    """An engine whose experts are not packed again is noticed; the metric is the busiest expert's share of tokens."""
    measured, rollout = found[name], found[name]["rollout"]
    experts = [each for each in measured["unpacked"] if ".experts." in each]
    plain = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
    routers = [layer.mlp.gate for layer in plain.model.layers if hasattr(layer.mlp, "experts")]
    assert len(experts) == 2 * len(routers), "each layer's gate_up_proj and down_proj"
    tokens = [torch.tensor([*row.ids, *ids[:-1]]) for row, ids in zip(rollout.rows, rollout.completions, strict=True)]
    with torch.no_grad():
        logits_of_sequences = [plain(each[None], output_router_logits=True).router_logits for each in tokens]
    loads = []
    for logits in map(torch.cat, zip(*logits_of_sequences, strict=True)):
        counts = logits.topk(EXPERTS["num_experts_per_tok"]).indices.flatten().bincount()
        loads.append((counts.max() / counts.sum() * EXPERTS["num_experts"]).item())
    assert measured["load"] == pytest.approx(max(loads)) and measured["load"] > 1.1
