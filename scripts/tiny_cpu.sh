#!/usr/bin/env bash
# Watch a small language model discover thinking: 3-digit addition, a policy of 0.6 M parameters, which
# `python scripts/warm_start.py --out_dir scripts/tiny_policy` has made. Source: our own. Hardware: 2 CPU cores, or
# NVIDIA GPUs. Time: benchmarks/README.md. Expected: eval/heldout/avg@4 from at most 0.45 to at least 0.90.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # NGPU, NNODES: see there

# Where: environment, because it differs per machine and does not change the result.
TP=${TP:-1}     # ranks per vLLM engine
SEED=${SEED:-1}
OUT_DIR=${OUT_DIR:-runs/tiny_cpu}
POLICY=${POLICY:-$(dirname "${BASH_SOURCE[0]}")/tiny_policy} # the policy and its data
GAP=$([ "$NUM_GPUS" -gt 0 ] && echo 0.05 || echo 1e-4) # bfloat16 rounds; in float32 the gap is 3e-8

# What: one flag per line. All are our own choice: nothing is being reproduced.
ARGS=(
    --model "$POLICY"
    --train_data "$POLICY/train.jsonl"
    --eval_data "$POLICY/heldout.jsonl"
    --out_dir "$OUT_DIR"
    --reward exact             # the final answer alone; the scratchpad is neither asked for nor paid
    --max_prompt_tokens 16     # <user>347+285<assistant> has 9
    --max_completion_tokens 48 # a scratchpad with its answer has 31
    --prompts_per_step 32
    --group_size 8
    --prompts_per_update 16    # 2 updates a step: the second is off-policy, so clipping and old log-probs are at work
    --micro_batch_tokens 4096
    --total_steps 15
    --temperature 1.0
    --tensor_parallel_size "$TP"
    --kl_coef 0.001            # small: there to be watched
    --learning_rate 3e-4       # 300 times what a 7B model wants: this one is 10,000 times smaller
    --lr_schedule linear
    --warmup_ratio 0.05
    --eval_every 5
    --eval_before_training
    --eval_samples 4           # 256 held-out problems x 4
    --save_every 10
    --max_rollout_gap "$GAP"
    --seed "$SEED"
)

launch train_grpo.py "${ARGS[@]}" "$@"
