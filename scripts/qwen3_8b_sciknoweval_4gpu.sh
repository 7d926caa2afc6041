#!/usr/bin/env bash
# GRPO on Qwen3-8B and five small tasks, TASK=chemistry, physics, biology, materials or tooluse. Source: lasgroup/SDPO
# (arXiv 2601.20802), its baseline GRPO without rich feedback: experiments/generalization/run_baseline_grpo_all.sh, the
# configurations baseline_grpo and user, its code and its README. Hardware: 4 GPUs of 96 GB (GH200). Time: about 6 h,
# from the source; it gives the best within 1 and within 5 hours. Expected, from its table, avg@16 before, 1 h, 5 h:
#     TASK=chemistry  41.2 -> 65.9, 74.5        TASK=materials  58.9 -> 74.3, 77.1
#     TASK=physics    59.2 -> 63.8, 72.7        TASK=tooluse    57.5 -> 64.9, 67.7
#     TASK=biology    30.8 -> 35.1, 59.9
# It has three seeds, and the better of the learning rates 1e-5 and 1e-6 (--learning_rate 1e-6). First, the data:
#     git clone https://github.com/lasgroup/SDPO data/SDPO
#     TASK=physics OUT_DIR=runs/physics bash scripts/seeds.sh 3 scripts/qwen3_8b_sciknoweval_4gpu.sh
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-4}
TP=${TP:-2} # source: tensor parallel 2, its default
TASK=${TASK:-chemistry}
case $TASK in # the folder of its data; steps: 30 epochs, and of tooluse, whose rows are not counted here, a guess
    chemistry) folder=sciknoweval/chemistry steps=1770 ;;
    physics) folder=sciknoweval/physics steps=660 ;;
    biology) folder=sciknoweval/biology steps=420 ;;
    materials) folder=sciknoweval/material steps=780 ;;
    tooluse) folder=tooluse steps=1000 ;;
    *) echo "error: TASK=$TASK; use chemistry, physics, biology, materials or tooluse" >&2 && exit 2 ;;
esac
MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-data/SDPO/datasets/$folder}
OUT_DIR=${OUT_DIR:-runs/qwen3_8b_sciknoweval_4gpu_$TASK}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
if [ "$TASK" = tooluse ]; then
    TASK_ARGS=(--reward "${REPO-}docs/rewards/sciknoweval.py:tool_calls")
else
    TASK_ARGS=(--reward "${REPO-}docs/rewards/sciknoweval.py:letter")
    TASK_ARGS+=(--system_prompt "${REPO-}scripts/sciknoweval_system_prompt.txt")
fi

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train"    # source: its train.json
    --eval_data "$DATA@test"      # source: its test.json: 210, 80, 50, 94 and 68 problems
    --out_dir "$OUT_DIR"
    --prompt_column prompt        # source: its data
    --answer_column answer        # source: its data
    "${TASK_ARGS[@]}"             # source: 1 if the letter is correct, or all tool calls are; its system prompt for the letter
    --template_args enable_thinking=false # source: thinking off
    --max_prompt_tokens 2048      # source: 2,048; longer ones are left out
    --max_completion_tokens 8192  # source: 8,192
    --prompts_per_step 32         # source: train batch size 32
    --group_size 8                # source: rollout n 8
    --prompts_per_update 8        # source: mini-batch 8, so 4 updates a step; with 32 it is the table's row "on-policy"
    --total_steps "$steps"        # source: 30 epochs, which 5 hours cut short
    --advantage dr_grpo           # source: not divided by the std
    --policy_loss clip            # source: its default
    --clip_low 0.2                # source: 0.2
    --clip_high 0.28              # source: 0.28
    --dual_clip 3                 # source: its default
    --loss_aggregation token_mean # source: its default
    --entropy_coef 0              # source: its default
    --kl_coef 0                   # source: no KL, neither in the loss nor in the reward
    --rollout_correction token_truncate:largest=2  # source: at most 2
    --learning_rate 1e-5          # source: 1e-5 or 1e-6, the better one; it does not say for which task
    --lr_schedule constant        # source: its default
    --warmup_ratio "$(awk "BEGIN { print 10 / $steps }")" # source: 10 warm-up steps; there it rises once a step, here with each update
    --weight_decay 0.01           # source: its default
    --adam_beta1 0.9              # source: its default
    --adam_beta2 0.999            # source: its default
    --max_grad_norm 1.0           # source: its default
    --temperature 1.0             # source: its default
    --eval_samples 16             # source: 16 samples in validation
    --eval_temperature 0.6        # source: 0.6
    --eval_top_p 0.95             # source: 0.95
    --eval_every 5                # source: every 5 steps
    --eval_before_training        # source: its default
    --save_every 20               # not in the source, which saves nothing: our choice
    --keep_checkpoints 1          # not in the source: our choice
    --dtype bfloat16              # source: its default
    --tensor_parallel_size "$TP"
    --micro_batch_tokens 10240    # source: 10,240 tokens
    --gradient_checkpointing      # source: its default
    --gpu_memory_utilization 0.55 # source: 0.55
    --plan_gpu GH200-96GB         # source: GH200; this and the next two are for the dry run alone
    --plan_prompt_tokens 400      # not in the source: our choice
    --plan_completion_tokens 600  # not in the source: our choice
)
launch train_grpo.py "${ARGS[@]}" "$@"
