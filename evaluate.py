"""Evaluates a model on held-out sets. What the figures mean: `evaluation.py`.

python evaluate.py --model runs/x/step_90 --data math500.jsonl aime24.jsonl --reward math --samples 1 32
python scripts/launch.py --ranks 8 evaluate.py --model Qwen/Qwen2.5-7B ...     # eight engines share the problems
"""

from runtime.start import join_launcher

if __name__ == "__main__":
    join_launcher()

import json
import math
import sys
import time
from argparse import Namespace
from pathlib import Path

from command_line import exit_with_error, parser_of
from evaluation import Result, evaluate
from flags import FLAGS as TRAINING_FLAGS
from flags import GROUPS, INF, EngineSettings, default_dtype, flag
from fsdp_utils import gather_from_ranks, init_world
from gate.checks import check_ranges, check_turns
from gate.describe import describe_set, describe_tags, prompt_text
from gate.inputs import SET_FLAGS, Inputs
from runtime.files import must_write, write
from runtime.history import read_config
from runtime.rank import RunError
from runtime.tables import in_columns
from watch.memory import MemoryWatch

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


def parse_arguments() -> Namespace:
    """The flags; --like takes the defaults from that run. Raises ValueError if it has no config.json."""
    about = "Evaluates a model on held-out sets. Sampling flags take one value for all sets or one for each."
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


def as_training(args: Namespace) -> Namespace:
    """The flags as those of a run that trains nothing, for `Inputs.load`."""
    values = {each.name[2:]: each.default for each in TRAINING_FLAGS.values()} | vars(args)
    values |= {f"eval_{name}": getattr(args, name) for name in SET_FLAGS}
    values |= {"train_data": [], "eval_data": args.data, "max_completion_tokens": max(args.max_completion_tokens)}
    return Namespace(**values | {"dtype": "bfloat16"})  # without a trainer any dtype will do


def main() -> None:
    try:
        args = parse_arguments()
        check_ranges(args, FLAGS)
        check_turns(args)
        if args.reward == "none" and not args.environment:
            raise ValueError("--reward none grades nothing; give the reward of the sets.")
        if args.published and len(args.published) != len(args.data):
            counts = f"{len(args.published)} numbers for {len(args.data)} sets"
            raise ValueError(f"--published has {counts}; give one for each, '-' for none.")
        folder = new_folder(args.out_dir, args.model)
        inputs = Inputs.load(as_training(args))
        world = init_world(args.tensor_parallel_size, timeout_minutes=600)
        inputs = inputs.with_usable_keys(world)
        folder = gather_from_ranks(folder)[0]  # the time in its name is the main process's
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            described = [line for data in inputs.eval_sets for line in describe_set(data, "results.json")]
            print(*described, *describe_tags(inputs.tokenizer), sep="\n")
            print(f"first prompt: {prompt_text(inputs.eval_sets[0].rows[0], inputs.tokenizer)!r}", flush=True)
    except (ValueError, OSError, RuntimeError) as error:
        exit_with_error(error)

    from engine.host_time import shorten  # vLLM takes seconds to import: errors come first
    from rollout import Engine

    longest = args.max_prompt_tokens + max(args.max_completion_tokens)
    settings = EngineSettings.from_flags(args, max_model_len=longest, load_format="auto")
    demand, play = inputs.engine_demand(world.num_engines), inputs.turns and inputs.turns.play
    memory, results = MemoryWatch(world), []
    try:
        with memory.phase("engine"):
            engine = Engine(args.model, inputs.tokenizer, world, settings, demand, play)
            shorten(engine.llm)
    except ValueError as error:
        exit_with_error(error)
    for i, (data, sampling) in enumerate(zip(inputs.eval_sets, inputs.eval_samplings, strict=True)):
        with memory.phase("engine"):
            results.append(evaluate(engine, data, sampling, inputs.grader, (args.seed, i), folder))
    if world.is_main:
        print(table(results, args.published), flush=True)
        with must_write(folder / "results.json"):
            write(folder / "results.json", results_json(vars(args), results))
        print(f"results.json and every completion with its grade: {folder}", flush=True)
    engine.close()
    inputs.close()


if __name__ == "__main__":
    try:
        main()
    except (RunError, MemoryError) as error:  # it says what to change
        exit_with_error(error)
    except KeyboardInterrupt:
        sys.exit("interrupted")
