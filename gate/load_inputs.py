"""What the user gives, read and checked before any weight is read: data, tokenizer, reward."""

from __future__ import annotations

import os
import socket
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import cached_file

from data import PromptData, check_vocabulary, describe_template
from engine.options import stop_ids
from extras.models.lora import target_names
from extras.models.vision import Vision, load_processor
from extras.teacher.hints import Hints
from extras.turns.turns import Turns
from flags import FLAGS, Grading, PromptFormat, Sampling, TurnLimits, ranks_per_engine, stall_limit
from fsdp_utils import World, gather_from_ranks, is_engine_leader_process, is_main_process, wait_for_all
from gate.agreement import ROOT, check_same_start, digest, digests_of
from gate.checks import LOOPBACK
from grading.own import files_of
from model.attention import check_device
from model.sizes import check_config, check_cpu_kernels, check_experts
from model.weights import load_config, load_generation_config, model_of_shapes, weight_files
from reward import Grader, workers_per_engine
from runtime.machine import check_cpp_compiler, check_launch, choose_interface, local_world_size
from runtime.stall import StallWatch
from schedule import make_plan
from sources import name_of_source, read_system_prompt

SET_FLAGS = ("samples", "temperature", "max_completion_tokens", "top_p")  # one value for all sets or one for each
SHOWN_AFTER = 10.0  # seconds: network file systems do not show a new file at once


@dataclass(frozen=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    vision: Vision | None  # what reads images; None if the model sees none
    train_data: list[PromptData]  # one for each source
    eval_sets: list[PromptData]
    eval_samplings: list[Sampling]
    grader: Grader
    turns: Turns | None  # who plays episodes; None: each completion has one turn
    hints: Hints | None  # what makes hints of a step's completions; None: they are in a column, or there are none
    companions: list[PreTrainedTokenizerBase | ProcessorMixin | GenerationConfig]  # files beside the exported policy
    digests: dict[str, str]  # for models (main process), the rows of each source, files of one's own; by name


def load_inputs(args: Namespace) -> Inputs:
    """Raises ValueError, OSError or RuntimeError for everything that is wrong with the user's input."""
    num_ranks = ranks_per_engine(args)
    engine_share = args.gpu_memory_utilization if args.engine == "colocated" else 0.0
    server_gpus = len(args.generation_gpus) if int(os.environ.get("RANK", "0")) < local_world_size() else 0
    check_launch(num_ranks, args.dtype, engine_share, server_gpus)  # servers are on the first node
    if args.compile and not torch.cuda.is_available():
        check_cpp_compiler()
    check_places(args)
    eval_options = args.eval_samples, args.eval_temperature, args.eval_max_completion_tokens, args.eval_top_p
    samplings = samplings_of(args.eval_data, "eval_", eval_options)
    longest = max(args.max_completion_tokens, *args.eval_max_completion_tokens)
    config, tokenizer, vision, load = load_model_files(args, longest)
    check_experts(args.model, config, args.router_replay, args.dtype if args.compile else None)
    if args.lora_rank:
        target_names(model_of_shapes(args.model, config), args.lora_targets)  # raises for one that it does not have
    generation = load_generation_config(args.model, config, stop_ids(tokenizer, args.stop_tokens))
    if args.reference:
        check_reference(args, config, tokenizer, longest)
    companions = [vision.processor if vision else tokenizer, generation]
    hint_column, hints = args.hint_column, None
    if hint_column and hint_column.startswith("@"):
        prompt_format = PromptFormat.from_flags(args, system_prompt=None)  # it is in the rows' messages
        hint_column, hints = None, Hints(tuple(hint_column.split(",")), prompt_format, tokenizer)
    train_data = load(args.train_data, args.seed, hint_column, args.shuffle == "on")
    make_plan(args, len(PromptData.mix(train_data).rows))  # raises for data that fills no step
    # The seed 0 draws #ROWS: held-out sets are the same problems whatever the seed of the run.
    eval_sets = load(args.eval_data, 0)
    digests = {}
    if is_main_process():  # downloads weights that are not on the disk, while nobody waits in a collective
        named = {"--model": args.model} | ({"--reference": args.reference} if args.reference else {})
        for flag, path in named.items():
            digests[flag] = digest(chain.from_iterable(map(samples_of, weight_files(path))))
            settings = Path(cached_file(path, "config.json")).read_bytes(), str(generation.eos_token_id).encode()
            digests[f"config of {flag}"] = digest(settings)
        check_replayed(args, digests["--model"])
    if (text := read_system_prompt(args.system_prompt)) != args.system_prompt:  # that of a file
        digests["--system_prompt"] = digest([text.encode()])
    grader, turns = start_grader(args, tokenizer, num_ranks)
    grader.check_groups("--group_size", args.group_size)
    grader.check_groups("--eval_samples", *(sampling.num_samples for sampling in samplings))
    sources = zip([*args.train_data, *args.eval_data], [*train_data, *eval_sets], strict=True)
    digests |= {source: digest(contents_of(data)) for source, data in sources}
    references = [args.environment or "", *(args.tools or "").split(",")]
    references += [args.advantage, args.policy_loss, args.kl_estimator, args.optimizer, args.after_step or ""]
    files = own_files([*grader.weights, *references])
    digests |= {str(file): digest([file.read_bytes()]) for file in files}
    return Inputs(tokenizer, vision, train_data, eval_sets, samplings, grader, turns, hints, companions, digests)


def own_files(named: list[str]) -> list[Path]:
    """The files of these functions (my_reward.py:score), and what they import from their folders, but for ours."""
    files = [file for each in named if ".py:" in each for file in files_of(Path(each.rpartition(":")[0]))]
    ours = {file.resolve() for file in files_of(ROOT / "train_grpo.py")} if files else ()
    return [file for file in files if file.resolve() not in ours]


def samples_of(file: Path) -> Iterator[bytes]:
    """64 pieces of 64 KiB, from all over the file: training changes every tensor, and large models are not read."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        for i in range(64):
            opened.seek(size * i // 64)
            yield opened.read(2**16)


def check_replayed(args: Namespace, weights: str) -> None:
    """Raises ValueError if the run that --replay names began with other weights than --model."""
    if args.replay and digests_of(args.replay).get("--model", weights) != weights:
        raise ValueError(f"--replay {args.replay} began with other weights than --model {args.model}; give its model.")


def contents_of(data: PromptData) -> Iterator[bytes]:
    """What the rows bring into training."""
    for row in data.rows:
        yield from (row.ids.tobytes(), row.answer.encode(), repr(row.columns).encode(), *row.encoded_images)


def load_model_files(
    args: Namespace, max_completion_tokens: int
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, Vision | None, Callable[..., list[PromptData]]]:
    """Config, tokenizer, what reads images, and what loads sources with them, drawn by a seed."""
    config = load_config(args.model)
    check_config(args.model, config, (args.max_prompt_tokens, max_completion_tokens), args.tensor_parallel_size)
    if not torch.cuda.is_available():
        check_cpu_kernels(args.model, config, args.dtype, args.tensor_parallel_size)
    model_of_shapes(args.model, config)
    answers = None if args.reward == "none" else args.answer_column
    system_prompt = read_system_prompt(args.system_prompt)
    prompt_format = PromptFormat.from_flags(args, system_prompt=system_prompt, answer_column=answers)
    tokenizer, vision = load_processor(args.model, config, prompt_format)
    num_rows, added = config.get_text_config().vocab_size, tokenizer.get_added_vocab()

    def check(where: str, ids: Sequence[int]) -> None:
        """Raises ValueError for a token id beyond the rows of the embedding."""
        if (largest := int(np.max(ids, initial=0))) >= num_rows:
            token = f"token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), which {where} has"
            advice = f"resize it to the tokenizer's {len(tokenizer)} tokens, or take the tokenizer that belongs to it"
            raise ValueError(f"--model {args.model}: its embedding has {num_rows} rows, none for {token}; {advice}.")

    check("--stop_tokens", stop_ids(tokenizer, args.stop_tokens))  # raises for a token that it does not have
    check("the chat template", [added[token] for token in added if token in str(tokenizer.chat_template)])
    for line in describe_template(prompt_format, tokenizer) if is_main_process() else ():
        print(line, flush=True)

    def load(sources: list[str], seed: int, hint: str | None = None, is_shuffled: bool = True) -> list[PromptData]:
        options = seed, vision, hint, is_shuffled
        parts = [PromptData.load(source, prompt_format, tokenizer, *options) for source in sources]
        for row in chain.from_iterable(part.rows for part in parts):
            check(row.where, row.ids if row.hinted_ids is None else row.hinted_ids)  # the latter are the ids and more
        return parts

    return config, tokenizer, vision, load


def check_reference(
    args: Namespace, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, longest: int
) -> None:
    """Raises ValueError for a --reference that cannot score what the policy samples, before any weight is read."""
    path = args.reference
    try:
        theirs = load_config(path)
        check_config(path, theirs, (args.max_prompt_tokens, longest), tensor_parallel_size=1)
        model_of_shapes(path, theirs)
        other, _ = load_processor(path, None, PromptFormat.from_flags(args))
    except (ValueError, OSError) as error:  # these know the policy alone
        raise ValueError(str(error).replace("--model", "--reference")) from None
    if args.image_column and getattr(theirs, "vision_config", None) is None:
        raise ValueError(f"--reference {path} sees no images, but --model does; use one of the same kind.")
    check_vocabulary(tokenizer, other, path)
    own_rows, rows = (each.get_text_config().vocab_size for each in (config, theirs))
    if rows < own_rows:  # the policy samples from all of its own, padding included
        raise ValueError(f"--reference {path} knows {rows} token ids, --model {own_rows}; use one that knows as many.")


def samplings_of(sources: list[str], prefix: str, flags: Sequence[list[int] | list[float]]) -> list[Sampling]:
    """How each set is sampled, by the values of the flags --<prefix>samples, ... of `SET_FLAGS`. Raises ValueError."""
    names, columns, samplings = [name_of_source(source) for source in sources], [], []
    if len(set(names)) < len(names):
        raise ValueError(f"the sets {', '.join(names)} are reported under their names, which must differ; rename one.")
    for name, values in zip(SET_FLAGS, flags, strict=True):
        if len(values) not in (1, len(names)):
            wrong = f"--{prefix}{name} has {len(values)} values for {len(names)} sets"
            raise ValueError(f"{wrong}; give one for all or one for each.")
        columns.append(values * len(names) if len(values) == 1 else values)
    for count, temperature, max_tokens, top_p in zip(*columns, strict=True):
        if temperature < 0.01 and count > 1:
            wrong = f"--{prefix}samples {count} at --{prefix}temperature {temperature:g} are {count} times the same"
            raise ValueError(f"{wrong}; use --{prefix}samples 1.")
        samplings.append(Sampling(count, temperature, max_tokens, top_p))
    return samplings


def start_grader(args: Namespace, tokenizer: PreTrainedTokenizerBase, num_ranks: int) -> tuple[Grader, Turns | None]:
    """The grader of an engine, and who plays episodes; the first rank has their workers."""
    grading, turns = Grading.from_flags(args), None
    num_workers = workers_per_engine(grading, num_ranks) if is_engine_leader_process(num_ranks) else 0
    if args.environment or args.tools:
        prompt_format = PromptFormat.from_flags(args, system_prompt=None)
        turns = Turns(TurnLimits.from_flags(args), grading, prompt_format, tokenizer, num_workers)
    kind = f"--reward {args.reward}: the class of --environment"
    if turns and turns.environments and turns.environments.has_reward:
        if args.reward not in ("none", FLAGS["--reward"].default):
            raise ValueError(f"{kind} has a reward(); leave one of them out.")
        grading = replace(grading, reward="none")
    elif turns and turns.environments and args.reward == "none" and getattr(args, "advantage", "") != "zero":
        raise ValueError(f"{kind} has no reward(); give --reward.")
    return Grader(grading, num_workers), turns


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
        raise ValueError(f"{FLAGS['--generation_gpus'].written(args)}: {taken}; use {num_ranks} and higher.")


def check_world(args: Namespace, world: World) -> None:
    """What only ranks together can know; then they watch each other. ValueError or RuntimeError, on every rank."""
    check_shared(Path(args.out_dir))
    check_same_start(vars(args))
    StallWatch(Path(args.out_dir) / "ranks", world.trainer_rank, world.num_trainers, stall_limit(args)).start()
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
