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
# 300 seconds before the time limit, or when the job is pre-empted, the run saves and ends (--grace_seconds), and the job
# queues itself again and goes on: until the run is complete, or fails.
# Submit it in the repository's root, on a file system that all nodes share, after `DEVICE=cuda bash scripts/setup.sh`
# (where you log in, there may be no GPU). Not tried on a cluster yet.
set -euo pipefail

NNODES=$SLURM_NNODES
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${nodes%%$'\n'*}
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one node do not meet
export NNODES MASTER_ADDR MASTER_PORT
is_ended="" is_interrupted=yes
trap 'is_ended=yes is_interrupted=yes; kill -USR1 "$step" || true' USR1 TERM # srun passes it on to every launcher
# shellcheck disable=SC2016 # SLURM_NODEID is known only where the task runs
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}" --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' launch "$@" &
step=$!
while [ -n "$is_interrupted" ]; do # a trap ends `wait`
    is_interrupted="" status=0
    wait "$step" || status=$?
done
if [ -n "$is_ended" ] && [ "$status" -eq 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
