"""The choices of the algorithm: names, flags without effect, and functions of the user's own."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from algorithm import NAMES, algorithm_of, choose
from command_line import choices_in_words, first_sentence, parse_flags
from gate.checks import check_flags
from gate.choices import check_choices
from gate.describe import describe_algorithm
from grpo import Algorithm, Groups, Tokens, as_loss
from helpers.made_up import flags


def checked(given: str) -> Namespace:
    args = parse_flags(f"--model m --train_data d --out_dir o --total_steps 10 {given}".split())
    check_flags(args, num_ranks=1)
    check_choices(args)
    return args


def algorithm_with(given: str) -> Algorithm:
    return algorithm_of(checked(given))


OWN = '''"""Losses of one's own."""
from __future__ import annotations
import torch
from grpo import Loss, token_ratio
from scale_of_loss import SCALE

def good(t, *, clip_low, power=2, scale=SCALE):
    """-A x logprob^power. The rest is not said."""
    return Loss(-scale * t.advantages * t.logprobs**power - clip_low, token_ratio(t.logprobs, t.old_logprobs))

def sized(t, *, clip_low, size): return t.logprobs
def tensor(t): return -t.advantages * t.logprobs
def of_completions(g, *, advantage_eps): return g.rewards_PG * 2 + advantage_eps
def of_tokens(g): return g.returns_T * 3
def squared(x, *, kl_clamp): return x**2 * kl_clamp
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch) -> str:
    # In a process of its own each test would find its own neighbour.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("grading.user_code.FOLDERS", set())
    monkeypatch.delitem(sys.modules, "scale_of_loss", raising=False)
    (tmp_path / "my_loss.py").write_text(OWN)
    (tmp_path / "scale_of_loss.py").write_text("SCALE = 2.0\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "dot.py").write_text("from .my_loss import good\n")
    return str(tmp_path / "my_loss.py")


@pytest.mark.parametrize(("given", "said"), [
    ("--advantage rloo --advantage_ddof 0", "--advantage_ddof 0 has no effect .*leave it out"),
    ("--policy_loss sapo --clip_high 0.28", "--clip_high 0.28 .*cispo"),
    ("--advantage ppo", "--advantage ppo: use grpo, .*, FILE.py:FUNCTION"),
    ("--loss_aggregation my.py:mean", "--loss_aggregation my.py:mean: use token_mean, "),
    ("--policy_loss broken.py:f", "broken.py:f cannot be loaded: ModuleNotFoundError.*no_such_module"),
    ("--policy_loss leaves.py:f", "leaves.py:f cannot be loaded: SystemExit: 3"),
    ("--policy_loss my_loss.py:f", "my_loss.py has no function or class 'f'; it has good, sized, .*, squared.$"),
    ("--policy_loss kl_cov:part=0.1", "kl_cov:part=...: what can be set here is share, penalty"),
    ("--policy_loss kl_cov:share=much", "'much' is no number; needed is NAME:PARAMETER=NUMBER"),
    ("--policy_loss gspo:clip_low=0.1", "gspo:clip_low=...: .* is none; flags are set as flags"),
    ("--policy_loss my_loss.py:sized", "sized: its parameter size is no flag; give it a default"),
    ("--policy_loss my_loss.py:good:power=1,clip_low=1", "clip_low=...: what can be set here is power, scale; flags"),
    ("--optimizer adam", "--optimizer adam: use adamw, FILE.py:FUNCTION"),
    ("--optimizer my_loss.py:none", "my_loss.py has no function or class 'none'; it has good"),
    ("--after_step my_loss.py", "my_loss.py: use FILE.py:FUNCTION"),
    ("--after_step dot.py:hook", "dot.py is in no package: import its neighbours without a dot"),
])  # fmt: skip
def test_a_missing_useless_or_failing_choice_is_refused(given, said, own, monkeypatch):
    monkeypatch.chdir(Path(own).parent)
    with pytest.raises(ValueError, match=said) as error:
        algorithm_with(given)
    text = str(error.value)
    is_quoted = "cannot be loaded: " in text  # the error of their code stands last
    assert "\n" not in text and (is_quoted or text.endswith((".", ",...")))


def test_the_log_states_every_choice_in_words_of_a_whole_sentence():
    given = checked(
        "--advantage reinforce++ --policy_loss cispo --clip_low 1 --clip_high 4 --kl_coef 0.01 --kl_in reward "
        "--loss_aggregation seq_mean_token_sum_norm --max_completion_tokens 77 --rollout_correction token_mask"
    )
    said, by_default = describe_algorithm(given), describe_algorithm(checked(""))
    chosen = "--loss_aggregation seq_mean_token_sum_norm --max_completion_tokens 77"
    assert f" {chosen}: {first_sentence(choose(*chosen.split()[:2]).__doc__)}; " in said
    for name in ("--kl_estimator k3 --kl_clamp 10.0: ", "--rollout_correction token_mask: "):
        assert name in said and name.split()[0] not in by_default
    assert "--kl_coef 0.01 --kl_in reward" in said
    for sentence in (sentence for flag in NAMES for sentence in choices_in_words(flag)):
        assert len(sentence) > 15 and sentence.count("(") == sentence.count(")"), sentence


def test_the_name_of_a_function_sets_what_is_no_flag(own):
    given = "--policy_loss kl_cov:share=0.5,penalty=2 --advantage pass_at_k:k=4"
    algorithm = algorithm_with(given)
    assert algorithm.policy_loss.keywords == {"share": 0.5, "penalty": 2} and algorithm.advantage.keywords == {"k": 4}
    assert "--policy_loss kl_cov:share=0.5,penalty=2: " in describe_algorithm(checked(given))
    assert algorithm_with(f"--policy_loss {own}:good:power=3").policy_loss.keywords["power"] == 3


def test_a_users_loss_takes_flags_and_may_return_values_alone(own):
    logprobs, old, rollout = -torch.arange(1.0, 10.0).view(3, 3)
    t = Tokens(
        logprobs=logprobs.requires_grad_(), old_logprobs=old, rollout_logprobs=rollout, mask=torch.ones(3).bool(),
        sequence_ids=torch.zeros(3).long(), advantages=torch.tensor([1.0, -1.0, 0.5]),
    )  # fmt: skip
    given = f"--policy_loss {own}:good --clip_low 0.25"
    algorithm = algorithm_with(given)
    assert f"{given}: -A x logprob^power;" in describe_algorithm(checked(given))
    expected = [-2 * a * x**2 - 0.25 for a, x in zip([1, -1, 0.5], [-1, -2, -3], strict=True)]
    for chosen, values in ((algorithm, expected), (algorithm_with(f"--policy_loss {own}:tensor"), [1, -2, 1.5])):
        loss = as_loss(chosen.policy_loss(t), t)
        assert loss.per_token.tolist() == values and not loss.is_low.any() and not loss.is_high.any()
        assert loss.ratio.tolist() == pytest.approx([20.085537] * 3), "the token ratio, for the metrics"


def test_a_users_advantage_is_of_completions_or_of_tokens(own):
    lengths_B, returns_T, mask_T = torch.tensor([2, 1]), torch.tensor([1.0, 1.0, 0.0]), torch.ones(3).bool()
    graded = Groups(rewards_PG=torch.tensor([[1.0, 0.0]]), returns_T=returns_T, lengths_B=lengths_B, mask_T=mask_T)
    # A flag that only a function of one's own uses has an effect.
    for function, expected in (("of_completions --advantage_eps 0.5", [[2.5, 0.5]]), ("of_tokens", [3, 3, 0])):
        assert algorithm_with(f"--advantage {own}:{function}").advantage(graded).tolist() == expected
    squared = algorithm_of(flags(kl_coef=0.1, kl_estimator=f"{own}:squared", kl_clamp=5)).kl_estimator
    assert squared(torch.tensor([2.0])).tolist() == [20]
