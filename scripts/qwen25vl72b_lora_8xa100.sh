#!/usr/bin/env bash
# GRPO with LoRA on Qwen2.5-VL-72B, texts and images. Source: the ms-swift document and the script that worked in the
# end. Hardware: 1 node x 8 A100 80 GB. Time and result: not in the source, whose run stalled at its first sync: the
# splitter that was to move the model to the engine in 40 groups did not know LoRA's names, so each sync gathered all
# 147 GB on every GPU. Here less than one layer is held.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
TP=${TP:-8} # source: TP 8 (its script: 4, two engines, which cannot share one prompt a step)
MODEL=${MODEL:-Qwen/Qwen2.5-VL-72B-Instruct}
DATA=${DATA:-lmms-lab/multimodal-open-r1-8k-verified}
OUT_DIR=${OUT_DIR:-runs/qwen25vl72b_lora_8xa100}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train#1000" # source: lmms-lab/multimodal-open-r1-8k-verified#1000
    --eval_data "$DATA@train#64"    # not in the source: our choice; rows of the same data, so partly trained on
    --out_dir "$OUT_DIR"
    --prompt_column problem         # source: its data
    --answer_column solution        # source: its data; the key is the <answer> of the solution
    --image_column image            # source: its data
    --max_pixels 602112             # source: max_pixels 602112, which are 768 image tokens
    --system_prompt "$(dirname "${BASH_SOURCE[0]}")/deepseek32b_system_prompt.txt" # not in the source: our choice; the reward's form
    --reward "math:1.0,format:0.1"  # source: accuracy + 0.1 x format
    --max_prompt_tokens 6144        # source: model length 8192, of which 2048 are the completion's
    --max_completion_tokens 2048    # source: completion 2048
    --prompts_per_step 1            # source: 1 a device x 8 devices x 1 accumulated = 8 completions, G = 8: one prompt
    --group_size 8                  # source: G = 8
    --prompts_per_update 1          # source: accumulation 1: one update a step
    --epochs 1                      # not in the source: our choice; 1000 steps
    --learning_rate 1e-6            # source: lr 1e-6
    --warmup_ratio 0.05             # source: warm-up 0.05
    --lr_schedule cosine            # not in the source: our choice, the default of its project
    --kl_coef 0.04                  # not in the source: our choice, the default of its project
    --kl_estimator k3               # not in the source: our choice, that of its project
    --kl_clamp 0                    # not in the source: our choice, that of its project
    --lora_rank 8                   # source: LoRA, vision tower frozen; rank, alpha, dropout are its project's defaults
    --lora_alpha 32                 # source: the same
    --lora_dropout 0.05             # source: the same
    --temperature 1.0               # not in the source: our choice, so that log-probs can match the sampler's
    --eval_every 100                # not in the source: our choice
    --save_every 100                # not in the source: our choice
    --offload all                   # source: ZeRO-3 with offload of model and optimizer
    --gradient_checkpointing        # source: one of the remedies for the stall at the start
    --micro_batch_tokens 8192       # source: batch 1 per device: one sequence of model length 8192
    --dtype bfloat16                # source: bf16
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.5    # source: memory share 0.5
    --plan_gpu A100-80GB            # source: 8 x A100 80 GB; for --dry_run
)
launch train_grpo.py "${ARGS[@]}" "$@"
