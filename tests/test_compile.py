"""--compile: an update is that of eager mode, whatever it goes with; a few graphs serve all layers and lengths; packed
as on GPUs a layer is one graph; a run begins as the golden curve.
"""

import re
from argparse import Namespace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import model.head
from batch import Rollout
from extras.models.compiled import compile_layers
from extras.models.experts import add_routes
from fsdp_utils import World
from helpers import made_up
from helpers.distributed import Metrics, Tensors, on_ranks, recorded, scored, weights_of
from helpers.made_up import build, flags, load_policy, make_model_of_family, make_rollout, make_vision_model
from helpers.runs import ROOT, lines, metrics_of, run_script, without_times
from model import sizes
from model.head import chunked_logprobs
from packing import pack
from test_cuda import pack_as_on_cuda
from test_main_job import POLICY, run_job
from tests.model.test_attention import random_model

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


COMPILED = {  # name -> flags
    "kernels": {},
    "all weights": {"kl_coef": 0.1, "num_iterations": 2},
    "prompts shared": {"share_prompts": True},
    "teacher": {"kl_coef": 0.5, "kl_over": "vocabulary"},
    "LoRA, recomputed": {
        "lora_rank": 3, "kl_coef": 0.1, "gradient_checkpointing": True, "communicate_once": True,
        "lora_targets": "v_proj",
    },
    "images": {"kl_coef": 0},
}  # fmt: skip


TRACED = {*COMPILED} - {"kernels"}


def compiled(world: World, path: str, vision: str) -> dict[str, object]:
    """Case -> (graphs that were compiled, update in eager mode, compiled update); "counts": those of the benchmark.

    An update: metrics, gradients, new weights. The backend of `TRACED` traces and differentiates as inductor does, and
    leaves the arithmetic to torch: their kernels would be half a minute of the C++ compiler each.
    """
    from torch._dynamo.utils import counters

    from bench_common import Trainer, flags_of
    from bench_update import count_compilations

    def train_one(args: Namespace, rollout: Rollout) -> tuple[Metrics, Tensors, Tensors]:
        policy, reference, _ = build(args, world)
        names = list(policy.state_dict())
        # Adam makes a step of a gradient that is rounding.
        result = recorded(policy, scored(rollout, policy, reference, args, world), args, world, rate=0.1)
        assert names == list(policy.state_dict()) and not any("_orig_mod" in name for name in names)
        return *result, weights_of(policy)

    torch._dynamo.config.disable = True  # as an engine on CPUs does
    lengths = np.random.default_rng(0).permutation(np.arange(2, 100, 12)).tolist()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        trainer = Trainer(flags_of(path, "--dtype", "float32", "--compile"), world)
        found = {"counts": count_compilations(trainer, 64, lengths)}
    common = {"dtype": "float32", "group_size": 2, "prompts_per_step": 4, "micro_batch_tokens": 40}
    for name, changes in COMPILED.items():
        args, rollout = flags(model=path, **common | changes), make_rollout(group_size=2)
        if name == "images":
            args = made_up.vision_flags(vision, **changes)
            rollout = made_up.vision_rollout(made_up.vision_data(args))
        eager, before = train_one(args, rollout), counters["stats"]["unique_graphs"]
        args.compile = True
        backend = "aot_eager" if name in TRACED else "inductor"
        with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
            update = train_one(args, rollout)
        found[name] = counters["stats"]["unique_graphs"] - before, eager, update
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    vision = make_vision_model(tmp_path_factory.mktemp("vision"))
    return on_ranks(1, compiled, "scripts/tiny_policy", vision)


@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_update_is_that_of_eager_mode(case, found):
    """In fp32, whose last bits differ: gradients of norm 1 within 1e-5."""
    _, eager, compiled = found[case]
    assert eager[0]["optim/grad_norm"] > 0.1
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5, abs=1e-5, nan_ok=True)
    torch.testing.assert_close(compiled[1:], eager[1:], atol=1e-5, rtol=1e-5)
    is_own = any(not gradient.equal(eager[1][name]) for name, gradient in compiled[1].items())
    assert is_own or case in TRACED, "eager mode has computed this"


def test_a_few_graphs_serve_all_layers_and_lengths(found):
    """On CPUs a layer is cut once, at its attention: a graph before it, and one after it."""
    assert found["counts"] == {"graphs": 2, "breaks": 1, "recompilations": 0}
    new = {case: found[case][0] for case in COMPILED}
    assert new["kernels"] == 2
    assert new["all weights"] == 4, "without gradients, and for the frozen reference"
    assert new["prompts shared"] == new["teacher"] == 0
    assert new["LoRA, recomputed"] >= 4 and new["images"] >= 2


@pytest.mark.parametrize("replays", [False, True], ids=["own routes", "replayed routes"])
def test_experts_compile_in_bfloat16_without_a_break(replays, tmp_path, monkeypatch):
    """Packed as on GPUs. The same as eager mode to the bit: the backend leaves the arithmetic to torch."""
    pack_as_on_cuda(monkeypatch)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    make_model_of_family(tmp_path, "qwen3_moe", num_hidden_layers=1, **EXPERTS)
    policies = [load_policy(tmp_path, torch.bfloat16) for _ in range(2)]
    compile_layers(policies[1].layers)
    torch._dynamo.reset()
    counters.clear()
    for length in range(3, 19, 2):
        rollout = make_rollout([length, 8, 5], seed=length)
        if replays:
            chosen = [np.arange(2 * n).reshape(n, 1, 2) % EXPERTS["num_experts"] for n in rollout.sequence_lengths_B]
            rollout = rollout.with_parts(routes=[each.astype(np.uint8) for each in chosen])
        batch, found = pack(rollout, [0, 1, 2]), []
        batch = add_routes(batch, rollout) if replays else batch
        for policy in policies:
            policy.zero_grad()
            logprobs = policy(batch, 1.0).logprobs_N
            logprobs.sum().backward()
            found.append([logprobs.detach(), *(parameter.grad.clone() for parameter in policy.parameters())])
        assert all(map(torch.equal, *found)), length
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


@pytest.mark.parametrize(("family", "backend", "graphs", "breaks"), [
    ("mistral", "inductor", 2, 0),  # one with gradients, one without; attention with a window is in it
    ("qwen3_5_text", "aot_eager", 6, 2),  # linear attention cuts its layers: also one before it, one after it
])  # fmt: skip
def test_the_graph_of_gpus_compiles(family, backend, graphs, breaks, tmp_path, monkeypatch):
    """In bf16, with shared prompts, around torch's varlen operator, for all lengths. Gradients differ from those of
    eager mode by at most 5 % of their norm: inductor rounds less often.
    """
    pack_as_on_cuda(monkeypatch)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    folder = random_model(tmp_path, family)
    policies = [load_policy(folder, torch.bfloat16) for _ in range(2)]
    compile_layers(policies[1].layers)
    torch._dynamo.reset()
    counters.clear()
    for length in (5, 17, 40):
        rollout, found = make_rollout([length, 8, 5, 21], seed=length, group_size=2), []
        batch = pack(rollout, [0, 1, 2, 3], 2)
        for policy in policies:
            policy.zero_grad()
            with torch.no_grad():
                policy(batch, 1.0)
            policy(batch, 1.0).logprobs_N.sum().backward()
            found.append(torch.cat([parameter.grad.float().flatten() for parameter in policy.parameters()]))
        assert (found[1] - found[0]).norm() <= 0.05 * found[0].norm(), length
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (graphs, breaks)


def test_the_head_compiles_to_one_kernel_in_each_direction(monkeypatch):
    """In bf16, with chunks of 9 and 4 tokens. Values of eager mode within 1e-5, gradients within a rounding."""
    monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", 9 * 1000)
    # What these find has no source.
    monkeypatch.setattr(torch._inductor.config, "fx_graph_cache", False)
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    torch.manual_seed(0)
    hidden, head = torch.randn(13, 16).bfloat16(), nn.Linear(16, 1000, bias=False).bfloat16()
    labels, weights, found = torch.randint(1000, (13,)), torch.randn(13), []
    for kinds in (set(), {"cpu"}):
        monkeypatch.setattr(model.head, "FUSED_ON", kinds)
        own, head.weight.grad = hidden.clone().requires_grad_(), None

        def passes(own: torch.Tensor = own) -> tuple[torch.Tensor, torch.Tensor]:
            logprobs, entropies, _ = chunked_logprobs(own, head, labels, 0.7)
            (logprobs * weights).sum().backward()
            return logprobs, entropies

        values, sources = run_and_get_code(passes)
        found.append([*values, own.grad, head.weight.grad])
    torch.testing.assert_close(found[1][:2], found[0][:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1][2:], found[0][2:], atol=2**-8, rtol=2**-7)
    assert [source.count("async_compile.cpp_pybinding(") for source in sources] == [1] * len(sources)
    # Two backwards: inductor tells whether the chunk is the first. The gradient takes the place of the logits.
    assert len(sources) <= 3 and not any(re.search(r"empty_strided_cpu\(\(\w+, 1000\)", x) for x in sources[1:])


def test_a_compiled_run_begins_as_the_golden_curve(tmp_path, found):
    """No other run compiles beside an engine, which turns compilation off in the whole process."""
    flags = ["--compile", "--stop_after", "1", "--eval_data", f"{POLICY}/heldout.jsonl#4"]
    done = run_job(run_script, tmp_path / "run", *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    step, golden = without_times(metrics_of(tmp_path / "run")[1]), lines(ROOT / "tests" / "golden_curve.jsonl")[1]
    rounding_noise = {name: step[name] for name in ["policy/rollout_temperature_r2"]}
    evaluated = {name: value for name, value in step.items() if name.startswith("eval/")}  # after the last step
    assert step == pytest.approx(golden | rounding_noise | evaluated, rel=1e-3, abs=1e-5)
    assert step != golden | evaluated, "eager mode has computed this"
