"""Trains a language model with GRPO on verifiable rewards: flags, checks, and the loop.

    torchrun --nproc_per_node 8 train_grpo.py --model Qwen/Qwen2.5-7B --train_data math.jsonl --out_dir runs/math ...

Every rank runs this file. It holds a shard of the policy (FSDP2) and a part of a sampling engine (vLLM), and sees the whole step:
all completions, all rewards, and one plan of who trains what. Read `main` first, then the files in the order of the loop: `data.py`,
`sampling.py`, `rollout.py`, `reward.py`, `update.py`, `grpo.py`, `batch.py`, `policy.py`, `fsdp_utils.py`, `checkpoint.py`, `metrics.py`.
Dimensions: `batch.py`.
Starting the same command again continues from the last checkpoint in --out_dir.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import checkpoint
from algorithm import add_algorithm_flags, describe_algorithm
from batch import Rollout
from data import PromptData, add_data_flags
from evaluate import evaluate, gather_grades, submit_to
from flags import AdamW, EngineSettings, Lora, Memory, Sampling, from_args
from fsdp_utils import World, close_world, exit_with_error, gather_from_ranks, init_world, is_main_process
from inputs import check_and_load_data, prepare_data
from metrics import Metrics, PhaseTimer, RunLog, reward_metrics, rollout_metrics
from model.attention import check_alignment
from model.lora import add_lora_flags
from model.vision import most_images
from plan import Plan, learning_rate
from planner.dry_run import add_dry_run_flags, dry_run
from policy import DTYPES, build_policy
from reward import Grade, add_reward_flags
from sampling import Groups, choose_groups, draw_prompts, prompts_to_sample
from throughput import throughput
from update import (
    add_advantages,
    add_logprobs,
    compute_advantages,
    gather_penalties,
    merge_updates,
    pack_updates,
    update_policy,
)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Wide lines, the type in the place of the value, and a default only where there is one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=140)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.type.__name__ if action.type else "text"

    def _get_help_string(self, action: argparse.Action) -> str:
        has_default = not (action.required or action.nargs in (0, "*") or action.default is None)
        return super()._get_help_string(action) if has_default else action.help


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line as attributes of the same names."""
    parser = argparse.ArgumentParser(
        usage="torchrun --nproc_per_node RANKS train_grpo.py --model MODEL --train_data FILE --out_dir FOLDER --total_steps N [flags]",
        description="Trains a language model with GRPO on verifiable rewards. One rank per GPU; on CPU, as many as you like. "
        "One step = one rollout of P prompts x G completions; one update = one optimizer step. "
        "Starting the same command again continues from the last checkpoint.",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("model and data").add_argument
    add(
        "--model",
        required=True,
        help="the starting policy, also the reference and the tokenizer: folder in Hugging Face format or hub id",
    )
    add(
        "--train_data",
        nargs="+",
        required=True,
        help="training problems: one or more sources WHAT[@SPLIT][#ROWS], see data.py",
    )
    add(
        "--data_weights",
        nargs="+",
        type=float,
        help="shares of the sources in an epoch; default: each row of each source once",
    )
    add(
        "--keep_last",
        action="store_true",
        help="fill an epoch's last partial step from the next epoch instead of dropping it",
    )
    add("--eval_data", nargs="*", default=[], help="held-out problems: sources, each reported under its own name")
    add(
        "--out_dir",
        required=True,
        help="the run folder; made if missing, continued if it holds a run of the same flags",
    )

    add_data_flags(parser)
    add_reward_flags(parser, default="exact")

    add = parser.add_argument_group("batch, counted in prompts").add_argument
    add(
        "--prompts_per_step",
        type=int,
        default=32,
        help="P: prompts sampled each step, over all ranks; divisible by the number of engines",
    )
    add("--group_size", type=int, default=8, help="G: completions per prompt, compared with each other; at least 2")
    add(
        "--prompts_per_update",
        type=int,
        help="prompts per update, over all ranks; divides P: P / this = updates a pass; default: P",
    )
    add(
        "--passes_per_step",
        type=int,
        default=1,
        help="how often a rollout is trained on; the later passes are off-policy",
    )
    add(
        "--micro_batch_tokens",
        type=int,
        default=8192,
        help="most tokens that one rank packs into one forward and backward pass (memory)",
    )
    add(
        "--share_prompts",
        action="store_true",
        help="the completions of a prompt that are packed together share it: it is computed once",
    )
    add("--total_steps", type=int, help="length of training in steps (give this, or one of the next two)")
    add(
        "--epochs",
        type=int,
        help="length of training in passes over the data; the last partial step of each is dropped",
    )
    add("--total_episodes", type=int, help="length of training in completions, rounded down to whole steps")
    add(
        "--stop_after",
        type=int,
        help="end after this step, with a checkpoint; the schedule stays that of the whole length",
    )

    add = parser.add_argument_group("sampling").add_argument
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="of the sampler and of the trainer's log-probabilities: logits are divided by it",
    )
    add(
        "--max_completion_tokens",
        type=int,
        default=1024,
        help="a completion is cut (is_truncated) after this many tokens",
    )
    add("--tensor_parallel_size", type=int, default=1, help="ranks per vLLM engine; divides the number of ranks")
    add(
        "--gpu_memory_utilization",
        type=float,
        default=0.6,
        help="CUDA: share of GPU memory that vLLM may take while it is awake",
    )
    add(
        "--enforce_eager",
        action="store_true",
        help="CUDA: no CUDA graphs in vLLM (starts faster, samples slower); always so on CPU",
    )
    add(
        "--seed",
        type=int,
        default=1,
        help="of data order and sampling; every random draw is a function of it, the step and the engine",
    )

    add_algorithm_flags(parser)
    add_lora_flags(parser)

    add = parser.add_argument_group("optimizer (AdamW)").add_argument
    add("--learning_rate", type=float, default=1e-6, help="peak learning rate")
    add(
        "--lr_schedule",
        choices=["constant", "cosine", "linear"],
        default="constant",
        help="after the warm-up; the last two fall to 0",
    )
    add(
        "--warmup_ratio",
        type=float,
        default=0.0,
        help="share of all updates in which the rate rises linearly to its peak",
    )
    add("--weight_decay", type=float, default=0.0, help="decoupled, on all trained parameters")
    add("--adam_beta1", type=float, default=0.9, help="decay of the mean gradient")
    add("--adam_beta2", type=float, default=0.999, help="decay of the mean squared gradient")
    add("--max_grad_norm", type=float, default=1.0, help="the global gradient norm is clipped to this")
    add(
        "--max_skipped_updates",
        type=int,
        default=3,
        help="an update with a non-finite loss or gradient is skipped; so many in a row end the run",
    )

    add = parser.add_argument_group("precision and memory").add_argument
    add(
        "--dtype",
        choices=list(DTYPES),
        default="bfloat16",
        help="of trainer and sampler arithmetic; gradients are reduced in fp32",
    )
    add(
        "--param_dtype",
        choices=list(DTYPES),
        default="float32",
        help="of parameters, gradients, Adam's moments: 16 bytes a parameter, or 10: fp32 parameters in two halves (optimizer.py)",
    )
    add(
        "--offload",
        choices=["none", "optimizer", "all"],
        default="none",
        help="what lives in host RAM: nothing; the optimizer's state, which streams through the GPU; that, parameters and gradients",
    )
    add(
        "--offload_reference",
        action="store_true",
        help="the reference's shards live in host RAM; each layer's is fetched as it is needed",
    )
    add(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute each decoder layer in the backward pass instead of keeping it",
    )
    add(
        "--offload_activations",
        action="store_true",
        help="what the backward pass needs waits in host RAM; beside checkpointing: less",
    )
    add(
        "--compile_layers",
        action="store_true",
        help="CUDA: torch.compile of the decoder layers, a minute or more at the first step",
    )
    add(
        "--reduce_gradients_once",
        action="store_true",
        help="per update, not per micro-batch: less traffic, for 4 bytes a trained parameter on every GPU",
    )
    add(
        "--gather_parameters_once",
        action="store_true",
        help="per update, or pass for log-probs, not per micro-batch: less traffic, for all of the policy in --dtype on every GPU",
    )
    add(
        "--timeout_minutes",
        type=float,
        default=30.0,
        help="a rank that waits longer than this for the others ends the run",
    )

    add = parser.add_argument_group("evaluation and checkpoints, counted in steps").add_argument
    add("--eval_every", type=int, default=0, help="evaluate after every so many steps and after the last; 0: never")
    add("--eval_before_training", action="store_true", help="evaluate the starting policy, too, as step 0")
    add(
        "--eval_samples",
        type=int,
        nargs="+",
        default=[1],
        help="k: completions per held-out problem; one number for all sets or one each",
    )
    add(
        "--eval_temperature",
        type=float,
        nargs="+",
        default=[1.0],
        help="temperature of held-out sampling; 0 is greedy; for all or each",
    )
    add("--eval_top_p", type=float, nargs="+", default=[1.0], help="nucleus sampling in evaluation; for all or each")
    add(
        "--eval_max_completion_tokens",
        type=int,
        nargs="+",
        help="limit in evaluation; for all or each; default: the training's",
    )
    add(
        "--save_every",
        type=int,
        default=0,
        help="write a checkpoint after every so many steps; after the last there always is one",
    )
    add("--keep_checkpoints", type=int, default=3, help="remove older checkpoints beyond so many; 0: keep all")
    add(
        "--async_checkpoint",
        action="store_true",
        help="write them in the background, from a copy in host RAM, while training goes on",
    )
    add(
        "--profile_steps",
        type=int,
        nargs="*",
        default=[],
        help="steps whose trace is written to OUT_DIR/profile, one file per rank",
    )
    add_dry_run_flags(parser)
    args = parser.parse_args(argv)
    if args.prompts_per_update is None:
        args.prompts_per_update = args.prompts_per_step
    if args.eval_max_completion_tokens is None:
        args.eval_max_completion_tokens = [args.max_completion_tokens]
    return args


def with_rewards(rollout: Rollout, grades: list[Grade], truncated: str) -> Rollout:
    """The rollout with its grades; `truncated` "mask": what was cut is compared with like the others, but left out of the loss."""
    return replace(
        rollout,
        rewards_B=np.array([grade.reward for grade in grades], dtype=np.float32),
        is_right_B=np.array([grade.is_right for grade in grades]),
        is_trained_B=~rollout.is_truncated_B if truncated == "mask" else None,
    )


def describe_run(args: argparse.Namespace, plan: Plan, datasets: list[PromptData], world: World, log: RunLog) -> None:
    """Prints what the flags amount to, before anything takes time: derived numbers, data counts, the first prompt as the model sees it."""
    log.say(
        f"{world.num_trainers} ranks on {world.device.type}, {world.num_engines} engines of {world.tp_size}; "
        f"{args.prompts_per_step} prompts x {args.group_size} = {plan.completions_per_step} completions a step, "
        f"{plan.updates_per_step} updates a step, {plan.steps_per_epoch:g} steps an epoch, {plan.total_steps} steps in all"
    )
    log.say(describe_algorithm(args))
    for data in datasets:
        log.say("\n".join(data.describe()))
    log.excluded([(data.name, where, reason) for data in datasets for where, reason in data.excluded])
    log.say(f"first prompt: {datasets[0].texts[0]!r}")


def finish(out_dir: Path, last_step: int, log: RunLog) -> None:
    """What a complete run has beyond its checkpoints: `final` and the curves. Safe to repeat, after a kill in the middle of it, say."""
    if log.is_main:
        checkpoint.link_final(out_dir, last_step)
    log.plot()


def main() -> None:
    args = parse_flags()
    try:
        if args.dry_run:
            sys.exit(dry_run(args))
        inputs = check_and_load_data(args)
        out_dir = Path(args.out_dir)
        lock = checkpoint.open_run_folder(out_dir, vars(args)) if is_main_process() else None
        world = init_world(args.tensor_parallel_size, args.timeout_minutes)
        if args.share_prompts:
            check_alignment(world.device)
        train_data, eval_sets, plan = prepare_data(args, inputs, world)
    except (ValueError, OSError, RuntimeError) as error:
        exit_with_error(error)
    log = RunLog(out_dir, world.is_main, plan.total_steps)
    describe_run(args, plan, [train_data, *eval_sets], world, log)
    saved = gather_from_ranks(checkpoint.checkpoints(out_dir))[0]  # what the main process sees is what all go by
    first_step = saved[-1][0] + 1 if saved else 1
    last_step = min(plan.total_steps, args.stop_after or plan.total_steps)
    if first_step > last_step:
        finish(out_dir, saved[-1][0], log)
        longer = "--stop_after" if last_step < plan.total_steps else "--total_steps"
        log.say(
            f"{out_dir} is complete: it has a checkpoint of step {saved[-1][0]}. To go on, raise {longer} or change --out_dir."
        )
        close_world()
        return

    from rollout import (  # here, not above: vLLM takes seconds to import, and bad input should be told at once
        Engine,
        largest_share,
    )

    try:
        objects = (from_args(Memory, args), from_args(Lora, args), from_args(AdamW, args), args.kl_coef != 0)
        policy, reference, optimizer = build_policy(args.model, *objects, args.seed, world)
    except ValueError as error:  # weights that do not fit config.json
        exit_with_error(error)
    log.say(policy.describe())
    dtype = DTYPES[args.dtype]
    max_model_len = args.max_prompt_tokens + max(args.max_completion_tokens, *args.eval_max_completion_tokens)
    settings = from_args(EngineSettings, args, max_model_len=max_model_len)
    max_images = most_images(images for data in [train_data, *eval_sets] for images in data.images)
    evaluations = [(len(data.rows), each.samples) for data, each in zip(eval_sets, inputs.eval_settings, strict=True)]
    sequences = largest_share([(args.prompts_per_step, args.group_size), *evaluations], world)
    engine = Engine(args.model, inputs.tokenizer, world, settings, inputs.vision, max_images, sequences)
    processor = inputs.vision.processor if inputs.vision else inputs.tokenizer  # goes into the checkpoints
    writer = checkpoint.Writer(out_dir, processor, dtype, args.keep_checkpoints, args.async_checkpoint, world)
    num_drawn = 0  # prompts sampled so far, in the order of the data
    if saved:
        num_drawn = checkpoint.load(saved[-1][1], policy, optimizer)
        log.say(f"continues from {saved[-1][1]}")
    if world.is_main:
        checkpoint.describe_start(out_dir, world, resumed_from=first_step - 1)
    engine.sync(policy.full_weights())  # from the trainer, always: also a resumed run samples from the policy it trains

    def evaluate_all(step: int) -> Metrics:
        metrics = {}
        for index, (data, settings) in enumerate(zip(eval_sets, inputs.eval_settings, strict=True), start=1):
            where = (out_dir / "eval" / f"step_{step}", world.is_main)
            metrics |= evaluate(engine, data, inputs.grader, settings, (args.seed, step, index), *where).metrics()
        return metrics

    timer = PhaseTimer(args.profile_steps, out_dir / "profile", world.trainer_rank)
    if args.eval_before_training and first_step == 1:
        with timer.phase("evaluate"):
            metrics = evaluate_all(step=0)
        log.log(0, metrics | timer.take())

    num_skipped_in_a_row = 0
    for step in range(first_step, last_step + 1):
        timer.begin(step)
        rounds: list[Groups] = []  # one; with --dynamic_sampling as many as it takes to fill the step
        engine_seconds: list[np.ndarray] = []
        while count := prompts_to_sample(rounds, args):
            # 1. Sample: every engine answers its share of the prompts, G times each; what is finished is graded meanwhile.
            with timer.phase("sample"):
                indices_P = draw_prompts(train_data, step, num_drawn, count, args)
                num_drawn += count
                rows = [SimpleNamespace(ids=train_data.prompts[i], images=train_data.images[i]) for i in indices_P]
                on_finished = submit_to(
                    inputs.grader, train_data, indices_P, args.group_size, args.max_completion_tokens
                )
                sampling = from_args(Sampling, args, num_samples=args.group_size)
                rollout = engine.sample(rows, sampling, (args.seed, step, 0, len(rounds)), on_finished=on_finished)
                engine_seconds.append(engine.seconds_E)

            # 2. Reward: wait for the grades that are still missing, and share them.
            with timer.phase("reward"):
                grades = gather_grades(inputs.grader)
                rounds.append(Groups(indices_P, with_rewards(rollout, grades, args.truncated), grades))
        with timer.phase("sleep"):
            engine.sleep()
        sampled, trained, metrics = choose_groups(rounds, args)

        # 3. Log-probs under weights that have not changed yet, where they are needed: by later updates, and for the KL to the reference.
        with timer.phase("pack"):
            updates = pack_updates(trained.rollout, plan, args, world, policy.parity_length)
        with timer.phase("logprobs"):
            updates = add_logprobs(updates, policy, reference, args)

        # 4. Advantage: compare each completion with the other answers to its own prompt.
        with timer.phase("advantage"):
            penalties = gather_penalties(trained.rollout, updates, args)
            rollout = compute_advantages(trained.rollout, penalties, args)
            updates = add_advantages(updates, rollout)

        # 5. Update: one optimizer step per mini-batch of prompts.
        with timer.phase("update"):
            update_metrics = []
            tokens_of_update = np.split(rollout.trained_lengths_B, plan.updates_per_pass) * args.passes_per_step
            for i, batches in enumerate(updates * args.passes_per_step):
                update_index = (step - 1) * plan.updates_per_step + i
                rate = learning_rate(
                    update_index, args.learning_rate, args.lr_schedule, plan.warmup_updates, plan.total_updates
                )
                num_tokens = max(int(tokens_of_update[i].sum()), 1)
                with policy.dropout_on((args.seed, update_index), world):
                    update_metrics.append(
                        update_policy(policy, optimizer, batches, num_tokens, i == 0, rate, args, world)
                    )
                num_skipped_in_a_row = num_skipped_in_a_row + 1 if update_metrics[-1]["optim/skipped_updates"] else 0
                if num_skipped_in_a_row >= args.max_skipped_updates:
                    raise FloatingPointError(
                        f"step {step}: loss or gradient not finite in {num_skipped_in_a_row} updates in a row."
                    )

        # 6. Sync: the new weights stream into the engine, which forgets what it cached under the old ones.
        with timer.phase("sync"):
            engine.sync(policy.full_weights())

        # 7. Evaluate: held-out problems, under the new weights.
        is_last = step == last_step
        metrics |= (
            rollout_metrics(sampled.rollout, args.group_size)
            | reward_metrics(sampled.grades)
            | merge_updates(update_metrics)
        )
        if args.eval_every and (is_last or step % args.eval_every == 0):
            with timer.phase("evaluate"):
                metrics |= evaluate_all(step)

        # 8. Log: one line of metrics, a few samples. Before the checkpoint, so that a kill in between costs a repeated step, not a line.
        with timer.phase("log"):
            log.samples(step, rollout, trained.grades, [train_data.rows[i] for i in trained.indices_P], args.group_size)
            rows_P = [train_data.rows[i] for i in sampled.indices_P]
            log.reward_failures(step, sampled.rollout, sampled.grades, rows_P, args.group_size)
        metrics |= timer.take()
        metrics |= throughput(metrics, sampled.rollout, rollout, updates, engine_seconds, args, policy, world)
        log.log(step, metrics)

        # 9. Checkpoint: whole or not at all; and the curves. Its time is counted in the next step's line.
        if is_last or (args.save_every and step % args.save_every == 0):
            with timer.phase("checkpoint"):
                writer.save(step, policy, optimizer, num_drawn)
                log.plot()

    writer.wait()
    finish(out_dir, last_step, log)
    log.say(f"done: {out_dir}/final holds the policy, {out_dir}/curves.png the curves")
    if inputs.grader is not None:
        inputs.grader.close()
    engine.close()
    close_world()
    del lock  # held open until here


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues from the last checkpoint" if is_main_process() else 1)
