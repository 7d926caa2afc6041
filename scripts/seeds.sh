#!/usr/bin/env bash
# Runs a launch script with the seeds 1 to N, one after the other, each in its own folder, OUT_DIR_seed1 and so on:
#     bash scripts/seeds.sh 3 scripts/tiny_cpu.sh FLAGS
#     OUT_DIR=runs/higher_rate bash scripts/seeds.sh 3 scripts/tiny_cpu.sh --learning_rate 3e-4
# Started again, it continues: complete runs say so and end, the others continue from their last checkpoint. A seed that
# fails does not stop the others. As a Slurm array, each task runs the seed of its number:
#     sbatch --array=1-3 scripts/slurm_example.sh scripts/seeds.sh 3 scripts/qwen7b_simplerl_2x8xh100.sh FLAGS
set -euo pipefail
usage="bash scripts/seeds.sh 3 scripts/tiny_cpu.sh FLAGS"
[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || { echo "error: how many seeds? $usage" >&2 && exit 2; }
[ -n "${2:-}" ] || { echo "error: which script? $usage" >&2 && exit 2; }
[ -f "$2" ] || { echo "error: $2 is not there (in $PWD); $usage" >&2 && exit 2; }
num_seeds=$1 script=$2
shift 2
for flag in "$@"; do
    case $flag in
        --seed | --seed=* | --out_dir | --out_dir=*)
            echo "error: $flag is set here for each seed; give OUT_DIR=runs/name instead" >&2 && exit 2
            ;;
    esac
done
base=${OUT_DIR:-runs/$(basename "$script" .sh)}
base=${base%/}

run_seed() { # SEED is for what the script makes before the training
    SEED=$1 OUT_DIR=${base}_seed$1 exec bash "$script" "${@:2}" --seed "$1"
}

if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    if ! [[ $SLURM_ARRAY_TASK_ID =~ ^[1-9][0-9]{0,8}$ ]] || [ "$SLURM_ARRAY_TASK_ID" -gt "$num_seeds" ]; then
        echo "error: array task $SLURM_ARRAY_TASK_ID is not one of the seeds 1 to $num_seeds; use --array=1-$num_seeds" >&2
        exit 2
    fi
    echo "seed $SLURM_ARRAY_TASK_ID is that of this array task: ${base}_seed$SLURM_ARRAY_TASK_ID"
    run_seed "$SLURM_ARRAY_TASK_ID" "$@"
fi

set -m # each run is a process group, which a signal reaches as a whole
run="" is_ended=""
trap 'is_ended=yes is_interrupted=yes; [ -z "$run" ] || kill -TERM -- "-$run" || true' INT TERM HUP USR1
failed=() folders=()
for seed in $(seq "$num_seeds"); do
    echo "seed $seed of $num_seeds: ${base}_seed$seed"
    (run_seed "$seed" "$@") &
    run=$! is_interrupted=yes
    while [ -n "$is_interrupted" ]; do # a trap ends `wait`
        is_interrupted="" status=0
        wait "$run" || status=$?
    done
    run="" folders+=("${base}_seed$seed")
    if [ -n "$is_ended" ]; then
        echo "ended by a signal in seed $seed; the same command continues" >&2
        exit "$status" # 75 if the run has saved: scripts/slurm_example.sh queues itself again then
    elif [ "$status" -ne 0 ]; then
        echo "seed $seed failed with exit status $status" >&2
        failed+=("$seed")
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "error: of $num_seeds seeds these failed: ${failed[*]}. The same command tries them again" >&2
    exit 1
fi
echo "seeds 1 to $num_seeds are done: ${folders[*]}"
