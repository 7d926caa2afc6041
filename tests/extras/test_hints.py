"""Hints that a step makes of its own completions: who gets which, in which words; and their loss, by the definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from algorithm import algorithm_of
from batch import Rollout, Row
from extras.teacher.hints import Hints
from flags import PromptFormat
from grading import Grade
from helpers import made_up
from helpers.distributed import kept_gradients
from helpers.made_up import ALONE, flags, load_policy, make_rollout, train_once, unpacked_distributions, whole_update
from update import add_reference

TOKENIZER = made_up.byte_tokenizer()
TOKENIZER.chat_template = f"<bos>{TOKENIZER.chat_template}"
BEHIND = "\n\nCorrectly solve the original question."
SOLUTION = "\nCorrect solution:\n\n{}" + BEHIND
FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{}" + BEHIND


def graded(rewards: list[int], texts: list[str], said: list[str], group_size: int = 4) -> Rollout:
    rollout = make_rollout([3] * len(rewards), group_size=group_size)
    rows = [Row(made_up.user(f"{i}?"), "", {}, "") for i in range(len(rewards) // group_size)]
    pairs = zip(rewards, said, strict=True)
    grades = [Grade(x, "ok", {"score": x}, feedback=feedback) for x, feedback in pairs]
    return replace(rollout, rows=[rows[b // group_size] for b in range(len(rewards))], texts=texts, grades=grades)


def hinted(names: str, rollout: Rollout, most: int = 1000) -> tuple[list[str | None], dict[str, float]]:
    """What the reference reads behind the question, None where there is no hint; and the metrics."""
    made, metrics = Hints(tuple(names.split(",")), PromptFormat(max_prompt_tokens=most), TOKENIZER).add(rollout, 4)
    found = []
    for b, row in enumerate(made.rows):
        assert (len(row.hinted_ids) > 0) == made.parts["is_hinted"][b] and row.ids is rollout.rows[b].ids
        text = None if not len(row.hinted_ids) else TOKENIZER.decode(row.hinted_ids)
        found.append(text and text.removeprefix(f"<bos>[user]{b // 4}?").removesuffix("[assistant]"))
    return found, metrics


def test_a_hint_is_another_completion_or_what_the_reward_says():
    """The first correct one of the group, never itself, without its thought; or the feedback; or none."""
    texts = ["a", "<think>b</think> c{}", "d", "e", *"fghi", "j", "k", "l<bos>", "m"]
    said = ["no a", "", " ", "no e", "no f", *[""] * 7]
    rollout = graded([0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0], texts, said)
    c, e, feedback = SOLUTION.format("c{}"), SOLUTION.format("e"), FEEDBACK.format
    alone = [None] * 4  # a completion that holds what only the template writes is no hint
    assert hinted("@group", rollout) == ([c, e, c, c, *[None] * 4, *alone], {"distill/frac_hinted": 4 / 12})
    says = [feedback("no a"), *[None] * 3, feedback("no f"), *[None] * 3, *alone]  # e is correct
    assert hinted("@feedback", rollout)[0] == says
    assert hinted("@group,@feedback", rollout)[0] == [c, e, c, c, *says[4:]]
    assert hinted("@feedback,@group", rollout)[0] == [says[0], e, c, c, *says[4:]]
    length = len(TOKENIZER(f"[user]0?{c}[assistant]")["input_ids"])
    assert hinted("@group", rollout, length - 1)[0] == [None, e, *[None] * 10], "the others are too long by one token"


CASES = {
    "SDPO": {"advantage": "zero", "kl_over": "vocabulary", "kl_direction": "jsd"},
    "each alike": {"advantage": "zero", "kl_estimator": "k2", "loss_aggregation": "seq_mean_token_mean"},
    "beside a reward, prompts shared": {"kl_estimator": "k1", "share_prompts": True, "micro_batch_tokens": 40},
}


@pytest.mark.parametrize("case", CASES)
def test_without_a_hint_a_completion_has_no_kl(case, policy, qwen3_policy):
    """Loss and gradient are those of the definition: a mean over the completions that have a hint. To 2e-6."""
    rng, lengths, has_hint = np.random.default_rng(1), [5, 7, 3, 6], [True, False, True, True]
    rollout = make_rollout(lengths, group_size=2)
    rows = [Row([], "", {}, "", ids=row.ids) for row in rollout.rows]
    for b in np.flatnonzero(has_hint):
        rows[b] = replace(rows[b], hinted_ids=np.append(rows[b].ids, rng.integers(0, 64, 2 + b)))
    rollout = replace(rollout, rows=rows).with_parts(is_hinted=has_hint)
    if "advantage" in CASES[case]:
        rollout = replace(rollout, advantages=[np.zeros(n, np.float32) for n in lengths])
    args = flags(model=policy, kl_coef=0.5, group_size=2, prompts_per_step=2, max_grad_norm=1e9, **CASES[case])
    model, reference = load_policy(policy), load_policy(qwen3_policy)
    update = add_reference(whole_update(rollout, args, model, ALONE), reference, algorithm_of(args))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gradients = kept_gradients(model, optimizer)
    metrics = train_once(model, optimizer, update, args)

    plain = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(qwen3_policy, dtype=torch.float32)
    log_p, log_q = unpacked_distributions(plain, rollout, 1.0), unpacked_distributions(teacher, rollout.hinted(), 1.0)
    at_labels = torch.arange(sum(lengths)), torch.from_numpy(np.concatenate(rollout.completions)).long()
    log_q, p, q = log_q.detach(), log_p[at_labels], log_q[at_labels].detach()
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()
    jsd = 0.5 * (log_p.exp() * (log_p - log_m)).sum(-1) + 0.5 * (log_q.exp() * (log_q - log_m)).sum(-1)
    kls = {"SDPO": jsd, "each alike": (p - q) ** 2 / 2}.get(case, p - q).split(lengths)
    with_hint = [kl for kl, has in zip(kls, has_hint, strict=True) if has]
    kl = torch.stack([kl.mean() for kl in with_hint]) if case == "each alike" else torch.cat(with_hint)
    losses = -(p - p.detach()).exp() * torch.from_numpy(np.concatenate(rollout.advantages))
    wanted = losses.mean() + 0.5 * kl.mean()
    wanted.backward()
    assert metrics["policy/loss"] == pytest.approx(wanted.item(), abs=2e-6)
    assert metrics["optim/grad_norm"] > 0.01
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[f"model.{name}"], parameter.grad, atol=2e-6, rtol=1e-4)


def test_a_step_without_a_hint_teaches_nothing(policy):
    args = flags(model=policy, kl_coef=0.5, advantage="zero", kl_over="vocabulary", prompts_per_step=8, group_size=1)
    rollout = make_rollout()
    rollout = replace(rollout, advantages=[0 * each for each in rollout.advantages]).with_parts(is_hinted=[False] * 8)
    model = load_policy(policy)
    update = add_reference(whole_update(rollout, args, model, ALONE), load_policy(policy), algorithm_of(args))
    metrics = train_once(model, torch.optim.SGD(model.parameters()), update, args)
    assert metrics["optim/grad_norm"] == metrics["policy/loss"] == metrics["distill/kl"] == 0
