"""minimal.py is the loop of train_grpo.py: the same rewards, losses and gradient norms, to the last bit."""

import json
import re
import sys

import pytest

from helpers.runs import metrics_of, run_ranks
from minimal import main
from test_core import FLAGS


def test_same_numbers(tmp_path):
    """Two steps of two updates, with a reference and a learning rate that falls; on two ranks."""
    outputs = {"train_grpo.py": f"{tmp_path}/run", "minimal.py": "-"}
    trained, minimal = (run_ranks(2, name, [*FLAGS, "--out_dir", output]) for name, output in outputs.items())
    assert (trained.returncode, minimal.returncode) == (0, 0), trained.stderr + minimal.stderr
    metrics = metrics_of(tmp_path / "run")
    expected = [[metrics[i][name] for name in ("reward/mean", "policy/loss", "optim/grad_norm")] for i in (1, 2)]
    form = r"^step \d/6 \| reward (\S+) \| advantage \S+ \| loss (\S+) \| grad (\S+) \| gap \S+$"
    lines = re.findall(form, minimal.stdout, flags=re.MULTILINE)
    assert [[json.loads(number) for number in line] for line in lines] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("flags", ["--dynamic_sampling correct", "--partial_rollouts", "--shuffle off"])
def test_left_out(flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["minimal.py", *FLAGS, "--out_dir", "-", *flags.split()])
    with pytest.raises(SystemExit, match=rf"minimal.py leaves out {flags.split()[0]}; start train_grpo.py"):
        main()
