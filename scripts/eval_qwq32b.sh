#!/usr/bin/env bash
# Evaluates as the QwQ-32B run validates: 500 held-out problems of math12k (they are MATH-500). Source: EasyR1's QwQ-32B
# document. Hardware: 8 x 80 GB (4 engines of 2). Time: not measured. Expected: the source gives no number.
#     MODEL=runs/qwq32b_8xh100/step_20 bash scripts/eval_qwq32b.sh    # further flags go to evaluate.py and win
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
TP=${TP:-2}
MODEL=${MODEL:-Qwen/QwQ-32B}
DATA=${DATA:-hiyouga/math12k@test}

# What: one flag per line, each with its source.
ARGS=(
    --reward math                # not in the source: our choice
    --prompt_column problem      # source: math12k, columns problem and answer
    --answer_column answer       # source: math12k, columns problem and answer
    --max_prompt_tokens 2048     # source: prompt / response 2048 / 2048
    --max_completion_tokens 2048 # source: prompt / response 2048 / 2048
    --temperature 1.0            # source: temperature 1.0, of the rollout
    --top_p 1.0                  # not in the source: our choice
    --samples 1                  # not in the source: our choice
    --published -                # the source has none
    --tensor_parallel_size "$TP"
)
exec python "${REPO}scripts/launch.py" --ranks "$NGPU" "${REPO}evaluate.py" --model "$MODEL" --data "$DATA" "${ARGS[@]}" "$@"
