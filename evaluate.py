"""Accuracy on held-out sets, inside training (`Evaluator`) and as a command.

    python evaluate.py --model runs/x/step_90 --data math500.jsonl aime24.jsonl --reward math --samples 1 32
    python scripts/launch.py --ranks 8 evaluate.py --model Qwen/Qwen2.5-7B ...     # eight engines share the problems

Figures, each with its standard error over problems: avg@k, the mean score of k samples of a
problem; pass@k, the chance that at least one of k is correct (unbiased, Chen et al. 2021); maj@k,
the chance that the most frequent answer of k is correct; the mean length in tokens; the shares that
are truncated and that could not be graded. A completion is correct if the reward's first verifier
gives it 1 or more.
"""

from __future__ import annotations

from runtime.start import join_launcher

if __name__ == "__main__":
    join_launcher()

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from batch import Metrics, Rollout
from command_line import exit_with_error, parser_of
from data import PromptData
from engine.options import EngineDemand, largest_share, stop_ids
from flags import FLAGS as TRAINING_FLAGS
from flags import (
    GROUPS,
    INF,
    EngineSettings,
    Grading,
    PromptFormat,
    Sampling,
    Settings,
    TurnLimits,
    default_dtype,
    flag,
    ks_of_pass,
)  # fmt: skip
from fsdp_utils import gather_from_ranks, init_world, is_main_process
from grading import Grade
from model.weights import load_config
from reward import Grader
from run import describe_completion
from runtime.files import best_effort, must_write, write
from runtime.history import read_config
from runtime.rank import RunError, Stopped
from runtime.tables import in_columns

if TYPE_CHECKING:  # importing vLLM takes seconds; the checks of bad input come first
    from rollout import Engine

Figure = tuple[float, float]  # mean and standard error; nan for what one problem cannot tell


@dataclass(frozen=True)
class Result:
    """The figures of one set."""

    data: PromptData
    sampling: Sampling
    figures: dict[str, Figure]

    def metrics(self) -> Metrics:
        """`eval/<set>/<figure>`, and `..._stderr` beside it; `stderr` alone belongs to avg@k."""
        metrics, prefix = {}, f"eval/{self.data.name}"
        for name, (mean, stderr) in self.figures.items():
            metrics[f"{prefix}/{name}"] = mean
            metrics[f"{prefix}/{'stderr' if name.startswith('avg@') else name + '_stderr'}"] = stderr
        return metrics


class Evaluator(Settings):
    """Evaluation during training: the held-out sets, how each is sampled, and when."""

    sets: Sequence[PromptData]
    samplings: Sequence[Sampling]  # one for each set
    grader: Grader
    folder: Path  # the completions after step 20 go to step_20 in it
    eval_every: int  # steps; 0: never
    eval_before_training: bool
    seed: int

    def is_due(self, step: int, is_last: bool = False) -> bool:
        """Whether to evaluate after this step. Step 0 is the start of training."""
        if step == 0:
            return self.eval_before_training
        return self.eval_every > 0 and (is_last or step % self.eval_every == 0)

    def is_missing(self, step: int, is_last: bool, logged: Metrics) -> bool:
        """Whether the evaluation after this step is due, but a signal has cut it short: its metrics are not there."""
        return self.is_due(step, is_last) and not any(name.startswith("eval/") for name in logged)

    def run(self, engine: Engine, step: int) -> Metrics:
        """The metrics of all sets, the same on every rank; {} if a signal has come."""
        metrics = {}
        try:
            for index, (data, sampling) in enumerate(zip(self.sets, self.samplings, strict=True), start=1):
                seed = (self.seed, step, index)
                metrics |= evaluate(engine, data, sampling, self.grader, seed, self.folder / f"step_{step}").metrics()
        except Stopped:
            return {}
        return metrics


def evaluate(
    engine: Engine, data: PromptData, sampling: Sampling, grader: Grader, seed: tuple[int, ...], folder: Path
) -> Result:
    """Samples and grades the set; every completion with its grade goes to <set>.jsonl in the folder."""
    on_finished = grader.callback_for(data.rows, sampling)
    rollout = engine.sample(data.rows, sampling, seed, f"evaluate {data.name}", on_finished)
    rollout = replace(rollout, grades=grader.collect_from_ranks())
    if is_main_process():
        with best_effort(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(describe_completion(rollout, b)) + "\n" for b in range(len(rollout.rows))]
            write(folder / f"{data.name}.jsonl", "".join(lines))
    return Result(data, sampling, figures_of(rollout, sampling.num_samples))


def calls_of(sets: list[PromptData], samplings: list[Sampling]) -> list[tuple[int, int]]:
    """(prompts, samples of each) of every set, for `largest_share`."""
    return [(len(data.rows), sampling.num_samples) for data, sampling in zip(sets, samplings, strict=True)]


def figures_of(rollout: Rollout, num_samples: int) -> dict[str, Figure]:
    """Every figure of the module's docstring, from graded completions."""
    grades = rollout.grades
    groups = [grades[i : i + num_samples] for i in range(0, len(grades), num_samples)]
    num_correct = [sum(grade.is_correct for grade in group) for group in groups]
    figures = {f"avg@{num_samples}": _figure([sum(grade.score for grade in group) / num_samples for group in groups])}
    for k in ks_of_pass(num_samples):
        figures[f"pass@{k}"] = _figure([pass_at_k(count, num_samples, k) for count in num_correct])
    votes = [majority_score(group) for group in groups]
    if num_samples > 1 and any(vote is not None for vote in votes):
        figures[f"maj@{num_samples}"] = _figure([vote or 0.0 for vote in votes])
    lengths_B, is_failed_B = rollout.completion_lengths_B, [grade.is_failed for grade in grades]
    columns = {"frac_truncated": rollout.is_truncated_B, "tokens_mean": lengths_B, "frac_failed": is_failed_B}
    means = {name: np.reshape(values_B, (-1, num_samples)).mean(axis=1) for name, values_B in columns.items()}
    return figures | {name: _figure(values) for name, values in means.items()}


def pass_at_k(num_correct: int, num_samples: int, k: int) -> float:
    """The chance that at least one of k of the samples, drawn without replacement, is correct."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority_score(grades: list[Grade]) -> float | None:
    """The chance that the most frequent answer of one problem is correct, ties broken by lot; None without any answer.

    All correct answers are one answer, whatever their form; incorrect ones are the same if they are read the same.
    """
    answered = [grade for grade in grades if grade.answer is not None]
    votes = Counter("correct" if grade.is_correct else f"incorrect {grade.answer}" for grade in answered)
    if not votes:
        return None
    most = max(votes.values())
    return float(votes["correct"] == most) / sum(count == most for count in votes.values())


def _figure(per_problem: list[float] | np.ndarray) -> Figure:
    values = np.asarray(per_problem, dtype=np.float64)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


# The command ----------------------------------------------------------------------------------------------------------


AS_IN_TRAINING = ("stop_tokens", "seed", "dtype", "head_dtype", "tensor_parallel_size")
# fmt: off
FLAGS = {
    "evaluation": [
        flag("--model", None, "folder in Hugging Face format (runs/x/step_90) or hub id", is_required=True),
        flag("--data", None, "sets, each WHAT[@SPLIT][#ROWS]: see docs/data.md", is_list=True, is_required=True),
        flag("--like", None, "folder of a run: reward, columns, prompts, limits and precision are by default as there"),
        flag("--out_dir", None, "new folder for the results; default: eval/NAME/TIME beside the model"),
        flag("--published", [], "published numbers to show beside ours, one text per set"),
        flag("--max_completion_tokens", [1024], "completions are truncated after this many tokens", (1, INF)),
        flag("--gpu_memory_utilization", 0.9, "CUDA: share of GPU memory that vLLM may take", (0.01, 1)),
        *(TRAINING_FLAGS[f"--eval_{name}"]._replace(name=f"--{name}") for name in ("samples", "temperature", "top_p")),
        *(TRAINING_FLAGS[f"--{name}"] for name in AS_IN_TRAINING),
    ],
    "prompts": GROUPS["prompts"],
    "reward": GROUPS["reward"],
    "turns": GROUPS["turns"],
}
# fmt: on


def new_folder(out_dir: str | None, model: str) -> Path:
    """The folder of the results. Raises ValueError if it is there already and not empty."""
    place = Path(model).resolve() if Path(model).is_dir() else Path(model.replace("/", "--"))  # `best` is a link
    folder = Path(out_dir) if out_dir else place.parent / "eval" / place.name / time.strftime("%Y-%m-%d_%H-%M-%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out_dir {str(folder)!r} is there already and not empty; choose another.")
    return folder


def table(results: list[Result], published: list[str]) -> str:
    """The console table: percentages with their standard errors, and the published numbers beside them."""
    rows = [["set", "problems", "k", "avg@k", "pass@k", "maj@k", "truncated", "tokens"]]
    for result in results:
        k = result.sampling.num_samples
        rows.append([result.data.name, str(len(result.data.rows)), str(k)])
        for name in (f"avg@{k}", f"pass@{k}", f"maj@{k}", "frac_truncated", "tokens_mean"):
            scale = 1 if name == "tokens_mean" else 100
            mean, stderr = result.figures.get(name, (math.nan, math.nan))
            cell = "-" if math.isnan(mean) else f"{mean * scale:.1f}"
            rows[-1].append(cell if math.isnan(stderr) else f"{cell} ± {stderr * scale:.1f}")
    if published:
        rows = [[*row, cell] for row, cell in zip(rows, ["published", *published], strict=True)]
    return "\n".join(in_columns(rows))


def results_json(given: dict[str, object], results: list[Result]) -> str:
    """The flags, and of each set the counts, the sampling and every figure."""
    sets = {}
    for result in results:
        data = result.data
        counts = {"problems": len(data.rows), "too_long": data.num_too_long, "excluded": data.excluded}
        sampling = {name.removeprefix("num_"): value for name, value in vars(result.sampling).items()}
        figures = {
            name: {"mean": mean, "stderr": None if math.isnan(stderr) else stderr}  # JSON knows no nan
            for name, (mean, stderr) in result.figures.items()
        }
        sets[data.name] = counts | sampling | figures
    return json.dumps({"flags": given, "sets": sets}, indent=2) + "\n"


def parse_arguments() -> argparse.Namespace:
    """The flags; --like takes the defaults from that run. Raises ValueError if it has no config.json."""
    about = "Evaluates a model on held-out sets. Sampling flags take one value for all sets or one for each."
    from gate.checks import SET_FLAGS

    parser = parser_of(FLAGS, about)
    if run := parser.parse_args().like:
        config = read_config(Path(run))
        if not config:
            raise ValueError(f"--like {run} has no config.json; name the folder of a run.")
        shared = [each.name[2:] for each in (*GROUPS["prompts"], *GROUPS["reward"], *GROUPS["turns"])]
        shared += ["stop_tokens", "dtype", "head_dtype"]
        parser.set_defaults(**{name: config[name] for name in shared if name in config})
        parser.set_defaults(**{name: config[f"eval_{name}"] for name in SET_FLAGS if config.get(f"eval_{name}")})
    args = parser.parse_args()
    args.dtype = args.dtype or default_dtype()
    return args


def main() -> None:
    try:
        args = parse_arguments()
        from gate.checks import SET_FLAGS, check_ranges, check_turns, samplings_of
        from gate.inputs import (
            check_evaluation,
            check_template,
            check_tokens,
            describe_set,
            describe_tags,
            describe_template,
            image_options,
            load_reader,
            read_system_prompt,
            start_grader,
        )
        from gate.keys import check_groups, check_keys

        check_ranges(args, FLAGS)
        check_turns(args)
        if args.reward == "none" and not args.environment:
            raise ValueError("--reward none grades nothing; give the reward of the sets.")
        check_evaluation(args)
        samplings = samplings_of(args.data, "", [getattr(args, name) for name in SET_FLAGS])
        if args.published and len(args.published) != len(args.data):
            counts = f"{len(args.published)} numbers for {len(args.data)} sets"
            raise ValueError(f"--published has {counts}; give one for each, '-' for none.")
        folder = new_folder(args.out_dir, args.model)
        prompt_format = PromptFormat.from_flags(args, system_prompt=read_system_prompt(args.system_prompt))
        tokenizer, vision = load_reader(args.model, load_config(args.model), prompt_format)
        check_template(prompt_format, tokenizer)
        sets = [PromptData.load(source, prompt_format, tokenizer, 0, vision) for source in args.data]
        check_tokens(args.model, tokenizer, stop_ids(tokenizer, args.stop_tokens), sets)
        size, limits = args.tensor_parallel_size, TurnLimits.from_flags(args)
        grader, turns = start_grader(Grading.from_flags(args), limits, prompt_format, tokenizer, size)
        check_groups(grader, "--samples", *(sampling.num_samples for sampling in samplings))
        world = init_world(size, timeout_minutes=600)
        sets = [check_keys(grader, data, world) for data in sets]
        folder = gather_from_ranks(folder)[0]  # the time in its name is the main process's
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            described = describe_template(prompt_format, tokenizer)
            described += [line for data in sets for line in describe_set(data, "results.json")]
            print(*described, *describe_tags(tokenizer), sep="\n")
            print(f"first prompt: {sets[0].rows[0].text!r}", flush=True)
    except (ValueError, OSError, RuntimeError) as error:
        exit_with_error(error)

    from rollout import Engine  # vLLM takes seconds to import: errors come first

    longest = args.max_prompt_tokens + max(args.max_completion_tokens)
    settings = EngineSettings.from_flags(args, max_model_len=longest, load_format="auto")
    demand = EngineDemand(largest_share(calls_of(sets, samplings), world.num_engines), image_options(sets, vision))
    try:
        engine = Engine(args.model, tokenizer, world, settings, demand, turns.play if turns else None)
    except ValueError as error:
        exit_with_error(error)
    results = []
    for i, (data, sampling) in enumerate(zip(sets, samplings, strict=True)):
        results.append(evaluate(engine, data, sampling, grader, (args.seed, i), folder))
    if world.is_main:
        print(table(results, args.published), flush=True)
        with must_write(folder / "results.json"):
            write(folder / "results.json", results_json(vars(args), results))
        print(f"results.json and every completion with its grade: {folder}", flush=True)
    grader.close()
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except (RunError, MemoryError) as error:  # it says what to change
        exit_with_error(error)
    except KeyboardInterrupt:
        sys.exit("interrupted")
