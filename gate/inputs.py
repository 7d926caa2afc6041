"""The inputs of a run but weights; what the machine, models and servers that flags name cannot do is refused."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from batch import Row
from data import ImageReader, PromptData, Tokenizer, UnusableRow, render, template_variables
from flags import FLAGS, Grading, PromptFormat, Sampling, TurnLimits
from gate.checks import LOOPBACK, ranks_per_engine
from gate.keys import check_groups
from gate.machine import check_launch
from gate.models import check_model, check_trained, checked_config, length_limits
from grading import alternatives
from model.special_tokens import TAG, special_tokens
from model.weights import load_config, load_tokenizer
from reward import Grader, workers_per_engine
from runtime.files import best_effort, run_and_step, write
from runtime.history import digests_of
from runtime.machine import choose_interface
from runtime.parts import part
from runtime.rank import local_world_size

if TYPE_CHECKING:
    from extras.teacher.hints import Hints
    from extras.turns.turns import Turns


@dataclass(frozen=True)
class Inputs:
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]  # of --stop_tokens
    vision: ImageReader | None  # what reads images; None if the model sees none
    train_data: list[PromptData]  # one for each source
    eval_sets: list[PromptData]
    eval_samplings: list[Sampling]
    grader: Grader
    turns: Turns | None  # who plays episodes; None: each completion has one turn
    hints: Hints | None  # what makes hints of a step's completions; None: they are in a column, or there are none
    companions: dict[str, bytes]  # name -> content of the files beside the exported weights (main process)
    digests: dict[str, str]  # for models (main process), the rows of each source, files of one's own; by name


def start_grader(
    grading: Grading, limits: TurnLimits, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase,
    num_ranks: int, is_needed: bool = True,
) -> tuple[Grader, Turns | None]:  # fmt: skip
    """The grader of an engine of so many ranks, and who plays episodes; the first rank has their workers.

    Raises ValueError if --reward and --environment both reward, or, where that is needed, neither does.
    """
    is_engine_leader = int(os.environ.get("RANK", "0")) % num_ranks == 0
    num_workers = workers_per_engine(num_ranks) if is_engine_leader else 0
    if not (limits.environment or limits.tools):
        return Grader(grading, num_workers), None
    turns = part("extras.turns.turns", "--environment or --tools").Turns(
        limits,
        grading,
        replace(prompt_format, system_prompt=None),  # it is in the messages
        tokenizer,
        num_workers,
    )
    kind = f"--reward {grading.reward}: the class of --environment"
    if turns.environments and turns.environments.has_reward:
        if grading.reward not in ("none", Grading.reward):  # the default is not meant
            raise ValueError(f"{kind} has a reward(); leave one of them out.")
        grading = replace(grading, reward="none")
    elif turns.environments and grading.reward == "none" and is_needed:
        raise ValueError(f"{kind} has no reward(); give --reward.")
    return Grader(grading, num_workers), turns


def check_training(args: Namespace) -> None:
    """Raises ValueError or OSError for a run of train_grpo.py that cannot work here, or with this model."""
    is_first_node = int(os.environ.get("RANK", "0")) < local_world_size()  # which has the servers
    check_launch(ranks_per_engine(args), args.dtype, len(args.generation_gpus) if is_first_node else 0)
    check_places(args)
    check_trained(args, checked_config(args.model))
    if args.reference:
        check_reference(args)


def check_evaluation(args: Namespace) -> None:
    """Raises ValueError or OSError for a run of evaluate.py that cannot work here, or with this model."""
    check_launch(args.tensor_parallel_size, "bfloat16")
    limits = args.max_prompt_tokens, max(args.max_completion_tokens)
    check_model(args.model, checked_config(args.model), limits, args.tensor_parallel_size)


def check_reference(args: Namespace) -> None:
    """Raises ValueError for a --reference that cannot score what the policy samples."""
    path = args.reference
    try:
        theirs = checked_config(path)
        check_model(path, theirs, length_limits(args), tensor_parallel_size=1)
        other = load_tokenizer(path)
    except (ValueError, OSError) as error:  # these know the policy alone
        raise ValueError(str(error).replace("--model", "--reference")) from None
    if args.image_column and getattr(theirs, "vision_config", None) is None:
        raise ValueError(f"--reference {path} sees no images, but --model does; use one of the same kind.")
    check_vocabulary(load_tokenizer(args.model), other, path)
    own_rows, rows = (each.get_text_config().vocab_size for each in (load_config(args.model), theirs))
    if rows < own_rows:  # the policy samples from all of its own, padding included
        raise ValueError(f"--reference {path} knows {rows} token ids, --model {own_rows}; use one that knows as many.")


def check_places(args: Namespace) -> None:
    """Raises ValueError if servers are to be started on what this machine lacks, or are out of its reach."""
    for host in [host for url in args.server_urls if (host := urlsplit(url).hostname) not in LOOPBACK]:
        choose_interface(host)  # weights go there; for the ranks of one node the loopback would be chosen
    if args.engine == "colocated" or args.server_urls or not torch.cuda.is_available():
        return
    num_ranks, gpus = local_world_size(), args.generation_gpus
    if not gpus:
        raise ValueError("--engine server: give --generation_gpus, or --server_urls of servers that run.")
    if min(gpus) < num_ranks:
        taken = f"the {num_ranks} ranks of this node train on GPUs 0 to {num_ranks - 1}"
        raise ValueError(f"{FLAGS['--generation_gpus'].written(args)}: {taken}; use {num_ranks} and higher.")


def check_loaded(args: Namespace, inputs: Inputs) -> None:
    """Raises ValueError for data that its model or reward cannot use, or a replay of other weights."""
    check_tokens(args.model, inputs.tokenizer, inputs.stop_ids, [*inputs.train_data, *inputs.eval_sets])
    check_groups(inputs.grader, "--group_size", args.group_size)
    check_groups(inputs.grader, "--eval_samples", *(sampling.num_samples for sampling in inputs.eval_samplings))
    if "--model" in inputs.digests:  # on the main process
        check_replayed(args, inputs.digests["--model"])


def check_replayed(args: Namespace, weights: str) -> None:
    """Raises ValueError if the run that --replay names began with other weights than --model."""
    if args.replay and digests_of(run_and_step(args.replay)[0]).get("--model", weights) != weights:
        raise ValueError(f"--replay {args.replay} began with other weights than --model {args.model}; give its model.")


def check_tokens(path: str, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], sources: list[PromptData]) -> None:
    """Raises ValueError for a token id beyond the rows of the model's embedding."""
    num_rows, added = load_config(path).get_text_config().vocab_size, tokenizer.get_added_vocab()
    in_template = [added[token] for token in added if token in str(tokenizer.chat_template)]
    places = {"--stop_tokens or eos_token": stop_ids, "the chat template": in_template}
    for source in sources:
        places |= {row.where: row.reference_ids for row in source.rows}  # with a hint, they are the ids and more
    for where, ids in places.items():
        if (largest := int(np.max(ids, initial=0))) >= num_rows:
            token = f"token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), which {where} has"
            advice = f"resize it to the tokenizer's {len(tokenizer)} tokens, or take the tokenizer that belongs to it"
            raise ValueError(f"--model {path}: its embedding has {num_rows} rows, none for {token}; {advice}.")


def check_template(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a chat template that is missing, or that ignores what is to be shown."""
    if prompt_format.prompt_format == "raw":
        return
    if tokenizer.chat_template is None:
        raise ValueError(
            "--prompt_format chat: the tokenizer of --model has no chat template; "
            "a base model may want --prompt_format raw, which gives it the text as it is."
        )
    template_variables(prompt_format, tokenizer)
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "0"}]
    with suppress(UnusableRow):  # it may take other conversations; each row will say
        prompt = render(talk[:1], prompt_format, tokenizer)
        if (tools := prompt_format.tools) and prompt == render(talk[:1], replace(prompt_format, tools=None), tokenizer):
            raise ValueError(f"--tools {tools}: the chat template of --model shows no tools.")
        if "1" not in prompt:
            raise ValueError("the chat template of --model shows no text of a user; give another one.")
        header = render(talk, prompt_format, tokenizer, continues=False).partition(prompt)[2].partition("0")[0].strip()
        if header and prompt == render(talk[:1], prompt_format, tokenizer, continues=False):
            raise ValueError(
                f"the chat template of --model has no generation prompt: it writes {header!r} before a reply, but not "
                f"at the end of {prompt!r}; give another one."
            )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, path: str) -> None:
    """Raises ValueError unless both have the same tokens. `path`: the value of --reference."""
    different = tokenizer.get_vocab().items() ^ other.get_vocab().items()
    if different:
        token, i = min(different, key=itemgetter(1))
        raise ValueError(
            f"--reference {path}: it or --model has {token!r} as token {i}, the other has not; "
            "use a model with the same vocabulary."
        )


def describe_data(sets: list[PromptData], tokenizer: PreTrainedTokenizerBase, file: Path) -> list[str]:
    """Lines that say what the sets hold. Excluded rows go to `file`.

    Warns of prompts that the first set, which is trained on, has in common with others.
    """
    lines, excluded = [], ""
    for data in sets:
        lines += describe_set(data, file.name)
        for row, reason in data.excluded:
            excluded += json.dumps({"set": data.name, "row": row, "reason": reason}) + "\n"
    if excluded:
        with best_effort(str(file)):
            write(file, excluded)
    trained = {(row.ids.tobytes(), row.encoded_images) for row in sets[0].rows}
    for data in sets[1:]:
        count = sum((row.ids.tobytes(), row.encoded_images) in trained for row in data.rows)
        if count:
            lines.append(f"warning: {count} of {len(data.rows)} prompts of {data.name} are training prompts")
    return [*lines, *describe_tags(tokenizer), f"first prompt: {prompt_text(sets[0].rows[0], tokenizer)!r}"]


def prompt_text(row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt as its tokens say; each image is one."""
    return tokenizer.decode((row.images.template_ids if row.images else row.ids).tolist())


def read_system_prompt(text: str | None) -> str | None:
    """The text, or the content of the file that it names. Raises ValueError if that is not there or cannot be read."""
    if not text:
        return text
    try:
        return Path(text).read_text(encoding="utf-8-sig").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError) or re.search(r"\.(txt|md)$|^\S*/\S*$", text):
            raise ValueError(
                f"--system_prompt {text!r}: no such file, or it cannot be read as UTF-8 text. "
                "If this is the text itself, put a space at its end."
            ) from None
    return text


def describe_tags(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for the log, if there are special tokens that a reward may look for."""
    shown = special_tokens(tokenizer)[0].values()
    tags = [token for token in shown if TAG.search(token) or token.startswith("</")]
    return [f"special tokens that the reward sees: {', '.join(tags)}"] if tags else []


def load_reader(
    path: str, config: PretrainedConfig | None, prompt_format: PromptFormat
) -> tuple[Tokenizer, ImageReader | None]:
    """The tokenizer of a model, and its reader of images: None without a config, or where nothing concerns images.

    Raises ValueError for image flags that do not suit the model, and if it has no tokenizer.
    """
    has_images = prompt_format.image_column is not None or getattr(config, "vision_config", None) is not None
    if config is None or not has_images:
        return load_tokenizer(path), None
    vision = part("extras.models.vision", "--image_column, or a model that sees images")
    return vision.load_processor(path, config, prompt_format)


def image_options(sources: list[PromptData], vision: ImageReader | None) -> dict[str, object]:
    """The engine's arguments for the images of these prompts; none for a model that sees none."""
    rows = chain.from_iterable(source.rows for source in sources)
    return vision.engine_options(max(len(row.images.encoded) if row.images else 0 for row in rows)) if vision else {}


def describe_template(prompt_format: PromptFormat, tokenizer: Tokenizer) -> list[str]:
    """Lines for the log: the variables that the chat template gets beside the messages, with their types."""
    variables = template_variables(prompt_format, tokenizer)
    return [f"template: {name} = {value!r} ({type(value).__name__})" for name, value in variables.items()]


def describe_set(data: PromptData, all_in: str = "") -> list[str]:
    """Lines for the console. Of the excluded rows all, or five and the file `all_in`."""
    dropped = f"{data.num_too_long} dropped (too many tokens), {len(data.excluded)} excluded"
    lines = [f"data {data.name}: {len(data.rows)} rows; {dropped}"]
    listed = data.excluded[:5] if all_in else data.excluded
    lines += [f"  excluded: {where}: {reason}" for where, reason in listed]
    if len(listed) < len(data.excluded):
        lines.append(f"  excluded: {len(data.excluded) - len(listed)} more; all are in {all_in}")
    num_several = sum(len(alternatives(row.answer)) > 1 for row in data.rows)
    if num_several:
        lines.append(f"  {num_several} rows have several answers, of which any is correct")
    return lines
