#!/usr/bin/env bash
# Prints the flags of a published method, with their source and what differs, or runs a launch script with them:
#     bash scripts/paper.sh                                  # names of all methods
#     bash scripts/paper.sh dapo                             # its flags
#     bash scripts/paper.sh dapo scripts/tiny_cpu.sh FLAGS   # a run with them, in runs/paper_dapo; FLAGS win
# BATCH=paper adds the batch that the source used. The methods are in docs/papers.json; docs/papers.md explains them.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3

told=$("$python" - "$root" "${1:-}" "${2:-}" "${BATCH:-}" << 'END'
import json, os, re, shlex, sys

root, name, script, batch = sys.argv[1:]
with open(f"{root}/docs/papers.json", encoding="utf-8") as file:
    papers = json.load(file)
if not name:
    print("\n".join(f"{name:<24}{paper['method']}" for name, paper in papers.items()))
    sys.exit()
if name not in papers:
    sys.exit(f"error: {name} is none of the methods, which are {', '.join(papers)}")
if script and not os.path.isfile(script):
    sys.exit(f"error: {script} is not there; which script? bash scripts/paper.sh {name} scripts/tiny_cpu.sh")
paper = papers[name]
files = f"{root}/docs" if script else os.path.relpath(f"{root}/docs")
flags = [re.sub("^docs/", f"{files}/", word) for word in paper["flags"].split()]
of_batch = paper.get("batch", "")
limits = [int(re.search(rf"--max_{kind}_tokens (\d+)|$", of_batch)[1] or 1024) for kind in ("prompt", "completion")]
if of_batch and sum(limits) > 8192:
    of_batch += f" --micro_batch_tokens {sum(limits)}"
if script:
    print(*flags, *(of_batch.split() if batch == "paper" else []), sep="\n")
else:
    about = [f"{paper['method']}  {paper.get('link', '')}".rstrip(), paper["notes"]]
    print(*(f"# {line}" for line in about), shlex.join(flags), of_batch or "# no batch is given", sep="\n")
END
) || exit 1
if [ -z "${2:-}" ]; then
    echo "$told"
    exit
fi
mapfile -t flags <<< "$told"
export OUT_DIR=${OUT_DIR:-runs/paper_$1}
exec bash "$2" "${flags[@]}" "${@:3}"
