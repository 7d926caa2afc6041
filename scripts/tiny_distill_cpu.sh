#!/usr/bin/env bash
# On-policy distillation on the CPU job: the starting policy of scripts/tiny_cpu.sh, which thinks about every fourth
# time, follows the policy that this job has trained, over the whole vocabulary. No reward is learnt from. Source: our
# own. Hardware: 2 CPU cores, or NVIDIA GPUs. Time: benchmarks/README.md; the teacher is trained first, if it is not
# there. Expected: eval/heldout/avg@4 from at most 0.45 to at least 0.95 of the teacher's.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
SEED=${SEED:-1}
OUT_DIR=${OUT_DIR:-runs/tiny_distill_cpu}
TEACHER=${TEACHER:-runs/tiny_cpu/final}

if [ ! -e "$TEACHER" ] && [ "$TEACHER" = runs/tiny_cpu/final ]; then
    SEED=1 OUT_DIR=runs/tiny_cpu bash "$(dirname "${BASH_SOURCE[0]}")/tiny_cpu.sh" --quiet
fi

# What: the flags that differ from that job's. All are our own choice: nothing is being reproduced.
ARGS=(
    --reference "$TEACHER"
    --kl_coef 1
    --kl_over vocabulary
    --kl_direction reverse
    --advantage zero         # the reward is logged, not learnt from
    --group_size 1           # nothing is compared
    --prompts_per_step 64
    --prompts_per_update 32
    --total_steps 20
    --learning_rate 1e-3
)
SEED=$SEED OUT_DIR=$OUT_DIR exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny_cpu.sh" "${ARGS[@]}" "$@"
