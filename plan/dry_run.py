"""`train_grpo.py --dry_run`: what a run amounts to and whether it fits. It needs no GPU, no weights and no data.

The exit code is 0 if the run fits and 3 if not. `setup_of` reads the flags, `memory.py` has the bytes, `time.py` the
seconds, `table.py` what is printed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from algorithm import own_function
from engine.options import stop_ids
from flags import EngineSettings, Lora, Memory, PromptFormat, Saving, Servers
from gate.checks import check_flags, launched_world_size
from gate.choices import check_choices
from gate.inputs import check_template, read_system_prompt, samplings_of
from gate.models import check_trained, checked_config, length_limits
from grading.score import parse_reward
from model.weights import load_tokenizer
from plan.memory import checkpoint_bytes, host_phases, total, with_grown_head
from plan.setup import GIB, Hardware, RunShape, Setup, critic_shape, shape_of
from plan.table import report_of, text_of
from runtime.cards import gpu_figures
from runtime.parts import part
from runtime.rank import local_world_size
from runtime.sources import parse_source
from schedule import make_plan

TABLE = Path(__file__).parent / "models.json"
NETWORK_SPEED = 50e9  # bytes per second between nodes, one way, for each GPU: a card of 400 Gbit/s each
HOST_MEMORY = 1000 * GIB  # of a node
# Share of peak FLOPs in matrix products, without and with links to other GPUs, whose waits it takes up:
# measured on one GPU, fitted to published runs on several (benchmarks/README.md).
FLOPS_SHARE = {False: 0.65, True: 0.42}
# Data set that is not on the disk -> its rows.
ROWS = json.loads(TABLE.with_name("data_sets.json").read_text("utf-8"))


def dry_run(args: argparse.Namespace) -> int:
    """Prints the report and returns the exit code. Raises ValueError for a run that could not start on any machine."""
    report = report_of(setup_of(args, config_of(args.model)))
    print(json.dumps(report, indent=2) if args.json else text_of(report))
    return 0 if report["fits"] else 3


def needs_of_launch(args: argparse.Namespace) -> dict[str, object]:
    """What these flags need of the machine that they are started on: {"host": bytes of RAM of a node, "checkpoints":
    (bytes of one, the most that are on the disk at a time)}. Raises ValueError for a model that is not known.
    """
    setup = setup_of(args, config_of(args.model))
    return {
        "host": max(map(total, host_phases(setup).values())),
        "checkpoints": (checkpoint_bytes(setup), setup.run.num_checkpoints),
    }


def head_growth(args: argparse.Namespace, gpu_bytes: float) -> int:
    """The size of a chunk of logits over the least, for these flags on such GPUs. Raises ValueError as `setup_of`."""
    setup = setup_of(args, config_of(args.model))
    hardware = replace(setup.hardware, gpu_bytes=gpu_bytes)
    return with_grown_head(replace(setup, hardware=hardware)).memory.head_growth


def config_of(model: str) -> PretrainedConfig:
    """The config in a folder, in `models.json`, or else on the hub. Raises ValueError."""
    if Path(model).exists():
        return checked_config(model)
    table = json.loads(TABLE.read_text("utf-8"))
    if model in table:
        own = table[model]
        return AutoConfig.for_model(**table.get(own.pop("as", None), {}) | own)
    try:
        return checked_config(model)
    except (ValueError, OSError) as error:
        near = ", ".join(difflib.get_close_matches(model, table, n=5, cutoff=0))
        raise ValueError(f"{str(error).splitlines()[0]} Known without network are, for example, {near}.") from None


def rows_of(train_data: list[str]) -> int | None:
    """Training rows by #ROWS, lines on the disk and the table; None if a source's are not known."""
    total = 0
    for source in train_data:
        path, split, count = parse_source(source)
        if count is None and Path(path).is_file() and path.endswith(".jsonl"):
            count = sum(1 for line in Path(path).read_bytes().splitlines() if line.strip())
        elif count is None:
            count = ROWS.get(f"{path}@{split or 'train'}", ROWS.get(Path(path).stem))
        if count is None:
            return None
        total += count
    return total


def setup_of(args: argparse.Namespace, config: PretrainedConfig) -> Setup:
    """The flags as a Setup. Raises ValueError for flags that contradict each other, the model or the hardware."""
    gpus = args.plan_gpus or launched_world_size()
    nodes = args.plan_nodes or (1 if args.plan_gpus else gpus // local_world_size())
    if gpus % nodes:
        raise ValueError(f"--plan_gpus {gpus} is not divisible by --plan_nodes {nodes}; it counts GPUs of all nodes.")
    check_flags(args, gpus)
    check_trained(args, config)
    if args.image_column:
        part("extras.models.vision", "--image_column").check_images(args.model, config, args.image_column)
    model, lora = shape_of(config, args.model), Lora.from_flags(args)
    check_choices(args)
    check_inputs(args)
    num_rows = rows_of(args.train_data)
    if num_rows is None and args.epochs is not None:
        raise ValueError(
            f"--epochs {args.epochs}: how many rows each of --train_data {' '.join(args.train_data)} has is not known; "
            f"give {args.train_data[0]}#ROWS."
        )
    plan = make_plan(args, args.prompts_per_step if num_rows is None else num_rows)
    has_kl = args.kl_coef != 0
    needs_first = args.num_iterations > 1 or (has_kl and args.kl_in == "reward") or lora.lora_dropout > 0
    run = RunShape.from_flags(
        args, num_rows=num_rows, longest_prompt=args.max_prompt_tokens, longest_completion=args.max_completion_tokens,
        has_kl=has_kl, over_vocabulary=args.kl_over == "vocabulary",
        mean_prompt_tokens=mean_tokens("prompt", args.plan_prompt_tokens, args.max_prompt_tokens),
        mean_completion_tokens=mean_tokens("completion", args.plan_completion_tokens, args.max_completion_tokens),
        needs_first_logprobs=needs_first,
        num_checkpoints=most_checkpoints(Saving.from_flags(args), min(plan.total_steps, args.stop_after or math.inf)),
    )  # fmt: skip
    engine = EngineSettings.from_flags(args, max_model_len=sum(length_limits(args)))
    generation_gpus = 0
    if args.engine == "server":
        generation_gpus = len(args.generation_gpus) or max(1, len(args.server_urls)) * args.tensor_parallel_size
    gpu_memory, flops, memory_speed, link_speed, host_speed = gpu_figures(args.plan_gpu)
    hardware = Hardware(
        name=args.plan_gpu, gpus=gpus, nodes=nodes,
        gpu_bytes=gpu_memory * GIB, host_bytes=HOST_MEMORY,
        flops=flops * 1e12, flops_share=FLOPS_SHARE[gpus > 1],
        memory_speed=memory_speed * 1e12,
        link_speed=link_speed * 1e9, network_speed=NETWORK_SPEED, host_speed=host_speed * 1e9,
        generation_gpus=generation_gpus,
    )  # fmt: skip
    teacher = None
    if has_kl and args.reference and args.reference != args.model:
        teacher = shape_of(config_of(args.reference), args.reference)
    critic, critic_passes = None, 0
    if args.critic:
        files = part("extras.critic.settings", "--critic")
        path, critic_passes = files.path_of(args.critic, args.model), files.settings_of(args.critic)[1].passes
        critic = critic_shape(config_of(path), path)
    return Setup(
        model=model, memory=Memory.from_flags(args), lora=lora, engine=engine,
        servers=Servers.from_flags(args), plan=plan, run=run, hardware=hardware,
        teacher=teacher, critic=critic, critic_passes=critic_passes,
    )  # fmt: skip


def check_inputs(args: argparse.Namespace) -> None:
    """Raises ValueError or FileNotFoundError for what a start refuses before it reads data.

    What depends on a tokenizer is checked where the folder of --model has one.
    """
    named = {"--reward": ",".join(parse_reward(args.reward)), "--environment": args.environment, "--tools": args.tools}
    for flag, references in named.items():
        for reference in (references or "").split(","):
            if ".py:" in reference:
                own_function(flag, reference)
    samplings_of(args)
    prompt_format = PromptFormat.from_flags(args, system_prompt=read_system_prompt(args.system_prompt))
    tokenizer = None
    if Path(args.model).is_dir():
        with suppress(ValueError):  # a config alone will do
            tokenizer = load_tokenizer(args.model)
    if tokenizer:
        check_template(prompt_format, tokenizer)
        stop_ids(tokenizer, args.stop_tokens)


def mean_tokens(kind: str, mean: float | None, limit: int) -> float:
    """The mean length that the flags assume, by default half of the limit. Raises ValueError for one above it."""
    if mean is not None and mean > limit:
        raise ValueError(f"--plan_{kind}_tokens {mean:g} is the mean; use at most --max_{kind}_tokens {limit}.")
    return limit / 2 if mean is None else mean


def most_checkpoints(saving: Saving, last_step: float) -> int:
    """Checkpoints on the disk at a time: those that are kept, the best one, and the one that is being written."""
    num_saves = math.ceil(last_step / (saving.save_every or last_step))
    if not saving.keep_checkpoints:
        return num_saves
    return min(num_saves, saving.keep_checkpoints + 1 + (saving.keep_best is not None))
