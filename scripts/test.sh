#!/usr/bin/env bash
# Installs what the tests need, if it is missing, and runs them: all (three files at a time), or the files that are named.
# Arguments go to pytest: `bash scripts/test.sh tests/test_batch.py -k micro_batches`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

if [ "$(cat .venv/installed-dev 2> /dev/null)" != "$(sha256sum < requirements-dev.txt)" ]; then
    pip install --quiet --disable-pip-version-check --no-deps -r requirements-dev.txt
    sha256sum < requirements-dev.txt > .venv/installed-dev
fi
# The report's page is tested in Chromium. Where it is missing and cannot be installed, those tests are skipped.
if ! command -v chromedriver > /dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; } > /dev/null ||
        echo "Chromium could not be installed: the report's page is not tested in a browser" >&2
fi
selection=(tests -n 3 --dist loadfile --no-loadscope-reorder)
if [ "$NUM_GPUS" -gt 0 ]; then
    selection=(tests) # each test has the GPUs to itself
fi
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then
        selection=() # pytest gets the paths with the other arguments
    fi
done
exec python -m pytest "${selection[@]}" "$@"
