#!/usr/bin/env bash
# GRPO with LoRA on DeepSeek-R1-Distill-Qwen-32B. Source: the ms-swift document. Hardware: 1 node x 8 GPUs of 80 GB.
# Time and result: not in the source, whose run stopped with three errors: it was not started under torchrun, so that
# one GPU of eight was used and neither batch was divisible by the group. Here the launcher starts one rank per GPU and
# batches are counted in prompts.
# MODEL=Qwen/Qwen3-30B-A3B works, too: experts, tried with a tiny random OLMoE (FAMILY=olmoe of scripts/smoke.sh); by
# the dry run it needs 50.1 of 79.0 GiB. The source has no result of it.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
TP=${TP:-4} # not in the source: our choice; it must divide the number of GPUs
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-32B}
DATA=${DATA:-AI-MO/NuminaMath-TIR}
OUT_DIR=${OUT_DIR:-runs/deepseek32b_lora_8gpu}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train#1000" # source: AI-MO/NuminaMath-TIR#1000, 1000 random rows of a fixed seed
    --eval_data "$DATA@train#64"    # not in the source: our choice; rows of the same data, so partly trained on
    --out_dir "$OUT_DIR"
    --prompt_column problem         # source: its data
    --answer_column solution        # source: its data; the key is the boxed answer of the solution
    --system_prompt "$(dirname "${BASH_SOURCE[0]}")/deepseek32b_system_prompt.txt" # source: a file; asks for <think> and <answer>
    --reward math                   # source: accuracy
    --max_prompt_tokens 1024        # not in the source: our choice
    --max_completion_tokens 2080    # source: 2080
    --prompts_per_step 8            # source: 1 a device x 8 devices x 8 accumulated = 64 completions, 8 of each prompt
    --group_size 8                  # source: 8 generations
    --prompts_per_update 8          # source: one update a step; 125 steps an epoch
    --epochs 3                      # source: 3
    --learning_rate 5e-6            # source: 5e-6
    --lr_schedule cosine            # not in the source: our choice, the default of its project
    --warmup_ratio 0.05             # not in the source: our choice, the default of its project
    --kl_coef 0.01                  # source: beta 0.01
    --kl_estimator k3               # not in the source: our choice, that of its project
    --kl_clamp 0                    # not in the source: our choice, that of its project
    --lora_rank 8                   # source: train_type lora; rank, alpha and dropout are the defaults of its project
    --lora_alpha 32                 # source: the same
    --lora_dropout 0.05             # source: the same
    --temperature 1.0               # not in the source: our choice, so that log-probs can match the sampler's
    --eval_samples 8                # source: the evaluation batch is made of groups of 8, too
    --eval_every 25                 # not in the source: our choice
    --save_every 25                 # not in the source: our choice
    --gradient_checkpointing        # not in the source: our choice
    --micro_batch_tokens 8192       # not in the source: our choice
    --dtype bfloat16                # source: bf16
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.5    # not in the source: our choice
)
launch train_grpo.py "${ARGS[@]}" "$@"
