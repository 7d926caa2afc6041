#!/usr/bin/env bash
# Runs a documented set-up as it is written, with every flag of its script, but on a tiny random model of the same
# architecture, data of the same schema and short completions. Two steps on two CPU processes (or GPUs, NGPU=2), of a
# set-up for one GPU on one, with evaluation, checkpoint, and a stop and resume between them. FLAGS go to the script.
#     bash scripts/smoke.sh scripts/qwq32b_8xh100.sh [FLAGS]
# STEPS=1 leaves the resume out. FAMILY=gemma3_text, or qwen3_moe, takes another architecture, for scripts that are run
# with another MODEL.
set -euo pipefail
[ -f "${1:-}" ] || { echo "error: no script '${1:-}' in $PWD: bash scripts/smoke.sh scripts/qwq32b_8xh100.sh" >&2 && exit 2; }
script=$1
shift
name=$(basename "$script" .sh)
folder=${SMOKE_DIR:-runs/smoke}/$name
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

python "${REPO}scripts/smoke_inputs.py" --setup "$name" --out_dir "$folder" ${FAMILY:+--family "$FAMILY"}
OUT_DIR=$(mktemp -d "$folder/run_XXXXXX")
longest=100 tp=1 ranks=2 steps=${STEPS:-2}
if [ "$name" = qwen25vl72b_lora_8xa100 ]; then
    longest=900 tp=2 # room for an image of the script's --max_pixels; one prompt a step needs one engine
elif [ "$name" = qwen3_8b_sciknoweval_4gpu ]; then
    longest=400 # its system prompt
elif [[ $name = *_1gpu || $name = *_speedrun ]]; then
    ranks=1
fi
export NNODES=1 NGPU=${NGPU:-$ranks} TP=${TP:-$tp} MODEL=$folder/model DATA=$folder/data OUT_DIR
export TEACHER=$folder/teacher CRITIC=$folder/model # some scripts have one
export EVAL_DATA=$DATA@test # some scripts evaluate on another data set than they train on

# What a random model and a laptop need: short texts. Everything else is the script's.
ARGS=(
    --max_prompt_tokens "$longest"
    --max_completion_tokens 8
    --eval_max_completion_tokens 8
)
if [ "$NUM_GPUS" -eq 0 ] && ! grep --quiet 'param_dtype bfloat16' "$script"; then
    ARGS+=(--dtype float32) # CPUs without bfloat16 of their own emulate it: many times slower
fi
for step in $(seq "$steps"); do
    bash "$script" "${ARGS[@]}" --stop_after "$step" "$@"
done
[ "$(readlink "$OUT_DIR/final")" = "step_$steps" ]
echo "smoke: $script ran, steps: $steps, with evaluation and checkpoint, each from a start of its own; see $OUT_DIR"
