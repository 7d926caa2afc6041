"""GRPO in one screen: the loop of `train_grpo.py` on the same pieces, without what lets a run survive. Read this first.

    python scripts/launch.py --ranks 2 minimal.py --model scripts/tiny_policy --out_dir - --total_steps 3 \
        --train_data scripts/tiny_policy/train.jsonl --max_prompt_tokens 16 --max_completion_tokens 48

Of train_grpo.py it leaves out gate, checkpoints, evaluation, observers, dynamic sampling, servers, turns, images and
replay. The rest gives the same numbers, to the last bit, also in a folder of what it imports (tests/test_core.py).
Of the paper's GRPO (arXiv 2402.03300, algorithm 1) it leaves out the outer iterations, where a reward model learns and
the reference becomes the policy: the rewards are rules here, and most recipes keep their reference, or have none.
Each verb has one file: sample `rollout.py`, grade `reward.py`, pack `packing.py`, update `update.py`, equations
`grpo.py`, log-probs `policy.py`, ranks `fsdp_utils.py`; records are in `batch.py`. Copy this file, hack it.
"""

import argparse
import sys

import numpy as np

from algorithm import algorithm_of
from data import PromptData
from flags import FLAGS, EngineSettings, Grading, Lora, Memory, PromptFormat, Sampling, add_flags, with_defaults
from fsdp_utils import init_world
from metrics import merge_updates
from model.weights import load_tokenizer
from policy import build_policy
from reward import Grader, workers_per_engine
from rollout import Engine
from schedule import make_plan
from update import add_advantages, add_logprobs, make_guard, pack_updates, update_policy

# Flags that change the numbers of train_grpo.py. Here they would do nothing, so they are refused.
LEFT_OUT = "engine", "partial_rollouts", "dynamic_sampling", "drop_solved", "truncated", "environment", "tools"
LEFT_OUT += "critic", "replay", "hint_column", "image_column", "after_step", "shuffle", "system_prompt"


def main() -> None:
    parser = argparse.ArgumentParser(usage="minimal.py FLAGS: those of train_grpo.py, whose --help says more")
    add_flags(parser)
    args = with_defaults(parser.parse_args())
    if given := [f"--{name}" for name in LEFT_OUT if FLAGS[f"--{name}"].is_changed(args)]:
        sys.exit(f"error: minimal.py leaves out {', '.join(given)}; start train_grpo.py with them.")

    # Set-up: data and reward, ranks, the sharded policy, and an engine that gets the policy's weights.
    algorithm, tokenizer, prompt_format = algorithm_of(args), load_tokenizer(args.model), PromptFormat.from_flags(args)
    world = init_world(args.tensor_parallel_size, args.timeout_minutes, args.shard_ranks)
    grader = Grader(Grading.from_flags(args), workers_per_engine(world.tp_size) if world.is_engine_leader else 0)
    data = PromptData.mix([PromptData.load(x, prompt_format, tokenizer, args.seed) for x in args.train_data])
    plan, memory = make_plan(args, len(data.rows)), Memory.from_flags(args)
    policy, reference, optimizer = build_policy(args.model, memory, Lora.from_flags(args), plan, world)
    sampling = Sampling.from_flags(args, num_samples=args.group_size, keeps_routes=args.router_replay)
    settings = EngineSettings.from_flags(args, max_model_len=args.max_prompt_tokens + args.max_completion_tokens)
    engine = Engine(args.model, tokenizer, world, settings)
    engine.sync(policy.full_weights())
    guard = make_guard(args.dtype, world)  # leaves an update out that is not finite

    for step in range(1, min(plan.total_steps, args.stop_after or plan.total_steps) + 1):
        # 1. Sample G completions to each of P prompts; each is graded as soon as it is finished.
        rows = [data.rows[i] for i in data.indices_of_step(step, plan.prompts_per_step, args.seed, args.keep_last)]
        seed = args.seed, step, 0, 0  # run, step, purpose, round
        rollout = engine.sample(rows, sampling, seed, "sample", grader.callback_for(rows, sampling))
        rollout = rollout.graded(grader.collect_from_ranks())
        rewards_B = rollout.rewards_B  # a number for each completion, in the order of the groups
        engine.sleep()  # and gives its memory to the trainer

        # 2. Log-probs of the sampled tokens under the old policy and the reference, where the loss needs them.
        updates = pack_updates(rollout, plan, algorithm, memory, policy, world)
        updates = add_logprobs(updates, policy, reference, algorithm)

        # 3. Advantage: how much better is a completion than the others of its group? To change it, write a function
        # (--advantage FILE.py:f), or change `advantages_N` of the batches here: the loss reads these.
        rollout, updates = add_advantages(rollout, updates, algorithm, step, plan.total_steps)
        advantages = np.concatenate(rollout.advantages)  # a number for each token, one completion after the other

        # 4. Update: one optimizer step per mini-batch of prompts.
        metrics = []
        for i, update in enumerate(updates * plan.num_iterations):
            metrics.append(update_policy(policy, optimizer, update, algorithm, plan.update(step, i), memory, guard))

        # 5. Sync: the new weights go to the engine, one parameter at a time.
        engine.sync(policy.full_weights())
        if world.is_main:
            mean, size = merge_updates(metrics), np.abs(advantages).mean()
            loss, norm, gap = (mean[name] for name in ("policy/loss", "optim/grad_norm", "policy/rollout_gap_mean"))
            line = f"step {step}/{plan.total_steps} | reward {rewards_B.mean()} | advantage {size}"
            print(f"{line} | loss {loss} | grad {norm} | gap {gap}")

    grader.close()
    engine.close()


if __name__ == "__main__":
    main()
