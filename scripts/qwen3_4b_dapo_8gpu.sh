#!/usr/bin/env bash
# torchtitan's dapo_math on Qwen3-4B-Base, all weights: of DAPO the clip, the token mean and the dynamic sampling, with
# advantages r - mean and without the length reward. Source: its examples/dapo_math (configuration
# rl_dapo_qwen3_4b_math_8k and README). Hardware: 1 node x 8 GPUs of 80 GB. Time: not in the source. Expected, read off
# the source's pictures: reward 0.05 at the start, 0.2 at step 40, 0.38 on average over steps 120 to 150 (single steps
# 0.18 to 0.55); completions of 800 tokens at the start and 3,000 at the end. It has no result on AIME.
# First, the problems of the evaluation:
#     python scripts/aime2025.py --output data/aime2025.jsonl
# The source's own layout, 2 GPUs train while 6 sample up to 4 steps ahead:
#     NGPU=2 bash scripts/qwen3_4b_dapo_8gpu.sh --engine server --generation_gpus 2 3 4 5 6 7 --steps_ahead 4 --in_flight
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
TP=${TP:-1} # source: each generator is one GPU; its trainer is 2 GPUs with tensor parallelism, here FSDP
MODEL=${MODEL:-Qwen/Qwen3-4B-Base}
DATA=${DATA:-hamishivi/DAPO-Math-17k-Processed_filtered}
EVAL_DATA=${EVAL_DATA:-data/aime2025.jsonl}
OUT_DIR=${OUT_DIR:-runs/qwen3_4b_dapo_8gpu}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train"    # source: 12,643 rows, shuffled each epoch
    --eval_data "$EVAL_DATA"      # source: AIME 2025, 30 problems
    --out_dir "$OUT_DIR"
    --prompt_column source_prompt # source: its data; DAPO's prompt as one user message, thinking not switched off
    --answer_column ground_truth  # source: its data
    --reward math                 # source: 1 if Math-Verify finds the key after "Answer:" or in a box, else 0
    --max_prompt_tokens 2048      # source: prompt / response 2,048 / 8,192
    --max_completion_tokens 8192  # source: the same
    --prompts_per_step 8          # source: 8 prompts a step
    --group_size 16               # source: 16 samples a prompt
    --prompts_per_update 8        # source: one update a step
    --dynamic_sampling reward     # source: groups with equal rewards are replaced
    --total_steps 150             # source: 150 steps
    --advantage dr_grpo           # source: r - mean of the group, not divided by the std
    --policy_loss clip            # source: DAPO
    --clip_low 0.2                # source: ratio clip 0.2 / 0.28
    --clip_high 0.28              # source: the same
    --loss_aggregation token_mean # source: mean over the tokens of the update
    --kl_coef 0                   # source: no KL
    --learning_rate 1e-6          # source: 1e-6
    --lr_schedule constant        # source: constant, no warm-up
    --weight_decay 0.1            # source: 0.1
    --adam_beta1 0.9              # source: betas 0.9, 0.98
    --adam_beta2 0.98             # source: the same
    --max_grad_norm 1.0           # source: its default
    --dtype bfloat16              # source: bf16
    --head_dtype float32          # source: logits in fp32
    --stop_tokens '<|im_end|>'    # source: ends at the template's end of turn, too, not only at the base model's own
    --temperature 1.0             # source: temperature 1.0, top-p 1.0
    --eval_temperature 0          # source: greedy, one answer
    --eval_samples 1              # source: the same
    --eval_every 150              # source: after training
    --eval_before_training        # source: and before it
    --save_every 100              # source: every 100 steps
    --keep_checkpoints 3          # source: keeps 3
    --micro_batch_tokens 10240    # source: packs 10,240 tokens
    --gradient_checkpointing      # not in the source: our choice
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.6  # not in the source: our choice
    --plan_completion_tokens 2000 # source: completions of 800 to 3,000 tokens; for the dry run alone
)
launch train_grpo.py "${ARGS[@]}" "$@"
