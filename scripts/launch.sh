#!/usr/bin/env bash
# Sourced by the launch scripts: sets up (setup.sh) and defines `launch train_grpo.py FLAGS`. All paths, also those of the
# environment and the default runs/..., are relative to where the user stands.
# NGPU: ranks on this node, one per GPU (on CPU: processes). Several nodes: the same command on each, with NNODES,
# NODE_RANK (0 to NNODES - 1) and MASTER_ADDR (the first node's address; MASTER_PORT: a free port there). MAX_RESTARTS
# (one node): how often a run that a fault has ended is started again. With --dry_run nothing is started.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

NGPU=${NGPU:-$([ "$NUM_GPUS" -gt 0 ] && echo "$NUM_GPUS" || echo 2)}
NNODES=${NNODES:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + NGPU - 1) / NGPU))}

launch() {
    local nodes=() flag
    for flag in "$@"; do
        if [ "$flag" = --dry_run ]; then # one process, on any machine, for the ranks that there would be
            exec python "$REPO$1" --plan_gpus $((NNODES * NGPU)) --plan_nodes "$NNODES" "${@:2}"
        fi
    done
    if [ "$NNODES" -gt 1 ]; then
        : "${NODE_RANK:?NNODES=$NNODES needs NODE_RANK: 0 on the first node, 1 on the next}"
        : "${MASTER_ADDR:?NNODES=$NNODES needs MASTER_ADDR: the address of the first node}"
        nodes=(--nodes "$NNODES" --node_rank "$NODE_RANK")
        nodes+=(--master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
    fi
    exec python "${REPO}scripts/launch.py" --ranks "$NGPU" --max_restarts "${MAX_RESTARTS:-0}" "${nodes[@]}" \
        "$REPO$1" "${@:2}"
}
