"""The memory policies train the same policy: whole runs, stopped half way and continued under another one."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import flags, metrics_of, torchrun, training_flags
from plan import check_flags


def without_times(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "perf/"))}


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_offloading_changes_no_bit_also_when_a_run_continues_under_another_choice(param_dtype, policy, tmp_path):
    common = {"param_dtype": param_dtype, "eval_every": 0, "eval_before_training": None}
    torchrun(2, "train_grpo.py", *training_flags(policy, tmp_path / "whole", **common))
    offloaded = {"offload": "optimizer", "offload_reference": True}
    torchrun(2, "train_grpo.py", *training_flags(policy, tmp_path / "parts", total_steps=2, **common, **offloaded))
    torchrun(2, "train_grpo.py", *training_flags(policy, tmp_path / "parts", total_steps=4, **common, offload="all"))
    expected, found = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    for step in range(1, 5):
        assert without_times(found[step]) == without_times(expected[step]), f"step {step} differs"
        assert expected[step]["policy/rollout_gap_mean"] < 0.005
        assert expected[step]["optim/grad_norm"] > 0.01
    starts = [json.loads(line)["resumed_from"] for line in (tmp_path / "parts" / "starts.jsonl").read_text().splitlines()]
    assert starts == [0, 2]
    weights = "final/model.safetensors"
    assert (tmp_path / "parts" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (policy, tmp_path / "whole" / "final"))
    assert not any(x.equal(y) for (name, x), y in zip(before.named_parameters(), after.parameters(), strict=True) if "proj.weight" in name)


def test_combinations_that_make_no_sense_are_refused():
    for changes, message in (
        ({"param_dtype": "bfloat16", "dtype": "float32"}, "--dtype float32 computes more finely than --param_dtype bfloat16"),
        ({"offload_reference": True, "kl_coef": 0}, "--offload_reference does nothing with --kl_coef 0"),
    ):
        with pytest.raises(ValueError, match=message):
            check_flags(flags(**changes), 1)
