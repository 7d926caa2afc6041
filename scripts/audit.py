"""Makes one step of a run again, and says whether it is equal: completions, rewards, metrics, weights.

    python scripts/audit.py runs/tiny_cpu 11
    python scripts/audit.py runs/x 37 --elsewhere --model /models/Qwen2.5-7B  # flags of train_grpo.py win

From the checkpoint before, it samples, grades, scores and updates again: to the bit, on as many ranks of the same
machine. Sampling of servers and partial rollouts cannot be repeated: there the stored completions are graded, scored
and trained on (--replay). On another machine, too, and what it computes may differ by TOLERANCE. The weights after a
step are in its checkpoint; without one the next step's log-probs show them. Status 1: different; 2: cannot be audited.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).parent.parent))

import torch
import torch.distributed.checkpoint as dcp
from pyarrow.parquet import read_table
from safetensors.torch import load_file

from batch import Completion
from command_line import parse_flags
from flags import Sampling
from gate.inputs import Inputs
from run import versions
from runtime.files import checkpoints, rollouts_file, steps_with_rollouts
from runtime.history import read_config, read_lines, read_metrics

SCORED = ("row", "prompt_ids", "token_ids", "is_sampled", "is_truncated", "rollout_logprobs", "old_logprobs")
GRADE = ("reward", "reward_parts", "reward_status", "read_as")
NOT_COMPUTED = ("step", "time/", "perf/", "memory/")
NOISE = "policy/rollout_temperature"  # a fit to what both arithmetics round: to the bit or not at all
ROUNDED = ("old_logprobs", "advantages", "policy/", "loss/", "distill/", "moe/", "optim/grad_norm")
# Relative or absolute, of what is ROUNDED. A weight may differ by twice the learning rate an update: a gradient of
# rounding errors alone is a whole step of Adam, in either direction.
TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
Value = tuple[str, str, object]  # name, place, value


class Different(Exception):
    """The first thing that is not equal, and where."""


def flags_of(run: Path, words: list[str]) -> tuple[dict[str, object], list[str]]:
    """The flags in config.json, and the words of the command, which says the same. Raises Different."""
    config = read_config(run)
    for name, value in json.loads(json.dumps(vars(parse_flags(words))), parse_constant=str).items():
        if config.get(name, value) != value and (name != "dtype" or "--dtype" in words):  # its default is the machine's
            raise Different(f"--{name}: {config[name]!r} in config.json, {value!r} in the command of starts.jsonl")
    return config, words


def grade_again(words: list[str], columns: dict[str, list]) -> None:
    """Decodes and grades the completions of these columns anew."""
    args = parse_flags(words)
    inputs, sampling = Inputs.load(args), Sampling.from_flags(args, num_samples=args.group_size)
    rows = {row.where: row for data in inputs.train_data for row in data.rows}
    submit = inputs.grader.callback_for([rows[x] for x in columns["row"][:: args.group_size]], sampling)
    for b, (ids, is_cut) in enumerate(zip(columns["token_ids"], columns["is_truncated"], strict=True)):
        columns["completion"][b] = Completion(ids, [], [], "length" if is_cut else "stop").read(inputs.tokenizer)
        submit(b, columns["completion"][b], ids, is_cut)
    for b, grade in inputs.grader.collect().items():
        values = grade.reward, json.dumps(grade.parts), grade.status, grade.answer
        for name, value in zip(GRADE, values, strict=True):
            columns[name][b] = value
    inputs.close()


def values_of(columns: dict[str, list], names: tuple[str, ...]) -> Iterator[Value]:
    for name in names:
        for b, value in enumerate(columns[name]):
            place = f"completion {b} ({columns['row'][b]}, answer {columns['answer'][b]!r}), {name}"
            values = enumerate(value) if isinstance(value, list) else [("", value)]
            yield from ((name, f"{place} {t}".strip(), x) for t, x in values)


def compare(old: Iterator[Value], new: Iterator[Value], tolerance: float | None) -> None:
    for (name, place, x), (_, other, y) in zip_longest(old, new, fillvalue=("", "nothing", None)):
        is_near = x == y
        if tolerance and name.startswith(ROUNDED) and None not in (x, y):
            is_near = math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance)
        if place != other or not is_near:
            raise Different(f"{place}: {x!r} there, {y!r} here" if place == other else f"{place} there, {other} here")


def weights_of(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The exported weights, and those that training continues with."""
    exported, reader = {}, dcp.FileSystemReader(checkpoint / "trainer")
    for file in checkpoint.glob("*.safetensors"):
        exported |= load_file(file)
    listed = reader.read_metadata().state_dict_metadata
    trained = {name: torch.empty(x.size) for name, x in listed.items() if name.startswith("model.model.")}
    dcp.load(trained, storage_reader=reader, no_dist=True)
    return exported, {name.removeprefix("model.model."): tensor for name, tensor in trained.items()}


def compare_weights(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor], where: str, most: float = 0.0) -> None:
    """Compares what both have, in the dtype of the first."""
    for name in sorted(old.keys() & new.keys()):
        x, y = old[name].double(), new[name].to(old[name].dtype).double()
        if not (difference := (x - y).abs().max().item()) <= most:
            raise Different(f"weight {name} {where}: the largest difference is {difference:.3g}")


def verdict(run: Path, step: int, again: Path, reasons: list[str], tolerance: float | None, words: list[str]) -> str:
    """What is equal in the run and in `again`. Raises Different. `words`: the flags; `reasons`: why it is a replay."""
    config, saved = read_config(run), dict(checkpoints(run))
    for n in sorted({step - 1, step} & saved.keys()):
        compare_weights(*weights_of(saved[n]), f"of step_{n}, exported and in trainer/")
    old, new = (read_table(rollouts_file(folder, step)).to_pydict() for folder in (run, again))
    if reasons and not parse_flags(words).environment:
        grade_again(words, new)
    for columns in (old, new):
        columns[", ".join(GRADE)] = [*zip(*(columns[name] for name in GRADE), strict=True)]
    names = *SCORED, "completion", ", ".join(GRADE), "advantages"
    compare(*(values_of(columns, names) for columns in (old, new)), tolerance)
    lines = [{line["step"]: line for line in read_metrics(folder)}[step] for folder in (run, again)]
    names = [name for name in lines[0] if not name.startswith((*NOT_COMPUTED, NOISE) if tolerance else NOT_COMPUTED)]
    names = [name for name in names if name in lines[1] or not reasons]  # a replay evaluates nothing
    compare(*([(name, f"metric {name}", line.get(name)) for name in names] for line in lines), tolerance)
    how, shown = f"within {tolerance:g}" if tolerance else "to the bit", "weights"
    if step in saved:
        updates = config["prompts_per_step"] // config["prompts_per_update"] * config["num_iterations"]
        most = 2 * lines[0]["optim/lr"] * updates if tolerance else 0.0
        compare_weights(*(weights_of(folder / f"step_{step}")[1] for folder in (run, again)), f"of step_{step}", most)
    else:
        shown = f"weights (by the log-probs of step {step + 1})"
        tables = [read_table(rollouts_file(folder, step + 1)).to_pydict() for folder in (run, again)]
        compare(*(values_of(table, SCORED) for table in tables), tolerance)
    return f"step {step}: equal {how}: {len(old['row'])} completions, rewards, {len(names)} metrics, {shown}"


def audit(run: Path, step: int, num_ranks: int | None, is_elsewhere: bool, more: list[str], again: Path) -> str:
    """The verdict on the step, which is made in the folder `again`. Raises Different, or ValueError if it cannot be."""
    starts, saved, kept = read_lines(run / "starts.jsonl"), dict(checkpoints(run)), steps_with_rollouts(run)
    logged = {line["step"] for line in read_metrics(run)} if starts else set()
    known = [n for n in sorted({*kept} & logged) if (n == 1 or n - 1 in saved) and (n in saved or n + 1 in kept)]
    if step not in known:
        needed = f"its rollouts, its line of metrics.jsonl, step_{step - 1}, and step_{step} or the next rollouts"
        raise ValueError(f"step {step} of {run} cannot be audited, which needs {needed}; steps that can: {known}.")
    config, words = flags_of(run, starts[-1]["command"][2:])
    start = [each for each in starts if each["resumed_from"] < step][-1]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    here = {"device": device, "cores": os.cpu_count(), "packages": versions()}
    here["world_size"] = num_ranks or start["world_size"]
    reasons = [f"{name} {start[name]} there, {here[name]} here" for name in here if start[name] != here[name]]
    reasons += ["--elsewhere"] * is_elsewhere
    tolerance = TOLERANCE[config["dtype"]] if reasons else None
    reasons += [f"--{name}" for name in ("partial_rollouts", "replay") if config[name]]
    reasons += ["--engine server"] * (config["engine"] == "server")
    before = run / f"step_{step - 1}" if step > 1 else run
    words += ["--dtype", config["dtype"], *more]
    if reasons:
        words = [*(word for word in words if word != "--partial_rollouts"), "--replay", str(before)]
    else:  # a copy of the run, which goes on with this step
        again.mkdir()
        for name in ("config.json", "inputs.json", "starts.jsonl"):
            (again / name).write_bytes((run / name).read_bytes())
        lines = [json.dumps(line) + "\n" for line in read_metrics(run) if line["step"] < step]
        (again / "metrics.jsonl").write_text("".join(lines))
        if step > 1:
            (again / before.name).symlink_to(before.absolute())
    words += ["--stop_after", str(step if step in saved else step + 1), "--out_dir", str(again)]
    words += ["--keep_rollouts", "1000", "--track", "none"]
    launcher = [sys.executable, ROOT / "scripts" / "launch.py", "--ranks", here["world_size"], ROOT / "train_grpo.py"]
    if subprocess.run([*map(str, launcher), *words], stdout=sys.stderr, check=False).returncode:
        raise ValueError(f"step {step} could not be made again; the reason is above.")
    said = verdict(run, step, again, reasons, tolerance, words)
    return said + f"; not sampled again, but graded, scored and trained on: {'; '.join(reasons)}" * bool(reasons)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("step", type=int)
    parser.add_argument("--ranks", type=int, help="default: as many as the run had")
    parser.add_argument("--elsewhere", action="store_true", help="the processor is another one, which no file tells")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="audit_") as folder:
        try:
            print(audit(args.run, args.step, args.ranks, args.elsewhere, more, Path(folder) / "run"))
        except Different as error:
            sys.exit(f"step {args.step}: {error}")
        except (ValueError, OSError) as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
