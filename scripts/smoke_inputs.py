"""Makes what stands for a real model and data set in a smoke run: a tiny random model of its architecture, and data.

    python scripts/smoke_inputs.py --setup qwq32b_8xh100 --out_dir runs/smoke/qwq32b_8xh100

writes `model/` (Hugging Face format, with a tokenizer of its own whose chat template has the form of the original's),
`teacher/` where the set-up has one, and `data/` (sums in the original's columns, as many rows as a step needs).
"""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
TULU = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n"
)
DEEPSEEK = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}<|User|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|Assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|>"
)
QWEN_VL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
DEEPSEEK_TOKENS = ("<|begin|>", "<|User|>", "<|Assistant|>")
# Qwen3: a thought that the template has closed
NOT_THINKING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
THINK = "<think>\n"  # QwQ and the distilled models: the template has opened it before the model says a word


@dataclass(frozen=True)
class Setup:
    """The stand-ins for the model and the data of a documented set-up."""

    schema: str
    num_rows: tuple[int, int]  # train, test: at least the prompts of a step
    chat_template: str  # without its last {% endif %}
    eos: str = "<|im_end|>"
    special: tuple[str, ...] = ("<|im_start|>",)
    has_teacher: bool = False


SETUPS = {
    "qwq32b_8xh100": Setup("math12k", (520, 8), CHATML + THINK),
    "deepseek32b_lora_8gpu": Setup("numina_tir", (1010, 0), DEEPSEEK + THINK, "<|end|>", DEEPSEEK_TOKENS),
    "qwen25vl72b_lora_8xa100": Setup("open_r1_8k", (1000, 0), QWEN_VL, special=("<|im_start|>", *VISION_TOKENS)),
    "tulu8b_rlvr_7plus1": Setup("rlvr", (730, 0), TULU, "<|end_of_text|>", ("<|begin_of_text|>",)),
    "qwen7b_simplerl_2x8xh100": Setup("simplerl", (1030, 8), CHATML),
    "qwen2.5_3b_gsm8k_lora_1gpu": Setup("gsm8k", (130, 8), CHATML),
    "distill_1gpu": Setup("gsm8k", (384, 8), CHATML, has_teacher=True),
    "qwen3_4b_dapo_8gpu": Setup("dapo", (40, 8), CHATML, "<|endoftext|>", ("<|im_start|>", "<|im_end|>")),
    "qwen3_0.6b_math_speedrun": Setup("boxed", (40, 8), CHATML, "<|endoftext|>"),
    "qwen3_0.6b_reverse_text_1gpu": Setup("reverse", (40, 0), CHATML),
    "tulu3.1_8b_grpo_8gpu": Setup("rlvr", (180, 0), TULU, "<|end_of_text|>", ("<|begin_of_text|>",)),
    "qwen3_8b_sciknoweval_4gpu": Setup("choice", (70, 8), CHATML + NOT_THINKING),
}


def row_of(schema: str, i: int) -> dict[str, object]:
    """The i-th sum in the columns of the data set."""
    question, answer = f"{i % 10}+{i // 10 % 10}?", str(i % 10 + i // 10 % 10)
    user, reward_model = [{"role": "user", "content": question}], {"style": "rule", "ground_truth": answer}
    boxed = f"We add: \\[\\boxed{{{answer}}}\\]"
    chatml = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    third_kind = {"ground_truth": json.dumps({"func_name": "validate_no_commas"}), "constraint_type": "No Commas"}
    return {
        "open_r1_8k": {
            "image": picture(i) if i % 3 else None, "problem": question,  # every third row is a text
            "solution": f"<think>I add.</think><answer>{answer}</answer>",
        },
        "rlvr": {
            "messages": user, "ground_truth": answer, "dataset": ("gsm8k", "MATH", "ifeval")[i % 3],
            "constraint_type": None, "constraint": None, **(third_kind if i % 3 == 2 else {}),
        },
        "math12k": {"problem": question, "answer": answer},
        "boxed": {"problem": question, "answer": answer, "must_box": True},
        "reverse": {"prompt": question},
        "choice": {"system": "Give the letter.", "prompt": question, "answer": "ABCD"[i % 4]},
        "numina_tir": {
            "problem": question, "solution": boxed, "messages": [*user, {"role": "assistant", "content": boxed}],
        },
        "simplerl": {
            "question": question, "gt_answer": answer, "prompt": [{"role": "user", "content": chatml}],
            "reward_model": reward_model,
        },
        "gsm8k": {"question": question, "answer": f"We add: <<{question[:-1]}={answer}>>{answer}\n#### {answer}"},
        "dapo": {
            "prompt": question, "source_prompt": user, "messages": user, "ground_truth": answer,
            "reward_model": reward_model,
        },
    }[schema]  # fmt: skip


def picture(number: int) -> dict[str, object]:
    """A plain image in one of a few sizes, as parquet files of the hub hold it."""
    out = io.BytesIO()
    Image.new("RGB", (40 + number % 3 * 30, 60), (number * 7 % 256, number * 31 % 256, 128)).save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}


def make_tokenizer(setup: Setup) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that learned the words of the prompts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = "Please reason step by step, and put your final answer within \\boxed{}. "
    words += "You are a helpful assistant. <think> </think> <answer>"
    sums = [row_of("math12k", i)["problem"] for i in range(100)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([words] * 10 + sums, trainer)
    special = [*setup.special, setup.eos, "<pad>"]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {"eos_token": setup.eos, "pad_token": "<pad>", "bos_token": setup.special[0]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=setup.chat_template + "{% endif %}", **names)


def make_config(setup: Setup, tokenizer: PreTrainedTokenizerFast, family: str | None = None) -> PretrainedConfig:
    """The original's architecture with two small layers, and heads that two tensor-parallel ranks can share.

    `family`: another model_type, with windows that are shorter than the prompts, or few experts, where it has any.
    """
    sizes = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,  # as the originals: more rows than tokens
        "hidden_size": 128,  # so that a head has 32, the least that the engine knows
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": setup.schema in ("gsm8k", "dapo", "boxed", "reverse"),  # as the small originals
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if family:
        own = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
        if "moe" in family:
            own = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            own |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
        if family == "qwen2_moe":
            own["shared_expert_intermediate_size"] = 64
        return transformers.AutoConfig.for_model(family, **sizes | own, head_dim=32)
    if setup.chat_template == QWEN_VL:
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        ids = dict(zip(names, tokenizer.convert_tokens_to_ids(VISION_TOKENS), strict=True))
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
        tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 128}
        tower |= {"fullatt_block_indexes": [1]}
        ids |= {"text_config": sizes | {"max_position_embeddings": 1024, "rope_parameters": rope}}
        return transformers.Qwen2_5_VLConfig(vision_config=tower, tie_word_embeddings=False, **ids)
    if setup.schema == "rlvr":
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
        return transformers.LlamaConfig(**sizes, rope_parameters=rope)
    if setup.schema in ("dapo", "boxed", "reverse", "choice"):
        return transformers.Qwen3Config(**sizes, head_dim=64)  # not hidden size / heads, as the original's
    return transformers.Qwen2Config(**sizes)


def make_model(setup: Setup, folder: Path, family: str | None = None, **sizes: int) -> None:
    """Random weights in bf16, and the tokenizer; of a model that sees, the processor, too. `sizes` differ from those
    of `make_config`.
    """
    tokenizer = make_tokenizer(setup)
    config, kind, processor = make_config(setup, tokenizer, family), transformers.AutoModelForCausalLM, tokenizer
    config.update(sizes)
    if config.model_type == "qwen2_5_vl":
        kind, parts = transformers.AutoModelForImageTextToText, {"chat_template": tokenizer.chat_template}
        images, videos = transformers.Qwen2VLImageProcessor(), transformers.Qwen2VLVideoProcessor()
        processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, **parts)
    kind.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--setup", choices=sorted(SETUPS), required=True, help="the launch script's name without .sh")
    parser.add_argument("--family", help="another architecture by its model_type, gemma3_text or olmo3 for example")
    parser.add_argument("--out_dir", type=Path, required=True, help="folder to make model/ and data/ in")
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    torch.manual_seed(0)
    make_model(setup, args.out_dir / "model", args.family)
    if setup.has_teacher:
        make_model(setup, args.out_dir / "teacher", hidden_size=192, num_attention_heads=6)
    (args.out_dir / "data").mkdir(exist_ok=True)
    num_train, num_test = setup.num_rows
    for split, numbers in {"train": range(num_train), "test": range(num_train, num_train + num_test)}.items():
        if numbers:
            rows = datasets.Dataset.from_list([row_of(setup.schema, i) for i in numbers])
            rows = rows.cast_column("image", datasets.Image()) if "image" in rows.features else rows
            rows.to_parquet(args.out_dir / "data" / f"{split}.parquet")


if __name__ == "__main__":
    main()
