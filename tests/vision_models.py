"""What the tests of images share: a tiny random Qwen2.5-VL, whose weights make a wrong image show, and prompts."""

from __future__ import annotations

import io
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from batch import Batch, Rollout, pack
from data import PromptData
from data_files import write_parquet
from flags import PromptFormat
from helpers import flags, make_rollout
from model.vision import load_processor
from policy import add_images
from smoke_inputs import SETUPS, make_model

# (width, height) of the images of five prompts.
IMAGE_SIZES = [[(56, 84)], [], [(90, 60), (56, 56), (56, 56)], [], [(120, 40)]]
MAX_PIXELS = 56 * 84  # so that some are scaled down


def make_vision_model(folder: Path) -> Path:
    """Model, processor and `train.parquet` with the five prompts."""
    torch.manual_seed(0)
    make_model(SETUPS["qwen25vl72b_lora_8xa100"], folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.15 if "visual" not in name else 0.08)
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    rows = []
    for number, sizes in enumerate(IMAGE_SIZES):
        images = [{"bytes": noise(rng, *size), "path": None} for size in sizes]
        rows.append({"problem": "<image>" * len(images) + f"{number}+1?", "answer": str(number + 1), "images": images})
    write_parquet(folder / "train.parquet", rows)
    return folder


def noise(rng: np.random.Generator, width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(out, "PNG")
    return out.getvalue()


def vision_flags(folder: Path, **changes: object) -> Namespace:
    limits = {"max_prompt_tokens": 40, "max_completion_tokens": 8, "max_grad_norm": 1e9, "kl_coef": 0.1}
    limits |= {"micro_batch_tokens": 60, "model": folder}
    images = {"image_column": "images", "max_pixels": MAX_PIXELS}
    return flags(**(limits | images | changes))


def vision_data(args: Namespace, source: Path | None = None) -> PromptData:
    """The five prompts of `make_vision_model`, or those of the source."""
    prompt_format, path = PromptFormat.from_flags(args), str(source or Path(args.model) / "train.parquet")
    tokenizer, vision = load_processor(args.model, AutoConfig.from_pretrained(args.model), prompt_format)
    return PromptData.load(path, prompt_format, tokenizer, 0, vision)


def pack_with_images(rollout: Rollout, indices: list[int], group_size: int = 1) -> Batch:
    return add_images(pack(rollout, indices, group_size), [row.images for row in rollout.rows])


def vision_rollout(data: PromptData, seed: int = 0) -> Rollout:
    """A random completion of each prompt, with random advantages. The first holds a sampled image token."""
    rollout = replace(make_rollout([8, 5, 7, 3, 6], seed=seed), rows=data.rows)
    rollout.completions[0][3] = data.rows[0].images.vision.image_token
    return rollout
