#!/usr/bin/env bash
# Watch a small language model learn to search in several turns: it guesses a number from 1 to 15, hears "higher" or
# "lower", and has four guesses. Its policy of 0.6 M parameters, which scripts/warm_start.py makes first, mostly
# insists on one number. Source: our own. Hardware: 2 CPU cores, or NVIDIA GPUs. Time: benchmarks/README.md. Expected:
# eval/heldout/avg@4, the share of games won, from at most 0.40 to at least 0.90.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # NGPU, NNODES: see there

# Where: environment, because it differs per machine and does not change the result.
SEED=${SEED:-1}
OUT_DIR=${OUT_DIR:-runs/tiny_turns_cpu}
POLICY=${POLICY:-runs/tiny_game_policy} # the policy and its data
GAP=$([ "$NUM_GPUS" -gt 0 ] && echo 0.05 || echo 1e-4)

if [ ! -e "$POLICY" ]; then
    python "${REPO}scripts/warm_start.py" --task game --out_dir "$POLICY"
fi

# What: one flag per line. All are our own choice: nothing is being reproduced.
ARGS=(
    --model "$POLICY"
    --train_data "$POLICY/train.jsonl"
    --eval_data "$POLICY/heldout.jsonl"
    --out_dir "$OUT_DIR"
    --environment "${REPO}docs/environments/guess_number.py:GuessNumber"
    --max_turns 4
    --max_turn_tokens 4        # "12" and the end of the turn have 3
    --max_prompt_tokens 16     # <user>game471<assistant> has 9
    --max_completion_tokens 64 # four guesses and three replies have at most 39
    --prompts_per_step 32
    --group_size 8
    --prompts_per_update 16    # 2 updates a step
    --micro_batch_tokens 4096
    --total_steps 20
    --learning_rate 2e-4
    --lr_schedule linear
    --warmup_ratio 0.05
    --eval_every 5
    --eval_before_training
    --eval_samples 4           # 120 held-out games x 4
    --max_rollout_gap "$GAP"
    --seed "$SEED"
)

launch train_grpo.py "${ARGS[@]}" "$@"
