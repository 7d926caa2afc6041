#!/usr/bin/env bash
# GRPO with LoRA on Qwen2.5-Instruct and GSM8K. Source: the logs behind verl's table of GSM8K results, and verl's code
# (its example script for 3B has other values: rank 64, learning rate 3e-6, 16 prompts, 15 epochs). Hardware: 1 GPU of
# 24 to 80 GB; the logs are of 2 GPUs, for 7B of 8. Time: not measured; the dry run says 1.8 h on a card of 24 GB,
# evaluation not counted. Expected, from the logs: GSM8K test, greedy, before -> after 116 steps (a standard error of 1
# point at 86):
#     MODEL=Qwen/Qwen2.5-0.5B-Instruct    0.1 -> 54.3    (it knows nothing of ####)
#     MODEL=Qwen/Qwen2.5-1.5B-Instruct    8.5 -> 77.9
#     MODEL=Qwen/Qwen2.5-3B-Instruct     56.3 -> 86.1
#     MODEL=Qwen/Qwen2.5-7B-Instruct     78.7 -> 93.4
# MODEL=google/gemma-3-1b-it works, too: windows, tried with a tiny random model; the source has no result of it.
# MODEL=Qwen/Qwen3.5-0.8B, too: its text model, tried with a tiny random one on a CPU (docs/data.md), without a result.
# By the dry run 0.5B, 1.5B and 3B fit 24 GB and more as they are, and 7B 48 GB and more. 7B fits 24 GB, with 2 % to
# spare and 55 GiB of host RAM, with
#     --offload all --gpu_memory_utilization 0.85
# With several GPUs: CUDA_VISIBLE_DEVICES=0 takes one, NGPU=8 all of them.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-1}
TP=${TP:-1}
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-openai/gsm8k/main}
OUT_DIR=${OUT_DIR:-runs/qwen2.5_3b_gsm8k_lora_1gpu}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train"    # source: openai/gsm8k, 7,473 rows; there not shuffled, here a new order each epoch
    --eval_data "$DATA@test"      # source: its test split, 1,319 rows
    --out_dir "$OUT_DIR"
    --prompt_column question      # source: its data
    --answer_column answer        # source: its data; the key stands after ####
    --prompt_suffix ' Let'\''s think step by step and output the final answer after "####".' # source: its data script
    --reward gsm8k_strict         # source: 1 if the number after #### is the key's, else 0; the first one in its logs
    --max_prompt_tokens 512       # source: 512; longer prompts are dropped
    --max_completion_tokens 1024  # source: 1024
    --prompts_per_step 64         # source: train batch size 64
    --group_size 5                # source: n 5
    --prompts_per_update 64       # source: mini-batch size 64, which counts prompts: one update a step
    --epochs 1                    # source: 1 epoch, 116 steps
    --advantage grpo              # source: GRPO
    --advantage_ddof 1            # source: its code
    --advantage_eps 1e-6          # source: its code
    --policy_loss clip            # source: its code
    --clip_low 0.2                # source: clip 0.2; without effect, as one update a step is always on-policy
    --clip_high 0.2               # source: the same
    --dual_clip 3                 # source: its code
    --loss_aggregation token_mean # source: token mean, there of each micro-batch; ours is of the whole update
    --entropy_coef 1e-3           # source: entropy bonus 1e-3
    --kl_coef 1e-3                # source: KL loss 1e-3, none in the reward
    --kl_estimator k3             # source: low_var_kl
    --kl_clamp 10                 # source: its code
    --learning_rate 3e-5          # source: 3e-5
    --lr_schedule constant        # source: constant, no warm-up
    --weight_decay 1e-2           # source: 1e-2
    --adam_beta1 0.9              # source: its code
    --adam_beta2 0.999            # source: its code
    --max_grad_norm 1.0           # source: 1.0
    --lora_rank 32                # source: LoRA rank 32
    --lora_alpha 32               # source: alpha 32
    --lora_dropout 0              # source: its code
    --temperature 1.0             # source: 1.0
    --eval_temperature 0          # source: greedy
    --eval_samples 1              # source: one answer
    --eval_every 5                # source: every 5 steps
    --eval_before_training        # source: and before training
    --save_every 20               # source: every 20 steps
    --keep_checkpoints 0          # source: keeps all
    --gradient_checkpointing      # source: on
    --micro_batch_tokens 8192     # not in the source: our choice
    --dtype bfloat16              # not in the source: our choice
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.5  # not in the source: our choice
    --plan_gpu RTX4090-24GB       # not in the source: our choice; this and the next two are for the dry run alone
    --plan_prompt_tokens 100      # not in the source: our choice, the mean of another run of verl on GSM8K
    --plan_completion_tokens 250  # not in the source: our choice, as before
)
launch train_grpo.py "${ARGS[@]}" "$@"
