"""Every flag, once: its default, what it means, its range, and whether it may change when a run continues.

A flag has the name of its attribute, so one search finds the flag, its use, the scripts and the documentation. Other
files get small frozen objects made from flags (`PromptFormat`, `Memory`, ...); only `main` sees all flags.
The choices of the algorithm are functions, which `algorithm.py` finds by name: their parameters after `*` are the flags
that have an effect.
No torch here, so that a mistake is reported at once.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, Self, dataclass_transform

MORE_UNFINISHED = 0.5  # --partial_rollouts: unfinished prompts beyond a step's, as a share of a step's
MOST_LAG = 4  # --partial_rollouts: steps that the oldest token may be behind; its group is then waited for

INF = math.inf
TINY = 1e-9  # as the smallest value: above 0


class Flag(NamedTuple):
    """One flag."""

    name: str
    default: object  # its value where it is not given
    help: str
    within: tuple[float, float] | None  # smallest and largest value
    type: type  # of a single value
    is_list: bool = False  # any number of values
    choices: tuple[str, ...] | None = None
    is_required: bool = False
    free_on_resume: bool = False  # may change when a run continues, because it does not change what a step computes
    only_with: str = ""  # the flags of which it needs one, or else has no effect

    def of(self, args: argparse.Namespace) -> object:
        """Its value in `args`."""
        return getattr(args, self.name.removeprefix("--"))

    def is_changed(self, args: argparse.Namespace) -> bool:
        """Whether its value in `args` is another one than the default."""
        return self.of(args) != self.default

    def written(self, args: argparse.Namespace) -> str:
        """The flag as it was written."""
        value = self.of(args)
        if value is True:
            return self.name
        values = value if isinstance(value, list) else [value]
        return " ".join([self.name, *map(str, values)])


def flag(
    name: str, default: object, help: str, within: tuple[float, float] | None = None, type: type = str, **more: object
) -> Flag:
    """A flag, whose default shows its type. `type`: of a single value, where the default is None or []."""
    example = default
    if isinstance(default, list):
        more["is_list"] = True
        example = default[0] if default else None
    if example is not None:
        type = example.__class__
    return Flag(name, default, help, within, type, **more)


DRY_RUN = "dry run (starts nothing; exit code 3: does not fit)"
GROUPS: dict[str, list[Flag]] = {}
# A flag takes one line, or two.
# fmt: off
GROUPS["model and data"] = [
    flag("--model", None, "starting policy, also reference and tokenizer: folder in Hugging Face format, or hub id",
         is_required=True),
    flag("--train_data", None, "training problems: one or more sources WHAT[@SPLIT][#ROWS], see docs/data.md",
         is_list=True, is_required=True),
    flag("--shuffle", "on", "an epoch is a new permutation of the rows (on), or keeps the order of the files (off)",
         choices=("on", "off")),
    flag("--keep_last", False, "fill an epoch's last partial step from the next epoch instead of dropping it"),
    flag("--eval_data", [], "held-out problems: sources, each reported under its own name",
         free_on_resume=True),
    flag("--out_dir", None, "run folder; made if missing, continued if it holds a run of the same flags",
         is_required=True, free_on_resume=True),
]
GROUPS["prompts"] = [
    flag("--prompt_column", "problem", "column of the problem: text or messages; a dotted path reaches into objects"),
    flag("--answer_column", "answer", "column of the correct answer, for the reward; objects become JSON text"),
    flag("--image_column", None, "column of the images, one or a list: files, relative to the data, or encoded bytes"),
    flag("--max_pixels", None, "larger images are scaled down to this many pixels; default: the processor's limit",
         (1, INF), only_with="--image_column", type=int),
    flag("--prompt_format", "chat", "chat: by the model's chat template; raw: the text as it is",
         choices=("chat", "raw")),
    flag("--template_args", [], "variables of the chat template, NAME=VALUE each: enable_thinking=false"),
    flag("--system_prompt", None, "text, or a file with it; replaces the data's own system message"),
    flag("--prompt_suffix", "", "appended to the last user message as it is: begin it with a space or a line break"),
    flag("--max_prompt_tokens", 1024, "longer prompts, template included, are dropped and counted", (1, INF)),
]
GROUPS["reward"] = [
    flag("--reward", "exact", "math, gsm8k, gsm8k_strict, ifeval, exact, format, think_format, length; a weighted "
         "sum (math:1.0,format:0.1); @COLUMN: the one that the row's column names; my_reward.py:function; none: "
         "nothing is graded"),
    flag("--reward_timeout", 5.0, "seconds after which the grading of a completion is stopped, and fails", (TINY, 1e6),
         free_on_resume=True),
    flag("--reward_in_flight", 1, "completions that a grading process grades at a time, each in a thread; for "
         "functions that only wait, such as for a server", (1, 1000), free_on_resume=True),
    flag("--truncated", "score", "completions cut at their token limit: graded like any other (score), reward 0 "
         "(zero) or another number (-10), which are not graded; or graded but left out of the loss (mask)"),
    flag("--overlong_cache_tokens", None, "the reward `length` falls from 0 to -1 over this many last tokens; "
         "default: 1/5 of the limit", (1, INF), type=int),
]
GROUPS["turns"] = [  # docs/turns.md
    flag("--environment", None, "my_environment.py:Class, which replies to completions, so that an episode has turns"),
    flag("--tools", None, "my_tools.py:function,my_tools.py:other: tools that the model may call; their results are "
         "the reply"),
    flag("--max_turns", 4, "turns of the policy in an episode", (1, 1000), only_with="--environment --tools"),
    flag("--max_turn_tokens", None, "a turn is cut after this many tokens; default: the limit of the completion, which "
         "counts all turns and replies", (1, INF), only_with="--environment --tools", type=int),
]
GROUPS["batch, counted in prompts"] = [
    flag("--prompts_per_step", 32, "P: prompts sampled each step, over all ranks; a multiple of the engines", (1, INF)),
    flag("--group_size", 8, "G: completions per prompt, compared with each other", (1, INF)),
    flag("--prompts_per_update", None, "prompts per optimizer step, over all ranks; divides P; default: P",
         (1, INF), type=int),
    flag("--num_iterations", 1, "passes over each rollout; all but the first are off-policy", (1, INF)),
    flag("--micro_batch_tokens", 8192, "maximum tokens that one rank packs into a forward and backward pass",
         (1, INF), free_on_resume=True),
    flag("--share_prompts", False, "compute a prompt once for all its completions that are packed together",
         free_on_resume=True),
    flag("--total_steps", None, "length of training in steps (give this, or one of the next two)", (1, INF), type=int),
    flag("--epochs", None, "length of training in passes over the data; their last partial steps are dropped",
         (1, INF), type=int),
    flag("--total_episodes", None, "length of training in completions, rounded down to whole steps",
         (1, INF), type=int),
    flag("--after_step", None, "my_hook.py:function, which is called as f(step, metrics) before the line of a step is "
         "written; a dict that it returns is added to the line; \"stop\" ends the run after this step",
         free_on_resume=True),
    flag("--stop_after", None, "stop after this step, with a checkpoint; the learning-rate schedule stays that of the "
         "whole length", (1, INF), free_on_resume=True, type=int),
]
GROUPS["sampling"] = [
    # vLLM would silently raise a temperature below 0.01; the trainer would not. It refuses one above 2.
    flag("--temperature", 1.0, "sampling temperature; the trainer divides its logits by it, too", (0.01, 2)),
    flag("--max_completion_tokens", 1024, "completions are truncated after this many tokens", (1, INF)),
    flag("--partial_rollouts", False, "begin 1.5 times a step's prompts, and end the step when P groups are finished; "
         "unfinished completions go on in the next step, under its weights; only with --engine colocated"),
    flag("--stop_tokens", [], "tokens, as text, that end completions, in addition to those of the model's folder, for "
         "example <|im_end|> for a base model with a chat template; exported with the policy"),
    flag("--tensor_parallel_size", 1, "ranks per vLLM engine, a divisor of the number of ranks; or GPUs per server",
         (1, INF), free_on_resume=True),
    flag("--gpu_memory_utilization", None, "CUDA: share of GPU memory that vLLM may take while it is awake; default: "
         "0.6, and 0.9 with --engine server, whose GPUs are its own", (0.01, 1), free_on_resume=True, type=float),
    flag("--seed", 1, "random seed for data order and sampling", (0, 2**63 - 1)),
]
GROUPS["generation servers"] = [  # docs/generation.md
    flag("--engine", "colocated", "who samples: vLLM in the ranks, which takes turns with the trainer (colocated), or "
         "vLLM servers on GPUs of their own (server)", choices=("colocated", "server"), free_on_resume=True),
    flag("--generation_gpus", [], "GPUs of this node, by index, on which servers are started, "
         "--tensor_parallel_size for each; the ranks take the first ones; on CPUs only their number counts", (0, INF),
         free_on_resume=True, only_with="--engine", type=int),
    flag("--server_urls", [], "servers that you have started, http://HOST:PORT each; the environment variable "
         "VLLM_API_KEY has the key that scripts/serve.py got or printed", free_on_resume=True, only_with="--engine"),
    flag("--steps_ahead", 0, "steps that the servers sample ahead of the one that the ranks train; the sampling "
         "weights are at most as many steps behind", (0, 16), only_with="--engine"),
    flag("--in_flight", False, "unfinished completions go on under new weights; without this a sync waits for them",
         only_with="--steps_ahead"),
]
GROUPS["advantage"] = [
    flag("--advantage", "grpo", "how a completion is compared with the others of its group:"),
    flag("--critic", None, "PPO: a value model makes the advantages: policy (it begins as --model), or a reward model, "
         "folder or hub id; settings may follow: policy:lam=0.95,rate=5e-6,clip=0.2,warmup=10"),
    flag("--advantage_ddof", 1, "the std divides by the count minus this: 1 (EasyR1, TRL, verl) or 0", (0, 1)),
    flag("--advantage_eps", 1e-6, "added to the std (EasyR1, verl: 1e-6; TRL: 1e-4)", (0, INF)),
    flag("--dynamic_sampling", "off", "replace groups without signal by newly sampled prompts (DAPO); a signal is that "
         "some but not all completions are correct (correct), or that rewards differ (reward)",
         choices=("off", "correct", "reward")),
    flag("--drop_solved", 0.0, "a prompt is no longer drawn once this share of its group was correct (ScaleRL: 0.9); "
         "enough prompts for a step stay; 0: all stay", (0, 1)),
]
GROUPS["policy loss"] = [
    flag("--policy_loss", "clip", "loss of a token:"),
    flag("--clip_low", 0.2, "the ratio pi / pi_old is clipped below 1 - this (cispo: 1 is no lower bound); dppo: "
         "largest divergence downwards", (0, 1)),
    flag("--clip_high", 0.2, "the ratio pi / pi_old is clipped above 1 + this; dppo: largest divergence upwards",
         (0, INF)),
    flag("--dual_clip", 0.0, "where A < 0, the loss is at most -A x this (EasyR1, verl: 3); 0: no bound", (0, INF)),
    flag("--loss_aggregation", "token_mean", "how the losses of the tokens add up:"),
    flag("--old_logprobs", "trainer", "whose log-probs are pi_old: computed by the trainer, or those of the sampler "
         "(rollout), which need no pass and take the mismatch of the two into the ratio (DPPO)",
         choices=("trainer", "rollout")),
    flag("--entropy_coef", 0.0, "weight of the entropy of the token distribution, subtracted from the loss", (0, INF)),
]
GROUPS["KL to the reference"] = [  # docs/algorithm.md, A teacher
    flag("--reference", None, "the reference, or teacher: folder or hub id, of any size, with the vocabulary of "
         "--model; default: --model", only_with="--kl_coef"),
    flag("--kl_coef", 0.0, "weight of KL(policy || reference); 0: no reference is loaded", (0, INF)),
    flag("--kl_estimator", "k3", "estimate of the KL of a token:", only_with="--kl_coef"),
    flag("--kl_clamp", 10.0, "clamp of the k3 estimate, and +-20 of its log-ratio (EasyR1, verl: 10); 0: none (TRL)",
         (0, INF), only_with="--kl_coef"),
    flag("--kl_in", "loss", "the KL is a term of the loss, or is subtracted from the reward before the advantage",
         choices=("loss", "reward"), only_with="--kl_coef"),
    flag("--kl_over", "sampled", "KL as estimated at the sampled tokens, or over the whole vocabulary at each of them",
         choices=("sampled", "vocabulary"), only_with="--kl_coef"),
    flag("--kl_direction", "reverse", "divergence over the vocabulary:", only_with="--kl_over"),
    flag("--reference_every", 0, "the reference moves to the policy after every so many steps; 0: it stays as it was",
         (0, INF), only_with="--kl_coef"),
    flag("--reference_mixup", 1.0, "how far it moves: 1 replaces it by the policy; 0.05 makes it an exponential mean "
         "of policies, which is kept in fp32", (TINY, 1), only_with="--reference_every"),
    flag("--reset_optimizer", False, "the optimizer starts anew each time the reference has moved (ProRL)",
         only_with="--reference_every"),
    flag("--hint_column", None, "column of a hint, for example a worked solution, that is in the reference's prompt "
         "and not in the policy's; @group: another completion of the prompt that is correct; @feedback: what the "
         "reward says of this one; @group,@feedback: the first of the two that exists", only_with="--kl_coef"),
]
GROUPS["sampler-trainer mismatch"] = [
    flag("--rollout_correction", None, "weight each token's loss by the ratio p_trainer / p_sampler; default: none, or "
         "token_truncate with --steps_ahead or --partial_rollouts; with --replay as in that run:"),
    flag("--router_replay", False, "mixture of experts: the trainer sends each token to the experts that took it in "
         "the engine (R3)"),
]
GROUPS["LoRA"] = [
    flag("--lora_rank", 0, "train adapters of this rank on frozen weights; 0: train all weights", (0, INF)),
    flag("--lora_alpha", 32.0, "adapters are scaled by this / rank (ms-swift: 32 with rank 8)",
         (TINY, INF), only_with="--lora_rank"),
    flag("--lora_dropout", 0.0, "share of an adapter's inputs that is dropped, only in the update",
         (0, 0.99), only_with="--lora_rank"),
    flag("--lora_targets", None, "names of the linear layers that get an adapter, for example q_proj v_proj; default: "
         "all of the decoder but the head", is_list=True, only_with="--lora_rank"),
]
GROUPS["optimizer"] = [  # docs/hacks.md
    flag("--optimizer", "adamw", "adamw; or my_optimizer.py:function, which takes the trained parameters (name -> "
         "parameter) and the settings below, and returns a torch optimizer"),
    flag("--learning_rate", None, "peak learning rate; default: 1e-6, and ten times that with --lora_rank",
         (0, INF), type=float),
    flag("--lr_schedule", "constant", "learning rate after the warm-up; cosine and linear fall to 0",
         choices=("constant", "cosine", "linear")),
    flag("--warmup_ratio", 0.0, "share of all updates in which the rate rises linearly to its peak", (0, 1)),
    flag("--weight_decay", 0.0, "decoupled weight decay of all trained parameters", (0, INF)),
    flag("--adam_beta1", 0.9, "decay of the mean gradient", (0, 0.99999)),
    flag("--adam_beta2", 0.999, "decay of the mean squared gradient", (0, 0.99999)),
    flag("--max_grad_norm", 1.0, "the global gradient norm is clipped to this", (TINY, INF)),
]
DTYPES = ("bfloat16", "float32")
GROUPS["precision and memory"] = [
    flag("--dtype", None, "arithmetic of trainer and sampler; default: bfloat16 on GPUs and with --param_dtype "
         "bfloat16, else float32, because many CPUs only emulate bfloat16; float16 rounds 8 times finer than bfloat16, "
         "and scales the loss", choices=(*DTYPES, "float16")),
    flag("--head_dtype", None, "arithmetic of the head's logits in trainer and sampler, for example float32 beside "
         "--dtype bfloat16; default: that of --dtype", choices=DTYPES),
    flag("--param_dtype", "float32", "parameters, gradients, Adam's moments: 16 bytes per parameter (float32), or 10 "
         "(bfloat16, updated as fp32 ones: model/optimizer.py)", choices=DTYPES),
    flag("--offload", "none", "keep in host RAM: nothing (none); the optimizer's state, which streams through the GPU "
         "(optimizer); also parameters and gradients (all)", choices=("none", "optimizer", "all"), free_on_resume=True),
    flag("--offload_reference", False, "keep the reference in host RAM; layers are fetched as they are needed",
         free_on_resume=True, only_with="--kl_coef"),
    flag("--shard_ranks", None, "ranks that share a copy of the policy (HSDP), for example the GPUs of a node; "
         "default: all ranks share one", (1, INF), free_on_resume=True, type=int),
    flag("--gradient_checkpointing", False, "recompute each decoder layer in the backward pass instead of keeping it",
         free_on_resume=True),
    flag("--compile", False, "torch.compile of the decoder layers, for fewer passes over memory between their matrix "
         "products; the first passes take a minute longer", free_on_resume=True),
    flag("--communicate_once", False, "gather parameters and reduce gradients per update, not per micro-batch: less "
         "traffic, for the policy in --dtype and 4 bytes per trained parameter on every GPU", free_on_resume=True),
    flag("--timeout_minutes", 30.0, "a rank that waits longer than this for the others ends the run",
         (TINY, 1e6), free_on_resume=True),
]
GROUPS["evaluation and checkpoints, counted in steps"] = [
    flag("--eval_every", 0, "evaluate every so many steps and after the last; 0: never", (0, INF),
         free_on_resume=True, only_with="--eval_data"),
    flag("--eval_before_training", False, "evaluate the starting policy, too, as step 0", free_on_resume=True,
         only_with="--eval_data"),
    flag("--eval_samples", [1], "k: completions per held-out problem; one number for all sets, or one each", (1, INF),
         free_on_resume=True),
    flag("--eval_temperature", [1.0], "temperature of held-out sampling; 0 is greedy; for all sets, or each", (0, 2),
         free_on_resume=True),
    flag("--eval_top_p", [1.0], "nucleus sampling in evaluation; for all sets, or each", (TINY, 1),
         free_on_resume=True),
    flag("--eval_max_completion_tokens", None, "token limit in evaluation; for all sets, or each; default: the "
         "training's", (1, INF), free_on_resume=True, is_list=True, type=int),
    flag("--save_every", 0, "write a checkpoint every so many steps; after the last there always is one",
         (0, INF), free_on_resume=True),
    flag("--keep_checkpoints", 3, "remove the oldest checkpoints beyond this many; 0: keep all",
         (0, INF), free_on_resume=True),
]
GROUPS["records"] = [  # docs/runs.md
    flag("--quiet", False, "no progress bars; a line only for steps with an evaluation", free_on_resume=True),
    flag("--track", "none", "also send the metrics of each step to wandb, tensorboard or trackio, which you install",
         choices=("none", "tensorboard", "wandb", "trackio"), free_on_resume=True),
    flag("--keep_rollouts", 20.0, "GiB that OUT_DIR/rollouts may take: all completions of the last steps, with tokens, "
         "log-probs and rewards; 0: none are kept", (0, 1e6), free_on_resume=True),
    flag("--replay", None, "folder of a run whose rollouts are trained on again, without an engine or evaluation; a "
         "checkpoint in it (RUN/step_39): from there on"),
]
GROUPS["faults"] = [  # docs/faults.md
    flag("--keep_best", None, "also keep the checkpoint with the largest value of this metric, for example "
         "eval/SET/avg@K; OUT_DIR/best points to it", free_on_resume=True),
    flag("--grace_seconds", 120.0, "after SIGTERM, SIGUSR1 or Ctrl-C: seconds in which the run saves and ends",
         (1, 1e6), free_on_resume=True),
    flag("--max_rollout_gap", 0.05, "the run ends if policy/rollout_gap_mean is above this, or if a wrong temperature "
         "explains as much: |policy/rollout_temperature - 1| x policy/rollout_temperature_r2; 0: no bound",
         (0, INF), free_on_resume=True),
]
GROUPS[DRY_RUN] = [  # all of them may change when a run continues
    flag("--dry_run", False, "print batches, memory, time and the flags to change, and stop; needs no GPU"),
    flag("--json", False, "print one JSON object instead"),
    flag("--plan_gpus", None, "GPUs of the ranks, over all nodes, without those of generation servers; default: "
         "the ranks that the same command starts without --dry_run", (1, INF), type=int),
    flag("--plan_nodes", None, "nodes that the GPUs of the ranks are on; default: those of the launcher",
         (1, INF), type=int),
    flag("--plan_gpu", "H100-80GB", "card of runtime/cards.json; or memory that a process can take, dense bf16 "
         "speed and bandwidth of another one, such as 23.5GiB:71TFLOPs:0.94TBs"),
    flag("--plan_prompt_tokens", None, "mean length of a prompt, hint included; default: half of "
         "--max_prompt_tokens", (1, INF), type=float),
    flag("--plan_completion_tokens", None, "mean length of a completion; default: half of --max_completion_tokens",
         (1, INF), type=float),
]
# fmt: on
FLAGS = {each.name: each for group in GROUPS.values() for each in group}


def add_flags(parser: argparse.ArgumentParser, groups: dict[str, list[Flag]] = GROUPS) -> None:
    """Gives the parser these flags."""
    parser._negative_number_matcher = re.compile(r"-[\d.]+(e[-+]?\d+)?$|-inf$|-nan$", re.IGNORECASE)  # also -1e-5
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            if flag.type is bool:
                group.add_argument(flag.name, action="store_true", help=flag.help)
                continue
            nargs = None
            if flag.is_list:
                nargs = "*" if flag.default == [] else "+"
            group.add_argument(
                flag.name, type=flag.type, default=flag.default, choices=flag.choices, nargs=nargs,
                required=flag.is_required, help=flag.help,
            )  # fmt: skip


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """The flags of training; the defaults that depend on other flags are filled in."""
    is_planned = args.dry_run or args.plan_gpus  # for GPUs
    args.dtype = args.dtype or default_dtype(bool(is_planned) or args.param_dtype == "bfloat16")
    if args.prompts_per_update is None:
        args.prompts_per_update = args.prompts_per_step
    if args.learning_rate is None:
        args.learning_rate = 1e-5 if args.lora_rank else 1e-6  # "LoRA Without Regret"
    if args.gpu_memory_utilization is None:
        args.gpu_memory_utilization = 0.9 if args.engine == "server" else 0.6
    if args.rollout_correction is None:
        default = "token_truncate" if most_lag(args) else "none"
        if args.replay:  # as in the run that has sampled
            from runtime.history import read_config

            default = read_config(Path(args.replay)).get("rollout_correction", "none")
        args.rollout_correction = default if args.old_logprobs == "trainer" else "none"
    if args.quiet:
        os.environ["TQDM_DISABLE"] = "1"  # `OFF` of runtime/progress.py
    if args.replay:  # the run's own command, with one flag more
        args.eval_every, args.eval_before_training, args.keep_best = 0, False, None
    args.eval_max_completion_tokens = args.eval_max_completion_tokens or [args.max_completion_tokens]
    return args


# What the flags become ------------------------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True)
class Settings:
    """Base of frozen dataclasses. A field with the name of a flag has the flag's default, if none is given."""

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        for name in cls.__annotations__:
            if f"--{name}" in FLAGS and name not in vars(cls):
                setattr(cls, name, as_field(FLAGS[f"--{name}"].default))
        dataclass(frozen=True, kw_only=kw_only)(cls)

    @classmethod
    def from_flags(cls, args: argparse.Namespace, **overrides: object) -> Self:
        """The record of `overrides`, then of the flags with the names of fields, then of the fields' own defaults."""
        names = [field.name for field in fields(cls) if hasattr(args, field.name)]
        values = {name: as_field(getattr(args, name)) for name in names}
        return cls(**values | overrides)


def as_field(value: object) -> object:
    """The value of a flag as a frozen record holds it: a tuple in place of a list."""
    return tuple(value) if isinstance(value, list) else value


class PromptFormat(Settings):  # how a row becomes a prompt
    prompt_column: str
    answer_column: str
    reward: str  # none: answers are not read
    image_column: str | None
    prompt_format: str
    system_prompt: str | None
    prompt_suffix: str
    template_args: tuple[str, ...]
    tools: str | None
    max_prompt_tokens: int
    max_pixels: int | None


class Grading(Settings):  # how completions are graded
    reward: str
    reward_timeout: float
    reward_in_flight: int
    truncated: str
    overlong_cache_tokens: int | None


class TurnLimits(Settings):  # who replies to completions, and how often
    environment: str | None
    tools: str | None
    max_turns: int
    max_turn_tokens: int | None


class Lora(Settings):  # which adapters are trained; rank 0: none, but all weights
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    lora_targets: tuple[str, ...] | None


class Memory(Settings):  # precision, and what is kept where
    dtype: str = "bfloat16"  # as on a GPU
    head_dtype: str | None  # the logits'; None: `dtype`
    head_growth: int = 1  # the size of a chunk of logits, over the least: train_grpo.py has the dry run decide
    param_dtype: str
    offload: str
    offload_reference: bool
    shard_ranks: int | None
    gradient_checkpointing: bool
    compile: bool
    communicate_once: bool
    micro_batch_tokens: int
    share_prompts: bool


class AdamW(Settings):  # the optimizer, whatever its kind
    optimizer: str
    learning_rate: float = 1e-6  # for all weights
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    max_grad_norm: float


class EngineSettings(Settings):  # the engine; `max_model_len` is in tokens, prompt and completion together
    max_model_len: int
    dtype: str = "bfloat16"  # as on a GPU
    head_dtype: str | None
    gpu_memory_utilization: float = 0.6  # beside a trainer
    enforce_eager: bool = False  # no CUDA graphs: starts faster, samples slower; always so on CPU
    router_replay: bool  # the experts of each token are returned
    stop_tokens: tuple[str, ...]
    # Random weights: the first `sync` brings the policy's, so nothing else is ever sampled from, also after a resume.
    load_format: str = "dummy"  # "auto": weights from the disk, for an engine without a trainer


class Servers(Settings):  # where generation servers are, and how far they work ahead
    generation_gpus: tuple[int, ...]
    server_urls: tuple[str, ...]
    tensor_parallel_size: int
    in_flight: bool


class Sampling(Settings):  # how often and how a set of prompts is sampled: the training prompts, or a held-out set
    num_samples: int
    temperature: float
    max_completion_tokens: int
    top_p: float = 1.0  # of an evaluation; training samples from the whole distribution
    keeps_routes: bool = False  # of what is sampled, for --router_replay; never in an evaluation

    def for_vllm(self, max_tokens: int) -> dict[str, object]:
        """vLLM's parameters of a request for one completion of at most `max_tokens` tokens, by their names there.

        Engines in the ranks and servers sample by them, in training and in evaluation: what else vLLM samples by, such
        as min_p, is a flag, a field and a line here.
        """
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": max_tokens,
            "logprobs": 0,  # 0: of the sampled token alone
            "detokenize": False,  # decoded when it is finished, in one go
        }


class Saving(Settings):  # when checkpoints are written, and which are kept
    save_every: int
    keep_checkpoints: int
    keep_best: str | None


def default_dtype(needs_bfloat16: bool = False) -> str:
    """bfloat16 on GPUs, else float32, if it may be. The launch scripts count the GPUs; else there is nvidia-smi."""
    has_gpus = shutil.which("nvidia-smi") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    num_gpus = int(os.environ.get("NUM_GPUS") or bool(has_gpus))
    return "bfloat16" if num_gpus or needs_bfloat16 else "float32"


def most_lag(args: argparse.Namespace) -> int:
    """The number of steps that the weights that sample may be behind the trained ones."""
    return MOST_LAG if args.partial_rollouts else args.steps_ahead


def ks_of_pass(num_samples: int) -> list[int]:
    """The k of pass@k: 2, 4, 8, ... and the number of samples."""
    return sorted({2**i for i in range(1, num_samples.bit_length())} | {num_samples} - {1})
