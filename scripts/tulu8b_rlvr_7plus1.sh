#!/usr/bin/env bash
# RLVR on Llama-3.1-Tulu-3-8B. Source: the Tulu 3 paper (arXiv 2411.15124) and Open-Instruct. Hardware: 8 GPUs of 80 GB.
# Time: not known. Expected: GSM8K 84.3 -> 87.6, MATH 42.0 -> 43.7, IFEval 81.1 -> 82.4, the paper's, by PPO at about
# 50,000 episodes (step 223):
#     MODEL=runs/tulu8b_rlvr_7plus1/best bash scripts/eval_tulu8b_rlvr.sh
# The source trains by PPO with a value model on 7 GPUs and samples on the eighth. This is its batch layout and data
# with GRPO, 16 completions a prompt; each of the 7 ranks trains and samples, the eighth GPU is free
# (CUDA_VISIBLE_DEVICES must hide it).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-7}
TP=${TP:-1}
MODEL=${MODEL:-allenai/Llama-3.1-Tulu-3-8B-DPO}
DATA=${DATA:-allenai/RLVR-GSM-MATH-IF-Mixed-Constraints}
OUT_DIR=${OUT_DIR:-runs/tulu8b_rlvr_7plus1}
source scripts/launch.sh

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train[500:]" # source: its mixture of gsm8k, MATH and ifeval; a new permutation each epoch
    --eval_data "$DATA@train[:500]"  # not in the source: our choice; near its own: scripts/eval_tulu8b_rlvr.sh
    --out_dir "$OUT_DIR"
    --prompt_column messages         # source: its data
    --answer_column ground_truth     # source: its data
    --reward @dataset                # source: the verifier is chosen per row: gsm8k, MATH or ifeval
    --max_prompt_tokens 2048         # source: prompt and response up to 2048
    --max_completion_tokens 2048     # source: the same
    --truncated zero                 # source: answers without an end are penalised; there by a constant below 0
    --prompts_per_step 14            # source: 224 completions (7 x 32): 14 prompts x 16
    --group_size 16                  # not in the source, which has 1 (PPO): our choice, that of its successor recipe
    --prompts_per_update 14          # source: local mini batch 32, global 224: one update a step
    --total_episodes 10000000        # source: 10,000,000, an upper bound; the checkpoint used is step 223
    --advantage grpo                 # not in the source (PPO): our choice, its successor recipe
    --kl_coef 0.01                   # not in the source: our choice, its successor recipe
    --kl_estimator k3                # not in the source: our choice, its successor recipe
    --learning_rate 5e-7             # not in the source: our choice, its successor recipe
    --lr_schedule constant           # not in the source: our choice, its successor recipe
    --max_grad_norm 1.0              # not in the source: our choice
    --temperature 1.0                # source: T 1.0
    --eval_every 20                  # not in the source: our choice
    --eval_before_training           # not in the source: our choice
    --save_every 20                  # not in the source: our choice
    --keep_checkpoints 3             # not in the source: our choice
    --keep_best "eval/$(basename "$DATA")_train[:500]/avg@1" # source: the best intermediate one by validation
    --tensor_parallel_size "$TP"
    --micro_batch_tokens 16384       # not in the source: our choice
    --gpu_memory_utilization 0.4     # not in the source: our choice
    --gradient_checkpointing         # not in the source: our choice
)
launch train_grpo.py "${ARGS[@]}" "$@"
