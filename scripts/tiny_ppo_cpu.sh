#!/usr/bin/env bash
# PPO on the sums of scripts/tiny_cpu.sh: a critic, which begins as the policy with a head of 0, makes the advantages;
# groups are not compared. Source: our own. Hardware: 2 CPU cores, or NVIDIA GPUs. Time: benchmarks/README.md. Expected:
# eval/heldout/avg@4 from at most 0.45 to at least 0.90.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
SEED=${SEED:-1}
OUT_DIR=${OUT_DIR:-runs/tiny_ppo_cpu}

# What: the flag that differs from that job's. It is our own choice: nothing is being reproduced.
ARGS=(
    --critic "policy:rate=1e-3,passes=2" # faster than the policy (3e-4): rewards rise from 0.26 to 0.8 in three steps
)
SEED=$SEED OUT_DIR=$OUT_DIR exec bash "$(dirname "${BASH_SOURCE[0]}")/tiny_cpu.sh" "${ARGS[@]}" "$@"
