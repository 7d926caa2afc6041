#!/usr/bin/env bash
# Reversing texts: the first run on a GPU with real weights, after scripts/check_gpu.sh. Source: prime-rl,
# examples/basic/reverse-text (rl.toml and README), the defaults of its configuration, and the environment reverse-text
# of its verifiers. Hardware: 1 GPU of 24 GB ("a single consumer GPU"); its example has 2, one trains and one samples.
# Time: a few minutes, from the source. Expected: a reward of 0.65 at step 20, below which its nightly test fails. Its
# README evaluates the trained policy at about 0.8, and Qwen3-0.6B, before it was fine-tuned for the task, at about 0.05.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-1}
TP=${TP:-1}
MODEL=${MODEL:-PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT}
DATA=${DATA:-PrimeIntellect/Reverse-Text-RL}
OUT_DIR=${OUT_DIR:-runs/qwen3_0.6b_reverse_text_1gpu}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train"    # source: PrimeIntellect/Reverse-Text-RL
    --eval_data "$DATA@train#20"  # source: 20 texts, also of the training data; ours are drawn at random
    --out_dir "$OUT_DIR"
    --prompt_column prompt        # source: its data
    --answer_column prompt        # source: the text itself, which the reward reverses
    --system_prompt 'Reverse the text character-by-character. Put your answer in <reversed_text> tags.' # source: its environment
    --reward "${REPO-}docs/rewards/reversed_text.py:score" # source: difflib's ratio of what the tags hold and the reversed text
    --max_prompt_tokens 1024      # not in the source, which has 2,048 tokens in all: our choice
    --max_completion_tokens 128   # source: 128
    --prompts_per_step 8          # source: batch size 128: 8 prompts x 16
    --group_size 16               # source: group size 16
    --prompts_per_update 8        # source: one update a step
    --total_steps 20              # source: 20 steps
    --advantage dr_grpo           # source: r - mean of the group
    --policy_loss dppo            # source: its default loss: no gradient where a probability has moved by more than 0.2
    --clip_low 0.2                # source: the same
    --clip_high 0.2               # source: the same
    --old_logprobs rollout        # source: the ratio to the sampler's log-probs
    --loss_aggregation token_mean # source: the sum over all tokens of the update, divided by their number
    --kl_coef 0                   # source: no reference; 1e-3 x the squared log-ratio to the sampler is left out here
    --learning_rate 3e-6          # source: 3e-6
    --lr_schedule constant        # source: its default
    --weight_decay 0.01           # source: its default
    --adam_beta1 0.9              # source: its default
    --adam_beta2 0.999            # source: its default
    --max_grad_norm 1.0           # source: its default
    --temperature 1.0             # source: its default
    --eval_samples 3              # source: 20 texts x 3
    --eval_temperature 1.0        # not in the source: our choice
    --eval_max_completion_tokens 1024 # source: 1,024
    --eval_every 20               # source: after training
    --eval_before_training        # not in the source: our choice
    --dtype bfloat16              # source: its default, with parameters in float32
    --micro_batch_tokens 8192     # not in the source: our choice
    --gradient_checkpointing      # not in the source: our choice
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.5  # not in the source: our choice
    --plan_gpu RTX4090-24GB       # not in the source: our choice; this and the next two are for the dry run alone
    --plan_prompt_tokens 150      # not in the source: our choice
    --plan_completion_tokens 100  # not in the source: our choice
)
launch train_grpo.py "${ARGS[@]}" "$@"
