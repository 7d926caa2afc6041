"""Trains a language model with GRPO on verifiable rewards: the set-up, then the loop.

    torchrun --nproc_per_node 8 train_grpo.py --model Qwen/Qwen2.5-7B --train_data math.jsonl --out_dir runs/math ...

Every rank runs this file. It holds a shard of the policy (FSDP2) and a part of a sampling engine (vLLM), and sees the
whole step: all completions, all rewards, and one plan of who trains what. To understand a step, read the loop below,
then `sampling.py`, `rollout.py`, `batch.py` (with the dimension key), `update.py`, `grpo.py`, `policy.py`,
`fsdp_utils.py`. Starting the same command again continues from the last checkpoint in --out_dir.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from inputs.checks import check_flags
from inputs.command_line import exit_with_error, parse_flags

if __name__ == "__main__":  # a mistake in a flag is reported before transformers and vLLM are imported
    ARGS = parse_flags()
    try:
        if ARGS.dry_run:
            from planner.dry_run import dry_run

            sys.exit(dry_run(ARGS))
        check_flags(ARGS)
        from inputs.choices import algorithm_of

        ALGORITHM = algorithm_of(ARGS)
    except (ValueError, OSError) as error:
        exit_with_error(error)

from checkpoint import Writer, latest, link_final, load
from data import PromptData
from evaluate import Evaluator
from flags import AdamW, EngineSettings, Lora, Memory, Sampling, free_on_resume, make_plan, take
from fsdp_utils import World, close_world, init_world, is_main_process
from grpo import Algorithm
from inputs.load import Inputs, check_world, load_inputs
from metrics import throughput, work_of_step
from model.vision import most_images
from planner.watch import watch_memory
from policy import build_policy
from reward import RewardFailed
from run import Run, open_run_folder
from sampling import Draws, Sampler
from update import add_advantages, add_logprobs, pack_updates, update_policy

if TYPE_CHECKING:
    from rollout import Engine


def build_engine(args: Namespace, inputs: Inputs, world: World) -> Engine:
    """The engine, with random weights until the first `sync`."""
    from rollout import Engine, largest_share  # vLLM takes seconds to import: mistakes are reported before

    limits = args.max_prompt_tokens, max(args.max_completion_tokens, *args.eval_max_completion_tokens)
    settings = take(EngineSettings, args, max_model_len=sum(limits))
    datasets = [*inputs.train_data, *inputs.eval_sets]
    max_images = most_images(row.images for data in datasets for row in data.rows)
    held_out = zip(inputs.eval_sets, inputs.eval_samplings, strict=True)
    calls = [(args.prompts_per_step, args.group_size)] + [(len(data.rows), each.num_samples) for data, each in held_out]
    sequences = largest_share(calls, world)
    engine = Engine(args.model, inputs.tokenizer, world, settings, inputs.vision, max_images, sequences)
    engine.sleep()  # until the first sync: what that gathers and the engine's cache are never held together
    return engine


def finish(run: Run, step: int) -> None:
    """What a run has beyond its checkpoints: `final` and the curves. Safe to repeat, after a kill, say."""
    if run.world.is_main:
        link_final(run.out_dir, step)
    run.plot()


def main(args: Namespace, algorithm: Algorithm) -> None:
    try:
        inputs, out_dir = load_inputs(args), Path(args.out_dir)
        lock = open_run_folder(out_dir, vars(args), free_on_resume(args)) if is_main_process() else None
        world = init_world(args.tensor_parallel_size, args.timeout_minutes, args.shard_ranks)
        check_world(args, world)
        train_data = PromptData.mix([inputs.grader.check_keys(x, world) for x in inputs.train_data], args.data_weights)
        eval_sets = [inputs.grader.check_keys(data, world) for data in inputs.eval_sets]
        plan, memory = make_plan(args, len(train_data.rows)), take(Memory, args)
        watch = watch_memory(args, len(train_data.rows), world)
    except (ValueError, OSError, RuntimeError) as error:
        exit_with_error(error)
    run = Run(out_dir, lock, world, watch, plan.total_steps, args.profile_steps, args.max_skipped_updates)
    run.say(f"{world.describe()}; {plan.describe()}")
    run.say(algorithm.description)
    run.describe_data([train_data, *eval_sets])
    saved_step, saved = latest(out_dir)
    last_step = min(plan.total_steps, args.stop_after or plan.total_steps)
    if saved_step >= last_step:
        finish(run, saved_step)
        longer = "--stop_after" if last_step < plan.total_steps else "--total_steps"
        way_on = f"To go on, raise {longer} or change --out_dir."
        run.say(f"{out_dir} is complete: it has a checkpoint of step {saved_step}. {way_on}")
        close_world()
        return

    lora, adamw, has_reference = take(Lora, args), take(AdamW, args), algorithm.kl_coef > 0
    try:
        policy, reference, optimizer = build_policy(args.model, memory, lora, adamw, has_reference, args.seed, world)
        engine = build_engine(args, inputs, world)
    except ValueError as error:  # weights that do not fit config.json
        exit_with_error(error)
    run.say(policy.describe())
    sampling = take(Sampling, args, num_samples=args.group_size)
    sampler = Sampler(engine, inputs.grader, train_data, take(Draws, args), sampling, run)
    evaluator = Evaluator(
        eval_sets, inputs.eval_samplings, inputs.grader, args.seed, out_dir / "eval", args.eval_every,
        args.eval_before_training,
    )  # fmt: skip
    writer = Writer(out_dir, inputs.companions, args.keep_checkpoints, args.async_checkpoint, world)
    if saved:
        sampler.restore(load(saved, policy, optimizer))
        run.say(f"continues from {saved}")
    run.describe_start(saved_step)
    engine.sync(policy.full_weights())  # also a resumed run samples from the policy that it trains
    if saved_step == 0 and evaluator.is_due(step=0):
        with run.phase("evaluate"):
            metrics = evaluator.run(engine, step=0)
        run.log(0, metrics)

    for step in run.steps(saved_step + 1, last_step):
        is_last = step == last_step
        # 1. Sample G completions to each of P prompts; each is graded as soon as it is finished.
        with run.phase("sample"):
            rollout, metrics = sampler.collect(step)
        with run.phase("sleep"):
            engine.sleep()  # and gives its memory to the trainer

        # 2. Log-probs of the sampled tokens under the old policy and the reference, where the loss needs them.
        with run.phase("pack"):
            updates = pack_updates(rollout, plan, algorithm, memory, policy, world)
        with run.phase("logprobs"):
            updates = add_logprobs(updates, policy, reference, algorithm)

        # 3. Advantage: how much better is a completion than the others of its group?
        with run.phase("advantage"):
            rollout, updates = add_advantages(rollout, updates, algorithm)

        # 4. Update: one optimizer step per mini-batch of prompts.
        with run.phase("update"):
            for i, update in enumerate(updates * plan.num_iterations):
                run.record(update_policy(policy, optimizer, update, algorithm, plan.update(step, i), memory, world))

        # 5. Sync: the new weights go to the engine, one parameter at a time.
        with run.phase("sync"):
            engine.sync(policy.full_weights())

        # 6. Evaluate on held-out problems, under the new weights.
        if evaluator.is_due(step, is_last):
            with run.phase("evaluate"):
                metrics |= evaluator.run(engine, step)

        # 7. Log, before the checkpoint: a kill in between repeats a step and loses no line.
        with run.phase("log"):
            run.samples(step, rollout, plan.group_size)
        work = work_of_step(sampler.sampled, rollout, updates, policy, plan.num_iterations, memory.share_prompts)
        run.log(step, metrics | throughput(work, sampler.seconds_RE, run.metrics(), world))

        # 8. Checkpoint: whole or not at all. Its time is counted in the next step's line.
        if is_last or (args.save_every and step % args.save_every == 0):
            with run.phase("checkpoint"):
                writer.save(step, policy, optimizer, sampler.state())
                run.plot()

    writer.wait()
    finish(run, last_step)
    run.say(f"done: {out_dir}/final holds the policy, {out_dir}/curves.png the curves")
    inputs.grader.close()
    engine.close()
    close_world()


if __name__ == "__main__":
    try:
        main(ARGS, ALGORITHM)
    except (MemoryError, RewardFailed) as error:  # of the engine, or the user's: it says what to change
        exit_with_error(error)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues from the last checkpoint" if is_main_process() else 1)
