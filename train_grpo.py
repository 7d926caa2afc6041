"""Trains a language model with GRPO on verifiable rewards: the set-up, then the loop.

    torchrun --nproc_per_node 8 train_grpo.py --model Qwen/Qwen2.5-7B --train_data math.jsonl --out_dir runs/math ...

Every rank runs this file. It holds a shard of the policy (FSDP2) and a part of a sampling engine (vLLM), and sees the whole
step: all completions, all rewards, and one plan of who trains what. To understand a step, read the loop below, then
`sampling.py`, `rollout.py`, `batch.py` (with the dimension key), `update.py`, `grpo.py`, `policy.py`, `fsdp_utils.py`.
Starting the same command again continues from the last checkpoint in --out_dir.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from flags import check_flags, exit_with_error, parse_flags

if __name__ == "__main__":  # a mistake in a flag is reported before torch, transformers and vLLM are imported
    ARGS = parse_flags()
    if ARGS.dry_run:
        from planner.dry_run import dry_run

        sys.exit(dry_run(ARGS))
    check_flags(ARGS)

from transformers import PreTrainedTokenizerBase

from checkpoint import Writer, checkpoints, link_final, load
from data import PromptData, read_system_prompt
from evaluate import Evaluator, check_names, settings_per_set
from flags import AdamW, EngineSettings, Grading, Lora, Memory, PromptFormat, Sampling
from flags import algorithm_of, free_on_resume, make_plan, take
from fsdp_utils import (
    check_launch,
    close_world,
    gather_from_ranks,
    init_world,
    is_engine_leader_process,
    is_main_process,
)
from model.sizes import check_model, load_config
from model.vision import Vision, load_processor
from policy import build_policy, check_device
from reward import Grader
from run import Run, open_run_folder
from sampling import Draws, Sampler
from update import add_advantages, add_logprobs, pack_updates, update_policy


@dataclass(frozen=True)
class Inputs:
    """What the user gives, read and checked before any weight is read."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what reads images; None if the model sees none
    train_parts: list[PromptData]
    eval_sets: list[PromptData]
    grader: Grader


def load_inputs(args: Namespace) -> Inputs:
    """Raises ValueError, OSError or RuntimeError for everything that is wrong with the user's input."""
    check_launch(args.tensor_parallel_size, args.dtype)
    check_names(args.eval_data)
    config = load_config(args.model)
    limits = (args.max_prompt_tokens, max(args.max_completion_tokens, *args.eval_max_completion_tokens))
    check_config(args.model, config, limits, args.tensor_parallel_size)
    lora, memory = take(Lora, args), take(Memory, args)
    check_policy(config, lora, memory)
    prompt_format = take(PromptFormat, args, system_prompt=read_system_prompt(args.system_prompt))
    tokenizer, vision = load_processor(args.model, config, prompt_format)
    train_parts = [PromptData.load(source, prompt_format, tokenizer, args.seed, vision) for source in args.train_data]
    make_plan(args, len(PromptData.mix(train_parts, args.data_weights).rows))  # raises if weights or rows are wrong
    # Held-out sets are the same problems whatever the run's seed: 0 draws the #ROWS.
    eval_sets = [PromptData.load(source, prompt_format, tokenizer, 0, vision) for source in args.eval_data]
    grader = Grader(take(Grading, args), args.tensor_parallel_size)
    return Inputs(tokenizer, vision, train_parts, eval_sets, held_out_settings(args), grader)


def main(args: Namespace) -> None:
    try:
        algorithm, inputs, out_dir = algorithm_of(args), load_inputs(args), Path(args.out_dir)
        lock = open_run_folder(out_dir, vars(args), free_on_resume(args)) if is_main_process() else None
        world = init_world(args.tensor_parallel_size, args.timeout_minutes)
        parts = [inputs.grader.check_keys(data, world) for data in inputs.train_parts]
        eval_sets = [inputs.grader.check_keys(data, world) for data in inputs.eval_sets]
        train_data = PromptData.mix(parts, args.data_weights)
        plan, memory = make_plan(args, len(train_data.rows)), take(Memory, args)
    except (ValueError, OSError, RuntimeError) as error:
        exit_with_error(error)
    run = Run(out_dir, lock, world, plan.total_steps, args.profile_steps, args.max_skipped_updates)
    run.say(describe_run(plan, world))
    run.say(algorithm.description)
    run.describe_data([train_data, *eval_sets])

    saved = gather_from_ranks(checkpoints(out_dir))[0]  # all ranks use the main process's list of checkpoints
    first_step = saved[-1][0] + 1 if saved else 1
    last_step = min(plan.total_steps, args.stop_after or plan.total_steps)
    if first_step > last_step:
        run.finish(saved[-1][0], is_whole=last_step == plan.total_steps)
        return close_world()

    from rollout import Engine, largest_share  # here: vLLM takes seconds to import, and bad input is reported before

    try:
        has_reference = algorithm.kl_coef > 0
        lora, adamw = take(Lora, args), take(AdamW, args)
        policy, reference, optimizer = build_policy(args.model, memory, lora, adamw, has_reference, args.seed, world)
    except ValueError as error:  # weights that do not fit config.json
        exit_with_error(error)
    run.say(policy.describe())
    engine = build_engine(args, inputs, train_data, eval_sets, world)
    sampling = take(Sampling, args, num_samples=args.group_size, top_p=1.0)
    sampler = Sampler(engine, inputs.grader, train_data, take(Draws, args), sampling, run)
    evaluator = Evaluator(eval_sets, inputs.eval_settings, inputs.grader, args.seed, out_dir)
    writer = Writer(out_dir, inputs.processor, args.keep_checkpoints, args.async_checkpoint, world)
    if saved:
        sampler.restore(load(saved[-1][1], policy, optimizer))
        run.say(f"continues from {saved[-1][1]}")
    run.describe_start(resumed_from=first_step - 1)
    engine.sync(policy.full_weights())  # also a resumed run samples from the policy it trains
    if args.eval_before_training and first_step == 1:
        with run.phase("evaluate"):
            metrics = evaluator.run(engine, step=0)
        run.log(0, metrics)

    for step in run.steps(first_step, last_step):
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
        if args.eval_every and (is_last or step % args.eval_every == 0):
            with run.phase("evaluate"):
                metrics |= evaluator.run(engine, step)

        # 7. Log, before the checkpoint: a kill in between repeats a step and loses no line.
        with run.phase("log"):
            run.samples(step, rollout, args.group_size)
        metrics |= throughput(run.metrics(), sampler, rollout, updates, policy, world)
        run.log(step, metrics)

        # 8. Checkpoint: whole or not at all. Its time is counted in the next step's line.
        if is_last or (args.save_every and step % args.save_every == 0):
            with run.phase("checkpoint"):
                writer.save(step, policy, optimizer, sampler.state())
                run.plot()

    writer.wait()
    run.finish(last_step)
    inputs.grader.close()
    engine.close()
    close_world()


if __name__ == "__main__":
    try:
        main(ARGS)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command continues from the last checkpoint" if is_main_process() else 1)
