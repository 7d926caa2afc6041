#!/usr/bin/env bash
# The first thing to run on a new machine: is everything there that a run needs, and is it exact, and fast? More checks
# with two GPUs or more. On a CPU it does what a CPU can, and says so. Writes runs/check_gpu/gpu_check.md, to attach to
# a bug report. Exit code 1: something is not as it should be.
#     bash scripts/check_gpu.sh
#     bash scripts/check_gpu.sh --model Qwen/Qwen2.5-7B --ranks 8     # another shape, more GPUs
#     bash scripts/qwen3_0.6b_reverse_text_1gpu.sh                    # the next step: real weights, minutes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec python "${REPO}scripts/check_gpu.py" "$@"
