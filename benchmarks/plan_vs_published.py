"""Published runs of GRPO beside what the dry run says of them. Needs no GPU and takes seconds.

    python benchmarks/plan_vs_published.py

Every run is planned by the code of --dry_run, from flags. The first table has the runs of which all phases are
published: the constants in `plan/time.py` and its `FLOPS_SHARE` were fitted on them. The second table was
held out. The third has runs that are left out (`LEFT_OUT` says why). Exit code 1: the median error is above 15 % or one
above 30.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parent.parent))

from command_line import parse_flags
from plan.dry_run import setup_of
from plan.time import phase_seconds

GOAL_MEDIAN, GOAL_WORST = 0.15, 0.30


def decoder(kind: str, sizes: str, **overrides: object) -> dict[str, object]:
    """A config: "vocabulary hidden intermediate layers heads kv_heads", as in the model's config.json."""
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "num_key_value_heads"]
    values = dict(zip(names, map(int, sizes.split()), strict=True))
    return {"model_type": kind, "tie_word_embeddings": False, "max_position_embeddings": 32_768} | values | overrides


def qwen_vl(sizes: str, intermediate: int, **overrides: object) -> dict[str, object]:
    text = decoder("qwen2_5_vl_text", sizes, **overrides)
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": intermediate, "num_heads": 16}
    tower |= {"out_hidden_size": text["hidden_size"]}
    return {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": tower}


MODELS = {
    "Llama-3.1-8B": decoder("llama", "128256 4096 14336 32 32 8"),
    "Llama-3.1-70B": decoder("llama", "128256 8192 28672 80 64 8"),
    "Llama-3.2-1B": decoder("llama", "128256 2048 8192 16 32 8", head_dim=64, tie_word_embeddings=True),
    "Qwen3-32B": decoder("qwen3", "151936 5120 25600 64 64 8", head_dim=128),
    "Qwen2.5-7B": decoder("qwen2", "152064 3584 18944 28 28 4"),
    "Qwen2-7B": decoder("qwen2", "152064 3584 18944 28 28 4"),
    "Qwen2.5-VL-3B": qwen_vl("151936 2048 11008 36 16 2", 3420, tie_word_embeddings=True),
    "Qwen2.5-VL-7B": qwen_vl("152064 3584 18944 28 28 4", 3420),
    "Qwen2.5-VL-32B": qwen_vl("152064 5120 27648 64 40 8", 3456),
}


@dataclass(frozen=True)
class Run:
    """A published run. Lengths are means, in tokens; seconds are those of a step."""

    name: str
    model: str
    layout: str  # how the source divides the trainer over GPUs
    prompt: float
    completion: float
    step: float
    flags: str
    phases: tuple[float, float, float] | None = None  # rollout with sync and sleep, log-probs, update; None: not known

    @cached_property
    def args(self) -> argparse.Namespace:
        lengths = f"--plan_prompt_tokens {self.prompt} --plan_completion_tokens {self.completion}"
        required = f"--model owner/{self.model} --train_data x#100000 --out_dir x --total_steps 1"
        return parse_flags(f"{required} {lengths} {self.flags}".split())

    @cached_property
    def planned(self) -> tuple[float, float, float]:
        """Seconds of the phases by our dry run."""
        setup = setup_of(self.args, AutoConfig.for_model(**MODELS[self.model]))
        eager = replace(setup.engine, enforce_eager=self.name.startswith("verl"))
        # All of them compute old log-probs for the first update of a step, too; ours takes those of the update itself.
        seconds = phase_seconds(replace(setup, engine=eager, run=replace(setup.run, needs_first_logprobs=True)))
        logprobs, update = seconds.pop("logprobs"), seconds.pop("update")
        return sum(seconds.values()), logprobs, update

    @property
    def error(self) -> float:
        return sum(self.planned) / self.step - 1


def flags_of(batch: tuple[int, int, int, int], limits: tuple[int, int], more: str) -> str:
    """`batch`: prompts of a step, completions of each, prompts of an update, tokens of a micro-batch."""
    names = ("prompts_per_step", "group_size", "prompts_per_update", "micro_batch_tokens")
    names += ("max_prompt_tokens", "max_completion_tokens")
    return " ".join(f"--{name} {value}" for name, value in zip(names, batch + limits, strict=True)) + " " + more


def nemo(gpus: int, tp: int, more: str) -> str:
    """NeMo-RL: 4096 tokens in all, micro-batches of one packed sequence of 4096."""
    more = f"--kl_coef 0.01 --tensor_parallel_size {tp} --plan_gpus {gpus} --plan_nodes {gpus // 8} {more}"
    return flags_of((64, 32, 16, 4096), (256, 3840), more)


def easyr1(tp: int, micro: int, more: str = "") -> str:
    """EasyR1: optimizer and reference wait in host RAM."""
    more = f"--kl_coef 0.01 --offload optimizer --offload_reference --tensor_parallel_size {tp} {more}"
    return flags_of((512, 5, 128, micro), (2048, 2048), f"--gradient_checkpointing --plan_gpus 8 {more}")


def verl(prompt: int, micro: int, more: str) -> str:
    """verl's examples of 2025: engines of two GPUs without CUDA graphs."""
    more = f"--gradient_checkpointing --plan_gpus 8 --tensor_parallel_size 2 {more}"
    return flags_of((1024, 5, 256, micro), (prompt, 1024), more)


STAYS = "--communicate_once"
KL, A100 = "--kl_coef 0.001", "--plan_gpu A100-80GB"
FITTED = [
    Run("NeMo-RL 0.3", "Llama-3.1-8B", "DP8", 130, 795, 112, nemo(8, 1, STAYS), (63, 18, 28)),
    Run("NeMo-RL 0.3", "Llama-3.1-8B", "FSDP8", 130, 777, 122, nemo(8, 1, ""), (61, 19, 38)),
    Run("NeMo-RL 0.3", "Qwen3-32B", "TP4 PP2 DP8", 110, 3283, 213, nemo(64, 4, ""), (103, 40, 68)),
    Run("NeMo-RL 0.3", "Llama-3.1-70B", "TP4 PP4 DP4", 130, 398, 147, nemo(64, 4, ""), (98, 18, 28)),
    Run("verl", "Qwen2.5-7B", "FSDP8", 93, 232, 80.3, verl(512, 13_000, KL), (33.0, 17.0, 29.1)),
    Run("verl", "Llama-3.2-1B", "FSDP8", 107, 183, 71.0, verl(512, 1536, KL), (21.7, 20.9, 27.3)),
    Run("verl, GPG", "Qwen2-7B", "FSDP8", 101, 224, 220.5, verl(1024, 5200, A100), (61.2, 31.2, 126.3)),
    Run("verl, GPG", "Qwen2-7B", "FSDP8", 101, 613, 374.3, verl(1024, 11_430, A100), (131.7, 50.1, 190.2)),
    Run("verl, GPG", "Qwen2-7B", "TP2 PP2 DP2", 94, 160, 209.3, verl(1024, 2048, A100), (45.7, 52.2, 109.9)),
]
HELD_OUT = [
    Run("NeMo-RL 0.4", "Llama-3.1-8B", "PP2 DP8", 132, 1060, 97.7, nemo(16, 1, f"{STAYS} --gradient_checkpointing")),
    Run("NeMo-RL 0.5", "Llama-3.1-8B", "PP2 DP8", 127, 1019, 92.8, nemo(16, 1, f"{STAYS} --gradient_checkpointing")),
    Run("NeMo-RL 0.4", "Qwen3-32B", "TP4 PP4 DP2", 110, 3206, 393, nemo(32, 4, "")),
    Run("NeMo-RL 0.5", "Qwen3-32B", "TP4 PP4 DP2", 104, 3251, 376, nemo(32, 4, "")),
    Run("EasyR1", "Qwen2.5-VL-7B", "FSDP8, fp32", 400, 335, 145, easyr1(2, 4096)),
    Run("EasyR1", "Qwen2.5-VL-7B", "FSDP8, fp32", 400, 335, 120, easyr1(2, 16_384)),
    Run("EasyR1", "Qwen2.5-VL-7B", "FSDP8, bf16", 400, 335, 145, easyr1(2, 4096, "--param_dtype bfloat16")),
    Run("EasyR1", "Qwen2.5-VL-32B", "FSDP8, bf16", 400, 625, 530, easyr1(8, 4096, "--param_dtype bfloat16")),
]
LEFT_OUT = [
    # Its authors call it slow: MFU 7 %, 147 s by Megatron on the same GPUs, 266 s on another cluster.
    Run("NeMo-RL 0.3", "Llama-3.1-70B", "TP8 FSDP8", 130, 395, 230, nemo(64, 4, "")),
    # Its vision tower, which ours does not train or plan, is 40 % of the text model's arithmetic (7B: 16 %).
    Run("EasyR1", "Qwen2.5-VL-3B", "FSDP8, fp32", 400, 275, 120, easyr1(2, 4096)),
]
COLUMNS = ("source", "model, GPUs", "mean lengths", "trained by", "published", "ours", "error")


def row_of(run: Run) -> list[str]:
    layout = f"{run.layout}, micro-batches of {run.args.micro_batch_tokens}"
    layout += ", recomputed" if run.args.gradient_checkpointing else ""
    published, ours = f"{run.step:g} s", f"{sum(run.planned):.0f} s"
    if run.phases:
        published += f" ({' + '.join(f'{x:.0f}' for x in run.phases)})"
        ours += f" ({' + '.join(f'{x:.0f}' for x in run.planned)})"
    gpus = f"{run.model}, {run.args.plan_gpus} {run.args.plan_gpu.partition('-')[0]}"
    return [run.name, gpus, f"{run.prompt:g} + {run.completion:g}", layout, published, ours, f"{run.error:+.0%}"]


def print_table(title: str, runs: list[Run]) -> None:
    print(f"{title}\n")
    for row in (COLUMNS, ["---"] * len(COLUMNS), *map(row_of, runs)):
        print(f"| {' | '.join(row)} |")
    print()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print_table("Fitted; in brackets rollout (with sync and the small rest), log-probs, update:", FITTED)
    print_table("Held out:", HELD_OUT)
    print_table("Left out:", LEFT_OUT)
    summary = {}
    groups = {"all": FITTED + HELD_OUT, "held_out": HELD_OUT, "with_left_out": FITTED + HELD_OUT + LEFT_OUT}
    for name, runs in groups.items():
        errors = [abs(run.error) for run in runs]
        summary |= {f"{name}_median": round(statistics.median(errors), 3), f"{name}_worst": round(max(errors), 3)}
    print(json.dumps({"goal": [GOAL_MEDIAN, GOAL_WORST], "runs": len(FITTED + HELD_OUT)} | summary))
    sys.exit(summary["all_median"] > GOAL_MEDIAN or summary["all_worst"] > GOAL_WORST)


if __name__ == "__main__":
    main()
