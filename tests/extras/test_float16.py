"""--dtype float16: the scale of the loss, in a guard and in a run; what is refused."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import model as vllm_model

from extras.precision.float16 import GROWTH, ScalingGuard
from gate.checks import check_flags
from gate.models import OVERFLOWING, check_compile, check_range_of
from helpers.made_up import ALONE, flags
from helpers.runs import NO_EVAL, copy_at, metrics_of, torchrun, training_flags, without_times
from runtime.rank import RunError
from test_bad_updates import GOOD, NAN, at

STEEP = GOOD | {"optim/grad_norm": math.inf}
OWN_LOSS = """
def steep(t):
    \"\"\"Dr. GRPO's without a clip; in step 2 its gradient is beyond float16, but not beyond float32.\"\"\"
    return -t.advantages * (t.logprobs - t.old_logprobs).exp() * (1e6 if t.step == 2 else 1)
"""


def test_the_scale_halves_at_an_overflow_and_doubles_after_400_updates():
    guard = ScalingGuard(ALONE)
    for _ in range(5):  # more in a row than bad updates may be
        assert guard.judge(STEEP, at(2))["optim/skipped_updates"] == 1
    assert guard.loss_scale == 2.0**11 and guard.num_skipped == 0 and not guard.is_broken
    for _ in range(GROWTH - 1):
        assert guard.judge(GOOD, at(3))["optim/skipped_updates"] == 0
    assert guard.loss_scale == 2.0**11
    resumed = ScalingGuard(ALONE)
    resumed.restore(json.loads(json.dumps(guard.state())))
    assert resumed.judge(GOOD, at(3))["optim/loss_scale"] == 2.0**11 and resumed.loss_scale == 2.0**12


def test_a_loss_that_is_not_finite_and_an_overflow_without_a_scale_are_bad_updates():
    for guard, metrics in ((ScalingGuard(ALONE), NAN), (ScalingGuard(ALONE, loss_scale=1.0), STEEP)):
        for _ in range(3):
            assert guard.judge(metrics, at(2))["optim/skipped_updates"] == 1
        with pytest.raises(RunError, match="is left out, as 3 before it"):
            guard.judge(metrics, at(2))


def test_an_overflow_leaves_the_weights_and_a_resume_keeps_the_scale(policy, reward, tmp_path):
    """On two ranks, an update a step, each step saved."""
    (tmp_path / "steep.py").write_text(OWN_LOSS)
    own = {"policy_loss": f"{tmp_path}/steep.py:steep", "reward": reward}
    changes = own | {"dtype": "float16", "prompts_per_update": 8, "save_every": 1}
    changes |= {"max_rollout_gap": 0.05, "keep_checkpoints": 0, "kl_coef": 0, **NO_EVAL}
    given = training_flags(policy, tmp_path / "run", **changes)
    torchrun(2, "train_grpo.py", *given)
    lines = metrics_of(tmp_path / "run")
    assert [lines[step]["optim/loss_scale"] for step in (1, 2, 3, 4)] == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
    assert [lines[step]["optim/skipped_updates"] for step in (1, 2, 3, 4)] == [0, 1, 0, 0]
    first, second, third = (
        (tmp_path / "run" / f"step_{step}" / "model.safetensors").read_bytes() for step in (1, 2, 3)
    )
    assert first == second != third
    states = [json.loads((tmp_path / "run" / f"step_{n}/trainer/progress.json").read_text()) for n in (2, 4)]
    assert [(state["loss_scale"], state["finite_in_a_row"]) for state in states] == [(2.0**15, 0), (2.0**15, 2)]

    copy = copy_at(2, tmp_path / "run", tmp_path / "copy")
    torchrun(2, "train_grpo.py", *training_flags(policy, copy, **changes))
    for step in (3, 4):
        assert without_times(metrics_of(copy)[step]) == without_times(lines[step])
        for name in ("model.safetensors", "trainer/progress.json"):
            assert (copy / f"step_{step}" / name).read_bytes() == (tmp_path / f"run/step_{step}" / name).read_bytes()

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert model.dtype == torch.float16 and math.isfinite(model(torch.tensor([[1, 2, 3]])).logits.sum().item())


def test_what_float16_cannot_do_is_refused():
    assert set(OVERFLOWING) == set(vllm_model._FLOAT16_NOT_SUPPORTED_MODELS)
    with pytest.raises(ValueError, match=r"--model m \(gemma3_text\) overflows in it.*; use --dtype bfloat16\.$"):
        check_range_of("--model m", AutoConfig.for_model("gemma3_text"), "float16")
    check_range_of("--model m", AutoConfig.for_model("gemma3_text"), "bfloat16")
    check_range_of("--model m", AutoConfig.for_model("qwen2"), "float16")
    with pytest.raises(ValueError, match="--compile with --dtype float16: the experts"):
        check_compile("m", AutoConfig.for_model("qwen3_moe"), "float16")
    for other in ({"param_dtype": "bfloat16"}, {"head_dtype": "bfloat16"}, {"router_replay": True}):
        with pytest.raises(ValueError, match="--dtype float16: .*; leave one of them out"):
            check_flags(flags(dtype="float16", **other), num_ranks=1)
