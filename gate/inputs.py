"""The inputs of a run but weights, for train_grpo.py and evaluate.py; what cannot be trained on is refused.

`Inputs.load` is the door: the rest of this file checks what the flags name.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Sequence
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

from checkpoint import Companions, files_of
from data import ImageReader, PromptData, Tokenizer, UnusableRow, render, template_variables
from engine.options import EngineDemand, stop_ids
from flags import FLAGS, Grading, PromptFormat, Sampling, TurnLimits
from fsdp_utils import World, is_main_process
from gate.checks import LOOPBACK, ranks_per_engine
from gate.describe import describe_template
from gate.keys import check_groups, check_keys, without_markers
from gate.machine import check_launch, check_room
from gate.models import check_model, check_range_of, check_trained, checked_config, length_limits
from model.weights import load_config, load_tokenizer
from reward import Grader, workers_per_engine
from runtime.files import run_and_step
from runtime.history import digests_of
from runtime.machine import choose_interface
from runtime.parts import part
from runtime.rank import local_world_size
from runtime.sources import name_of_source
from schedule import make_plan

if TYPE_CHECKING:
    from extras.teacher.hints import Hints
    from extras.turns.turns import Turns


SET_FLAGS = ("samples", "temperature", "max_completion_tokens", "top_p")  # one value for all sets or one for each


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the flags name, read and checked: tokenizer, data, reward, and how held-out sets are sampled."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]  # of --stop_tokens, and of the tokenizer's end
    vision: ImageReader | None  # what reads images; None if the model sees none
    train_data: list[PromptData]  # one for each source; empty: nothing is trained
    eval_sets: list[PromptData]
    eval_samplings: list[Sampling]  # one for each set
    grader: Grader
    turns: Turns | None  # who plays episodes; None: each completion has one turn
    hints: Hints | None  # what makes hints of a step's completions; None: they are in a column, or there are none
    companions: Companions  # files beside the exported weights; on the main process of a run that trains

    @staticmethod
    def load(args: Namespace) -> Inputs:
        """The inputs of these flags. The main process says what the chat template gets.

        Raises ValueError, OSError or RuntimeError, with a sentence, for all that is wrong with them or the machine.
        """
        check_places(args)
        samplings = samplings_of(args)
        config = checked_config(args.model)
        check_trained(args, config)
        if args.reference:
            check_reference(args, args.reference)
        if args.critic:
            check_critic(args)
        if args.train_data:
            check_room(args)
        prompt_format = PromptFormat.from_flags(args, system_prompt=read_system_prompt(args.system_prompt))
        tokenizer, vision = load_reader(args.model, config, prompt_format)
        check_template(prompt_format, tokenizer)
        ends = stop_ids(tokenizer, args.stop_tokens)
        hint_column, hints = args.hint_column, None
        if hint_column and hint_column.startswith("@"):
            make_hints = part("extras.teacher.hints", "--hint_column").Hints
            hints = make_hints(tuple(hint_column.split(",")), replace(prompt_format, system_prompt=None), tokenizer)
            hint_column = None
        options = vision, hint_column, args.shuffle == "on"
        train_data = [PromptData.load(x, prompt_format, tokenizer, args.seed, *options) for x in args.train_data]
        # The seed 0 draws #ROWS: held-out sets are the same problems whatever the seed of the run.
        eval_sets = [PromptData.load(x, prompt_format, tokenizer, 0, vision) for x in args.eval_data]
        if not args.image_column:
            train_data, eval_sets = ([without_markers(data) for data in sets] for sets in (train_data, eval_sets))
        check_tokens(args.model, tokenizer, ends, [*train_data, *eval_sets])
        if train_data:
            make_plan(args, len(PromptData.mix(train_data).rows))  # raises for data that fills no step
        grader, turns = start_grader(args, prompt_format, tokenizer)
        check_groups(grader, "--group_size", args.group_size)
        check_groups(grader, eval_flag(args, "samples"), *(sampling.num_samples for sampling in samplings))
        companions = {}
        if is_main_process():
            for line in describe_template(prompt_format, tokenizer):
                print(line, flush=True)
            companions = files_of(args.model, getattr(torch, args.dtype), ends) if train_data else {}
        return Inputs(
            tokenizer=tokenizer, stop_ids=ends, vision=vision,
            train_data=train_data, eval_sets=eval_sets, eval_samplings=samplings,
            grader=grader, turns=turns, hints=hints, companions=companions,
        )  # fmt: skip

    def with_usable_keys(self, world: World) -> Inputs:
        """The inputs without the rows whose answer key the reward cannot use. All ranks call it. Raises ValueError."""
        train_data = [check_keys(self.grader, data, world) for data in self.train_data]
        eval_sets = [check_keys(self.grader, data, world) for data in self.eval_sets]
        return replace(self, train_data=train_data, eval_sets=eval_sets)

    def engine_demand(self, num_engines: int, *calls: tuple[int, int]) -> EngineDemand:
        """The most that one engine is asked for: by these calls, (prompts, samples of each), and by evaluations."""
        for data, sampling in zip(self.eval_sets, self.eval_samplings, strict=True):
            calls += ((len(data.rows), sampling.num_samples),)
        images = {}
        if self.vision:
            rows = chain.from_iterable(data.rows for data in [*self.train_data, *self.eval_sets])
            images = self.vision.engine_options(max(len(row.images.encoded) if row.images else 0 for row in rows))
        return EngineDemand(largest_share(calls, num_engines), images)

    def close(self) -> None:
        """Ends the workers. After the engine is closed: episodes of servers go on until then."""
        self.grader.close()
        if self.turns:
            self.turns.close()


def largest_share(calls: Sequence[tuple[int, int]], num_engines: int) -> int:
    """The most completions that one engine makes in a call, from the (prompts, samples of each) of every call."""
    return max(-(-prompts // num_engines) * num_samples for prompts, num_samples in calls)


def samplings_of(args: Namespace) -> list[Sampling]:
    """The sampling of each held-out set, by the flags of `SET_FLAGS`. Raises ValueError."""
    names, columns, samplings = [name_of_source(source) for source in args.eval_data], [], []
    if len(set(names)) < len(names):
        raise ValueError(f"the sets {', '.join(names)} are reported under their names, which must differ; rename one.")
    given = args.eval_samples, args.eval_temperature, args.eval_max_completion_tokens, args.eval_top_p
    for name, values in zip(SET_FLAGS, given, strict=True):
        if len(values) not in (1, len(names)):
            wrong = f"{eval_flag(args, name)} has {len(values)} values for {len(names)} sets"
            raise ValueError(f"{wrong}; give one for all or one for each.")
        columns.append(values * len(names) if len(values) == 1 else values)
    for count, temperature, max_tokens, top_p in zip(*columns, strict=True):
        if temperature < 0.01 and count > 1:
            samples, at = eval_flag(args, "samples"), f"{eval_flag(args, 'temperature')} {temperature:g}"
            raise ValueError(f"{samples} {count} at {at} are {count} times the same; use {samples} 1.")
        limits = {"max_completion_tokens": max_tokens, "top_p": top_p}
        samplings.append(Sampling(num_samples=count, temperature=temperature, **limits))
    return samplings


def eval_flag(args: Namespace, name: str) -> str:
    """The flag of a held-out set's sampling, as train_grpo.py and evaluate.py call it."""
    return f"--eval_{name}" if args.train_data else f"--{name}"


def start_grader(
    args: Namespace, prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase
) -> tuple[Grader, Turns | None]:
    """The grader, and who plays episodes. The first rank of each engine has their workers.

    Raises ValueError if --reward and --environment both reward, or, where that is needed, neither does.
    """
    grading, size = Grading.from_flags(args), ranks_per_engine(args)
    is_engine_leader = int(os.environ.get("RANK", "0")) % size == 0
    num_workers = workers_per_engine(size) if is_engine_leader else 0
    if not (args.environment or args.tools):
        return Grader(grading, num_workers), None
    in_turns = replace(prompt_format, system_prompt=None)  # it is in the messages
    make_turns = part("extras.turns.turns", "--environment or --tools").Turns
    turns = make_turns(TurnLimits.from_flags(args), grading, in_turns, tokenizer, num_workers)
    kind = f"--reward {grading.reward}: the class of --environment"
    if turns.environments and turns.environments.has_reward:
        if grading.reward not in ("none", Grading.reward):  # the default is not meant
            raise ValueError(f"{kind} has a reward(); leave one of them out.")
        grading = replace(grading, reward="none")
    elif turns.environments and grading.reward == "none" and args.advantage != "zero":
        raise ValueError(f"{kind} has no reward(); give --reward.")
    return Grader(grading, num_workers), turns


def check_critic(args: Namespace) -> None:
    """Raises ValueError for a --critic that cannot read what the policy samples, or has other heads."""
    path = part("extras.critic.settings", "--critic").path_of(args.critic, args.model)
    try:
        check_reference(args, path)
    except ValueError as error:
        raise ValueError(str(error).replace("--reference", "--critic")) from None
    part("extras.critic.critic", "--critic").value_class(load_config(path))


def check_reference(args: Namespace, path: str) -> None:
    """Raises ValueError for a --reference that cannot score what the policy samples."""
    try:
        theirs = checked_config(path)
        check_model(path, theirs, length_limits(args), tensor_parallel_size=1)
        check_range_of(f"--model {path}", theirs, args.dtype)
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
    """Raises ValueError if ranks or servers are to be started on what this machine lacks, or are out of its reach."""
    is_first_node = int(os.environ.get("RANK", "0")) < local_world_size()  # which has the servers
    check_launch(ranks_per_engine(args), args.dtype, len(args.generation_gpus) if is_first_node else 0)
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


def check_replayed(args: Namespace, digests: dict[str, str]) -> None:
    """Raises ValueError if the run that --replay names began with other weights than --model: on the main process."""
    weights = digests.get("--model")
    if weights and args.replay and digests_of(run_and_step(args.replay)[0]).get("--model", weights) != weights:
        raise ValueError(f"--replay {args.replay} began with other weights than --model {args.model}; give its model.")


def check_tokens(path: str, tokenizer: PreTrainedTokenizerBase, stop_ids: list[int], sources: list[PromptData]) -> None:
    """Raises ValueError for a token id beyond the rows of the model's embedding."""
    num_rows, added = load_config(path).get_text_config().vocab_size, tokenizer.get_added_vocab()
    in_template = [added[token] for token in added if token in str(tokenizer.chat_template)]
    places = {"eos_token": [tokenizer.eos_token_id or 0], "--stop_tokens": stop_ids, "the chat template": in_template}
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
