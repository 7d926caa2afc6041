"""Checks of the flags. Each sentence says what was given, what is required, what to do. No torch: they come first."""

from __future__ import annotations

import argparse
import os
from urllib.parse import urlsplit

from flags import FLAGS, GROUPS, INF, TINY, Flag
from inputs.records import name_of_source
from model.sizes import check_path
from records.trackers import check_tracker

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_flags(args: argparse.Namespace, num_ranks: int | None = None) -> None:
    """Raises ValueError for flags out of range, without effect, or in contradiction to each other.

    `num_ranks`: by default those that were started. What has no effect on the algorithm is found by `algorithm_of`.
    """
    check_ranges(args, GROUPS)
    check_path(args.model)
    num_ranks = launched_world_size() if num_ranks is None else num_ranks
    check_batches(args, num_ranks)
    check_algorithm(args)
    check_memory(args, num_ranks)
    check_waits(args, num_ranks)
    check_servers(args)
    check_rollouts(args)
    check_tracker(args.track)
    check_best(args)
    check_bounds(args)
    for name in ("eval_every", "eval_before_training"):
        if getattr(args, name) and not args.eval_data:
            wrong = given(FLAGS[f"--{name}"], args)
            raise ValueError(f"{wrong} needs --eval_data; name a file, or leave --{name} out.")


def check_rollouts(args: argparse.Namespace) -> None:
    """Raises ValueError for rollouts that would be sampled and not sampled, or not kept."""
    if args.replay and args.rollout_only:
        raise ValueError("--replay samples nothing, and --rollout_only trains nothing; leave one of them out.")
    if args.replay and args.partial_rollouts:
        raise ValueError("--partial_rollouts has no effect with --replay, which samples nothing; leave it out.")
    if args.rollout_only and not args.keep_rollouts:
        raise ValueError("--rollout_only with --keep_rollouts 0 would keep nothing; leave one of them out.")
    if args.replay and os.path.realpath(args.replay) == os.path.realpath(args.out_dir):
        raise ValueError(f"--replay {args.replay} is --out_dir, too; name another folder for what is trained now.")


def check_best(args: argparse.Namespace) -> None:
    """Raises ValueError if not every checkpoint will have a value of --keep_best."""
    if args.keep_best is None:
        return
    wrong = f"--keep_best {args.keep_best}"
    names, ks = [name_of_source(source) for source in args.eval_data], args.eval_samples
    known = [f"eval/{name}/{figure}" for i, name in enumerate(names) for figure in scores_of(ks[i % len(ks)])]
    if args.keep_best not in known:
        advice = f"use one of {', '.join(known)}" if known else "name held-out problems with --eval_data"
        raise ValueError(f"{wrong} is not evaluated; {advice}.")
    if not args.eval_every or not args.save_every or args.save_every % args.eval_every:
        periods = f"--save_every {args.save_every} and --eval_every {args.eval_every}"
        raise ValueError(f"{wrong} needs a value for each checkpoint, not {periods}; make the first a multiple.")


def scores_of(num_samples: int) -> list[str]:
    """What a held-out set is measured by, the larger the better: avg@k, pass@2, 4, ... k, maj@k."""
    passes = [f"pass@{k}" for k in ks_of_pass(num_samples)]
    return [f"avg@{num_samples}", *passes] + ([f"maj@{num_samples}"] if num_samples > 1 else [])


def ks_of_pass(num_samples: int) -> list[int]:
    """The k of pass@k: 2, 4, 8, ... and the number of samples."""
    return sorted({2**i for i in range(1, num_samples.bit_length())} | {num_samples} - {1})


def launched_world_size() -> int:
    """Number of processes that the launcher started, on all nodes; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_ranges(args: argparse.Namespace, groups: dict[str, list[Flag]]) -> None:
    """Raises ValueError for a value out of its range, and for a flag that has no effect without another one."""
    for each in (each for group in groups.values() for each in group):
        value = each.of(args)
        low, high = each.within or (-INF, INF)
        for number in value if isinstance(value, list) else [value]:
            if each.within and number is not None and not low <= number <= high:  # also true for nan
                bounds = "above 0" if low == TINY else f"at least {low:g}"
                bounds += "" if high == INF else f" and at most {high:.7g}"
                raise ValueError(f"{each.name} {number:g}: must be {bounds}.")
        if each.only_with and value != each.value:
            other = FLAGS[each.only_with].of(args)
            if other in (0, None, "off", "none", "colocated"):
                needed = f"{each.only_with} above 0" if other == 0 else each.only_with
                needed += " server" if other == "colocated" else ""
                wrong = f"{given(each, args)} has no effect here, only with {needed}"
                raise ValueError(f"{wrong}: {leave(each)}, or change the other.")


def given(each: Flag, args: argparse.Namespace) -> str:
    """The flag as it was written."""
    value = each.of(args)
    values = value if isinstance(value, list) else [] if value is True else [value]
    return " ".join([each.name, *map(str, values)])


def leave(each: Flag) -> str:
    """How to say that the default should stay."""
    return f"leave it at {each.value}" if each.value else "leave it out"


def divisors(number: int) -> str:
    """The numbers that divide it, as words."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def check_engines(tensor_parallel_size: int, num_ranks: int) -> None:
    """Raises ValueError if so many ranks are no whole number of engines."""
    if tensor_parallel_size < 1 or num_ranks % tensor_parallel_size:
        wrong = f"--tensor_parallel_size {tensor_parallel_size} does not divide the world size {num_ranks}"
        raise ValueError(f"{wrong}; use one of {divisors(num_ranks)}.")


def ranks_per_engine(args: argparse.Namespace, num_ranks: int | None = None) -> int:
    """Ranks that see the same completions and grade them once: servers are to all ranks as one engine."""
    num_ranks = launched_world_size() if num_ranks is None else num_ranks
    return args.tensor_parallel_size if args.engine == "colocated" else num_ranks


def check_servers(args: argparse.Namespace) -> None:
    """Raises ValueError for servers that cannot be reached safely or started, and for what they cannot do."""
    if args.partial_rollouts and args.engine != "colocated":
        raise ValueError("--partial_rollouts is for --engine colocated; servers do the same by --in_flight.")
    if args.partial_rollouts and args.image_column:
        wrong = f"--image_column {args.image_column} with --partial_rollouts"
        raise ValueError(f"{wrong}: a completion that goes on is read without its images; leave one of them out.")
    if args.engine == "colocated":
        return
    if args.image_column:
        raise ValueError(f"--image_column {args.image_column}: images are not sent to servers; use --engine colocated.")
    gpus, urls, size = args.generation_gpus, args.server_urls, args.tensor_parallel_size
    if urls and gpus:
        raise ValueError("--server_urls names servers that run; leave --generation_gpus out.")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"--server_urls {url}: needed is http://HOST:PORT.")
        if parts.hostname not in LOOPBACK and not os.environ.get("VLLM_API_KEY"):
            key = "set VLLM_API_KEY, here and there, to the same secret"
            raise ValueError(f"--server_urls {url} is not on this machine: others could change its weights; {key}.")
    if len(set(urls)) < len(urls) or len(set(gpus)) < len(gpus):
        raise ValueError("--server_urls and --generation_gpus: each can be given once.")
    if len(gpus) % size:
        wrong = f"{given(FLAGS['--generation_gpus'], args)}: {len(gpus)} GPUs"
        raise ValueError(f"{wrong} are no whole number of servers of {size}; give a multiple.")


def check_batches(args: argparse.Namespace, num_ranks: int) -> None:
    """Raises ValueError for batches that cannot be divided, and for a length of training that is not clear."""
    prompts, size = args.prompts_per_step, ranks_per_engine(args, num_ranks)
    check_engines(size, num_ranks)
    num_engines = num_ranks // size
    if prompts % num_engines:
        below = prompts // num_engines * num_engines
        near = f"{below} or {below + num_engines}" if below else num_engines
        engines = f"{num_engines} engines ({num_ranks} ranks / --tensor_parallel_size {size})"
        raise ValueError(f"--prompts_per_step {prompts} is not divisible by {engines}; use {near}.")
    if prompts % args.prompts_per_update:
        wrong = f"--prompts_per_update {args.prompts_per_update} does not divide --prompts_per_step {prompts}"
        raise ValueError(f"{wrong}; use one of {divisors(prompts)}.")
    longest = args.max_prompt_tokens + args.max_completion_tokens
    if args.micro_batch_tokens < longest:
        raise ValueError(
            f"--micro_batch_tokens {args.micro_batch_tokens} cannot hold one sequence of --max_prompt_tokens "
            f"{args.max_prompt_tokens} + --max_completion_tokens {args.max_completion_tokens}; use at least {longest}."
        )
    num_lengths = sum(x is not None for x in (args.total_steps, args.epochs, args.total_episodes))
    if num_lengths != 1:
        raise ValueError(f"{num_lengths} of --total_steps, --epochs, --total_episodes were given; give exactly one.")
    completions = prompts * args.group_size
    if args.total_episodes is not None and args.total_episodes < completions:
        wrong = f"--total_episodes {args.total_episodes} is less than one step"
        raise ValueError(f"{wrong}, --prompts_per_step x --group_size; use at least {completions}.")


def check_waits(args: argparse.Namespace, num_ranks: int) -> None:
    """Raises ValueError if a single completion may be graded for longer than the other ranks wait."""
    minutes = args.reward_timeout * (1 + args.reward_retries) / 60
    if num_ranks > 1 and minutes >= args.timeout_minutes:
        wrong = f"--reward_timeout {args.reward_timeout:g} with --reward_retries {args.reward_retries}"
        rule = f"the other ranks wait --timeout_minutes {args.timeout_minutes:g}"
        raise ValueError(
            f"{wrong} lets a completion be graded for {minutes:.3g} minutes, but {rule}; make that longer."
        )
    if num_ranks > 1 and (args.stall_seconds or 0) >= args.timeout_minutes * 60:
        ends = f"--timeout_minutes {args.timeout_minutes:g} would end the run before the report"
        most = args.timeout_minutes * 60
        raise ValueError(f"--stall_seconds {args.stall_seconds:g}: {ends}; use less than {most:g}.")


def check_bounds(args: argparse.Namespace) -> None:
    """Raises ValueError for bounds of an update that every update would break, or none could, and for no way back."""
    is_on_policy = args.prompts_per_update == args.prompts_per_step and args.num_iterations == 1
    for name in ("max_kl", "max_ratio", "max_grad_norm_factor"):
        wrong, value = given(FLAGS[f"--{name}"], args), getattr(args, name)
        if 0 < value <= 1 and name != "max_kl":
            raise ValueError(f"{wrong}: must be above 1, or 0 for none.")
        if value and is_on_policy and not args.lora_dropout and name != "max_grad_norm_factor":
            known = "with one update a step, which is of the policy that sampled: KL 0, ratio 1"
            raise ValueError(f"{wrong} has no effect {known}; leave it out.")
    if args.on_bad_update == "rollback" and not args.save_every:
        raise ValueError("--on_bad_update rollback goes back to a checkpoint, and none is written; give --save_every.")


def check_algorithm(args: argparse.Namespace) -> None:
    """Raises ValueError for flags of the algorithm that contradict each other."""
    if 0 < args.dual_clip <= 1:
        raise ValueError(f"--dual_clip {args.dual_clip:g}: must be above 1, or 0 for none.")
    low, high = args.rollout_correction_min, args.rollout_correction_max
    if args.rollout_correction.endswith("mask") and low >= high:
        raise ValueError(f"--rollout_correction_min {low:g} must be below --rollout_correction_max {high:g}.")
    if args.kl_in == "reward" and args.kl_estimator == "k3+":
        raise ValueError("--kl_estimator k3+: only its gradient differs from k3, and --kl_in reward has none; use k3.")
    if args.kl_in == "reward" and args.advantage == "reinforce++" and args.policy_loss == "gspo":
        differs = "--advantage reinforce++ with --kl_in reward differs from token to token"
        raise ValueError(f"--policy_loss gspo weighs whole sequences, but {differs}; use gspo_token.")
    if args.dynamic_sampling != "off":
        dynamic = f"--dynamic_sampling {args.dynamic_sampling}"
        if args.epochs is not None:
            known = "the steps of an epoch are known only afterwards"
            raise ValueError(f"--epochs {args.epochs} with {dynamic}: {known}; give --total_steps.")
        if args.keep_last:
            raise ValueError(f"--keep_last has no effect with {dynamic}, which has no last steps; leave it out.")


def check_head_dtype(args: argparse.Namespace) -> None:
    """Raises ValueError for logits that are coarser than all the rest."""
    if args.head_dtype == "bfloat16" and args.dtype == "float32":
        raise ValueError("--head_dtype bfloat16 would round what --dtype float32 computes; leave it out.")


def check_memory(args: argparse.Namespace, num_ranks: int) -> None:
    """Raises ValueError for flags of precision and memory that contradict each other or the number of ranks."""
    check_head_dtype(args)
    if args.shard_ranks is not None and num_ranks % args.shard_ranks:
        wrong = f"--shard_ranks {args.shard_ranks} does not divide the world size {num_ranks}"
        raise ValueError(f"{wrong}; use one of {divisors(num_ranks)}.")
    if args.param_dtype == "bfloat16" and args.dtype == "float32":
        raise ValueError(
            "--dtype float32 computes more finely than --param_dtype bfloat16 stores; leave one of them out."
        )
    if args.lora_rank:
        advice = f"has no effect with --lora_rank {args.lora_rank}; leave it out"
        if args.param_dtype != "float32":
            raise ValueError(
                f"--param_dtype {args.param_dtype} {advice}: adapters are kept in float32, the rest in --dtype."
            )
        if args.offload_reference:
            raise ValueError(f"--offload_reference {advice}: the reference is the policy with its adapter off.")
