#!/usr/bin/env bash
# SimpleRL-Zoo's evaluation of Qwen2.5-7B, six sets at once. Source: the SimpleRL-Zoo paper, table of Qwen2.5-7B after
# training, and its code. Hardware: 8 GPUs of 80 GB, or fewer. Time: not measured. Expected: the column `published`
# (a standard error of 1.9 points on MATH500).
#     MODEL=runs/qwen7b_simplerl_2x8xh100/best DATA=folder bash scripts/eval_qwen7b_simplerl.sh
# The folder holds the six sets of the paper as .jsonl files with the columns problem and answer: math500, gsm8k,
# minerva, olympiadbench, aime24, amc23. Before training the paper has 64.6, 88.2, 25.7, 30.1, 0.3 (avg@32) and 30.0,
# the base model sampled greedily: append --temperature 0 --samples 1.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
MODEL=${MODEL:-Qwen/Qwen2.5-7B}
DATA=${DATA:-data/simplerl}

# What: one flag per line, each with its source.
ARGS=(
    --data "$DATA"/{math500,gsm8k,minerva,olympiadbench,aime24,amc23}.jsonl
    --published 78.2 91.7 38.6 40.4 15.6 62.5 # source: the paper's table; aime24 as avg@32
    --samples 1 1 1 1 32 1                    # source: pass@1, and avg@32 for AIME24
    --temperature 1.0                         # source: T = 1.0
    --top_p 0.95                              # source: top_p 0.95
    --max_completion_tokens 16000             # source: 16,000 tokens
    --max_prompt_tokens 1024                  # source: the training's prompt / response 1024 / 8192
    --reward math                             # source: 1 if correct else 0
    --prompt_suffix $'\nPlease reason step by step, and put your final answer within \\boxed{}.' # source: its prompt
)
exec python "${REPO}scripts/launch.py" --ranks "$NGPU" "${REPO}evaluate.py" --model "$MODEL" "${ARGS[@]}" "$@"
