"""Makes what stands for a real model and data set in a smoke run: a tiny random model of its architecture, data of its schema.

    python scripts/smoke_inputs.py --setup qwq32b_8xh100 --out_dir runs/smoke/qwq32b_8xh100

writes `model/` (Hugging Face format, with a tokenizer of its own whose chat template has the form of the original's) and `data/` (sums, in
the columns of the original data set, as many rows as a step needs). Used by scripts/smoke.sh.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config

Rows = list[dict[str, object]]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
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
THINK = "<think>\n"  # QwQ and the distilled models: the template has opened it before the model says a word


@dataclass(frozen=True)
class Setup:
    """What stands for the model and the data of a documented set-up."""

    chat_template: str  # without its last {% endif %}
    eos: str
    special: tuple[str, ...]
    num_rows: tuple[int, int]  # train, test: at least the prompts of a step
    schema: str


SETUPS = {
    "qwq32b_8xh100": Setup(CHATML + THINK, "<|im_end|>", ("<|im_start|>",), (520, 8), "math12k"),
    "deepseek32b_lora_8gpu": Setup(DEEPSEEK + THINK, "<|end|>", ("<|begin|>", "<|User|>", "<|Assistant|>"), (1010, 0), "numina_tir"),
    "tulu8b_rlvr_7plus1": Setup(TULU, "<|end_of_text|>", ("<|begin_of_text|>",), (520, 0), "rlvr"),
    "qwen7b_simplerl_2x8xh100": Setup(CHATML, "<|im_end|>", ("<|im_start|>",), (1030, 8), "simplerl"),
}


def rows_of(schema: str, count: int, offset: int) -> Rows:
    """`count` sums in the columns of the data set."""
    rows: Rows = []
    for i in range(offset, offset + count):
        question, answer = f"{i % 10}+{i // 10 % 10}?", str(i % 10 + i // 10 % 10)
        user = [{"role": "user", "content": question}]
        if schema == "math12k":
            rows.append({"problem": question, "answer": answer})
        elif schema == "numina_tir":
            solution = f"We add: \\[\\boxed{{{answer}}}\\]"
            rows.append({"problem": question, "solution": solution, "messages": [*user, {"role": "assistant", "content": solution}]})
        elif schema == "simplerl":
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt, reward_model = [{"role": "user", "content": text}], {"style": "rule", "ground_truth": answer}
            rows.append({"question": question, "gt_answer": answer, "prompt": prompt, "reward_model": reward_model})
        else:
            assert schema == "rlvr", f"unknown schema {schema!r}"
            kind = ("gsm8k", "MATH", "ifeval")[i % 3]
            row = {"messages": user, "ground_truth": answer, "dataset": kind, "constraint_type": None, "constraint": None}
            if kind == "ifeval":
                row |= {"ground_truth": json.dumps({"func_name": "validate_no_commas"}), "constraint_type": "No Commas"}
            rows.append(row)
    return rows


def make_tokenizer(setup: Setup) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that learned the words of the prompts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*setup.special, setup.eos, "<pad>"]
    words = [
        "Please reason step by step, and put your final answer within \\boxed{}. You are a helpful assistant. <think> </think> <answer>"
    ]
    sums = [row["problem"] for row in rows_of("math12k", 100, 0)]
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(words * 10 + sums, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=setup.eos, pad_token="<pad>", bos_token=setup.special[0])
    tokenizer.chat_template = setup.chat_template + "{% endif %}"
    return tokenizer


def make_config(setup: Setup, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The architecture of the original with two small layers; heads that tensor parallelism over two ranks can divide."""
    sizes = {
        "vocab_size": (len(tokenizer) + 63) // 64 * 64,  # as the originals: more rows than tokens
        "hidden_size": 128,  # so that a head has 32, the least that the engine knows
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if setup.schema == "rlvr":
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return LlamaConfig(**sizes, rope_parameters=rope | {"original_max_position_embeddings": 256})
    return Qwen2Config(**sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--setup", choices=sorted(SETUPS), required=True, help="the launch script's name without .sh")
    parser.add_argument("--out_dir", type=Path, required=True, help="folder to make model/ and data/ in")
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    torch.manual_seed(0)
    tokenizer = make_tokenizer(setup)
    AutoModelForCausalLM.from_config(make_config(setup, tokenizer)).to(torch.bfloat16).save_pretrained(args.out_dir / "model")
    tokenizer.save_pretrained(args.out_dir / "model")
    (args.out_dir / "data").mkdir(exist_ok=True)
    offset = 0
    for split, count in zip(("train", "test"), setup.num_rows, strict=True):
        if count:
            datasets.Dataset.from_list(rows_of(setup.schema, count, offset)).to_parquet(args.out_dir / "data" / f"{split}.parquet")
        offset += count


if __name__ == "__main__":
    main()
