"""The first lines of the log: flags, data and policy in words."""

import json
from argparse import Namespace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from algorithm import functions_of
from batch import Row
from command_line import first_sentence
from data import PromptData, template_variables
from flags import FLAGS, PromptFormat
from fsdp_utils import World
from grading import alternatives
from model.special_tokens import TAG, special_tokens
from policy import Policy
from runtime.files import best_effort, write
from runtime.tables import counted
from schedule import Plan

ALSO_DESCRIBED = (
    "--old_logprobs", "--kl_coef", "--kl_in", "--entropy_coef", "--dynamic_sampling", "--truncated",
    "--num_iterations", "--temperature",
)  # fmt: skip


def describe_algorithm(args: Namespace) -> str:
    """Says in one log line what the flags amount to: the functions in words, the rest as it was written."""
    unused = {"--kl_estimator"} if not args.kl_coef or args.kl_over == "vocabulary" else set()
    if args.critic:
        unused.add("--advantage")
    if args.rollout_correction == "none":
        unused.add("--rollout_correction")
    parts = []
    if args.critic:
        parts.append(f"{FLAGS['--critic'].written(args)}: values of a model make the advantages")
    for name, function in functions_of(args).items():
        if name not in unused:
            words = [FLAGS[name].written(args)]
            words += [f"--{key} {value}" for key, value in function.keywords.items() if f"--{key}" in FLAGS]
            parts.append(f"{' '.join(words)}: {first_sentence(function.func.__doc__)}")
    parts.append(" ".join(FLAGS[name].written(args) for name in ALSO_DESCRIBED))
    return f"algorithm: {'; '.join(parts)}"


def describe_world(world: World) -> str:
    """The log's line: 16 ranks on cuda, 2 copies of the policy, 8 engines of 2."""
    text = f"{counted(world.num_trainers, 'rank')} on {world.device.type}"
    if world.shard_ranks not in (None, world.num_trainers):
        text += f", {world.num_trainers // world.shard_ranks} copies of the policy"
    if not world.has_engines:
        return f"{text}, generation servers"
    return f"{text}, {counted(world.num_engines, 'engine')} of {world.tp_size}"


def describe_plan(plan: Plan) -> str:
    """The numbers of the plan, for the first lines of the log."""
    return (
        f"{counted(plan.prompts_per_step, 'prompt')} x {plan.group_size} = "
        f"{counted(plan.completions_per_step, 'completion')} a step, "
        f"{counted(plan.updates_per_step, 'update')} a step, {counted(plan.steps_per_epoch, 'step')} an epoch, "
        f"{counted(plan.total_steps, 'step')} in all"
    )


def describe_policy(policy: Policy) -> str:
    """The numbers of parameters and of trained ones, and which are frozen, for the first lines of the log."""
    named = dict(policy.model.named_parameters())
    trained = sum(parameter.numel() for parameter in named.values() if parameter.requires_grad)
    text = f"trainable: {trained:,} of {sum(parameter.numel() for parameter in named.values()):,} parameters"
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    if policy.adapter:  # the rest is frozen anyway
        text += f": {policy.adapter.describe()}"
        frozen = [name for name in frozen if ".lora_" in name]
    if frozen:
        text += f"; frozen: {', '.join(frozen[:3])}" + f" and {len(frozen) - 3} more" * (len(frozen) > 3)
    return text


def describe_template(prompt_format: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Lines for the log: the variables that the chat template gets beside the messages, with their types."""
    variables = template_variables(prompt_format, tokenizer)
    return [f"template: {name} = {value!r} ({type(value).__name__})" for name, value in variables.items()]


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


def describe_tags(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for the log, if there are special tokens that a reward may look for."""
    shown = special_tokens(tokenizer)[0].values()
    tags = [token for token in shown if TAG.search(token) or token.startswith("</")]
    return [f"special tokens that the reward sees: {', '.join(tags)}"] if tags else []
