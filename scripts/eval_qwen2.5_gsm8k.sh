#!/usr/bin/env bash
# GSM8K for Qwen2.5-Instruct as verl's runs validate. Source: the logs behind verl's table of GSM8K results, and verl's
# code. Hardware: 1 GPU of 24 GB. Time: not measured. Expected: the column `published`, after training; before it, and
# for other sizes (append --published 54.3), see scripts/qwen2.5_3b_gsm8k_lora_1gpu.sh.
# With several GPUs: CUDA_VISIBLE_DEVICES=0 takes one, NGPU=8 all of them.
#     MODEL=runs/qwen2.5_3b_gsm8k_lora_1gpu/final bash scripts/eval_qwen2.5_gsm8k.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-1}
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-openai/gsm8k/main@test}

# What: one flag per line, each with its source.
ARGS=(
    --prompt_column question     # source: its data
    --answer_column answer       # source: its data
    --prompt_suffix ' Let'\''s think step by step and output the final answer after "####".' # source: its data script
    --reward gsm8k_strict        # source: 1 if the number after #### is the key's, else 0
    --max_prompt_tokens 512      # source: 512
    --max_completion_tokens 1024 # source: 1024
    --temperature 0              # source: greedy
    --samples 1                  # source: one answer
    --published 86.1             # source: its table, 3B
)
exec python "${REPO}scripts/launch.py" --ranks "$NGPU" "${REPO}evaluate.py" --model "$MODEL" --data "$DATA" "${ARGS[@]}" "$@"
