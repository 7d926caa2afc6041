"""Checks of the flags. Each sentence says what was given, what is required, what to do. No torch: they come first."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
from itertools import chain, cycle, product
from types import SimpleNamespace
from urllib.parse import urlsplit

from flags import DRY_RUN, FLAGS, GROUPS, INF, TINY, Flag, ks_of_pass
from gate.models import check_path
from runtime.cards import gpu_figures
from runtime.files import run_and_step
from runtime.history import read_config
from runtime.parts import check_part, part
from runtime.rank import launched_world_size
from runtime.sources import name_of_source
from runtime.start import check_divides

# Flags that stored rollouts depend on: groups, tokens sampled under these limits, their rewards.
FIXED_BY_ROLLOUTS = (
    "prompts_per_step", "group_size", "temperature", "max_completion_tokens", "max_prompt_tokens", "stop_tokens",
    "reward", "reward_timeout", "overlong_cache_tokens", "truncated", "dynamic_sampling",
    "environment", "tools", "max_turns", "max_turn_tokens",
)  # fmt: skip
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Flags of the first column do not go together with those of the second: one with a value if it has that value, one
# without if it has not its default.
CONTRADICTIONS = (
    ("--kl_over", "--kl_estimator --kl_clamp", "the KL over the vocabulary is exact"),
    ("--kl_over", "--kl_in", "a reward takes the KL of sampled tokens"),
    ("--drop_solved --dynamic_sampling", "--epochs --keep_last", "the steps of an epoch are no fixed number"),
    ("--router_replay", "--engine --partial_rollouts --replay",
     "routes are known of what an engine in the ranks samples, from beginning to end, in the step that trains on it"),
    ("--hint_column", "--image_column", "hints are for prompts of text"),
    ("--environment", "--tools", "an environment calls its tools itself"),
    ("--system_prompt --image_column --template_args --environment --tools", "--prompt_format",
     "the former needs a chat template"),
    ("--environment --tools", "--partial_rollouts --image_column", "the latter is for completions of one turn"),
    ("--partial_rollouts", "--image_column", "completions go on without images"),
    ("--partial_rollouts", "--engine", "servers do the same by --in_flight"),
    ("--partial_rollouts", "--replay", "nothing is sampled"),
    ("--engine", "--image_column", "images are not sent to servers"),
    ("--server_urls", "--generation_gpus", "the servers of the former run already"),
    ("--critic", "--advantage --advantage_ddof --advantage_eps", "its values make the advantages"),
    ("--critic", "--lora_rank --image_column --router_replay", "a critic trains all weights of a model of text"),
    ("--critic", "--policy_loss=gspo", "the latter needs one advantage a sequence"),
    ("--critic", "--dtype=float16", "the loss of a critic is not scaled"),
    ("--lora_rank", "--param_dtype", "adapters are kept in float32, the rest in --dtype"),
    ("--lora_rank", "--reference_every", "the reference is the policy with its adapter off, which never moves"),
    ("--optimizer", "--param_dtype --offload=optimizer --reset_optimizer", "the latter is for adamw alone"),
    ("--param_dtype=bfloat16", "--dtype=float32", "the latter computes more finely than the former stores"),
    ("--head_dtype=bfloat16", "--dtype=float32 --dtype=float16", "the former would round what the latter computes"),
    ("--param_dtype=bfloat16", "--dtype=float16", "the former rounds 8 times coarser than the latter computes"),
    ("--router_replay", "--dtype=float16", "the routes of float16 are not tested"),
    ("--advantage=maxrl", "--kl_in", "rewards must not be negative"),
    ("--advantage=zero", "--kl_in", "nothing is trained on but the KL in the loss"),
    ("--advantage=zero", "--kl_estimator=k1 --kl_estimator=none",
     "as a loss the latter has a gradient of mean zero, which learns nothing (use k2)"),
    ("--reference_every", "--reference", "the reference that moves began as --model"),
    ("--group_size=1", "--dynamic_sampling", "a group of one never has a signal"),
)  # fmt: skip
# A flag with this value needs one of the flags of the second column.
NEEDS = (
    ("--advantage=zero", "--kl_coef", "it trains on nothing but the KL in the loss"),
    ("--policy_loss=a_star_po", "--kl_coef", "it reads the log-probs of the reference"),
    ("--policy_loss=rlsd", "--kl_coef", "it reads the log-probs of the teacher"),
    ("--advantage=gigpo", "--environment --tools", "it compares turns"),
    ("--advantage=mt_grpo", "--environment", "it compares the rewards of turns"),
)
# Flag -> the part that it asks for, whose folder may have been deleted.
PARTS = {
    "--critic": "extras.critic.critic",
    "--lora_rank": "extras.models.lora",
    "--template_args": "extras.sources.variables",
    "--image_column": "extras.models.vision",
    "--router_replay": "extras.models.routes",
    "--kl_over": "extras.teacher.vocabulary",
    "--engine": "extras.servers.engine",
    "--environment": "extras.turns.turns",
    "--tools": "extras.turns.turns",
    "--partial_rollouts": "extras.samplers.partial",
    "--drop_solved": "extras.samplers.solved",
    "--replay": "extras.samplers.replay",
}


def check_flags(args: argparse.Namespace, num_ranks: int | None = None) -> None:
    """Raises ValueError for flags out of range, without effect, or in contradiction; see also `algorithm_of`."""
    check_ranges(args, GROUPS)
    for name, module in PARTS.items():
        if FLAGS[name].is_changed(args):
            check_part(module, name)
    if args.hint_column and args.hint_column.startswith("@"):
        check_part("extras.teacher.hints", "--hint_column")
    check_path(args.model)
    gpu_figures(args.plan_gpu)  # raises for one that is not known
    if num_ranks is None:
        for name in ("--plan_gpus", "--plan_nodes", "--json"):  # scripts set --plan_gpu and its like
            if FLAGS[name].is_changed(args) and not args.dry_run:
                raise ValueError(f"{name} has no effect without --dry_run; leave it out.")
        num_ranks = launched_world_size()
    check_batches(args, num_ranks)
    check_turns(args)
    flag = SimpleNamespace(**{name.removeprefix("--"): each.written(args) for name, each in FLAGS.items()})
    checks = check_loss, check_groups, check_reward, check_hints, check_servers, check_replay
    for check in (*checks, check_evaluation):
        check(args, flag)
    if args.track != "none" and importlib.util.find_spec(args.track) is None:
        raise ValueError(f"--track {args.track}: its package is not installed; run `pip install {args.track}`.")


# Contradictions, by topic: each check raises ValueError for the first. `flag.NAME`: as written.


def check_loss(args: argparse.Namespace, flag: SimpleNamespace) -> None:
    if 0 < args.dual_clip <= 1:
        raise ValueError(f"{flag.dual_clip}: must be above 1, or 0 for none.")
    if args.old_logprobs == "rollout" and args.rollout_correction != "none":
        raise ValueError(
            f"{flag.old_logprobs} with {flag.rollout_correction}: the ratio is already that of trainer and sampler; "
            "use --rollout_correction none."
        )
    if args.advantage == "maxrl" and re.search(r"\blength\b|:-", args.reward):
        raise ValueError("--advantage maxrl needs rewards that are not negative; leave `length` and such weights out.")

    if args.critic:
        _, settings = part("extras.critic.settings", "--critic").settings_of(args.critic)
        if settings.rate and not args.learning_rate:
            raise ValueError(
                f"{flag.critic}: its rate follows the schedule of {flag.learning_rate}; give that a value."
            )


def check_groups(args: argparse.Namespace, flag: SimpleNamespace) -> None:
    compares = args.advantage not in ("zero", "none", "reinforce++", "a_star_po") and ".py:" not in args.advantage
    if args.group_size == 1 and compares and not args.critic:
        raise ValueError(
            f"--group_size 1 has nothing to compare with for {flag.advantage}; use 2 or more, or --advantage zero."
        )
    if args.kl_in == "reward" and args.advantage == "reinforce++" and args.policy_loss == "gspo":
        raise ValueError(
            "--policy_loss gspo needs one advantage a sequence, not reinforce++ with --kl_in reward; use gspo_token."
        )


def check_reward(args: argparse.Namespace, flag: SimpleNamespace) -> None:
    if args.truncated not in ("score", "zero", "mask"):
        try:
            is_number = math.isfinite(float(args.truncated))
        except ValueError:
            is_number = False
        if not is_number:
            raise ValueError(f"{flag.truncated}: use score, zero, mask, or a number.")
    is_ungraded = args.reward == "none" and not args.environment
    if is_ungraded and args.advantage != "zero":
        raise ValueError(
            f"--reward none grades nothing for {flag.advantage} to compare; give --advantage zero, or a reward."
        )
    for needing in ("--dynamic_sampling", "--drop_solved", "--truncated=zero", "--eval_data"):
        if is_ungraded and is_given(needing, args):
            raise ValueError(f"{needing} needs a reward; leave it out, or give one, which --advantage zero only logs.")
    if args.advantage == "zero" and args.reference in (None, args.model) and not args.hint_column:
        raise ValueError(
            "--advantage zero follows the reference, which is --model itself: give --reference, or --hint_column."
        )
    if args.overlong_cache_tokens and not re.search(r"\blength\b|@", args.reward):
        raise ValueError(
            f"{flag.overlong_cache_tokens} has no effect without the reward `length`; leave it out, or add that."
        )
    if args.overlong_cache_tokens and args.overlong_cache_tokens >= args.max_completion_tokens:
        raise ValueError(
            f"{flag.overlong_cache_tokens} makes all completions of {flag.max_completion_tokens} too long; use less."
        )


def check_hints(args: argparse.Namespace, flag: SimpleNamespace) -> None:
    """Checks hints that a step makes; a hint in a column has nothing of its own to contradict."""
    if not (args.hint_column or "").startswith("@"):
        return
    names = args.hint_column.split(",")
    if not set(names) <= {"@group", "@feedback"}:
        raise ValueError(f"{flag.hint_column}: use a column, or @group, @feedback or both, with a comma between them.")
    if args.kl_in == "reward":
        raise ValueError(f"{flag.hint_column} is for --kl_in loss, where completions without a hint have no KL.")
    if "@group" in names and (args.group_size == 1 or args.reward == "none" and not args.environment):
        raise ValueError(
            f"{flag.hint_column} takes another completion that is correct; "
            f"give a reward, and a --group_size of 2 or more, not {flag.reward} and {flag.group_size}."
        )
    if "@feedback" in names and ".py:" not in args.reward and not args.environment:
        raise ValueError(
            f"{flag.hint_column} with {flag.reward}, which says nothing in words; "
            "give a function of your own that returns 'feedback', too (docs/rewards.md)."
        )
    if "@feedback" in names and args.replay:
        raise ValueError(f"{flag.hint_column} with {flag.replay}: rollouts keep no feedback; leave one of them out.")


def check_turns(args: argparse.Namespace) -> None:
    for reference in (args.environment or args.tools or "").split(","):
        if reference and not re.fullmatch(r".+\.py:\w+", reference):
            raise ValueError(f"{reference!r} in --environment or --tools: needed is FILE.py:NAME.")


def check_servers(args: argparse.Namespace, flag: SimpleNamespace) -> None:
    if args.engine == "colocated":
        return
    for url in map(urlsplit, args.server_urls):
        if url.scheme not in ("http", "https") or not url.hostname or url.path.strip("/"):
            raise ValueError(f"{flag.server_urls}: needed is http://HOST:PORT for each.")
    size, num_gpus = args.tensor_parallel_size, len(args.generation_gpus)
    check_divides("--tensor_parallel_size", size, "the number of --generation_gpus", num_gpus)


def check_replay(args: argparse.Namespace, flag: SimpleNamespace) -> None:
    if not args.replay:
        return
    folder, step = run_and_step(args.replay)
    if os.path.realpath(folder) == os.path.realpath(args.out_dir):
        raise ValueError(f"{flag.replay} is --out_dir, too; name another folder for what is trained now.")
    replayed = read_config(folder)
    if not replayed:
        raise ValueError(f"{flag.replay}: {folder} has no config.json; name the folder of a run.")
    for name, kept in (("reference_every", "reference"), ("critic", "critic")):
        if getattr(args, name) and step and not replayed.get(name):
            given = f"{getattr(flag, name)} with {flag.replay}"
            raise ValueError(f"{given}: this checkpoint holds no {kept}; give {folder}.")
    for name in FIXED_BY_ROLLOUTS:
        if name in replayed and replayed[name] != getattr(args, name):
            written, value = getattr(flag, name), replayed[name]
            raise ValueError(f"{written}: the rollouts of --replay were made with {value}; give that.")


def check_evaluation(args: argparse.Namespace, flag: SimpleNamespace) -> None:
    if args.eval_data and not (args.eval_every or args.eval_before_training or args.replay):
        raise ValueError(
            f"{flag.eval_data} is never evaluated; give --eval_every or --eval_before_training, or leave it out."
        )
    if args.keep_best is None:
        return
    metrics = []
    for source, k in zip(args.eval_data, cycle(args.eval_samples), strict=False):
        figures = [f"avg@{k}"]
        if k > 1:
            figures += [*(f"pass@{i}" for i in ks_of_pass(k)), f"maj@{k}"]
        metrics += [f"eval/{name_of_source(source)}/{figure}" for figure in figures]
    if args.keep_best not in metrics:
        advice = f"use one of {', '.join(metrics)}" if metrics else "name held-out problems with --eval_data"
        raise ValueError(f"{flag.keep_best} is not evaluated; {advice}.")
    if not args.eval_every or not args.save_every or args.save_every % args.eval_every:
        raise ValueError(
            f"{flag.keep_best} needs a value for each checkpoint, not {flag.save_every} and {flag.eval_every}; "
            "make the first a multiple."
        )


def check_ranges(args: argparse.Namespace, groups: dict[str, list[Flag]]) -> None:
    """Raises ValueError for a value out of its range, a flag without effect, `CONTRADICTIONS`, `NEEDS`."""
    for flag in chain.from_iterable(groups.values()):
        value = flag.of(args)
        for number in value if isinstance(value, list) else [value]:
            if flag.within and number is not None:
                check_range(flag, number)
        partners = [FLAGS[name] for name in flag.only_with.split()]
        if partners and flag.is_changed(args) and not any(partner.is_changed(args) for partner in partners):
            needed = " or ".join(map(as_needed, partners))
            raise ValueError(
                f"{flag.written(args)} has no effect here, only with {needed}: leave it out, or change the other."
            )
    for flags, opposites, reason in CONTRADICTIONS:
        for pair in product(flags.split(), opposites.split()):
            if all(is_given(each, args) for each in pair):
                both = " with ".join(FLAGS[each.partition("=")[0]].written(args) for each in pair)
                raise ValueError(f"{both}: {reason}; leave one of them out.")
    for choice, partners, reason in NEEDS:
        if is_given(choice, args) and not any(is_given(each, args) for each in partners.split()):
            raise ValueError(f"{choice.replace('=', ' ')} needs {partners.replace(' ', ' or ')}: {reason}.")


def is_given(written: str, args: argparse.Namespace) -> bool:
    """Whether FLAG=VALUE has this value, or FLAG not its default. A program may lack the flag."""
    name, _, value = written.partition("=")
    if not hasattr(args, name.removeprefix("--")):
        return False
    if not value:
        return FLAGS[name].is_changed(args)
    return str(FLAGS[name].of(args)).partition(":")[0] == value  # behind it are parameters of a function


def as_needed(flag: Flag) -> str:
    """The flag with a value that another flag needs, for example: --engine server, --lora_rank above 0."""
    needed = f"{flag.name} {flag.choices[-1]}" if flag.choices else flag.name
    return f"{needed} above 0" if flag.default == 0 else needed


def check_range(flag: Flag, number: float) -> None:
    low, high = flag.within
    if not (low <= number <= high and number < INF):  # also true for nan
        bounds = "above 0" if low == TINY else f"at least {low:g}"
        bounds += " and finite" * (number == INF) if high == INF else f" and at most {high:.7g}"
        raise ValueError(f"{flag.name} {number:g}: must be {bounds}.")


def check_batches(args: argparse.Namespace, num_ranks: int) -> None:
    """Raises ValueError for batches that cannot be divided, and for a length of training that is not clear."""
    prompts, size = args.prompts_per_step, ranks_per_engine(args, num_ranks)
    check_divides("--tensor_parallel_size", size, "the world size", num_ranks)
    check_divides("--shard_ranks", args.shard_ranks or 1, "the world size", num_ranks)
    num_engines = num_ranks // size
    if prompts % num_engines:
        below = prompts // num_engines * num_engines
        near = f"{below} or {below + num_engines}" if below else num_engines
        raise ValueError(
            f"--prompts_per_step {prompts} is not divisible by {num_engines} engines "
            f"({num_ranks} ranks / --tensor_parallel_size {size}); use {near}."
        )
    check_divides("--prompts_per_update", args.prompts_per_update, "--prompts_per_step", prompts)
    for name in ("train_data", "server_urls"):
        given = [each.rstrip("/") for each in getattr(args, name)]
        if twice := [each for each in given if given.count(each) > 1]:
            raise ValueError(f"--{name} names {twice[0]} more than once; name it once.")
    longest = args.max_prompt_tokens + args.max_completion_tokens
    if args.micro_batch_tokens < longest:
        raise ValueError(
            f"--micro_batch_tokens {args.micro_batch_tokens} cannot hold one sequence of --max_prompt_tokens "
            f"{args.max_prompt_tokens} + --max_completion_tokens {args.max_completion_tokens}; "
            f"use at least {longest}."
        )
    num_lengths = 3 - [args.total_steps, args.epochs, args.total_episodes].count(None)
    if num_lengths != 1:
        raise ValueError(f"{num_lengths} of --total_steps, --epochs, --total_episodes were given; give exactly one.")
    completions = prompts * args.group_size
    if args.total_episodes is not None and args.total_episodes < completions:
        raise ValueError(f"--total_episodes {args.total_episodes} is less than one step; use at least {completions}.")


def ranks_per_engine(args: argparse.Namespace, num_ranks: int | None = None) -> int:
    """Ranks that see the same completions and grade them once: servers are to all ranks as one engine."""
    return args.tensor_parallel_size if args.engine == "colocated" else num_ranks or launched_world_size()


def free_on_resume(args: argparse.Namespace) -> set[str]:
    """Names of the flags that may differ when a run continues: also its length, unless something may depend on it.

    That is the learning rate, or a function of the user's that knows the length.
    """
    free = {each.name.removeprefix("--") for each in FLAGS.values() if each.free_on_resume or each in GROUPS[DRY_RUN]}
    is_constant = args.lr_schedule == "constant" and not args.warmup_ratio
    is_constant &= ".py:" not in args.policy_loss + args.advantage + args.kl_estimator
    return free | {"total_steps", "epochs", "total_episodes"} if is_constant else free
