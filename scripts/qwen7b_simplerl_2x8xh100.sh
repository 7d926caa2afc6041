#!/usr/bin/env bash
# Zero RL on Qwen2.5-7B. Source: SimpleRL-Zoo (paper arXiv 2503.18892, its code and its released data). Hardware:
# 2 nodes x 8 H100 80 GB. Time: about 15 h for about 100 steps, from the source. Expected, from the source: MATH500
# 64.6 -> 78.2, AIME24 avg@32 0.3 -> 15.6 (step 90):
#     MODEL=runs/qwen7b_simplerl_2x8xh100/best bash scripts/eval_qwen7b_simplerl.sh
# On each node, with NODE_RANK=0 on the first and 1 on the other:
#     NODE_RANK=0 MASTER_ADDR=first-node DATA=folder bash scripts/qwen7b_simplerl_2x8xh100.sh
# A Slurm job that does so: scripts/slurm_example.sh.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
NNODES=${NNODES:-2}
TP=${TP:-2} # source: tensor parallel 2
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-data/simplelr_qwen_level3to5} # folder with train.parquet and test.parquet of hkust-nlp/SimpleRL-Zoo-Data
OUT_DIR=${OUT_DIR:-runs/qwen7b_simplerl_2x8xh100}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train"     # source: simplelr_qwen_level3to5, 8,532 rows
    --eval_data "$DATA@test"       # source: MATH500
    --out_dir "$OUT_DIR"
    --prompt_column question       # source: the problem as it is; the column prompt holds the template already
    --answer_column gt_answer      # source: its data
    --prompt_suffix $'\nPlease reason step by step, and put your final answer within \\boxed{}.' # source: its prompt
    --max_prompt_tokens 1024       # source: prompt / response 1024 / 8192; its filter counted characters, ours tokens
    --max_completion_tokens 8192   # source: the same
    --prompts_per_step 1024        # source: 1024 prompts a rollout
    --group_size 8                 # source: rollout_n 8
    --prompts_per_update 256       # source: 256 prompts an update, so 4 updates a step
    --total_steps 100              # source: about 100 rollouts, 12 epochs of 8 steps; the released model is step 90
    --advantage grpo               # source: GRPO
    --policy_loss clip             # source: GRPO
    --clip_low 0.2                 # source: clip 0.2
    --clip_high 0.2                # source: the same
    --loss_aggregation token_mean  # source: token mean, there of each micro-batch; ours is of the whole update
    --kl_coef 1e-4                 # source: KL loss 1e-4
    --kl_estimator k3              # source: low_var_kl
    --entropy_coef 1e-3            # source: entropy bonus 1e-3
    --learning_rate 5e-7           # source: 5e-7
    --lr_schedule constant         # source: constant
    --max_grad_norm 1.0            # not in the source: our choice, its framework's default
    --temperature 1.0              # source: T 1.0
    --reward math                  # source: 1 if correct, else 0
    --eval_every 5                 # source: tests every 5 steps
    --eval_before_training         # not in the source: our choice, to have the starting point of the curve
    --save_every 5                 # source: saves every 5 steps
    --keep_checkpoints 3           # not in the source: our choice; one takes 99 GiB
    --keep_best "eval/$(basename "$DATA")_test/avg@1" # source: chosen by validation, on 500 rows that are not published
    --dtype bfloat16               # not in the source: our choice
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.75  # source: memory share 0.75
    --micro_batch_tokens 18432     # not in the source: our choice, two sequences of full length
    --gradient_checkpointing       # source: on
)
# ARGS+=(--compile) # by the dry run 846 s a step, not 900; no card has run this set-up with it yet
launch train_grpo.py "${ARGS[@]}" "$@"
