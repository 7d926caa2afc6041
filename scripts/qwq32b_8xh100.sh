#!/usr/bin/env bash
# GRPO on QwQ-32B, all weights. Source: the EasyR1 document. Hardware: 1 node x 8 H100 80 GB.
# Time and result: not in the source, which ran out of GPU memory, and with everything offloaded out of 512 GB of host
# RAM. What is done about it: bf16 parameters updated as fp32 ones (10 bytes each), the reference offloaded, sleep level
# 2, no full logits.
# Evaluation: MODEL=runs/qwq32b_8xh100/step_100 bash scripts/eval_qwq32b.sh.
set -euo pipefail

# Where: environment, because it differs per machine and does not change the result.
NGPU=${NGPU:-8}
TP=${TP:-8} # source: 2, with which it ran out of memory; its project changed it to 8
MODEL=${MODEL:-Qwen/QwQ-32B}
DATA=${DATA:-hiyouga/math12k}
OUT_DIR=${OUT_DIR:-runs/qwq32b_8xh100}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

# What: one flag per line, each with its source.
ARGS=(
    --model "$MODEL"
    --train_data "$DATA@train"     # source: math12k, 12,000 rows, shuffled each epoch, last partial batch dropped
    --eval_data "$DATA@test"       # source: its test split, 500 rows
    --out_dir "$OUT_DIR"
    --prompt_column problem        # source: its data
    --answer_column answer         # source: its data
    --prompt_suffix $'\nPlease reason step by step, and put your final answer within \\boxed{}.' # not in the source: our choice
    --reward math                  # not in the source: our choice; no format reward: its template opens <think>
    --max_prompt_tokens 2048       # source: 2048; longer prompts are dropped and counted
    --max_completion_tokens 2048   # source: 2048
    --prompts_per_step 512         # source: rollout batch size 512
    --group_size 5                 # source: n 5
    --prompts_per_update 128       # source: global batch size 128, which counts prompts: 4 updates a step
    --epochs 15                    # source: 15 epochs: 23 x 15 = 345 steps, 1380 updates
    --advantage grpo               # source: GRPO
    --advantage_ddof 1             # source: its code
    --advantage_eps 1e-6           # source: its code
    --policy_loss clip             # source: its code
    --clip_low 0.2                 # source: its code
    --clip_high 0.2                # source: its code; later versions 0.3, with --dual_clip 3
    --loss_aggregation token_mean  # source: its code
    --kl_coef 1e-2                 # source: KL loss, coefficient 1e-2
    --kl_estimator k3              # source: low_var_kl
    --kl_clamp 10                  # source: its code
    --learning_rate 1e-6           # source: 1e-6
    --lr_schedule constant         # source: its code
    --weight_decay 1e-2            # source: 1e-2
    --adam_beta1 0.9               # source: its code
    --adam_beta2 0.999             # source: its code
    --max_grad_norm 1.0            # source: its code
    --temperature 1.0              # source: 1.0
    --eval_every 5                 # source: validates every 5 steps
    --eval_before_training         # source: and before training
    --save_every 10                # source: every 10 steps
    --keep_checkpoints 3           # source: keeps 3
    --param_dtype bfloat16         # source: what its project changed; 10 bytes a parameter
    --offload_reference            # source: reference with CPU offload
    --gradient_checkpointing       # source: on
    --micro_batch_tokens 16384     # source: micro batch of 4 sequences x 4096 tokens
    --dtype bfloat16               # source: bf16
    --tensor_parallel_size "$TP"
    --gpu_memory_utilization 0.4   # not in the source: our choice
)
# ARGS+=(--compile) # by the dry run 850 s a step, not 900; no card has run this set-up with it yet
launch train_grpo.py "${ARGS[@]}" "$@"
