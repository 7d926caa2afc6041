#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=runs/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
# A launch script on several nodes under Slurm:
#     sbatch scripts/slurm_example.sh scripts/qwen7b_simplerl_2x8xh100.sh FLAGS
# With generation servers on the last SERVER_NODES nodes, one on each GPU; SERVE: flags of scripts/serve.py:
#     SERVER_NODES=1 SERVE="--model Qwen/Qwen3-4B-Base --max_model_len 10240 --head_dtype float32" \
#         sbatch --nodes=3 scripts/slurm_example.sh scripts/qwen3_4b_dapo_8gpu.sh --steps_ahead 2 --in_flight
# 300 seconds before the time limit, or when the job is pre-empted, the run saves and ends (--grace_seconds), and the job
# queues itself again and continues, until the run is complete, or fails.
# Submit it in a folder with a folder `runs`, as the repository's root, on a file system that all nodes share, after
# `DEVICE=cuda bash scripts/setup.sh` (where you log in, there may be no GPU). Not tried on a cluster yet.
set -euo pipefail
REPO=$(dirname "$1")/.. # the launch script's: Slurm runs a copy of this one
export REPO

SERVER_NODES=${SERVER_NODES:-0}
NNODES=$((SLURM_NNODES - SERVER_NODES)) # that train
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${nodes[0]}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one node do not meet
export NNODES MASTER_ADDR MASTER_PORT
on_each=(srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}")

flags=()
if [ "$SERVER_NODES" -gt 0 ]; then
    VLLM_API_KEY=$(od -An -N 32 -tx1 /dev/urandom | tr -d ' \n') # beyond one machine servers want a key
    export VLLM_API_KEY
    flags=(--engine server --server_urls)
    for node in "${nodes[@]:NNODES}"; do
        for gpu in $(seq 0 $((${SLURM_GPUS_PER_NODE:-8} - 1))); do
            flags+=("http://$node:$((MASTER_PORT + 1 + gpu))")
        done
    done
    # shellcheck disable=SC2016 # for the node where it runs
    serve='for gpu in $(seq 0 $((${SLURM_GPUS_PER_NODE:-8} - 1))); do
        CUDA_VISIBLE_DEVICES=$gpu "$REPO/.venv/bin/python" "$REPO/scripts/serve.py" --host 0.0.0.0 --port $((MASTER_PORT + 1 + gpu)) "$@" &
    done; wait'
    read -ra serve_flags <<< "${SERVE:?which? For example --model MODEL --max_model_len 4096}"
    "${on_each[@]}" --nodes="$SERVER_NODES" --relative="$NNODES" bash -c "$serve" serve "${serve_flags[@]}" &
    servers=$!
    trap 'kill "$servers" || true' EXIT
fi

is_ended="" is_interrupted=yes
trap 'is_ended=yes is_interrupted=yes; kill -USR1 "$step" || true' USR1 TERM # srun passes it on to every launcher
# shellcheck disable=SC2016 # SLURM_NODEID is known only where the task runs
"${on_each[@]}" --nodes="$NNODES" --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' launch "$@" "${flags[@]}" &
step=$!
while [ -n "$is_interrupted" ]; do # a trap ends `wait`
    is_interrupted="" status=0
    wait "$step" || status=$?
done
# 75: saved, not finished; srun has then ended launchers that were still leaving. 1: it could not save.
if [ -n "$is_ended" ] && [ "$status" -ne 1 ]; then
    # In an array, this task alone: the job's number may be that of the whole array.
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
fi
exit "$status"
