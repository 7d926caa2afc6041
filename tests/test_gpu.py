"""What only CUDA has (varlen attention, the engine's sleep and wake, offloading), or has other kernels for there.

Skipped without a GPU. With DEVICE = "cpu" the runs below `trained` and the routes run on a CPU, too.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_utils import World
from gate.machine import check_alignment
from helpers.distributed import GAP, Trial, on_ranks
from helpers.made_up import RAGGED, load_policy, make_hybrid, make_model_of_family, make_rollout
from helpers.runs import ENVIRONMENT, NO_EVAL, copy_at, metrics_of, torchrun, training_flags, without_times
from model.head import chunked_logprobs
from packing import pack
from test_rollout import samples
from tests.extras.test_router_replay import RATE, SAMPLING, SIZES, begin, replayed
from tests.model.test_memory_policies import check_same_training, memory_policies
from update import with_advantages

DEVICE = "cuda"
IS_MISSING = DEVICE == "cuda" and not torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(IS_MISSING, reason="needs a CUDA device")]
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
THREE_STEPS = NO_EVAL | {"total_steps": 3}


@pytest.fixture(autouse=True)
def one_visible_gpu(monkeypatch):
    """The programs started here have one rank, and a start that leaves GPUs idle is refused."""
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.parametrize("group_size", [1, 16])
def test_varlen_attention_agrees_with_the_cpu_path(group_size, policy):
    """Also where completions share their prompts, which needs a causal mask that ends with the last key. bf16 on the
    GPU against fp32 on the CPU: log-probs within 0.05, the gradients' cosine above 0.999.
    """
    check_alignment(torch.device(DEVICE))
    rollout, gradients, logprobs = make_rollout(RAGGED * 4, prompt_length=50, group_size=16), [], []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16)):
        model = load_policy(str(policy), dtype).to(device)
        batch = with_advantages(rollout, pack(rollout, list(range(32)), group_size)).to(torch.device(device))
        found = model(batch, 1.0)[0]
        (found * batch.advantages_N)[batch.loss_mask_N].sum().backward()
        logprobs.append(found.detach().float().cpu())
        gradients.append(torch.cat([p.grad.float().cpu().flatten() for p in model.parameters()]))
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=0.05, rtol=0)
    assert torch.cosine_similarity(gradients[0], gradients[1], dim=0) > 0.999


def test_fp32_logits_on_a_gpu_are_those_of_an_fp64_head():
    torch.manual_seed(0)
    hidden, head = torch.randn(40, 512), nn.Linear(512, 3000, bias=False)
    labels, exact = torch.randint(3000, (40,)), (hidden.bfloat16().double() @ head.weight.bfloat16().double().T)
    on_gpu = hidden.bfloat16().to(DEVICE), head.bfloat16().to(DEVICE), labels.to(DEVICE)
    found = chunked_logprobs(*on_gpu, 1.0, head_dtype=torch.float32).logprobs_N
    wanted = exact.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(found.double().cpu(), wanted, atol=1e-4, rtol=0)


def test_the_engine_agrees_with_the_trainer_and_follows_a_sync(policy):
    found = on_ranks(1, samples, policy, "bfloat16", "bfloat16")
    assert max(found["gap_before"], found["gap_after"]) < 0.005
    assert found["gap_of_stale_engine"] > 4 * found["gap_after"]


def test_the_engine_returns_the_routes_that_the_trainer_replays(tmp_path):
    """By vLLM's own return of them, with CUDA graphs, in bf16. A sequence of n tokens has n - 1; half of the prompts
    are longer than a block of the cache, where their completions find them. Wrong experts are another policy.
    """
    make_model_of_family(tmp_path, "qwen3_moe", **EXPERTS)
    found = on_ranks(1, replayed, tmp_path, "bfloat16")
    shapes = [(each.shape, each.dtype) for each in found["routes"]]
    assert shapes == [((length, 2, 2), np.uint8) for length in found["lengths"]]
    assert found["clean"] < 1.2 * found["clean, free"] and found["clean"] < 0.01 < found["wrong"] / 3
    # A token ends half of the completions: the cache is emptied, with nothing in flight that still writes routes.
    found = on_ranks(1, stopped, tmp_path, "bfloat16")
    assert all(0.1 < share < 0.9 for share in found["ended"])
    assert max(found["gaps"]) < 0.01


def stopped(world: World, path: str, dtype: str) -> dict[str, list[float]]:
    """Three steps in which a token that half of the completions draw ends them: the shares so ended, and gaps.

    The last completion of a call may end so, while the engine prepares one token more.
    """
    trial = Trial(world, path, **SIZES, dtype=dtype)
    rows, engine = begin(trial), trial.engine
    drawn = [set(completion.tolist()) for completion in engine.sample(rows, SAMPLING, (1, 0)).completions]
    shares = {token: np.mean([token in each for each in drawn]) for token in set.union(*drawn)}
    engine.stop_ids = [min(shares, key=lambda token: abs(shares[token] - 0.5))]
    found: dict[str, list[float]] = {"ended": [], "gaps": []}
    for step in range(3):
        rollout = engine.sample(rows, SAMPLING, (1, step))
        found["ended"].append(1 - rollout.is_truncated_B.mean().item())
        found["gaps"].append(trial.train(rollout, rate=RATE)[GAP])
        engine.sync(trial.policy.full_weights())
    engine.close()
    return found


def trained(policy, out_dir, **changes) -> dict:
    torchrun(1, "train_grpo.py", *training_flags(policy, out_dir, gpu_memory_utilization=0.3, **changes))
    return metrics_of(out_dir)


def test_communicate_once_and_share_prompts_train_the_same(policy, tmp_path):
    """Losses within 0.02 of the plain run's: bf16 arithmetic, in other kernels. The engine sleeps and wakes twice."""
    plain = trained(policy, tmp_path / "plain", **THREE_STEPS, gradient_checkpointing=True)
    faster = THREE_STEPS | {"gradient_checkpointing": True, "communicate_once": True, "share_prompts": True}
    found = trained(policy, tmp_path / "fast", **faster)
    assert found[1]["policy/loss"] == pytest.approx(plain[1]["policy/loss"], abs=0.02)
    assert max(metrics["policy/rollout_gap_mean"] for run in (plain, found) for metrics in run.values()) < 0.005


@pytest.mark.parametrize(("family", "changes"), [
    ("experts", {}), ("experts", {"router_replay": True, "gradient_checkpointing": True}),
    ("experts", {"lora_rank": 4}), ("dense", {"lora_rank": 4, "gradient_checkpointing": True}),
    ("hybrid", {"kl_coef": 0.01}), ("windows", {"share_prompts": True}),
])  # fmt: skip
def test_engine_and_trainer_agree_on_other_layers(family, changes, policy, tmp_path):
    """In bf16, in three steps with a sleep, a wake and a sync between them. Windows are shorter than the sequences."""
    model = policy if family == "dense" else tmp_path / "model"
    if family == "experts":
        make_model_of_family(model, "qwen3_moe", **EXPERTS)
    elif family == "hybrid":
        make_hybrid(model)
    elif family == "windows":
        make_model_of_family(model, "mistral", sliding_window=5)
    flags = THREE_STEPS | {"train_data": policy / "train.jsonl", "save_every": 0, "dtype": "bfloat16"}
    flags |= {"reward": f"{tmp_path}/reward.py:score"}
    (tmp_path / "reward.py").write_text("def score(completion, answer, columns):\n    return len(completion) / 10\n")
    found = trained(model, tmp_path / "run", **flags | changes)
    assert sorted(found) == [1, 2, 3]
    assert max(metrics["policy/rollout_gap_mean"] for metrics in found.values()) < 0.01
    assert all(0 < metrics["optim/grad_norm"] < 1e3 for metrics in found.values())


def test_a_run_goes_on_from_its_checkpoint(policy, tmp_path):
    """A run whose last two steps are lost makes them again: on a GPU up to the order in which kernels add."""
    whole = trained(policy, tmp_path / "whole")
    resumed = trained(policy, copy_at(2, tmp_path / "whole", tmp_path / "resumed"))
    for step in (3, 4):
        for name in ("policy/loss", "optim/grad_norm", "policy/rollout_gap_mean"):
            assert resumed[step][name] == pytest.approx(whole[step][name], rel=0.05, abs=0.02), (step, name)
        assert DEVICE == "cuda" or without_times(resumed[step]) == without_times(whole[step])


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_offloading_trains_the_same_policy(param_dtype, policy):
    """State that streams through the GPU changes no bit; updates on the host are made by another kernel."""
    results = on_ranks(1, memory_policies, policy)
    resident, streamed, on_host = (
        results[f"--param_dtype {param_dtype} --offload {words}"][-1]
        for words in ("none", "optimizer", "all --offload_reference")
    )
    torch.testing.assert_close(streamed, resident, atol=0, rtol=0)
    check_same_training(on_host, resident)
