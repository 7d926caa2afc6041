#!/usr/bin/env bash
# A pretrained language model learns to follow instructions, without a GPU: SmolLM2-135M-Instruct, and questions with
# two instructions each that a program checks, one on the length and one on the form. Source: our own. Hardware: 2 CPU
# cores and 12 GB of memory, or NVIDIA GPUs. Time: benchmarks/README.md. Expected: eval/heldout/avg@1, on subjects that
# are not trained on, from about 0.13 to about 0.70. The texts stay readable: `python report.py runs/smollm2_cpu`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh" # NGPU, NNODES: see there

# Where: environment, because it differs per machine and does not change the result.
TP=${TP:-1} # ranks per vLLM engine
SEED=${SEED:-1}
OUT_DIR=${OUT_DIR:-runs/smollm2_cpu}
DATA=${DATA:-runs/smollm2} # made here: the prompts and, without MODEL, a link to the model
GAP=$([ "$NUM_GPUS" -gt 0 ] && echo 0.05 || echo 1e-4) # bfloat16 rounds; in float32 the gap is 1e-6

python "${REPO}scripts/smollm2.py" --out_dir "$DATA" ${MODEL:+--data_only}
MODEL=${MODEL:-$DATA/model} # a folder in Hugging Face format, or a hub id
if [ "$NUM_GPUS" -eq 0 ]; then
    echo "24 steps take about 26 minutes of CPU time, over all cores; each step's line says how long is left" >&2
fi

# What: one flag per line. All are our own choice: nothing is being reproduced.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA/train.jsonl"
    --eval_data "$DATA/heldout.jsonl"
    --out_dir "$OUT_DIR"
    --reward ifeval            # 1 if both instructions are followed
    --max_prompt_tokens 96     # the longest has 63
    --max_completion_tokens 56 # 30 words have about 40
    --prompts_per_step 8
    --group_size 8
    --temperature 0.8          # at 1 this small model writes little sense
    --micro_batch_tokens 1024
    --share_prompts
    --total_steps 24
    --learning_rate 4e-5       # constant: --total_steps 48 continues a run
    --eval_every 8
    --eval_before_training
    --eval_temperature 0.8     # 96 held-out prompts
    --save_every 8
    --keep_checkpoints 1       # it takes 2 GB
    --tensor_parallel_size "$TP"
    --max_rollout_gap "$GAP"
    --seed "$SEED"
)

launch train_grpo.py "${ARGS[@]}" "$@"
