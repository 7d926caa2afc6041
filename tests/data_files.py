"""What the tests of data need: tokenizers that keep every character, small images, files like public data sets."""

from __future__ import annotations

import io
from pathlib import Path

import datasets
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batch import IMAGE, Row
from data import PromptData
from flags import PromptFormat
from helpers import write_lines

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
    from tokenizers.processors import TemplateProcessing

    special = ["<bos>", "<eos>", "<pic>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def png(red: int = 255, size: int = 4) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (size, size), (red, 0, 0)).save(out, "PNG")
    return out.getvalue()


def write_parquet(file: Path, rows: list[dict[str, object]], **features: object) -> str:
    """A .parquet file; `features` are those that the values do not tell (images)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    dataset = datasets.Dataset.from_list(rows)
    for column, feature in features.items():
        dataset = dataset.cast_column(column, feature)
    dataset.to_parquet(file)
    return str(file)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_math12k(folder: Path) -> None:
    """hiyouga/math12k."""
    for split, count in (("train", 3), ("test", 2)):
        rows = [{"problem": f"{split} {i}?", "answer": str(i)} for i in range(count)]
        write_parquet(folder / "data" / f"{split}-00000-of-00001.parquet", rows)


GOOD = '{"problem": "1+1", "answer": "2"}\n'
TOKENIZER = byte_tokenizer()


def write(folder: Path, content: str | bytes, name: str = "rows.jsonl") -> str:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def load(source: object, tokenizer=TOKENIZER, seed: int = 0, vision=None, **changes: object) -> PromptData:
    prompt_format = PromptFormat(**{"max_prompt_tokens": 10**6} | changes)
    return PromptData.load(str(source), prompt_format, tokenizer, seed, vision)


def load_rows(folder: Path, rows: list[dict[str, object]], **changes: object) -> PromptData:
    return load(write_lines(folder / "rows.jsonl", rows), **changes)


def load_values(folder: Path, column: str, values: list[object], **changes: object) -> PromptData:
    return load_rows(folder, [{"problem": "q", "answer": "1"} | {column: value} for value in values], **changes)


def numbered(folder: Path, count: int, name: str = "rows", **changes: object) -> PromptData:
    """`count` rows whose problem is `<name> <i>` and whose answer is `<i> of <name>`."""
    rows = [{"problem": f"{name} {i}", "answer": f"{i} of {name}"} for i in range(count)]
    return load(write_lines(folder / f"{name}.jsonl", rows), **changes)


def prompt_of(row: Row) -> str:
    """The user's last text; images show as `<image>`."""
    content = row.messages[-1]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", IMAGE) for part in content)


def texts(loaded: PromptData) -> list[str]:
    return [row.text for row in loaded.rows]
