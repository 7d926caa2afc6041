#!/usr/bin/env bash
# The speedrun: Qwen3-0.6B-Base learns from 400 completions. Source: rasbt's reasoning-from-scratch, chapter 6
# (ch06/02_rlvr_grpo_scripts_intro: rlvr_grpo_original_no_kl.py and its README). Hardware: 1 GPU of 24 GB (20.3 GB in the
# source); or CPUs, with --dtype float32, overnight. Time: not known. Expected, from the source: MATH-500,
# greedy, 15.2 before and 47.4 after 50 steps; after 100 it is 44.0. Part of that is form: see reward/part/box, and
# docs/setups.md, which also has the leaderboard.
# First, the data:
#     python scripts/math_speedrun.py --out_dir data/math_speedrun
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-1}
TP=${TP:-$NGPU} # one prompt a step needs one engine
MODEL=${MODEL:-Qwen/Qwen3-0.6B-Base}
DATA=${DATA:-data/math_speedrun}
OUT_DIR=${OUT_DIR:-runs/qwen3_0.6b_math_speedrun}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train"    # source: rasbt/math_full_minus_math500, 12,000 problems
    --shuffle off                 # source: in the order of the file
    --eval_data "$DATA@test"      # source: MATH-500
    --out_dir "$OUT_DIR"
    --prompt_format raw           # source: no chat template; its prompt asks for a box
    --reward "${REPO-}docs/rewards/boxed_math.py:score" # source: 1 if the last box is correct; in evaluation without one also the last number
    --max_prompt_tokens 1024      # not in the source, which has no limit: our choice
    --max_completion_tokens 512   # source: 512
    --prompts_per_step 1          # source: one problem a step
    --group_size 8                # source: 8 rollouts
    --prompts_per_update 1        # source: one update a step
    --total_steps 50              # source: 50 steps are its best
    --advantage grpo              # source: (r - mean) / (std + 1e-4)
    --advantage_ddof 1            # source: the same
    --advantage_eps 1e-4          # source: the same
    --policy_loss reinforce       # source: -A x the sum of the log-probs
    --loss_aggregation seq_mean_token_sum_norm:constant=1 # source: the sum of a completion, averaged over the completions
    --kl_coef 0                   # source: no KL
    --learning_rate 1e-5          # source: 1e-5
    --lr_schedule constant        # source: constant
    --weight_decay 0.01           # source: AdamW's default
    --adam_beta1 0.9              # source: the same
    --adam_beta2 0.999            # source: the same
    --max_grad_norm 1.0           # source: 1.0
    --temperature 0.8             # source: 0.8, with top_p 0.9, which we leave out; ours divides the logits of the loss by it, too
    --eval_temperature 0          # source: greedy
    --eval_samples 1              # source: one answer
    --eval_max_completion_tokens 2048 # source: 2,048
    --eval_every 50               # source: after 50 steps
    --eval_before_training        # source: and before
    --save_every 50               # source: every 50 steps
    --dtype bfloat16              # source: bf16, there of the parameters, too
    --param_dtype float32         # not in the source: our choice
    --micro_batch_tokens 8192     # not in the source: our choice
    --gradient_checkpointing      # not in the source: our choice
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.5  # not in the source: our choice
    --plan_gpu RTX4090-24GB       # not in the source: our choice; this and the next two are for the dry run alone
    --plan_prompt_tokens 120      # not in the source: our choice
    --plan_completion_tokens 400  # not in the source: our choice
)
launch train_grpo.py "${ARGS[@]}" "$@"
