"""The packed forward pass against the Hugging Face model run on each sequence alone. float32, tolerance 1e-5."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.integrations import moe
from transformers.models.qwen3_5 import modeling_qwen3_5

from batch import pack
from extras.models import linear_attention
from helpers.made_up import RAGGED, load_policy, make_model_of_family, make_rollout, unpacked_logprobs
from model import attention
from model.packed import Segment

WINDOW = 16
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILY_SIZES = {  # what differs from the sizes of `make_model_of_family`; None takes one away
    "gemma3_text": KINDS | {"query_pre_attn_scalar": 32},
    "olmo3": KINDS | {"head_dim": None},
    "ministral": KINDS,
    "mistral": {"sliding_window": WINDOW},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "olmoe": EXPERTS | {"head_dim": None},
    # Rotary angles for a part of a head; more heads of values than of keys, of other widths.
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    },
}  # fmt: skip
SEVERAL_RECTANGLES = [70, 5, 100, 30, 66]  # on CPU: too different in length to share one


def random_model(folder: Path, architecture: str) -> Path:
    """A folder with a random model: grouped queries, and what its architecture has (norms, windows)."""
    name, _, tied = architecture.partition(", ")
    sizes = {"hidden_size": 64, "initializer_range": 0.12, "tie_word_embeddings": bool(tied)}
    make_model_of_family(folder, name, **sizes | FAMILY_SIZES.get(name, {}))
    return folder


def delta_rule(query, key, value, g, beta, **unused):
    """The gated delta rule by its definition (arXiv 2412.06464, equation 10), in the inputs' dtype."""
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    state, outputs = 0.0, []  # [S, heads, width of keys, width of values]
    for t in range(key.shape[1]):
        q, k, v, b, decay = query[:, t, ..., None], key[:, t, ..., None], value[:, t], beta[:, t], g[:, t].exp()
        state = state * decay[..., None, None]
        state = state + k * (b[..., None] * (v - (k * state).sum(-2)))[..., None, :]
        outputs.append((q * state).sum(-2) * key.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


MODELS = [
    ("policy", 1.0), ("policy", 0.7), ("untied_policy", 1.0), ("llama", 0.7), ("qwen3", 0.7), ("qwen3, tied", 1.0),
    ("seed_oss", 1.0),  # whose residual_dropout of 0.1 must never be on
    ("qwen3_moe", 1.0), ("qwen2_moe", 0.7), ("olmoe", 1.0), ("qwen3_5_text", 0.7),
]  # fmt: skip
FORMS = [
    (False, RAGGED, 4, 1), (True, RAGGED, 4, 1), (False, SEVERAL_RECTANGLES, 4, 1), (False, RAGGED, 4, 4),
    (True, RAGGED, 50, 3), (False, SEVERAL_RECTANGLES, 40, 2), (False, RAGGED, 1, 8),
]  # fmt: skip
WINDOWED = [("gemma3_text, tied", 0.7), ("olmo3", 1.0), ("ministral", 1.0), ("mistral", 1.0)]
# Inputs of one token less than the window, as many, one more, and of several windows; longer prompts.
WINDOWED_FORMS = [
    (False, [12, 13, 14], 4, 1), (False, [12, 13, 14, 60], 4, 1),
    (True, [2, 3, 4, 50, 90, 33], 14, 3), (False, [5, 20, 40, 2], 30, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "model, temperature, gradient_checkpointing, lengths, prompt_length, group_size",
    [(*model, *form) for model in MODELS for form in FORMS]
    + [(*model, *form) for model in WINDOWED for form in WINDOWED_FORMS],
)
def test_packed_logprobs_and_gradients_equal_those_unpacked(
    model, temperature, gradient_checkpointing, lengths, prompt_length, group_size, request, tmp_path, monkeypatch
):
    """In fp64, but for norms and log-probs. Completions share the positions of their prompt."""
    path = str(request.getfixturevalue(model) if "policy" in model else random_model(tmp_path, model))
    packed = load_policy(path, torch.float64, gradient_checkpointing)
    # Its eager attention rounds probabilities to fp32; only windows are compared with it.
    kind = "eager" if (model, temperature) in WINDOWED else "sdpa"
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)  # its kernel has no fp64
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", delta_rule)  # nor has its own
    plain = {"dtype": torch.float64, "attn_implementation": kind, "experts_implementation": "eager"}
    alone = AutoModelForCausalLM.from_pretrained(path, **plain)
    rollout = make_rollout(lengths, prompt_length, group_size=group_size)
    batch = pack(rollout, list(range(len(lengths))), group_size)
    num_shared = (prompt_length - 1) * (len(lengths) - -(-len(lengths) // group_size))
    assert len(batch.labels_N) == rollout.sequence_lengths_B.sum() - num_shared
    weights = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(0))
    passes = []
    packed.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    logprobs = packed(batch, temperature)[0][batch.loss_mask_N]
    expected = unpacked_logprobs(alone, rollout, temperature)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=0)
    (logprobs * weights).sum().backward()
    (expected * weights).sum().backward()
    found, wanted = ({name: p.grad for name, p in x.named_parameters()} for x in (packed.model, alone))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert len(passes) == 1 + gradient_checkpointing, "with checkpoints a layer is computed again"


def test_rectangles_hold_sequences_of_similar_length():
    """8 and 33 positions; then 69, 73 and 103: the first two would bring 95 + 70 padding slots to 103."""
    batch = pack(make_rollout(SEVERAL_RECTANGLES), [0, 1, 2, 3, 4])
    assert attention.padded_packing(batch.segments_S).rectangles == [(4, 73), (1, 103)]
    equal = pack(make_rollout([9] * 50), list(range(50)))
    assert attention.padded_packing(equal.segments_S).rectangles == [(50, 12)]


def test_without_rows_a_recurrence_goes_on_into_the_next_sequence(tmp_path, monkeypatch):
    """What transformers has for packed sequences changes nothing without another library."""
    path, batch = random_model(tmp_path, "qwen3_5_text"), pack(make_rollout([30, 20]), [0, 1])
    right = load_policy(path)
    monkeypatch.setattr(linear_attention, "run_in_rows", lambda layers: None)
    leaking = load_policy(path)
    ends = F.pad(torch.tensor(batch.lengths_S).cumsum(0), (1, 0)).int()
    inputs = {"input_ids": batch.input_ids_N[None], "position_ids": batch.position_ids_N[None], "use_cache": False}
    inputs |= {"packing": attention.padded_packing(batch.segments_S)}
    with torch.no_grad():
        gaps = (right(batch, 1.0).logprobs_N - leaking(batch, 1.0).logprobs_N)[batch.loss_mask_N].abs()
        plain = leaking.model.get_decoder()(**inputs).last_hidden_state
        with_ends = leaking.model.get_decoder()(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state
    assert gaps[:30].max() < 1e-5 and gaps[30:].mean() > 0.05
    assert torch.equal(plain, with_ends), "if transformers now parts sequences, rows may be needed no more"


@pytest.mark.parametrize("option", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}])
def test_attention_that_is_asked_for_something_else_ends_the_run(option):
    """For a family whose config and layers do not show it before."""
    packing = attention.padded_packing((Segment(0, 0, 3),))
    inputs = [torch.randn(1, 4, 3, 32) for _ in range(3)]
    with pytest.raises(ValueError, match="packed attention does not implement it"):
        attention.packed_attention(torch.nn.Module(), *inputs, None, packing=packing, **option)
    attention.packed_attention(torch.nn.Module(), *inputs, None, packing=packing, **dict.fromkeys(option))
