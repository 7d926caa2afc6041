"""--compile: an update is that of eager mode, whatever it goes with; a few graphs serve all layers and lengths; a run
follows the golden curve, and is the same after a kill.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import model.head
from helpers.distributed import COMPILED, on_ranks
from helpers.made_up import make_vision_model
from helpers.runs import ROOT, copy_at, lines, metrics_of, run_script, without_times
from model import sizes
from model.head import chunked_logprobs
from test_main_job import POLICY, run_job

FEW = ["--stop_after", "3", "--save_every", "2", "--eval_data", f"{POLICY}/heldout.jsonl#4"]


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory):
    """One folder for all: a kernel takes the C++ compiler half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setattr("helpers.runs.ENVIRONMENT", os.environ | {"OMP_NUM_THREADS": "1"})
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory, kernels):
    vision = make_vision_model(tmp_path_factory.mktemp("vision"))
    # Long: on a slow or busy machine the compiler takes minutes, while the other rank waits.
    arguments, patience = ("distributed:compiled", "scripts/tiny_policy", vision), {"timeout": 1500, "wait_minutes": 10}
    return {num_ranks: on_ranks(num_ranks, *arguments, **patience) for num_ranks in COMPILED}


@pytest.mark.parametrize(("num_ranks", "case"), [(n, case) for n, cases in COMPILED.items() for case in cases])
def test_a_compiled_update_is_that_of_eager_mode(num_ranks, case, found):
    """In fp32, whose last bits differ: gradients of norm 1 within 1e-5."""
    _, eager, compiled = found[num_ranks][case]
    assert eager[0]["optim/grad_norm"] > 0.1
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5, abs=1e-5, nan_ok=True)
    torch.testing.assert_close(compiled[1:], eager[1:], atol=1e-5, rtol=1e-5)
    is_own = any(not gradient.equal(eager[1][name]) for name, gradient in compiled[1].items())
    assert is_own or num_ranks == 1, "eager mode has computed this"


def test_a_few_graphs_serve_all_layers_and_lengths(found):
    """A layer is cut twice, around its attention: by how it is called and by how it calls."""
    assert found[2]["counts"] == {"graphs": 4, "breaks": 2, "recompilations": 0}
    new = {case: found[num_ranks][case][0] for num_ranks, cases in COMPILED.items() for case in cases}
    assert new["all weights"] == 8, "without gradients, and for the frozen reference"
    assert new["prompts shared"] == new["copies"] == new["teacher"] == 0
    assert new["LoRA, recomputed"] >= 8 and new["images"] >= 4


def test_the_head_compiles_to_one_kernel_in_each_direction(monkeypatch):
    """The head is one kernel forwards, and one backwards, in place. In bf16, with chunks of 9 and 4 tokens. Values
    of eager mode within 1e-5, gradients within a rounding.
    """
    monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", 9 * 1000)
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


def test_a_compiled_run_follows_the_golden_curve(tmp_path):
    """A compiled run follows the golden curve, and is the same after a kill. Its first three steps. Step 1 within
    the tolerance of test_main_job.py; the last from a checkpoint of step 2.
    """

    def run(folder: Path) -> dict[int, dict[str, float]]:
        done = run_job(run_script, folder, "--compile", *FEW, OMP_NUM_THREADS=1)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return {step: without_times(metrics) for step, metrics in metrics_of(folder).items()}

    undisturbed, golden = run(tmp_path / "run"), lines(ROOT / "tests" / "golden_curve.jsonl")
    rounding_noise = {name: undisturbed[1][name] for name in ["policy/rollout_temperature_r2"]}
    assert undisturbed[1] == pytest.approx(golden[1] | rounding_noise, rel=1e-3, abs=1e-5)
    assert undisturbed[1] != golden[1], "eager mode has computed this"
    for name in ("reward/mean", "completion/tokens_mean", "policy/entropy"):
        drift = max(abs(later[name] - line[name]) for line, later in zip(golden[1:], golden[3:], strict=False))
        assert [undisturbed[step][name] for step in (2, 3)] == pytest.approx(
            [golden[step][name] for step in (2, 3)], abs=drift
        ), name
    resumed = copy_at(2, tmp_path / "run", tmp_path / "resumed")
    assert run(resumed) == undisturbed
    weights = [folder / "final" / "model.safetensors" for folder in (tmp_path / "run", resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
