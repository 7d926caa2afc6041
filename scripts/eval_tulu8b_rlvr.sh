#!/usr/bin/env bash
# GSM8K, MATH and IFEval for Llama-3.1-Tulu-3-8B before and after RLVR. Source: the Tulu 3 paper, table of the RLVR
# step. Hardware: 8 GPUs of 80 GB, or fewer. Time: not measured. Expected: the column `published`, after RLVR; before it
# 84.3, 42.0 and 81.1.
#     MODEL=runs/tulu8b_rlvr_7plus1/best bash scripts/eval_tulu8b_rlvr.sh  # further flags go to evaluate.py and win
# Not the paper's harness: it shows 8 (GSM8K) and 4 (MATH) worked examples and counts IFEval loosely; here there are
# none, and IFEval is counted strictly.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
MODEL=${MODEL:-allenai/Llama-3.1-Tulu-3-8B-DPO}
GSM8K=${GSM8K:-openai/gsm8k/main@test}   # columns question, answer
MATH=${MATH:-HuggingFaceH4/MATH-500@test} # columns problem, answer
IFEVAL=${IFEVAL:-google/IFEval@train}    # columns prompt, instruction_id_list, kwargs

# What: one flag per line, each with its source. The sets differ in columns and verifiers, so they come one by one.
ARGS=(
    --max_prompt_tokens 2048     # source: the training's limit
    --max_completion_tokens 2048 # source: the training's limit
    --temperature 0              # not in the source: our choice, greedy
)
evaluate() {
    python "${REPO}scripts/launch.py" --ranks "$NGPU" "${REPO}evaluate.py" --model "$MODEL" "${ARGS[@]}" "$@"
}
evaluate --data "$GSM8K" --reward gsm8k --prompt_column question --answer_column answer --published 87.6 "$@"
evaluate --data "$MATH" --reward math --prompt_column problem --answer_column answer --published 43.7 "$@"
evaluate --data "$IFEVAL" --reward ifeval --prompt_column prompt --answer_column instruction_id_list \
    --published 82.4 "$@"
