"""LoRA: what is trained, the reference, what engine and checkpoints get; on one and two ranks and in a whole run."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

import checkpoint
from batch import pack
from distributed_lora import RANK, adapted_policy, lora_flags
from flags import Lora, take
from fsdp_utils import World
from helpers import flags, logprobs_in_vllm, make_rollout, metrics_of, torchrun, training_flags, unpacked_logprobs
from inputs.checks import check_flags
from model.lora import add_adapter, check_targets, target_names
from policy import Policy, load_policy

TOLERANCE = {"atol": 2e-6, "rtol": 1e-4}  # as in test_fsdp.py: fp32, a gradient of norm 2
TINY = Qwen2Config(vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2)
HALF_BF16 = 2**-8 * (
    1 + 1e-3
)  # a value with 8 significant bits is off by at most half a unit of the last, and fp32 adds a little


# Flags ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_alpha": 16}, ["--lora_alpha 16.0 has no effect", "only with --lora_rank above 0", "leave it at 32.0"]),
        ({"lora_dropout": 0.05}, ["--lora_dropout 0.05 has no effect", "only with --lora_rank above 0"]),
        (
            {"lora_targets": "q_proj"},
            ["--lora_targets q_proj has no effect", "only with --lora_rank above 0: leave it out"],
        ),
        (
            {"lora_rank": 8, "lora_targets": "query"},
            ["--lora_targets query:", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_"],
        ),
        (
            {"lora_rank": 8, "lora_targets": "lm_head"},
            ["--lora_targets lm_head:", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj"],
        ),
        ({"lora_rank": -1}, ["--lora_rank -1", "at least 0"]),
        ({"lora_rank": 8, "lora_alpha": 0}, ["--lora_alpha 0", "above 0"]),
        ({"lora_rank": 8, "lora_dropout": 1}, ["--lora_dropout 1", "at least 0 and at most 0.99"]),
    ],
)
def test_flags_that_make_no_sense_are_refused_with_a_way_out(changes, words):
    args = flags(**changes)
    with pytest.raises(ValueError) as error:
        check_flags(args, 1)
        check_targets(TINY, args.lora_targets)
    for word in words:
        assert word in str(error.value)


def test_sensible_flags_pass():
    for args in (flags(), flags(lora_rank=8, lora_targets="q_proj")):
        check_targets(TINY, args.lora_targets)


@pytest.mark.parametrize("name", ["untied_policy", "untied_qwen3_policy"])
def test_the_targets_are_all_linear_layers_of_the_decoder_or_those_that_are_named(name, request):
    """The norms of Qwen3's queries and keys are none of them."""
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(name))
    own = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    assert target_names(model, None) == [f"model.layers.{i}.{name}" for i in range(2) for name in own]
    assert target_names(model, ["v_proj", "q_proj"]) == [
        f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "v_proj")
    ]


def test_adapters_are_fp32_and_alone_trained_beside_weights_in_bf16(policy):
    model = adapted_policy(lora_flags(str(policy)))
    for name, parameter in model.named_parameters():
        is_adapter = ".lora_" in name
        assert (parameter.requires_grad, parameter.dtype) == (
            is_adapter,
            torch.float32 if is_adapter else torch.bfloat16,
        ), name


def test_rank_8_on_all_linear_layers_of_a_32b_model_is_67_million_parameters():
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    args = flags(lora_rank=8, lora_dropout=0.05)
    with torch.device("meta"):
        policy = Policy(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
        add_adapter(policy.model, take(Lora, args), args.seed, args.model)
    assert sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad) == 67_108_864
    described = policy.describe()
    assert "67,108,864 of 32,830,985,216 parameters: LoRA (rank 8, alpha 32, so s = 4; dropout 0.05)" in described
    assert "on 448 linear layers: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in described


# One update, the reference and the sync, on one and two ranks ---------------------------------------------------------


@pytest.fixture(scope="module")
def results(policy, tmp_path_factory) -> dict[int, dict]:
    folder = tmp_path_factory.mktemp("lora")
    for num_ranks in (1, 2):
        torchrun(num_ranks, "tests/distributed_lora.py", policy, folder / f"{num_ranks}.pt")
    return {num_ranks: torch.load(folder / f"{num_ranks}.pt") for num_ranks in (1, 2)}


def plain_gradients(policy: Path) -> tuple[float, dict[str, Tensor]]:
    """(loss, name -> gradient) by the formula, without FSDP, packing or peft's forward pass."""
    args, rollout = lora_flags(str(policy)), make_rollout(group_size=4)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).float()
    with torch.no_grad():
        ref = unpacked_logprobs(model, rollout, 1.0)
    adapter = {
        name: p.detach().clone() for name, p in adapted_policy(args).model.named_parameters() if ".lora_" in name
    }
    for tensor in adapter.values():
        tensor.requires_grad_(True)
    merged = {}
    for name, parameter in model.named_parameters():
        a, b = (adapter.get(name.replace("weight", f"lora_{part}.default.weight")) for part in "AB")
        merged[name] = parameter.detach() if a is None else parameter.detach() + 6 / RANK * (b @ a)

    class Merged:
        def __call__(self, tokens: Tensor):
            return torch.func.functional_call(model, merged, (tokens,))

    logprobs = unpacked_logprobs(Merged(), rollout, 1.0)
    advantages = torch.cat([torch.from_numpy(piece) for piece in rollout.advantages])
    ratio, x = (logprobs - logprobs.detach()).exp(), ref - logprobs
    loss = (-advantages * ratio + 0.1 * (x.exp() - x - 1)).mean()
    loss.backward()
    return loss.item(), {f"model.{name}": tensor.grad for name, tensor in adapter.items()}


def test_loss_and_gradient_are_those_of_the_formula_on_one_and_two_ranks_with_and_without_checkpointing(
    results, policy
):
    loss, gradients = plain_gradients(policy)
    assert len(gradients) == 2 * 14
    assert min(gradient.abs().max() for gradient in gradients.values()) > 1e-3, (
        "a gradient this small would hide a difference"
    )
    for found in results.values():
        assert len(found["gradients"]) == 8
        for metrics, ours in found["gradients"].values():
            assert metrics["policy/loss"] == pytest.approx(loss, abs=2e-6)
            assert metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
            assert ours.keys() == gradients.keys(), "nothing but A and B is trained"
            for name, gradient in ours.items():
                assert gradient.dtype == torch.float32
                torch.testing.assert_close(
                    gradient, gradients[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
                )


def test_gradients_are_reduced_in_fp32_also_where_the_first_pass_was_that_of_the_reference(results):
    """FSDP2 decides in its first pass which parameters are trained and in which dtype their gradients are reduced."""
    for found in results.values():
        first, second = found["bf16"].values()
        for name, gradient in first.items():
            assert gradient.dtype == second[name].dtype == torch.float32, name
            assert gradient.equal(second[name]), name


def test_the_reference_is_exactly_the_base_model(results):
    for found in results.values():
        for dtype in (torch.float32, torch.bfloat16):
            assert found[f"reference is the base model, {dtype}"]
            assert not found[f"reference is the policy, {dtype}"]


def test_dropout_is_drawn_again_by_seed_and_update_also_where_a_layer_is_recomputed(results):
    for found in results.values():
        cases = found["with dropout"]
        (metrics, plain), (_, other) = cases["plain"], cases["other update"]
        for name in ("plain, again", "checkpointed", "checkpointed, again"):
            assert cases[name][0] == metrics
            for key, gradient in cases[name][1].items():
                assert gradient.equal(plain[key]), (name, key)
        assert any(not gradient.equal(other[key]) for key, gradient in plain.items())


def test_with_dropout_the_ratio_is_taken_against_the_policy_without(results):
    for found in results.values():
        for name in ("plain", "checkpointed", "other update"):
            assert found["with dropout"][name][0]["policy/ratio_max"] > 1.01
            assert found["with dropout"][name][0]["policy/ratio_min"] < 0.99
            assert all(found["with dropout"][f"{name}, passes without"]), (
                "the update's dropout was still on in a later pass"
            )


def test_each_rank_draws_masks_of_its_own(policy):
    model = adapted_policy(lora_flags(str(policy), lora_dropout=0.5))
    batch = pack(make_rollout(), [0])

    def with_dropout(seed: tuple[int, ...], rank: int) -> Tensor:
        with torch.no_grad(), model.dropout_on(seed, World(rank, 2, 1, torch.device("cpu"))):
            return model(batch, 1.0)[0]

    assert with_dropout((1, 2), 0).equal(with_dropout((1, 2), 0))
    assert not with_dropout((1, 2), 0).equal(with_dropout((1, 2), 1))


def test_a_hundred_syncs_leave_the_weights_and_what_is_sent_bit_for_bit_as_they_were(results, policy):
    for found in results.values():
        for name, before in found["parameters"].items():
            assert before.equal(found["parameters after"][name]), name
        assert [name for name, _ in found["merged"]] == [name for name, _ in found["merged after"]]
        for (name, first), (_, last) in zip(found["merged"], found["merged after"], strict=True):
            assert first.equal(last), name
    for (_, alone), (_, together) in zip(results[1]["merged"], results[2]["merged"], strict=True):
        assert alone.equal(together)


def test_a_sync_holds_less_than_one_decoder_layer_in_full(results):
    held = results[2]["held in a sync, in layers"]  # on one rank there is nothing to gather
    assert 0.2 < held <= 1, "beyond the shards and the engine's own memory"


def test_the_engine_gets_the_sum_rounded_once_under_the_names_of_the_base_model(results, policy):
    weights = results[2]["parameters"]
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
    assert [name for name, _ in results[2]["merged"]] == [name for name, _ in base.named_parameters()]
    num_merged = 0
    for name, found in results[2]["merged"]:
        prefix = f"model.{name.removesuffix('weight')}"
        assert found.dtype == torch.bfloat16
        if f"{prefix}lora_A.default.weight" not in weights:
            assert found.equal(base.get_parameter(name)), name
            continue
        a, b = (weights[f"{prefix}lora_{part}.default.weight"].double() for part in "AB")
        exact = base.get_parameter(name).double() + 6 / RANK * (b @ a)
        assert ((found.double() - exact).abs() <= HALF_BF16 * exact.abs() + 1e-7).all(), name
        num_merged += 1
    assert num_merged == 14


def test_a_merge_in_fp32_leaves_the_weights_as_they_were(policy):
    """Where nothing has to be gathered or cast, what is sent could be the parameter's own memory."""
    model = adapted_policy(lora_flags(str(policy))).float()
    model.dtype = torch.float32
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    first, second = ([tensor.clone() for _, tensor in model.full_weights()] for _ in range(2))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())


def test_the_first_adapter_is_a_function_of_the_seed(policy):
    def first_adapter(seed: int) -> Tensor:
        torch.rand(seed)  # whatever was drawn before
        model = load_policy(str(policy), torch.bfloat16)
        add_adapter(model.model, Lora(lora_rank=RANK), seed, str(policy))
        return torch.cat([parameter.flatten() for parameter in model.parameters() if parameter.requires_grad])

    assert first_adapter(1).equal(first_adapter(1))
    assert not first_adapter(1).equal(first_adapter(2))


# A whole run ----------------------------------------------------------------------------------------------------------


def run_flags(policy: Path, reward: str, out_dir: Path, **changes: object) -> list[str]:
    lora = {"lora_rank": RANK, "lora_dropout": 0.05, "prompts_per_update": 8}
    return training_flags(
        policy, out_dir, reward=reward, eval_data=None, eval_every=0, eval_before_training=None, **(lora | changes)
    )


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("reward") / "thirds.py"
    file.write_text("def score(completion, answer, columns):\n    return float(len(completion) % 3 == 0)\n")
    return f"{file}:score"


@pytest.fixture(scope="module")
def finished_run(policy, reward, tmp_path_factory) -> Path:
    """Four steps of one update each on two ranks, in bf16, with dropout and a KL term."""
    out_dir = tmp_path_factory.mktemp("lora_runs") / "undisturbed"
    done = torchrun(2, "train_grpo.py", *run_flags(policy, reward, out_dir))
    assert (
        "trainable: 7,680 of 118,976 parameters: LoRA (rank 3, alpha 32, so s = 10.6667; dropout 0.05)" in done.stdout
    )
    return out_dir


@pytest.fixture(scope="module")
def trained(finished_run) -> Policy:
    """The policy of the last step as a resume has it, in fp32 arithmetic."""
    config = json.loads((finished_run / "config.json").read_text())
    args = flags(**{name: config[name] for name in ("model", "lora_rank", "lora_alpha", "lora_dropout")})
    policy = load_policy(args.model, torch.bfloat16)
    add_adapter(policy.model, take(Lora, args), args.seed, args.model)
    optimizer = torch.optim.AdamW([parameter for parameter in policy.parameters() if parameter.requires_grad])
    assert checkpoint.load(finished_run / "step_4", policy, optimizer)["prompts_drawn"] == 32
    return policy.float()


def test_sampler_and_trainer_agree_at_every_step(finished_run):
    gaps = [metrics["policy/rollout_gap_mean"] for metrics in metrics_of(finished_run).values()]
    assert len(gaps) == 4
    assert min(gaps) > 0 and max(gaps) < 0.005


def test_the_policy_starts_at_the_reference_and_leaves_it(finished_run):
    metrics = metrics_of(finished_run)
    assert metrics[1]["policy/kl_ref"] == pytest.approx(0, abs=1e-6)
    assert min(abs(metrics[step]["policy/kl_ref"]) for step in (2, 3, 4)) > 1e-4  # an estimate, which may be negative
    assert metrics[1]["policy/ratio_max"] == 1.0, "dropout in front of a B that is zero changes nothing"
    assert metrics[2]["policy/ratio_max"] > 1.001 and metrics[2]["policy/ratio_min"] < 0.999
    assert all(metrics[step]["optim/grad_norm"] > 0.01 for step in metrics)


def test_only_what_has_an_adapter_changes_and_the_checkpoint_is_the_sum_in_the_names_of_the_base_model(
    finished_run, policy
):
    found = load_file(finished_run / "final" / "model.safetensors")
    adapter = load_file(finished_run / "final" / "adapter" / "adapter_model.safetensors")
    base = load_file(policy / "model.safetensors")
    assert found.keys() == base.keys() and len(adapter) == 2 * 14
    for name, weight in base.items():
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight") for part in "AB")
        weight = weight.bfloat16()
        if a is None:
            assert found[name].equal(weight), name
            continue
        exact = weight.double() + 32 / RANK * (b.double() @ a.double())
        assert ((found[name].double() - exact).abs() <= HALF_BF16 * exact.abs() + 1e-7).all(), name
        assert not found[name].equal(weight), f"{name} was not trained"


def test_the_adapter_loads_in_peft_and_gives_the_log_probs_of_the_trainer(finished_run, trained, policy):
    base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).float()
    rollout = make_rollout()
    before = unpacked_logprobs(base, rollout, 1.0)
    model = PeftModel.from_pretrained(base, finished_run / "final" / "adapter")
    batch = pack(rollout, list(range(8)))
    with torch.no_grad():
        found, expected = unpacked_logprobs(model, rollout, 1.0), trained(batch, 1.0)[0][batch.loss_mask_N]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - before).abs().max() > 0.05, "an adapter that does nothing would go unnoticed"


def test_the_merged_policy_loads_in_transformers_and_in_vllm(finished_run, trained):
    final = finished_run / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert model.dtype == torch.bfloat16
    rollout = make_rollout()
    batch = pack(rollout, list(range(8)))
    with torch.no_grad():
        found, expected = unpacked_logprobs(model.float(), rollout, 1.0), trained(batch, 1.0)[0][batch.loss_mask_N]
        prompt = tokenizer("<user>1+2<assistant>")["input_ids"]
        logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)  # weights rounded to bf16
    for token, logprob in logprobs_in_vllm(final, prompt).items():
        assert logprob == pytest.approx(logprobs[token].item(), abs=0.03)


def test_what_is_kept_for_a_resume_is_the_adapter_and_its_optimizer_state(finished_run):
    names = FileSystemReader(finished_run / "step_4" / "trainer").read_metadata().state_dict_metadata
    parameters = {name for name in names if name.startswith("model.")}
    assert len(parameters) == 2 * 14
    assert all(".lora_A." in name or ".lora_B." in name for name in parameters)
    assert sum(name.endswith("exp_avg_sq") for name in names) == 2 * 14


def test_a_resumed_run_is_bit_for_bit_the_undisturbed_one(finished_run, policy, reward, tmp_path):
    for total_steps in (2, 4):
        torchrun(2, "train_grpo.py", *run_flags(policy, reward, tmp_path / "parts", total_steps=total_steps))
    expected, found = metrics_of(finished_run), metrics_of(tmp_path / "parts")
    for step in range(1, 5):
        without_times = [
            {k: v for k, v in run[step].items() if not k.startswith(("time/", "perf/", "memory/"))}
            for run in (expected, found)
        ]
        assert without_times[0] == without_times[1], f"step {step} differs"
    for name in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (tmp_path / "parts" / "final" / name).read_bytes() == (finished_run / "final" / name).read_bytes()


def test_a_run_of_qwen3_with_logits_in_fp32_gives_an_adapter_for_peft_and_its_sum_with_the_model(
    qwen3_policy, reward, tmp_path
):
    changes = {"lora_dropout": 0.0, "head_dtype": "float32", "gradient_checkpointing": True, "total_steps": 2}
    torchrun(2, "train_grpo.py", *run_flags(qwen3_policy, reward, tmp_path, **changes))
    metrics = metrics_of(tmp_path)
    assert max(metrics[step]["policy/rollout_gap_mean"] for step in (1, 2)) < 0.0025, "0.0036 with logits in bf16"
    assert min(metrics[step]["optim/grad_norm"] for step in (1, 2)) > 0.01
    assert metrics[1]["policy/ratio_max"] == 1.0 and abs(metrics[2]["policy/kl_ref"]) > 1e-5
    base = AutoModelForCausalLM.from_pretrained(qwen3_policy, dtype=torch.bfloat16).float()
    rollout = make_rollout()
    with torch.no_grad():
        before = unpacked_logprobs(base, rollout, 1.0)
        merged = unpacked_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "final").float(), rollout, 1.0)
        adapted = PeftModel.from_pretrained(base, tmp_path / "final" / "adapter")
        found = unpacked_logprobs(adapted, rollout, 1.0)
    torch.testing.assert_close(found, merged, atol=0.03, rtol=0)  # weights rounded to bf16
    assert (found - before).abs().max() > 0.1, "an adapter that does nothing would go unnoticed"
