"""What the user gives, read and checked before any weight is read: data, tokenizer, reward."""

from __future__ import annotations

import socket
import time
import uuid
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from data import PromptData
from flags import FLAGS, Grading, Lora, PromptFormat, Sampling, Stalls, make_plan, take
from fsdp_utils import World, gather_from_ranks, is_engine_leader_process, is_main_process, wait_for_all
from guards.doctor import start_doctor
from guards.fingerprint import check_same_start
from inputs.checks import LOOPBACK, given, ranks_per_engine
from inputs.evaluation import check_names, settings_per_set
from inputs.machine import check_launch, choose_interface, is_first_node, local_world_size
from inputs.records import read_system_prompt
from model.attention import check_device
from model.engine_options import stop_ids
from model.sizes import check_config
from model.vision import Vision, load_processor
from model.weights import load_config, load_generation_config, weight_files
from policy import check_policy
from reward import Grader, workers_per_engine

SHOWN_AFTER = 10.0  # seconds: network file systems do not show a new file at once


@dataclass(frozen=True)
class Inputs:
    """What `load_inputs` returns."""

    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what reads images; None if the model sees none
    train_data: list[PromptData]  # of each source
    eval_sets: list[PromptData]
    eval_samplings: list[Sampling]
    grader: Grader
    generation_config: GenerationConfig  # of the exported policy

    @property
    def companions(self) -> list[PreTrainedTokenizerBase | ProcessorMixin | GenerationConfig]:
        """What belongs to the model in its folder."""
        return [self.vision.processor if self.vision else self.tokenizer, self.generation_config]


def load_inputs(args: Namespace) -> Inputs:
    """Raises ValueError, OSError or RuntimeError for everything that is wrong with the user's input."""
    of_engine = args.gpu_memory_utilization if args.engine == "colocated" else 0.0
    check_launch(ranks_per_engine(args), args.dtype, of_engine, len(args.generation_gpus) * is_first_node())
    check_places(args)
    check_names(args.eval_data)
    eval_samplings = settings_per_set(
        len(args.eval_data), "eval_", samples=args.eval_samples, temperature=args.eval_temperature,
        top_p=args.eval_top_p, max_completion_tokens=args.eval_max_completion_tokens,
    )  # fmt: skip
    config = load_config(args.model)
    limits = args.max_prompt_tokens, max(args.max_completion_tokens, *args.eval_max_completion_tokens)
    check_config(args.model, config, limits, args.tensor_parallel_size)
    check_policy(config, take(Lora, args))
    prompt_format = take(PromptFormat, args, system_prompt=read_system_prompt(args.system_prompt))
    tokenizer, vision = load_processor(args.model, config, prompt_format)
    generation_config = load_generation_config(args.model, config, stop_ids(tokenizer, args.stop_tokens))
    train_data = [PromptData.load(source, prompt_format, tokenizer, args.seed, vision) for source in args.train_data]
    make_plan(args, len(PromptData.mix(train_data, args.data_weights).rows))  # raises for too few rows, wrong weights
    # The seed 0 draws #ROWS: held-out sets are the same problems whatever the seed of the run.
    eval_sets = [PromptData.load(source, prompt_format, tokenizer, 0, vision) for source in args.eval_data]
    if is_main_process():
        weight_files(args.model)  # downloads what is not on the disk, while nobody waits in a collective
    grading, is_leader = take(Grading, args), is_engine_leader_process(ranks_per_engine(args))
    grader = Grader(grading, workers_per_engine(grading, ranks_per_engine(args)) if is_leader else 0)
    return Inputs(tokenizer, vision, train_data, eval_sets, eval_samplings, grader, generation_config)


def check_places(args: Namespace) -> None:
    """Raises ValueError if servers are to be started on what this machine lacks, or are out of its reach."""
    for host in [host for url in args.server_urls if (host := urlsplit(url).hostname) not in LOOPBACK]:
        choose_interface(host)  # weights go there; for the ranks of one node the loopback would be chosen
    if args.engine == "colocated" or args.server_urls:
        return
    num_ranks, gpus = local_world_size(), args.generation_gpus
    if torch.cuda.is_available() and not gpus:
        raise ValueError("--engine server: give --generation_gpus, or --server_urls of servers that run.")
    if torch.cuda.is_available() and min(gpus) < num_ranks:
        taken = f"the {num_ranks} ranks of this node train on GPUs 0 to {num_ranks - 1}"
        raise ValueError(f"{given(FLAGS['--generation_gpus'], args)}: {taken}; use {num_ranks} and higher.")


def check_world(args: Namespace, world: World) -> None:
    """What only ranks together can know; from here on they watch each other. Raises ValueError or RuntimeError, on
    every rank.
    """
    check_shared(Path(args.out_dir))
    check_same_start(vars(args))
    start_doctor(Path(args.out_dir), world, take(Stalls, args))
    check_device(world.device, args.share_prompts)


def check_shared(folder: Path) -> None:
    """Raises ValueError, on every rank, if a node does not see what the main process writes into the folder."""
    mark = folder / f".seen_by_all_{gather_from_ranks(uuid.uuid4().hex)[0]}"
    if is_main_process():
        mark.touch()
    wait_for_all()
    deadline = time.monotonic() + SHOWN_AFTER
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    blind = {host for host in gather_from_ranks(None if mark.exists() else socket.gethostname()) if host is not None}
    if is_main_process():
        mark.unlink()
    if blind:
        where = f"{folder} on the first node is not what {', '.join(sorted(blind))} has under this name"
        raise ValueError(f"--out_dir: {where}; it must be on a file system that all nodes share.")
