"""Flags, tiny models, rollouts, data files and run folders, all made up, and an update by hand."""

import argparse
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from algorithm import algorithm_of
from batch import IMAGE, NO_IDS, Batch, Rollout, Row, Update
from command_line import parse_flags
from data import PromptData
from extras.models.lora import add_adapter
from extras.models.vision import add_images
from flags import Grading, Lora, Memory, PromptFormat
from fsdp_utils import World, gather_from_ranks
from gate.inputs import check_template, load_reader
from grading import Grade
from model.weights import fill
from packing import pack
from policy import Policy, build_policy, empty_policy
from run import StepRecord
from schedule import UpdateStep, make_plan
from smoke_inputs import SETUPS
from smoke_inputs import make_model as make_smoke_model
from update import UpdateGuard, add_gradients, logprobs_under, pack_updates, update_policy, with_advantages
from warm_start import build_tokenizer
from watch.rollouts import Keeper

RAGGED = [12, 7, 3, 11, 5, 9, 2, 6]  # completion lengths
ALONE = World(trainer_rank=0, num_trainers=1, tp_size=1, device=torch.device("cpu"))

# Flags ----------------------------------------------------------------------------------------------------------------


def flags(**changes: object) -> argparse.Namespace:
    """The flags, with these changed and the required ones filled in. Made-up rollouts are trained on."""
    values = {"model": "m", "train_data": "d", "out_dir": "o", "total_steps": 10, "max_rollout_gap": 0} | changes
    return parse_flags(command_line(values))


def command_line(values: dict[str, object]) -> list[str]:
    """The flags with these values: True is a switch, None is left out."""
    given = [(f"--{name}", value) for name, value in values.items() if value is not None]
    return [part for flag, value in given for part in ([flag] if value is True else [flag, str(value)])]


def vision_flags(folder: Path | str, **changes: object) -> argparse.Namespace:
    """For the model and the five prompts of `make_vision_model`, of which some are scaled down."""
    limits = {
        "model": folder, "image_column": "images", "max_pixels": 56 * 84, "max_prompt_tokens": 40,
        "max_completion_tokens": 8, "micro_batch_tokens": 60, "max_grad_norm": 1e9, "kl_coef": 0.1,
    }  # fmt: skip
    return flags(**limits | changes)


# Tiny models ----------------------------------------------------------------------------------------------------------

FAMILY_SIZES = {
    "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip


def random_model(model_type: str, sizes: dict[str, object]) -> torch.nn.Module:
    """Two layers, for the CPU job's tokenizer."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    common = {"vocab_size": 64, "num_hidden_layers": 2, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(model_type, **common | {"eos_token_id": tokenizer.eos_token_id} | sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_model(folder: Path, tied: bool = True, **sizes: object) -> Path:
    """A random Qwen2 of 0.3 M parameters with the CPU job's tokenizer, and data (jsonl) of one-digit sums.

    `sizes` of a Qwen3: its norms of queries and keys are random, and all logits are near 13, where bf16 has steps of
    0.06: the first number of hidden states and of the head's rows is large. Log-probs do not depend on it.
    """
    model = random_model("qwen3" if sizes else "qwen2", {
        "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2,
        "initializer_range": 0.12,  # larger than usual, far from uniform: a wrong weight shows
        "max_position_embeddings": 128, "tie_word_embeddings": tied, "bos_token_id": None,
    } | sizes)  # fmt: skip
    if sizes:
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_norm.weight, 1.0, 0.3)
            torch.nn.init.normal_(layer.self_attn.k_norm.weight, 1.0, 0.3)
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 4.0
            model.model.norm.weight[1:] = 2.0
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    rng = np.random.default_rng(0)
    for name, count in (("train", 64), ("heldout", 16)):
        sums = rng.integers(0, 5, size=(count, 2)).tolist()
        write_lines(folder / f"{name}.jsonl", [{"problem": f"{a}+{b}", "answer": str(a + b)} for a, b in sums])
    return folder


def make_model_of_family(folder: Path, model_type: str, **changes: object) -> None:
    """A random model with the CPU job's tokenizer; `changes` of its config: None takes a size away."""
    sizes = FAMILY_SIZES | {"bos_token_id": build_tokenizer().pad_token_id} | changes
    model = random_model(model_type, {name: x for name, x in sizes.items() if x is not None})
    vary_vectors(model)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def vary_vectors(model: torch.nn.Module) -> None:
    """Norms begin at 0 or 1, biases at 0, and recurrences forget all at once: what is wrong would not show."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            mean = -3.0 if name.endswith("A_log") else parameter.mean().item()
            torch.nn.init.normal_(parameter, mean, 0.3)


def make_hybrid(folder: Path) -> None:
    """A random Qwen3.5, with a tower and a layer that predicts further tokens; heads of sizes that vLLM has on CPUs."""
    tokenizer = build_tokenizer()
    angles = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    text = FAMILY_SIZES | {
        "vocab_size": 64, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "tie_word_embeddings": True,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mamba_ssm_dtype": "float32", "output_gate_type": "swish", "attn_output_gate": True,
        "rope_parameters": angles | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=tower, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    vary_vectors(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(128, 256)}, file, metadata={"format": "pt"})


def make_vision_model(folder: Path) -> Path:
    """A random Qwen2.5-VL that shows a wrong image, its processor and `train.parquet`: five prompts."""
    torch.manual_seed(0)
    make_smoke_model(SETUPS["qwen25vl72b_lora_8xa100"], folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.15 if "visual" not in name else 0.08)
    model.save_pretrained(folder)
    rng, rows = np.random.default_rng(0), []
    for number, sizes in enumerate(([(56, 84)], [], [(90, 60), (56, 56), (56, 56)], [], [(120, 40)])):
        noise = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]
        images = [{"bytes": png(pixels=pixels), "path": None} for pixels in noise]
        rows.append({"problem": "<image>" * len(images) + f"{number}+1?", "answer": str(number + 1), "images": images})
    write_parquet(folder / "train.parquet", rows)
    return folder


def load_policy(path: Path | str, dtype: torch.dtype = torch.float32, gradient_checkpointing: bool = False) -> Policy:
    """The policy with the weights at `path`, whole, and on the CPU."""
    policy = empty_policy(str(path), dtype, dtype, gradient_checkpointing)
    fill(policy, policy.model, str(path), torch.device("cpu"))
    return policy


def policy_of(args: argparse.Namespace, dtype: torch.dtype = torch.float32) -> Policy:
    """The policy of these flags, whole or with LoRA: its adapter is not the zero that it starts as."""
    policy = load_policy(args.model, dtype, args.gradient_checkpointing)
    if args.lora_rank:
        policy.adapter = add_adapter(policy.model, Lora.from_flags(args), args.seed, str(args.model))
        torch.manual_seed(2)
        for name, parameter in policy.named_parameters():
            if ".lora_B." in name:
                parameter.data.normal_(std=0.2)
    return policy


def build(args: argparse.Namespace, world: World) -> tuple[Policy, Policy | None, torch.optim.Optimizer]:
    plan = make_plan(args, args.prompts_per_step)
    return build_policy(args.model, Memory.from_flags(args), Lora.from_flags(args), plan, world)


# Rollouts -------------------------------------------------------------------------------------------------------------


def make_row(ids: list[int] | np.ndarray, **fields: object) -> SimpleNamespace:
    """A stand-in for `data.Row` with this prompt."""
    known = {"text": "", "answer": "", "columns": {}, "where": "", "images": None, "hinted_ids": NO_IDS}
    return SimpleNamespace(ids=np.array(ids, dtype=np.int32), **known | fields)


def make_grade(reward: float, is_correct: bool = False, **parts: float) -> SimpleNamespace:
    """A stand-in for `grading.Grade`."""
    fields = {"status": "ok", "is_failed": False, "is_compared": True}
    fields |= {"parts": parts, "answer": None, "turn_rewards": ()}
    return SimpleNamespace(reward=float(reward), is_correct=is_correct, **fields)


class Ear:
    """A grader: the reward of a completion is its length; each is heard once."""

    grading = Grading()

    def __init__(self) -> None:
        self.heard: dict[int, SimpleNamespace] = {}

    def callback_for(self, rows, sampling):
        def on_finished(b, text, token_ids, is_truncated, grade):
            assert b not in self.heard
            self.heard[b] = make_grade(len(token_ids), is_correct=len(token_ids) % 2 == 0)
            self.heard[b].where = rows[b // sampling.num_samples].where

        return on_finished

    def collect_from_ranks(self):
        heard = {b: grade for share in gather_from_ranks(self.heard) for b, grade in share.items()}
        self.heard = {}
        return [heard[b] for b in range(len(heard))]


def make_rollout(lengths: list[int] = RAGGED, prompt_length: int = 4, seed: int = 0, group_size: int = 1) -> Rollout:
    """Random tokens, advantages and log-probs of these completion lengths; `group_size` per prompt."""
    rng = np.random.default_rng(seed)
    rows = [make_row(rng.integers(0, 64, prompt_length)) for _ in lengths]
    return Rollout(
        rows=[rows[b - b % group_size] for b in range(len(lengths))],
        completions=[rng.integers(0, 64, n).astype(np.int32) for n in lengths],
        rollout_logprobs=[rng.normal(-3, 1, n).astype(np.float32) for n in lengths],
        texts=[""] * len(lengths),
        is_truncated_B=np.zeros(len(lengths), dtype=bool),
        is_sampled=[np.ones(n, dtype=bool) for n in lengths],
        is_trained_B=np.ones(len(lengths), dtype=bool),
        loss_weights_B=np.full(len(lengths), 1 / sum(lengths), dtype=np.float32),
        advantages=[np.full(n, rng.normal(), dtype=np.float32) for n in lengths],
    )


def vision_rollout(data: PromptData) -> Rollout:
    """A random completion of each prompt, and advantages. The first holds a sampled image token."""
    rollout = replace(make_rollout([8, 5, 7, 3, 6]), rows=data.rows)
    rollout.completions[0][3] = data.rows[0].images.vision.image_token
    return rollout


def pack_with_images(rollout: Rollout, indices: list[int], group_size: int = 1) -> Batch:
    return add_images(pack(rollout, indices, group_size), rollout)


def unpacked_distributions(model: Callable, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Log-probs of all tokens [T, V] at each completion token, sequence after sequence, by the definition."""
    pieces = []
    for row, completion in zip(rollout.rows, rollout.completions, strict=True):
        logits = model(torch.tensor([*row.ids, *completion])[None]).logits[0] / temperature
        pieces.append(logits[len(row.ids) - 1 : -1].log_softmax(-1))
    return torch.cat(pieces)


def unpacked_logprobs(model: Callable, rollout: Rollout, temperature: float) -> torch.Tensor:
    """Those of the completion tokens [T]."""
    labels_T = torch.from_numpy(np.concatenate(rollout.completions)).long()
    return unpacked_distributions(model, rollout, temperature).gather(-1, labels_T[:, None])[:, 0]


def one_bit(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with another last bit in its last number."""
    changed = tensor.clone()
    changed.view(torch.uint8).flatten()[-tensor.itemsize] ^= 1
    return changed


# An update by hand ----------------------------------------------------------------------------------------------------


def whole_update(rollout: Rollout, args: argparse.Namespace, policy: Policy, world: World) -> Update:
    """The whole rollout as one update, with the advantages that it comes with."""
    plan = replace(make_plan(args, args.prompts_per_step), completions_per_step=len(rollout.rows))
    algorithm = replace(algorithm_of(args), group_size=1)  # so that groups do not matter
    (update,) = pack_updates(rollout, plan, algorithm, Memory.from_flags(args), policy, world)
    return [with_advantages(rollout, batch) for batch in update]


def train_once(
    policy: Policy, optimizer: torch.optim.Optimizer, update: Update, args: argparse.Namespace, world: World = ALONE,
    **changes: object,
) -> dict[str, float]:  # fmt: skip
    """The metrics of one optimizer step, by default the first of its rollout and at the rate 0."""
    step = UpdateStep(index=0, rate=0.0, is_first=True, max_grad_norm=args.max_grad_norm, seed=args.seed)
    settings = algorithm_of(args), step._replace(**changes), Memory.from_flags(args)
    return update_policy(policy, optimizer, update, *settings, UpdateGuard(world))


def run_passes(policy: Policy, args: argparse.Namespace, rollout: Rollout) -> int:
    """The passes for log-probs and for the update; returns over how many micro-batches this went.

    On the meta device, which raises wherever the host would wait for a GPU to read a value (`item`, `tolist`, `if`), or
    a size that depends on values (`nonzero`, an index that is a mask).
    """
    policy.to("meta")
    algorithm, memory, world = algorithm_of(args), Memory.from_flags(args), replace(ALONE, device=torch.device("meta"))
    packed = whole_update(rollout, args, policy, world)
    step = UpdateStep(index=0, rate=0.0, is_first=False, max_grad_norm=1.0, seed=0)
    for field in ("old_logprobs_N", "ref_logprobs_N"):
        packed = logprobs_under(policy, field, packed, algorithm)
    passes = add_gradients(policy, packed, algorithm, step, memory, UpdateGuard(world))
    assert all(parameter.grad is not None for parameter in policy.parameters() if parameter.requires_grad)
    return len(passes)


# Data files -----------------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
VISION_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<pic>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %}[assistant]"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, and <bos>, <eos> and <pic>; a bare text gets a <bos>."""
    special = ["<bos>", "<eos>", "<pic>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    options = {"bos_token": "<bos>", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options, chat_template=chat_template)


GOOD = '{"problem": "1+1", "answer": "2"}\n'
TOKENIZER = byte_tokenizer()


def png(red: int = 255, size: int = 4, pixels: np.ndarray | None = None) -> bytes:
    """A file with these pixels, or with a square of this red."""
    image = Image.new("RGB", (size, size), (red, 0, 0)) if pixels is None else Image.fromarray(pixels)
    image.save(out := io.BytesIO(), "PNG")
    return out.getvalue()


def write(folder: Path, content: str | bytes, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def write_lines(file: Path, rows: list[dict[str, object]]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_parquet(file: Path, rows: list[dict[str, object]], **features: object) -> str:
    """A .parquet file; `features` are those that the values do not tell (images)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dataset = datasets.Dataset.from_list(rows)
    for column, feature in features.items():
        dataset = dataset.cast_column(column, feature)
    dataset.to_parquet(file)
    return str(file)


def write_math12k(folder: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"problem": f"{split} {i}?", "answer": str(i)} for i in range(count)]
        write_parquet(folder / "data" / f"{split}-00000-of-00001.parquet", rows)


def load(source: object, tokenizer=TOKENIZER, seed: int = 0, vision=None, **changes: object) -> PromptData:
    prompt_format = PromptFormat(**{"max_prompt_tokens": 10**6} | changes)
    check_template(prompt_format, tokenizer)
    return PromptData.load(str(source), prompt_format, tokenizer, seed, vision)


def load_rows(folder: Path, rows: list[dict[str, object]], **changes: object) -> PromptData:
    return load(write_lines(folder / "rows.jsonl", rows), **changes)


def load_values(folder: Path, column: str, values: list[object], **changes: object) -> PromptData:
    return load_rows(folder, [{"problem": "q", "answer": "1"} | {column: value} for value in values], **changes)


def vision_data(args: argparse.Namespace, source: Path | None = None) -> PromptData:
    """The five prompts of `make_vision_model`, or those of the source."""
    prompt_format, path = PromptFormat.from_flags(args), str(source or Path(args.model) / "train.parquet")
    tokenizer, vision = load_reader(args.model, AutoConfig.from_pretrained(args.model), prompt_format)
    return PromptData.load(path, prompt_format, tokenizer, 0, vision)


def numbered(folder: Path, count: int, name: str = "rows", **changes: object) -> PromptData:
    """`count` rows whose problem is `<name> <i>` and whose answer is `<i> of <name>`."""
    rows = [{"problem": f"{name} {i}", "answer": f"{i} of {name}"} for i in range(count)]
    return load(write_lines(folder / f"{name}.jsonl", rows), **changes)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def prompt_of(row: Row) -> str:
    """The user's last text; images show as `<image>`."""
    content = row.messages[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", IMAGE) for part in content)


def texts(loaded: PromptData) -> list[str]:
    return [row.text for row in loaded.rows]


# Run folders ----------------------------------------------------------------------------------------------------------

HOSTILE = "<script>window.hacked=1</script></script><img src=x onerror='window.hacked=2'><!-- <b>bold</b> &amp; \\u003c"
SMILE = "\N{SMILING FACE WITH OPEN MOUTH}"  # four bytes, of which each is a token
SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ha", "je", "ki", "lo", "mu", "na", "pe", "qui", "ro", "su", "ta"]
GROUP_SIZE = 8
STEP_LEVELS = {  # metric -> its value but for the noise
    "policy/entropy": 0.3, "policy/kl_ref": 0.05, "policy/clip_frac": 0.01, "policy/clip_frac_low": 0.004,
    "policy/clip_frac_high": 0.006, "policy/rollout_gap_mean": 0.002, "optim/grad_norm": 0.3,
    "reward/mean": 0.8, "reward/mean_stderr": 0.03, "reward/part/math": 0.7, "reward/part/format": 0.9,
    "completion/tokens_mean": 400, "completion/tokens_right_mean": 350, "completion/tokens_wrong_mean": 500,
    "time/sample_s": 20, "time/update_s": 12, "time/sync_s": 1, "time/step_s": 38, "time/rollout_tail_s": 3,
    "perf/tokens_per_s": 9000, "perf/update_mfu": 0.41, HOSTILE: 1,
}  # fmt: skip
EVALUATION_LEVELS = {
    "eval/math500/avg@4": 0.6, "eval/math500/stderr": 0.015, "eval/math500/pass@4": 0.7,
    "eval/math500/pass@4_stderr": 0.012, "time/evaluate_s": 15,
}  # fmt: skip


def write_run(folder: Path, config: dict, records: list[dict]) -> Path:
    write_lines(folder / "metrics.jsonl", records)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_completions(run: Path, step: int, name: str, scores: list[float]) -> None:
    """The file of an evaluation: a completion of each problem, with these scores."""
    write_lines(run / "eval" / f"step_{step}" / f"{name}.jsonl", [
        {"row": f"{name}.jsonl, line {i + 1}", "answer": str(i), "reward_parts": {"math": score}}
        for i, score in enumerate(scores)
    ])  # fmt: skip


def make_run(folder: Path, seed: int = 1, steps: int = 500, patch: str | None = None, **flags: object) -> Path:
    """A run with an evaluation at every 25th step. `patch`: the name of that of its uncommitted changes."""
    config = {"model": f"policies/warm_seed{seed}", "out_dir": str(folder), "seed": seed, "clip_high": 0.2}
    random, records = np.random.default_rng(seed), []
    for step in range(steps + 1):
        levels = (STEP_LEVELS if step else {}) | (EVALUATION_LEVELS if step % 25 == 0 else {})
        records.append({"step": step} | {name: x * (1 + 0.05 * random.normal()) for name, x in levels.items()})
        records[-1] |= {"completion/frac_truncated": 0.05} if step else {}
        records[-1] |= {"optim/grad_norm": None} if step == 7 else {}
    write_run(folder, config | {"group_size": GROUP_SIZE, "system_prompt": HOSTILE} | flags, records)
    start = {"time": "20260101T120000", "world_size": 8, "device": "NVIDIA H100 80GB HBM3", "commit": "a" * 40}
    write_lines(folder / "starts.jsonl", [start | {"packages": {"torch": "2.13.0"}, "patch": patch}])
    return folder


def make_vocabulary(size: int) -> list[bytes]:
    """All bytes, then words, as many as a real model has; the last token is hostile."""
    words = [f" {a}{b}{c}{d}" for a in SYLLABLES for b in SYLLABLES for c in SYLLABLES for d in ["", *SYLLABLES]]
    words += [f"{word}{number}" for word in words for number in (1, 2)]
    pieces = [*(bytes([byte]) for byte in range(256)), *map(str.encode, words)]
    return [*pieces[: size - 1], HOSTILE.encode()]


def make_rollouts(run: Path, steps: list[int], prompts: int, tokens: int, vocabulary: list[bytes]) -> None:
    """Rollouts of random words. The first completion is hostile, the second smiles."""
    random, count = np.random.default_rng(0), prompts * GROUP_SIZE
    words, end = np.arange(256, len(vocabulary)), len(vocabulary)
    frequencies = 1 / np.arange(2, len(words) + 2)  # Zipf's law
    keeper = Keeper(run, 100.0, [*vocabulary, b"<|im_end|>"])
    for step in steps:
        lengths = np.clip(random.normal(tokens, tokens / 5, count), 20, None).astype(int)
        drawn = random.choice(words, lengths.sum(), p=frequencies / frequencies.sum())
        completions = [np.append(each, end) for each in np.split(drawn, np.cumsum(lengths)[:-1])]
        completions[0] = np.append(end - 1, completions[0])
        smiling = f"{SMILE} is the answer\nand a new line, {SMILE}"
        completions[1] = np.append(list(smiling.encode()), completions[1])
        texts = [f"<|im_start|>user\nGroup {group} {HOSTILE}<|im_end|>\n" for group in range(prompts)]
        rows = [
            make_row([1], text=text, answer=f"{group} {HOSTILE}", where=f"train.jsonl:{step * prompts + group}")
            for group, text in enumerate(texts)
        ]
        grades = [
            Grade(0.1 + right, HOSTILE if b == 3 else "ok", {HOSTILE: right, "format": 0.1}, HOSTILE if b % 5 else None)
            for b, right in enumerate((random.random(count) < 0.5).astype(float).tolist())
        ]
        rollout = replace(
            make_rollout([len(each) for each in completions]), grades=grades,
            rows=[rows[b // GROUP_SIZE] for b in range(count)],
            rollout_logprobs=[-random.exponential(0.4, len(each)).astype(np.float32) for each in completions],
            texts=[b"".join(vocabulary[i] for i in each[:-1]).decode() for each in completions],
            completions=completions, is_truncated_B=np.arange(count) % 4 == 2,
        )  # fmt: skip
        keeper.rollout(StepRecord(step, GROUP_SIZE, rollout, np.zeros(count), np.arange(count), None, {}))
    keeper.wait()
