#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --output=runs/slurm-%j.log
# A launch script on several nodes under Slurm:
#     sbatch scripts/slurm_example.sh scripts/qwen7b_simplerl_2x8xh100.sh FLAGS
# Submit it in the repository's root, on a file system that all nodes share, after `DEVICE=cuda bash scripts/setup.sh`
# (where you log in, there may be no GPU). Not tried on a cluster yet.
set -euo pipefail

NNODES=$SLURM_NNODES
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one node do not meet
export NNODES MASTER_ADDR MASTER_PORT
# shellcheck disable=SC2016 # SLURM_NODEID is known only where the task runs
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}" --kill-on-bad-exit=1 \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$@"' launch "$@"
