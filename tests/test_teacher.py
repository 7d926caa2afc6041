"""A reference that is another model, reads another prompt or hints of the step, or is followed over the vocabulary."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from algorithm import algorithm_of
from batch import NO_IDS, Rollout, Row
from command_line import parse_flags
from extras.teacher.divergences import forward, jsd, reverse
from extras.teacher.head import Teacher, distilled_logprobs
from extras.teacher.hints import Hints
from extras.teacher.vocabulary import run
from flags import Grading, PromptFormat, Sampling
from fsdp_utils import World, full_tensors
from gate.inputs import Inputs, check_vocabulary
from grading import NOT_GRADED, Grade
from helpers import made_up
from helpers.distributed import Result, kept_gradients, on_ranks, recorded, scored, sharded
from helpers.made_up import ALONE, RAGGED, build, flags, load_policy, make_rollout, policy_of, train_once, whole_update
from helpers.runs import NO_EVAL, training_flags
from model import sizes
from model.head import HeadSettings
from reward import Grader
from schedule import make_plan
from step_metrics import rollout_metrics
from update import add_reference

WHOLE, TINY = {"kl_over": "vocabulary"}, {"micro_batch_tokens": 24}
LORA, HINTS = WHOLE | {"lora_rank": 3}, WHOLE | {"hint_column": "@group"}
TAUGHT = {  # name -> flags
    "sampled, with hints": {"kl_estimator": "k2"} | TINY,
    "hints of the step": HINTS | TINY,
    "hints of the step, shared": HINTS | {"share_prompts": True},
    "whole": WHOLE,
    "small, on the host": WHOLE | TINY | {"offload_reference": True},
    "shared, communicates once": WHOLE | {"share_prompts": True, "communicate_once": True},
    "LoRA": LORA,
    "LoRA, small": LORA | TINY,
    "LoRA, small, communicates once": LORA | TINY | {"communicate_once": True},
    "LoRA, shared, recomputed": LORA | {"share_prompts": True, "gradient_checkpointing": True},
}


def with_hints(rollout: Rollout) -> Rollout:
    """Two completions to a prompt; hints of different lengths."""
    rng, ids = np.random.default_rng(3), [row.ids for row in rollout.rows[::2]]
    hinted = [np.append(each, rng.integers(0, 64, 2 + i)) for i, each in enumerate(ids)]
    rows = [Row([], "", {}, "", ids=each, hinted_ids=more) for each, more in zip(ids, hinted, strict=True)]
    return replace(rollout, rows=[row for row in rows for _ in range(2)])


def taught(world: World, path: str, teacher: str) -> dict[str, Result]:
    """Case -> result. Eight completions, of which a rank may have none in a micro-batch."""
    found = {}
    for name, changes in TAUGHT.items():
        args = flags(model=path, max_grad_norm=1e9, group_size=2, kl_coef=0.5, prompts_per_step=4, **changes)
        reference = policy = sharded(policy_of(args), world, stays_gathered=args.communicate_once)
        if not args.lora_rank:
            own = load_policy(teacher).requires_grad_(False)
            reference = sharded(own, world, on_host=args.offload_reference)
        rollout = with_hints(make_rollout(group_size=2))
        if args.hint_column:  # every third completion has none
            without = range(1, len(rollout.rows), 3)
            rows = [replace(row, hinted_ids=NO_IDS) if b in without else row for b, row in enumerate(rollout.rows)]
            rollout = replace(rollout, rows=rows).with_parts(is_hinted=[b not in without for b in range(len(rows))])
        update = add_reference(whole_update(rollout, args, policy, world), reference, algorithm_of(args))
        found[name] = recorded(policy, update, args, world)
    return found


@pytest.fixture(scope="module")
def teachers(untied_qwen3_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All have the vocabulary of the fixture `policy`."""
    hybrid, granite = map(tmp_path_factory.mktemp, ("hybrid", "granite"))
    made_up.make_hybrid(hybrid)  # a Qwen3.5, which has linear attention
    made_up.make_model_of_family(granite, "granite", logits_scaling=8.0)  # divides its logits
    return {"another": untied_qwen3_policy, "hybrid": hybrid, "granite": granite}


def in_order(values: list[tuple[object, Tensor]], num_sequences: int) -> Tensor:
    """Values at the positions of batches -> those of the completion tokens, sequence after sequence."""
    found = {}
    for batch, values_N in values:
        starts = np.cumsum([0, *batch.lengths_S])
        for x, start in zip(batch.segments_S, starts, strict=False):
            own = slice(start, start + x.length)
            found[x.index] = values_N[own][batch.loss_mask_N[own]]
    return torch.cat([found[b] for b in range(num_sequences)])


FORMS = {"whole": {}, "small": {"micro_batch_tokens": 24}, "shared": {"share_prompts": True}}


@pytest.mark.parametrize(("kind", "form", "direction"), [
    *product(["another"], FORMS, ["reverse", "forward"]),
    ("hybrid", "shared", "reverse"), ("granite", "small", "reverse"),
])  # fmt: skip
def test_log_probs_and_kl_are_those_of_full_logits(kind, form, direction, policy, teachers):
    """Of each model after its own prompt. A Granite teaches itself."""
    teacher = teachers[kind]
    policy = teacher if kind == "granite" else policy
    rollout = with_hints(make_rollout(group_size=2))
    changes = {"kl_over": "vocabulary", "kl_direction": direction, "prompts_per_step": 4} | FORMS[form]
    args = flags(group_size=2, temperature=0.8, kl_coef=1, **changes)
    model, reference, algorithm = load_policy(policy), load_policy(teacher), algorithm_of(args)
    update, found = whole_update(rollout, args, model, ALONE), []
    longest = max(len(each.labels_N) for batch in update for each in (batch, batch.hinted))
    assert longest <= args.micro_batch_tokens and len(update) > (form == "small")
    for batch in update:
        scores = model(batch, 0.8, run(reference, algorithm.kl_direction, 0.8, batch))
        found.append((batch, [scores.logprobs_N, scores.entropies_N, *scores.distilled]))
    plain = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (policy, teacher)]
    log_p, log_q = map(made_up.unpacked_distributions, plain, (rollout, rollout.hinted()), (0.8, 0.8))
    a, b = (log_p, log_q) if direction == "reverse" else (log_q, log_p)
    labels = torch.from_numpy(np.concatenate(rollout.completions)).long()
    label_logprobs = [x.gather(1, labels[:, None])[:, 0] for x in (log_p, log_q)]
    wanted = [label_logprobs[0], -(log_p.exp() * log_p).sum(-1), label_logprobs[1], (a.exp() * (a - b)).sum(-1)]
    wanted.append((log_p.argmax(-1) == log_q.argmax(-1)).double())
    for i, expected in enumerate(wanted):
        ours = in_order([(batch, values[i].detach()) for batch, values in found], len(RAGGED))
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=1e-5)
    sampled = add_reference(update, reference, algorithm_of(flags(temperature=0.8, kl_coef=1)))  # these tokens alone
    ours = in_order([(batch, batch.ref_logprobs_N) for batch in sampled], len(RAGGED))
    torch.testing.assert_close(ours.double(), label_logprobs[1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("changes", [
    {}, {"kl_over": "vocabulary", "kl_direction": "forward"}, {"kl_estimator": "k2"}, {"lora_rank": 4},
    {"lora_rank": 4, "kl_over": "vocabulary", "communicate_once": True}, {"lora_rank": 4, "kl_over": "vocabulary"},
])  # fmt: skip
def test_without_advantages_only_the_reference_teaches(changes, policy, untied_qwen3_policy):
    """Rewards differ, so any other advantage would have a gradient. LoRA's reference is the adapter off."""
    path = None if "lora_rank" in changes else untied_qwen3_policy
    args = flags(model=policy, reference=path, advantage="zero", kl_coef=0.5, group_size=2, **changes)
    model = policy_of(args)
    reference = model if path is None else load_policy(path)
    rollout = replace(make_rollout(group_size=2), advantages=[np.zeros(n, np.float32) for n in RAGGED])
    update = add_reference(whole_update(rollout, args, model, ALONE), reference, algorithm_of(args))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    metrics = train_once(model, torch.optim.SGD(trained), update, args)
    assert metrics["optim/grad_norm"] > 0.01
    is_over = "kl_over" in changes
    assert ("distill/agreement" in metrics) == is_over and ("distill/kl" in metrics) == (is_over or path is not None)
    if is_over:
        assert metrics["policy/loss"] == pytest.approx(0.5 * metrics["distill/kl"], rel=1e-4)


def test_packing_ranks_and_offload_do_not_change_distillation(policy, untied_qwen3_policy):
    """One and two ranks; fp32. With LoRA the reference is the adapter off, between two passes of the policy."""
    results = [on_ranks(num_ranks, taught, policy, untied_qwen3_policy) for num_ranks in (1, 2)]
    alike = [
        ["sampled, with hints"], ["hints of the step", "hints of the step, shared"],
        ["whole", "small, on the host", "shared, communicates once"],
        ["LoRA", "LoRA, small", "LoRA, small, communicates once", "LoRA, shared, recomputed"],
    ]  # fmt: skip
    for names in alike:
        cases = [found[name] for found in results for name in names]
        for metrics, gradients in cases:
            metrics.pop("perf/update_idle_frac", None)
            assert metrics["optim/grad_norm"] > 0.01 and metrics == pytest.approx(cases[0][0], abs=1e-5)
            torch.testing.assert_close(gradients, cases[0][1], atol=2e-6, rtol=1e-4)
    assert set(chain(*alike)) == TAUGHT.keys()


MOVED = {  # name -> flags of a reference that moves
    "replaced": {"reference_every": 2, "reset_optimizer": True},
    "replaced, bf16": {"reference_every": 2, "dtype": "bfloat16"},
    "mean": {"reference_every": 1, "reference_mixup": 0.05, "offload_reference": True},
    "mean, bf16": {"reference_every": 1, "reference_mixup": 0.05, "dtype": "bfloat16"},
}


def moved(world: World, path: str) -> dict[str, list[tuple[torch.Tensor, torch.Tensor, float]]]:
    """Case -> after each of steps 0 to 4: weights of policy and reference, count of Adam's updates."""
    found = {}
    for name, changes in MOVED.items():
        args = flags(model=path, kl_coef=0.5, group_size=1, prompts_per_step=8, learning_rate=1e-2, **changes)
        policy, reference, optimizer = build(args, world)
        plan, steps = make_plan(args, 8), found.setdefault(name, [])
        for number in range(5):
            if number:
                update = scored(make_rollout(), policy, reference, args, world)
                train_once(policy, optimizer, update, args, world, **plan.update(number, 0)._asdict())
            models = [full_tensors((x, torch.float32) for x in model.parameters()) for model in (policy, reference)]
            whole = [torch.cat([x.flatten().cpu() for x in tensors]) for tensors in models]
            steps.append((*whole, *{float(state["step"]) for state in optimizer.state.values()}))
    return found


def test_a_reference_that_moves_is_the_policy_or_a_mean_of_it(policy):
    """Replaced, it is the policy to the bit; as a mean, the formula. On two ranks it is that of one."""
    one, two = (on_ranks(num_ranks, moved, policy) for num_ranks in (1, 2))
    for name, steps in [*one.items(), *two.items()]:
        start, expected = steps[0][0], steps[0][1].double()
        for number, (trained, reference, count) in enumerate(steps):
            if name == "replaced":
                assert reference.equal(steps[number - number % 2][0]) and count == number % 2
            elif name == "replaced, bf16":
                assert reference.equal(steps[number - number % 2][0].bfloat16().float()) and count == number
            elif number:
                expected += 0.05 * (trained - expected)
                torch.testing.assert_close(reference.double(), expected, atol=1e-6, rtol=0)
            assert number == 0 or (trained - start).abs().max() > 5e-3
    for name in ("replaced", "mean"):
        start, ours, theirs = one[name][0][1], one[name][-1][1], two[name][-1][1]
        assert (ours - theirs).norm() < 1e-2 * (ours - start).norm()  # Adam makes much of a gradient's last bit


@pytest.mark.parametrize(("changes", "is_own"), [
    ({}, True), ({"lora_rank": 4}, False), ({"lora_rank": 4, "reference": "another", "head_dtype": "float32"}, True),
])  # fmt: skip
def test_a_reference_of_another_path_is_its_own_model(changes, is_own, policy, untied_qwen3_policy, monkeypatch):
    monkeypatch.setattr("policy.shard_and_fill", lambda policy, *rest: policy)
    changes = {name: untied_qwen3_policy if name == "reference" else value for name, value in changes.items()}
    found, reference, _ = build(flags(model=policy, kl_coef=1, dtype="bfloat16", **changes), ALONE)
    head_dtype = torch.float32 if "head_dtype" in changes else torch.bfloat16
    assert found.head_dtype == reference.head_dtype == head_dtype
    assert (reference is not found) == is_own
    assert ("Qwen3" in type(reference.model).__name__) == ("reference" in changes)
    assert not is_own or not any(parameter.requires_grad for parameter in reference.parameters())


def test_another_vocabulary_is_told_by_its_first_different_token(policy, tmp_path):
    tokenizer = Inputs.load(parse_flags(training_flags(policy, tmp_path / "run"))).tokenizer
    check_vocabulary(tokenizer, tokenizer, "same")
    words = "--reference bytes: it or --model has .* as token 0, the other has not; use a model with the same"
    with pytest.raises(ValueError, match=words):
        check_vocabulary(tokenizer, made_up.byte_tokenizer(), "bytes")


@pytest.mark.parametrize(("changes", "words"), [
    ({"vocab_size": 60}, "--reference .* knows 60 token ids, --model 64; use one that knows as many"),
    ({"max_position_embeddings": 19}, "= 20 is beyond the context of --reference .*, 19 tokens"),
])  # fmt: skip
def test_a_reference_that_cannot_score_every_sample_is_refused(changes, words, policy, tmp_path):
    """Before any weight is read. A vocabulary that is padded to more rows is no fault."""
    folder = shutil.copytree(policy, tmp_path / "teacher")
    config = json.loads((folder / "config.json").read_text())
    args = parse_flags(training_flags(policy, tmp_path / "run", reference=folder))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 70}))
    Inputs.load(args)
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=words):
        Inputs.load(args)


def test_a_hint_is_before_the_suffix_and_counts_for_the_limit(policy, tmp_path):
    rows = [{"problem": "1+2", "answer": "3", "why": "so"}, {"problem": "1+3", "answer": "4", "why": "so" * 60}]
    unusable = [{"problem": "1+4", "answer": "5", "why": why} for why in (None, "<user>so")]
    data = made_up.write_lines(tmp_path / "d.jsonl", [*rows, *unusable])
    changes = NO_EVAL | {"train_data": data, "kl_coef": 1, "hint_column": "why", "max_prompt_tokens": 116}
    changes |= {"prompt_suffix": " =", "prompts_per_step": 1, "prompts_per_update": 1}
    args = parse_flags(training_flags(policy, tmp_path / "run", **changes))
    inputs = Inputs.load(args)
    (loaded,) = inputs.train_data
    assert loaded.num_too_long == 1
    assert [where for where, _ in loaded.excluded] == [f"{data}, line {i}" for i in (3, 4)]
    reasons = [reason for _, reason in loaded.excluded]
    assert reasons[0] == "column 'why' is null" and reasons[1].startswith("with the hint of column 'why': column 'prob")
    (row,) = loaded.rows
    assert row.text == "<user>1+2 =<assistant>"
    hinted_prompt = inputs.tokenizer.decode(row.hinted_ids.tolist())
    assert re.fullmatch(r"<user>1\+2.*a reference solution:<unk>so.*your own words. =<assistant>", hinted_prompt)


def test_without_a_reward_nothing_is_graded(policy, tmp_path):
    data = made_up.write_lines(tmp_path / "d.jsonl", [{"problem": f"1+{i}"} for i in range(9)])
    changes = NO_EVAL | {"train_data": data, "reward": "none", "advantage": "zero"}
    args = parse_flags(training_flags(policy, tmp_path / "run", **changes))
    inputs = Inputs.load(args)
    assert [row.answer for row in inputs.train_data[0].rows] == [""] * 9
    grader = Grader(Grading.from_flags(args), num_workers=2)
    on_finished = grader.callback_for(inputs.train_data[0].rows[:1], Sampling(2, 1.0, 8))
    for b in (1, 0):
        on_finished(b, "3", [7], False)
    grades = grader.collect_from_ranks()
    assert [grade.status for grade in grades] == [NOT_GRADED] * 2 and grader.pool is None
    rollout = replace(make_rollout([3, 5]), grades=grades)
    names = ("tokens_mean", "tokens_max", "frac_truncated")
    assert rollout_metrics(rollout, 2).keys() == {f"completion/{name}" for name in names}


# Hints that a step makes of its own completions ----------------------------------------------------------------------

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
    log_p, log_q = map(made_up.unpacked_distributions, (plain, teacher), (rollout, rollout.hinted()), (1.0, 1.0))
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


# The head over the whole vocabulary: values and gradients are those of full logits in float64 -----------------------

V, REF_V, T = 64, 70, 20  # the reference's vocabulary is padded to more rows


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() * (a - b)).sum(dim=-1)


def mixed(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


EXPECTED = {"reverse": (reverse, kl), "forward": (forward, lambda log_p, log_q: kl(log_q, log_p))}
EXPECTED |= {f"jsd {beta}": (partial(jsd, beta=beta), partial(mixed, beta=beta)) for beta in (0.3, 0.9)}


@pytest.mark.parametrize("trains_entropy", [False, True])
@pytest.mark.parametrize("name", EXPECTED)
def test_value_and_gradient_are_those_of_full_logits_in_float64(name, trains_entropy, monkeypatch):
    """Logits of a spread of 2; chunks of 7 tokens, of which the last one has 6."""
    monkeypatch.setattr(sizes, "HEAD_CHUNK_LOGITS", 7 * V)
    torch.manual_seed(0)
    hidden, ref_hidden = torch.randn(T, 16, requires_grad=True), torch.randn(T, 24)
    head, ref_weight, labels = nn.Linear(16, V, bias=False), torch.randn(REF_V, 24) * 0.2, torch.randint(V, (T,))
    nn.init.normal_(head.weight, std=0.25)
    divergence, plain = EXPECTED[name]
    teacher = Teacher(ref_hidden, ref_weight, divergence, 0.7)
    settings = HeadSettings(0.7, torch.float32)
    scores = distilled_logprobs(hidden, head.weight, labels, settings, teacher)
    found = scores.logprobs_N, scores.entropies_N, *scores.distilled
    exact = [x.detach().double().requires_grad_() for x in (hidden, head.weight)]
    log_p = (exact[0] @ exact[1].T / 0.7).log_softmax(dim=-1)
    log_q = (ref_hidden.double() @ ref_weight[:V].double().T / 0.7).log_softmax(dim=-1)
    entropies = -(log_p.exp() * log_p).sum(dim=-1)
    logprobs, ref_logprobs = (x.gather(-1, labels[:, None])[:, 0] for x in (log_p, log_q))
    agrees = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).double()
    expected = logprobs, entropies, ref_logprobs, plain(log_p, log_q), agrees
    torch.testing.assert_close([x.double() for x in found], [*expected], atol=1e-6, rtol=1e-6)
    weights, gradients = torch.randn(3, T) / T, []
    for sums, tensors in ((found, (hidden, head.weight)), (expected, exact)):
        terms = sums[0] * weights[0] + sums[3] * weights[1] + (sums[1] * weights[2] if trains_entropy else 0)
        gradients.append(torch.autograd.grad(terms.sum(), tensors))
    ours, wanted = gradients
    assert all(gradient.abs().max() > 0.01 for gradient in wanted)
    torch.testing.assert_close([x.double() for x in ours], [*wanted], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_token_ruled_out_by_one_model_has_a_finite_gradient(name):
    logits = torch.tensor([[0.0, -200.0, 1.0], [0.0, 1.0, -200.0]], requires_grad=True)
    values = EXPECTED[name][0](logits.log_softmax(dim=-1), logits.detach().flip(0).log_softmax(dim=-1))
    (slopes,) = torch.autograd.grad(values.sum(), logits)
    assert values.isfinite().all() and slopes.isfinite().all() and (values > 0.1).all()
