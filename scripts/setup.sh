#!/usr/bin/env bash
# Makes .venv with the pinned packages, if it is not there already: requirements.txt where there is an NVIDIA GPU, else
# requirements-cpu.txt. Run it (`bash scripts/setup.sh`), or source it from a launch script: that also puts .venv/bin
# first on the PATH and sets NUM_GPUS and REPO. PYTHON chooses the interpreter (3.11 or newer), DEVICE=cpu or
# DEVICE=cuda overrules the choice of packages.
set -euo pipefail
REPO=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/ # before a path in the repository
if [ "$REPO" -ef . ]; then REPO=""; fi                             # there paths are as short as they were typed

NUM_GPUS=0
if command -v nvidia-smi > /dev/null; then
    if ! listed=$(nvidia-smi --list-gpus 2>&1) && [ -z "${DEVICE:-}" ]; then
        echo "error: nvidia-smi says: $listed. Mend the driver, or set DEVICE=cpu for a run on the CPU" >&2 && exit 2
    fi
    NUM_GPUS=$(grep --count '^GPU' <<< "$listed" || true)
fi
DEVICE=${DEVICE:-$([ "$NUM_GPUS" -gt 0 ] && echo cuda || echo cpu)}
case $DEVICE in
    cuda) requirements=requirements.txt ;;
    cpu) requirements=requirements-cpu.txt NUM_GPUS=0 ;;
    *) echo "error: DEVICE=$DEVICE; use cpu or cuda, or leave it out" >&2 && exit 2 ;;
esac

# The mark is written last and holds what was installed: a stopped or outdated installation is done again.
wanted="$DEVICE $(cat "${REPO}"requirements{,-cpu,-cuda}.txt "${REPO}scripts/torchvision_on_cpu.py" | sha256sum)"
lock=""
is_installed() { [ "$(cat "${REPO}.venv/installed" 2> /dev/null)" = "$wanted" ]; }
if ! is_installed; then
    [ -w "${REPO:-.}" ] || { echo "error: ${REPO:-$PWD/} has no up-to-date .venv, and you may not write there" >&2 && exit 2; }
    # Two nodes may start in one folder: the second waits here, and finds it done. NFS locks only what can be written.
    exec {lock}>> "${REPO}.venv.lock"
    flock "$lock" || echo "warning: ${REPO}.venv.lock cannot be locked here; run one scripts/setup.sh before others" >&2
fi
if ! is_installed; then
    PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3.12 || command -v python3 || echo python3)}
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "error: $PYTHON is not Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2 && exit 2; }
    echo "setting up .venv from $requirements (NVIDIA GPUs found: $NUM_GPUS), a few minutes once"
    clear=() # packages for the other kind of machine must go: a CPU build of torch would satisfy the GPU list
    if [ -s "${REPO}.venv/installed" ] && [ "$(cut -d ' ' -f 1 "${REPO}.venv/installed")" != "$DEVICE" ]; then
        clear=(--clear)
    fi
    "$PYTHON" -m venv "${clear[@]}" "${REPO}.venv"
    install=("${REPO}.venv/bin/pip" install --quiet --disable-pip-version-check)
    if [ "$DEVICE" = cuda ]; then
        "${install[@]}" -r "${REPO}requirements.txt"
    else
        "${install[@]}" --no-deps -r "${REPO}requirements-cpu.txt"
        if ! "${REPO}.venv/bin/python" -c 'import torch' 2> /dev/null; then
            echo "this index has the CUDA build of torch only: installing the libraries it is linked to" \
                "(several GB, see docs/hardware.md)"
            "${install[@]}" "$(grep --only-matching '^torch==[^ ]*' "${REPO}requirements-cpu.txt")"
        fi
        packages=$("${REPO}.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        cp "${REPO}scripts/torchvision_on_cpu.py" "$packages"
        echo 'import torchvision_on_cpu' > "$packages/torchvision_on_cpu.pth" # run by every Python of .venv
    fi
    echo "$wanted" > "${REPO}.venv/installed"
fi
if [ -n "$lock" ]; then exec {lock}>&-; fi # the run would hold it to its end
if ! "${REPO}.venv/bin/python" -c '' 2> /dev/null; then # a link into a home that this user may not enter
    echo "error: ${REPO}.venv/bin/python cannot be started by $(id -un); remove .venv, and set PYTHON to one that can" >&2
    exit 2
fi
if [ "$DEVICE" = cuda ]; then
    NUM_GPUS=$("${REPO}.venv/bin/python" -c 'import torch; print(torch.cuda.device_count())') # respects CUDA_VISIBLE_DEVICES
fi
export PATH="${REPO:-$PWD/}.venv/bin:$PATH" NUM_GPUS
