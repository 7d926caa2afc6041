#!/usr/bin/env bash
# Self-distillation by hints (SDPO) on the sums of scripts/tiny_cpu.sh: the policy of 0.6 M parameters, which
# scripts/warm_start.py makes first, thinks about every fourth time, and mostly where the solution is in the prompt. The
# hint of a completion is another one of its group, a correct one. Source: our own, with the flags of docs/papers.md.
# Hardware: 2 CPU cores, or NVIDIA GPUs. Time: benchmarks/README.md. Expected: eval/heldout/avg@4 from at most 0.45 to
# at least 0.90.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
SEED=${SEED:-1}
OUT_DIR=${OUT_DIR:-runs/tiny_sdpo_cpu}
POLICY=${POLICY:-runs/tiny_hints_policy} # the policy and its data

HERE=$(dirname "${BASH_SOURCE[0]}")
if [ ! -e "$POLICY" ]; then
    python "$HERE/warm_start.py" --task hints --out_dir "$POLICY"
fi

# What: the flags that differ from that job's. All are our own choice: nothing is being reproduced.
ARGS=(
    --hint_column @group
    --max_prompt_tokens 80   # with the hint
    --advantage zero         # the reward says what is correct, and is not learnt from
    --kl_coef 1
    --kl_over vocabulary
    --kl_direction jsd
    --reference_every 1
    --reference_mixup 0.05   # the authors'
)
POLICY=$POLICY SEED=$SEED OUT_DIR=$OUT_DIR exec bash "$HERE/tiny_cpu.sh" "${ARGS[@]}" "$@"
