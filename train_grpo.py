"""Trains a language model with GRPO on verifiable rewards: the set-up, then the loop.

    python scripts/launch.py --ranks 8 train_grpo.py --model Qwen/Qwen2.5-7B --train_data math.jsonl --out_dir runs/x

Every rank runs this file. It holds a shard of the policy (FSDP2) and a part of a sampling engine
(vLLM), and sees the whole step: all completions, all rewards, and one plan of who trains what. To
understand a step, read the loop below, then what the README lists, from `batch.py` (with the
dimension key) to `grpo.py`. The same command again continues from the last checkpoint.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gate import command

# Before the imports that take seconds, so that a mistake in a flag is reported at once.
ARGS = command.start() if __name__ == "__main__" else None

import update as without_critic
from algorithm import algorithm_of, own_function
from checkpoint import Writer, latest, load, set_link
from command_line import exit_with_error
from data import PromptData
from evaluation import Evaluator
from flags import EngineSettings, Lora, Memory, Sampling, Saving, Servers
from fsdp_utils import World, close_world, init_world, is_main_process, set_allocator
from gate.agreement import check_same_step, check_world
from gate.checks import free_on_resume, ranks_per_engine
from gate.describe import describe_algorithm, describe_data, describe_plan, describe_policy, describe_world
from gate.digests import digests_of_files, digests_of_inputs
from gate.inputs import Inputs, check_replayed
from gate.machine import head_growth
from gate.models import length_limits
from gate.own import guarded
from metrics import merge_updates
from policy import Policy, build_policy
from run import Observer, Run, open_run_folder
from runtime.files import run_and_step
from runtime.history import read_metrics
from runtime.parts import part
from runtime.rank import OwnCodeError, RunError, Stopped
from runtime.signals import arm
from runtime.start import NOT_FINISHED, leave, signal_name
from sampling import Sampler
from schedule import Plan, make_plan
from step_metrics import throughput, work_of_step
from update import add_logprobs, make_guard, pack_updates
from watch.after_step import AfterStep
from watch.console import Console
from watch.memory import MemoryWatch
from watch.results import Results
from watch.rollouts import Keeper, bytes_of_tokens
from watch.samples import Samples
from watch.tracker import Tracker

if TYPE_CHECKING:
    from types import ModuleType

    from torch.optim import Optimizer

    from extras.critic.critic import Critic
    from extras.servers.engine import ServerEngine
    from rollout import Engine


def load_models(
    args: Namespace, plan: Plan, inputs: Inputs, run: Run
) -> tuple[Policy, Policy | None, Optimizer, ModuleType | Critic, Engine | ServerEngine]:
    """The policy, the reference (None without a KL term), the policy's optimizer, the learner, and the engine.

    The learner has the verbs of `update.py` that a critic changes: it is that module, or a `Critic`.
    """
    memory = Memory.from_flags(args, head_growth=head_growth(args, run.world))
    learner = without_critic
    try:
        with run.observed("load"):
            # First, so that a wrong key or model of a server ends the run before weights are loaded.
            servers = None
            if args.engine == "server" and not args.replay:
                from extras.servers.engine import build_servers, describe_weights

                given = engine_settings(args), Servers.from_flags(args)
                servers = build_servers(args.model, *given, inputs.tokenizer, inputs.turns, run, run.step)
            policy, reference, optimizer = build_policy(args.model, memory, Lora.from_flags(args), plan, run.world)
            if args.critic:
                make_critic = part("extras.critic.critic", "--critic").Critic
                learner = make_critic(args.critic, args.model, memory, plan.adamw, run.world)
                policy.beside["critic"] = learner
            engine = servers or build_engine(args, inputs, run)
            if servers:
                servers.weights = describe_weights(policy)
    except ValueError as error:  # weights that do not fit config.json
        exit_with_error(error)
    run.say(describe_policy(policy))
    if inputs.turns:
        run.say(inputs.turns.describe())
    return policy, reference, optimizer, learner, engine


def engine_settings(args: Namespace) -> EngineSettings:
    return EngineSettings.from_flags(args, max_model_len=sum(length_limits(args)))


def build_engine(args: Namespace, inputs: Inputs, run: Run) -> Engine:
    """The engine in the ranks, with random weights until the first `sync`, which brings the weights of `run.step`."""
    if args.replay:
        from extras.samplers.replay import NoEngine

        set_allocator(is_expandable=True)  # as beside an engine
        return NoEngine()
    from engine.host_time import shorten  # vLLM takes seconds to import: mistakes are reported before
    from rollout import Engine

    prompts, num_engines = args.prompts_per_step, run.world.num_engines
    if args.partial_rollouts:
        from extras.samplers.partial import num_unfinished_prompts

        prompts = num_unfinished_prompts(prompts, num_engines)
    demand = inputs.engine_demand(num_engines, (prompts, args.group_size))
    play = inputs.turns and inputs.turns.play  # who says what comes after a completion; None: nobody
    engine = Engine(args.model, inputs.tokenizer, run.world, engine_settings(args), demand, play)
    shorten(engine.llm)
    engine.sleep()  # until the first sync: what that gathers and the engine's cache are never held together
    return engine


def build_sampler(
    args: Namespace, plan: Plan, inputs: Inputs, data: PromptData, engine: Engine | ServerEngine, run: Run
) -> Sampler:
    sampling = Sampling.from_flags(args, num_samples=args.group_size, keeps_routes=args.router_replay)
    make_sampler = Sampler
    if args.partial_rollouts:
        make_sampler = part("extras.samplers.partial", "--partial_rollouts").PartialSampler
    if args.replay:
        make_sampler = partial(
            part("extras.samplers.replay", "--replay").ReplaySampler, folder=run_and_step(args.replay)[0]
        )
    add_hints = inputs.hints and inputs.hints.add
    return make_sampler(engine, inputs.grader, data, plan, sampling, run, add_hints)


def finish(run: Run, step: int) -> None:
    """Makes `final` point to the last checkpoint, and ends the run. May be repeated, as after a kill."""
    if run.world.is_main:
        set_link(run.out_dir / "final", run.out_dir / f"step_{step}")
    run.end("done" if step == run.total_steps else f"stopped after step {step}")


def end_complete(run: Run, saved_step: int, last_step: int) -> None:
    """Says that there is nothing left to train, and how there would be."""
    finish(run, saved_step)
    longer = "--stop_after" if last_step < run.total_steps else "--total_steps (of a constant learning rate alone)"
    way_on = f"To continue it, raise {longer} or change --out_dir."
    if run.is_stopped:
        way_on = "It was ended by --after_step; to start afresh, change --out_dir."
    run.say(f"{run.out_dir} is complete: it has a checkpoint of step {saved_step}. {way_on}")
    close_world()


def end_by_signal(run: Run, inputs: Inputs, engine: Engine | ServerEngine) -> None:
    """Ends the process. The last step that was done is saved."""
    run.end(f"stopped after step {run.num_done}")
    run.say(f"ended by {signal_name()} after step {run.num_done}, which is saved; the same command continues")
    close(inputs, engine)
    leave(NOT_FINISHED)  # on GPUs the engine may sleep: its exit could change the status


def starting_point(args: Namespace, run: Run, last_step: int) -> tuple[int, Path | None]:
    """The step that the run continues from, and its checkpoint; (0, None): it begins with --model."""
    step, folder = latest(run.out_dir, run.world, run.say)
    if args.replay and folder is None:
        from extras.samplers.replay import weights_of

        return weights_of(args.replay, last_step)
    return step, folder


def close(inputs: Inputs, engine: Engine | ServerEngine) -> None:
    engine.close()
    inputs.close()
    close_world()


def open_run(args: Namespace) -> tuple[Inputs, PromptData, Plan, Run]:
    """The user's inputs, checked by all ranks together, and the run folder. A mistake ends with one sentence."""
    try:
        inputs, out_dir = Inputs.load(args), Path(args.out_dir)
        digests = digests_of_inputs(args, inputs)
        check_replayed(args, digests)
        lock = open_run_folder(out_dir, vars(args), free_on_resume(args), digests) if is_main_process() else None
        read_metrics(out_dir)  # raises for a log that is damaged
        world = init_world(ranks_per_engine(args), args.timeout_minutes, args.shard_ranks, args.engine == "colocated")
        check_world(args, world)
        inputs = inputs.with_usable_keys(world)
        train_data = PromptData.mix(inputs.train_data)
        plan = make_plan(args, len(train_data.rows))
    except (ValueError, OSError, RuntimeError) as error:
        exit_with_error(error)
    observers = observers_of(args, inputs, world, plan.total_steps)
    files = digests | digests_of_files([args.after_step or ""])  # to be kept, but not compared
    run = Run(out_dir, lock, world, plan.total_steps, files, observers)
    run.say(f"{describe_world(world)}; {describe_plan(plan)}\n{describe_algorithm(args)}")
    if world.is_main:
        file = out_dir / "excluded_rows.jsonl"
        run.say("\n".join(describe_data([train_data, *inputs.eval_sets], inputs.tokenizer, file)))
    return inputs, train_data, plan, run


def observers_of(args: Namespace, inputs: Inputs, world: World, total_steps: int) -> list[Observer]:
    """The observers of this rank's run: those that add to a step's line before those that show it."""
    out_dir, observers = Path(args.out_dir), [MemoryWatch(world)]
    if args.tools:
        observers.append(inputs.turns)
    if args.after_step:  # behind all that add to the line
        observers.append(AfterStep(own_function("--after_step", args.after_step)))
    if args.keep_rollouts:
        tokens = bytes_of_tokens(inputs.tokenizer) if world.is_main else None
        observers.append(Keeper(out_dir, args.keep_rollouts, tokens))
    if world.is_main:
        observers += [Samples(out_dir), Console(out_dir, total_steps, args.quiet), Results(out_dir)]
    if world.is_main and args.track != "none":
        observers.append(Tracker(args.track, out_dir))
    return observers


def main(args: Namespace) -> None:
    algorithm = guarded(algorithm_of(args))
    inputs, train_data, plan, run = open_run(args)
    world, out_dir, memory = run.world, run.out_dir, Memory.from_flags(args)
    last_step = min(plan.total_steps, args.stop_after or plan.total_steps)
    saved_step, saved = starting_point(args, run, last_step)
    run.step = saved_step
    logged = run.logged([saved_step]).get(saved_step, {})
    evaluator = Evaluator.from_flags(
        args, sets=inputs.eval_sets, samplings=inputs.eval_samplings, grader=inputs.grader, folder=out_dir / "eval"
    )
    must_evaluate = evaluator.is_missing(saved_step, saved_step == last_step, logged)
    # If that step's evaluation is missing, its line is logged again below.
    run.recall(saved_step - 1 if must_evaluate else saved_step)
    if (saved_step >= last_step or run.is_stopped) and not must_evaluate:
        end_complete(run, saved_step, last_step)
        return
    policy, reference, optimizer, learner, engine = load_models(args, plan, inputs, run)
    sampler = build_sampler(args, plan, inputs, train_data, engine, run)
    writer = Writer(out_dir, inputs.companions, Saving.from_flags(args), world, run.say)
    guard = make_guard(args.dtype, world)
    with run.observed("load"):
        if saved:
            state = load(saved, policy, optimizer)
            sampler.restore(state)
            guard.restore(state)
            run.say(f"continues from {saved}")
        run.describe_start(saved_step)
        engine.sync(policy.full_weights())  # also a resumed run samples from the policy that it trains
    if must_evaluate:  # before training, or where a kill came between a step and its evaluation
        with run.phase("evaluate"):
            logged |= evaluator.run(engine, saved_step)
        run.log(saved_step, logged)

    arm(args.grace_seconds)  # from here on a signal is a request: the run ends with a checkpoint
    try:
        for step in run.steps(saved_step + 1, last_step):
            # 1. Sample G completions to each of P prompts; each is graded as soon as it is finished.
            with run.phase("sample"):
                rollout, metrics = sampler.collect(step)
                check_same_step(step, sampler.rollout)
                sampler.start(step, last_step)  # servers work ahead; an engine in these ranks samples when it is asked
            # The trainer needs the memory of the GPU: the engine gives weights and cache back.
            with run.phase("sleep"):
                engine.sleep()

            # 2. Log-probs of the sampled tokens under the old policy and the reference, where the loss needs them.
            with run.phase("pack"):
                updates = pack_updates(rollout, plan, algorithm, memory, policy, world)
            with run.phase("logprobs"):
                updates = add_logprobs(updates, policy, reference, algorithm)

            # 3. Advantage: how much better is a completion than the others of its group?
            # Not before the log-probs: with --kl_in reward the KL of each token is a part of its reward.
            # Where own code or a guard ends the run, what was sampled is written first, so that it can be looked at.
            record = partial(sampler.step_record, step, rollout, updates)
            with run.phase("advantage"), run.shown(record, is_complete=False):
                rollout, updates = learner.add_advantages(rollout, updates, algorithm, step, plan.total_steps)

            # 4. Update: one optimizer step per mini-batch of prompts.
            trained = []
            with run.phase("update"), run.shown(partial(sampler.step_record, step, rollout, updates)):
                for i, update in enumerate(updates * plan.num_iterations):
                    position = plan.update(step, i)
                    trained.append(learner.update_policy(policy, optimizer, update, algorithm, position, memory, guard))

            # 5. Sync: the new weights go to the engine, one parameter at a time.
            # Never are the whole weights of trainer and engine in memory together.
            with run.phase("sync"):
                engine.sync(policy.full_weights())

            # 6. Evaluate on held-out problems, under the new weights.
            if evaluator.is_due(step, run.is_last):
                with run.phase("evaluate"):
                    metrics |= evaluator.run(engine, step)

            # 7. Log, before the checkpoint: a kill in between repeats a step and loses no line.
            work = work_of_step(sampler.rollout, rollout, updates, plan.num_iterations, policy)
            metrics |= merge_updates(trained) | throughput(work, sampler.seconds_RE, run.times(), world)
            run.log(step, metrics)

            # 8. Checkpoint: whole or not at all. Its time is counted in the next step's line.
            if writer.is_due(step, run.is_last):
                with run.phase("checkpoint"):
                    writer.save(step, policy, optimizer, sampler.state(step) | guard.state(), run.is_last)
        finish(run, done := run.num_done)
        run.say(f"done, step {done}/{plan.total_steps}: {out_dir}/final holds the policy; curves.png is beside it")
    except Stopped:
        done = run.num_done
        writer.save(done, policy, optimizer, sampler.state(done) | guard.state(), is_required=True)
        end_by_signal(run, inputs, engine)
    close(inputs, engine)


if __name__ == "__main__":
    try:
        main(ARGS)
    except (RunError, OwnCodeError, MemoryError) as error:  # it says what to change
        exit_with_error(error)
