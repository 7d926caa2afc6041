"""Checks of the flags. Each sentence says what was given, what is required, what to do. No torch: they come first."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import chain, cycle
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

from flags import FLAGS, GROUPS, INF, TINY, Flag
from inputs.sources import name_of_source
from model.sizes import check_path
from runtime.cards import gpu_figures
from runtime.start import check_divides, launched_world_size

# What stored rollouts hold: who is compared with whom, tokens sampled under these limits, and their rewards.
FIXED_BY_ROLLOUTS = (
    "prompts_per_step", "group_size", "temperature", "max_completion_tokens", "max_prompt_tokens", "stop_tokens",
    "reward", "reward_timeout", "overlong_cache_tokens", "list_answers", "truncated", "dynamic_sampling",
    "environment", "tools", "max_turns", "max_turn_tokens",
)  # fmt: skip
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_flags(args: argparse.Namespace, num_ranks: int | None = None) -> None:
    """Raises ValueError for flags out of range, without effect, or in contradiction; see also `algorithm_of`."""
    check_ranges(args, GROUPS)
    check_path(args.model)
    gpu_figures(args.plan_gpu)  # raises for one that is not known
    for name in ("--plan_gpus", "--plan_nodes", "--json") if num_ranks is None else ():
        if not args.dry_run and FLAGS[name].of(args) != FLAGS[name].value:
            raise ValueError(f"{name} has no effect without --dry_run; leave it out.")
    num_ranks = launched_world_size() if num_ranks is None else num_ranks
    check_batches(args, num_ranks)
    check_common_flags(args)
    flag = all_given(args)
    topics = (topic(args, flag) for topic in (of_algorithm, of_memory, of_servers, of_replay, of_evaluation))
    for sentence in chain(*topics, of_waits(args, flag, num_ranks)):
        raise ValueError(sentence)  # the first one is enough
    if args.track != "none" and importlib.util.find_spec(args.track) is None:
        raise ValueError(f"--track {args.track}: its package is not installed; run `pip install {args.track}`.")
    is_online = os.environ.get("WANDB_MODE", "online") == "online" and not os.environ.get("WANDB_API_KEY")
    if args.track == "wandb" and is_online and not (Path.home() / ".netrc").exists():  # where `wandb login` writes it
        raise ValueError("--track wandb: no key is known; run `wandb login`, set WANDB_API_KEY or WANDB_MODE=offline.")


def default_dtype(needs_bfloat16: bool = False) -> str:
    """bfloat16 on GPUs, else float32, if it may be. The launch scripts count the GPUs; else there is nvidia-smi."""
    has_gpus = shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    num_gpus = int(os.environ.get("NUM_GPUS") or bool(has_gpus))
    return "bfloat16" if num_gpus or needs_bfloat16 else "float32"


def check_common_flags(args: argparse.Namespace) -> None:
    """Raises ValueError for contradictions among the flags that evaluate.py has too."""
    if args.head_dtype == "bfloat16" and args.dtype == "float32":
        raise ValueError("--head_dtype bfloat16 would round what --dtype float32 computes; leave it out.")
    for sentence in of_turns(args, all_given(args)):
        raise ValueError(sentence)


# Contradictions, by topic. `flag.NAME` is the flag as it was written.


def of_algorithm(args: argparse.Namespace, flag: SimpleNamespace) -> Iterator[str]:
    if 0 < args.dual_clip <= 1:
        yield f"{flag.dual_clip}: must be above 1, or 0 for none."
    if args.rollout_correction.endswith("mask") and args.rollout_correction_min >= args.rollout_correction_max:
        yield f"{flag.rollout_correction_min} must be below {flag.rollout_correction_max}."
    if args.old_logprobs == "rollout" and args.rollout_correction != "none":
        twice = "the ratio is already that of trainer and sampler"
        yield f"{flag.old_logprobs} with {flag.rollout_correction}: {twice}; use --rollout_correction none."
    if args.advantage == "maxrl" and (args.kl_in == "reward" or re.search(r"\blength\b|:-", args.reward)):
        yield "--advantage maxrl needs rewards that are not negative; leave out `length`, negative weights and --kl_in."
    if args.kl_over == "vocabulary" and args.kl_in == "reward":
        yield "--kl_in reward takes the KL of sampled tokens; with --kl_over vocabulary leave it at loss."
    for name in ("kl_estimator", "kl_clamp") if args.kl_over == "vocabulary" else ():
        if getattr(args, name) != FLAGS[f"--{name}"].value:
            yield f"{getattr(flag, name)} has no effect with --kl_over vocabulary, which is exact; leave it out."
    if args.advantage == "zero" and (not args.kl_coef or args.kl_in == "reward"):
        yield "--advantage zero trains on nothing but the KL in the loss: give --kl_coef, and --kl_in loss."
    if args.kl_over == "sampled" and args.advantage == "zero" and args.kl_estimator == "k1":
        yield "--kl_estimator k1 as a loss has a gradient of mean zero, so --advantage zero learns nothing; use k2."
    if args.group_size == 1 and not (args.advantage in ("zero", "none", "reinforce++") or ".py:" in args.advantage):
        yield f"--group_size 1 has nothing to compare with for {flag.advantage}; use 2 or more, or --advantage zero."
    if args.group_size == 1 and args.dynamic_sampling != "off":
        yield f"--group_size 1 with {flag.dynamic_sampling}: a group of one never has a signal; leave that out."
    if args.hint_column and args.image_column:
        yield f"{flag.hint_column} with {flag.image_column}: hints are for prompts of text; leave one of them out."
    if args.kl_in == "reward" and args.advantage == "reinforce++" and args.policy_loss == "gspo":
        yield "--policy_loss gspo needs one advantage a sequence, not reinforce++ with --kl_in reward; use gspo_token."
    if args.dynamic_sampling != "off" and args.epochs is not None:
        yield f"{flag.epochs} with {flag.dynamic_sampling} is no fixed number of steps; give --total_steps."
    if args.dynamic_sampling != "off" and args.keep_last:
        yield f"--keep_last has no effect with {flag.dynamic_sampling}, which has no last steps; leave it out."
    is_on_policy = args.prompts_per_update == args.prompts_per_step and args.num_iterations == 1
    if args.max_kl and is_on_policy and not args.lora_dropout:
        yield f"{flag.max_kl} has no effect with one update a step, whose KL is 0; leave it out."
    is_ungraded = args.reward == "none" and not args.environment
    if is_ungraded and args.advantage != "zero":
        yield f"--reward none grades nothing for {flag.advantage} to compare; give --advantage zero, or a reward."
    needs = {"dynamic_sampling": args.dynamic_sampling != "off", "truncated": args.truncated == "zero"}
    for name in [x for x, is_so in (needs | {"eval_data": args.eval_data}).items() if is_so and is_ungraded]:
        yield f"{getattr(flag, name)} needs a reward; leave it out, or give one, which --advantage zero only logs."
    if args.advantage == "zero" and args.reference in (None, args.model) and not args.hint_column:
        yield "--advantage zero follows the reference, which is --model itself: give --reference, or --hint_column."
    if args.overlong_cache_tokens and not re.search(r"\blength\b|@", args.reward):
        yield f"{flag.overlong_cache_tokens} has no effect without the reward `length`; leave it out, or add that."
    if args.overlong_cache_tokens and args.overlong_cache_tokens >= args.max_completion_tokens:
        yield f"{flag.overlong_cache_tokens} makes all completions of {flag.max_completion_tokens} too long; use less."


def of_turns(args: argparse.Namespace, flag: SimpleNamespace) -> Iterator[str]:
    has_turns = bool(args.environment or args.tools)
    for name in ("max_turns", "max_turn_tokens"):
        if not has_turns and getattr(args, name) != FLAGS[f"--{name}"].value:
            yield f"{getattr(flag, name)} has no effect without --environment or --tools; leave it out."
    if args.environment and args.tools:
        yield f"{flag.environment} with {flag.tools}: an environment calls its tools itself; leave one of them out."
    for reference in ",".join(filter(None, [args.environment, args.tools])).split(",") if has_turns else ():
        if not re.fullmatch(r".+\.py:\w+", reference):
            yield f"{reference!r} in --environment or --tools: needed is FILE.py:NAME."
    if has_turns and args.prompt_format != "chat":
        yield f"{flag.prompt_format}: turns are written by a chat template; use --prompt_format chat."
    for name in ("partial_rollouts", "image_column"):
        if has_turns and getattr(args, name, None):
            yield f"{getattr(flag, name)} has one turn alone; leave it out with --environment and --tools."
    if getattr(args, "advantage", "") == "mt_grpo" and not args.environment:
        yield "--advantage mt_grpo needs an --environment that rewards each turn; give one, or use grpo."


def of_memory(args: argparse.Namespace, flag: SimpleNamespace) -> Iterator[str]:
    if args.param_dtype == "bfloat16" and args.dtype == "float32":
        yield "--dtype float32 computes more finely than --param_dtype bfloat16 stores; leave one of them out."
    no_effect = f"has no effect with {flag.lora_rank}; leave it out"
    if args.lora_rank and args.param_dtype != "float32":
        yield f"{flag.param_dtype} {no_effect}: adapters are kept in float32, the rest in --dtype."
    if args.lora_rank and args.offload_reference and args.reference in (None, args.model):
        yield f"--offload_reference {no_effect}: the reference is the policy with its adapter off."


def of_waits(args: argparse.Namespace, flag: SimpleNamespace, num_ranks: int) -> Iterator[str]:
    if num_ranks == 1:
        return
    minutes = 2 * args.reward_timeout / 60  # what is late is tried a second time
    if minutes >= args.timeout_minutes:
        takes = f"{flag.reward_timeout}: a completion, which is tried twice, may be graded for {minutes:.3g} minutes"
        yield f"{takes}, but the other ranks wait {flag.timeout_minutes}; make that longer."
    if (args.stall_seconds or 0) >= (most := args.timeout_minutes * 60):
        yield f"{flag.stall_seconds}: {flag.timeout_minutes} would end the run first; use less than {most:g}."


def of_servers(args: argparse.Namespace, flag: SimpleNamespace) -> Iterator[str]:
    if args.partial_rollouts and args.engine != "colocated":
        yield "--partial_rollouts is for --engine colocated; servers do the same by --in_flight."
    if args.partial_rollouts and args.image_column:
        yield f"{flag.image_column} with --partial_rollouts: completions go on without images; leave one of them out."
    if args.engine == "colocated":
        return
    if args.image_column:
        yield f"{flag.image_column}: images are not sent to servers; use --engine colocated."
    gpus, urls, size = args.generation_gpus, args.server_urls, args.tensor_parallel_size
    if urls and gpus:
        yield "--server_urls names servers that run; leave --generation_gpus out."
    places = [urlsplit(url) for url in urls]
    if any(x.scheme not in ("http", "https") or not x.hostname or x.path.strip("/") for x in places):
        yield f"{flag.server_urls}: needed is http://HOST:PORT for each."
    if urls and not args.dry_run and not os.environ.get("VLLM_API_KEY"):
        yield "--server_urls: set VLLM_API_KEY to the key of the servers, which scripts/serve.py prints or was given."
    if len({*urls, *gpus}) < len([*urls, *gpus]):
        yield f"{flag.server_urls if urls else flag.generation_gpus}: one is there twice; name each once."
    if len(gpus) % size:
        yield f"{flag.generation_gpus}: {len(gpus)} GPUs are no whole number of servers of {size}; give a multiple."


def of_replay(args: argparse.Namespace, flag: SimpleNamespace) -> Iterator[str]:
    if args.replay and args.partial_rollouts:
        yield "--partial_rollouts has no effect with --replay, which samples nothing; leave it out."
    if args.replay and os.path.realpath(args.replay) == os.path.realpath(args.out_dir):
        yield f"{flag.replay} is --out_dir, too; name another folder for what is trained now."
    if args.replay:
        file = Path(args.replay) / "config.json"
        try:
            then = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError):
            yield f"{flag.replay}: {file} cannot be read; name the folder of a run."
            return
        for name in FIXED_BY_ROLLOUTS:
            if (there := then.get(name, getattr(args, name))) != getattr(args, name):
                yield f"{getattr(flag, name)}: the rollouts of --replay were made with {there}; give that."


def of_evaluation(args: argparse.Namespace, flag: SimpleNamespace) -> Iterator[str]:
    for name in ("eval_every", "eval_before_training"):
        if getattr(args, name) and not args.eval_data:
            yield f"{getattr(flag, name)} needs --eval_data; name a file, or leave --{name} out."
    if args.eval_data and not (args.eval_every or args.eval_before_training or args.replay):
        yield f"{flag.eval_data} is never evaluated; give --eval_every or --eval_before_training, or leave it out."
    if args.keep_best is not None:
        known = []
        for source, k in zip(args.eval_data, cycle(args.eval_samples), strict=False):
            figures = [f"avg@{k}", *(f"pass@{i}" for i in ks_of_pass(k)), *[f"maj@{k}"] * (k > 1)]
            known += [f"eval/{name_of_source(source)}/{figure}" for figure in figures]
        if args.keep_best not in known:
            advice = f"use one of {', '.join(known)}" if known else "name held-out problems with --eval_data"
            yield f"{flag.keep_best} is not evaluated; {advice}."
        if not args.eval_every or not args.save_every or args.save_every % args.eval_every:
            wrong = f"{flag.keep_best} needs a value for each checkpoint, not {flag.save_every} and {flag.eval_every}"
            yield f"{wrong}; make the first a multiple."


def ks_of_pass(num_samples: int) -> list[int]:
    """The k of pass@k: 2, 4, 8, ... and the number of samples."""
    return sorted({2**i for i in range(1, num_samples.bit_length())} | {num_samples} - {1})


def check_ranges(args: argparse.Namespace, groups: dict[str, list[Flag]]) -> None:
    """Raises ValueError for a value out of its range, and for a flag that has no effect without another one."""
    for each in (each for group in groups.values() for each in group):
        value = each.of(args)
        low, high = each.within or (-INF, INF)
        for number in value if isinstance(value, list) else [value]:
            if each.within and number is not None and not (low <= number <= high and number < INF):  # also true for nan
                bounds = "above 0" if low == TINY else f"at least {low:g}"
                bounds += " and finite" * (number == INF) if high == INF else f" and at most {high:.7g}"
                raise ValueError(f"{each.name} {number:g}: must be {bounds}.")
        if each.only_with and value != each.value:
            other = FLAGS[each.only_with].of(args)
            if other in (0, None, "off", "none", "colocated", "sampled"):
                needed = f"{each.only_with} above 0" if other == 0 else each.only_with
                needed += {"colocated": " server", "sampled": " vocabulary"}.get(other, "")
                wrong = f"{given(each, args)} has no effect here, only with {needed}"
                raise ValueError(f"{wrong}: {leave(each)}, or change the other.")


def given(each: Flag, args: argparse.Namespace) -> str:
    """The flag as it was written."""
    value = each.of(args)
    values = value if isinstance(value, list) else [] if value is True else [value]
    return " ".join([each.name, *map(str, values)])


def all_given(args: argparse.Namespace) -> SimpleNamespace:
    """All flags that there are, as they were written."""
    names = [name for name in FLAGS if hasattr(args, name.removeprefix("--"))]
    return SimpleNamespace(**{name.removeprefix("--"): given(FLAGS[name], args) for name in names})


def leave(each: Flag) -> str:
    """How to say that the default should stay."""
    return f"leave it at {each.value}" if each.value else "leave it out"


def ranks_per_engine(args: argparse.Namespace, num_ranks: int | None = None) -> int:
    """Ranks that see the same completions and grade them once: servers are to all ranks as one engine."""
    return args.tensor_parallel_size if args.engine == "colocated" else num_ranks or launched_world_size()


def check_batches(args: argparse.Namespace, num_ranks: int) -> None:
    """Raises ValueError for batches that cannot be divided, and for a length of training that is not clear."""
    prompts, size = args.prompts_per_step, ranks_per_engine(args, num_ranks)
    check_divides("--tensor_parallel_size", size, "the world size", num_ranks)
    check_divides("--shard_ranks", args.shard_ranks or 1, "the world size", num_ranks)
    num_engines = num_ranks // size
    if prompts % num_engines:
        below = prompts // num_engines * num_engines
        near = f"{below} or {below + num_engines}" if below else num_engines
        engines = f"{num_engines} engines ({num_ranks} ranks / --tensor_parallel_size {size})"
        raise ValueError(f"--prompts_per_step {prompts} is not divisible by {engines}; use {near}.")
    check_divides("--prompts_per_update", args.prompts_per_update, "--prompts_per_step", prompts)
    longest = args.max_prompt_tokens + args.max_completion_tokens
    if args.micro_batch_tokens < longest:
        needed = f"--max_prompt_tokens {args.max_prompt_tokens} + --max_completion_tokens {args.max_completion_tokens}"
        wrong = f"--micro_batch_tokens {args.micro_batch_tokens} cannot hold one sequence of {needed}"
        raise ValueError(f"{wrong}; use at least {longest}.")
    num_lengths = sum(x is not None for x in (args.total_steps, args.epochs, args.total_episodes))
    if num_lengths != 1:
        raise ValueError(f"{num_lengths} of --total_steps, --epochs, --total_episodes were given; give exactly one.")
    completions = prompts * args.group_size
    if args.total_episodes is not None and args.total_episodes < completions:
        raise ValueError(f"--total_episodes {args.total_episodes} is less than one step; use at least {completions}.")
