"""Images of a vision-language model (Qwen2.5-VL): which tokens stand for them in a prompt, at which positions, and their pixel values.

The processor scales an image to multiples of 28 pixels, at most `--max_pixels` of them in all, and cuts it into patches of 14 x 14. Four
patches become one token: in the prompt, one `<|image_pad|>` from the chat template is repeated so often. Prompts hold the repeated
tokens, so length limits, packing and the token cap count them. Engine and trainer get the same decoded image and the same sizes; the
engine repeats the token by itself, and `rollout.py` compares its prompt with ours.
Images are kept encoded; pixel values are worked out for the micro-batches of a step and go with them.
"""

from __future__ import annotations

import io
import struct
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

KNOWN = ("qwen2_5_vl",)  # model types
ORIENTATION, QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # of a photograph's EXIF data: these exchange height and width


@dataclass(frozen=True, eq=False)
class Vision:
    """The processor of a vision-language model and the limits under which it is called."""

    processor: ProcessorMixin
    image_token: int  # id of `<|image_pad|>`
    patch_size: int  # in pixels
    merge_size: int  # patches along each side of a token
    min_pixels: int
    max_pixels: int
    kept: WeakValueDictionary[bytes, Tensor] = field(
        default_factory=WeakValueDictionary
    )  # pixel values while a micro-batch holds them

    @property
    def size(self) -> dict[str, int]:
        """The limits as the processor wants them, here and in vLLM: numbers of pixels, whatever the names say."""
        return {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt."""

    encoded: tuple[bytes, ...]
    grids: tuple[tuple[int, int, int], ...]  # (1, height, width) of each in patches
    template_ids: (
        np.ndarray
    )  # int32, the prompt with one token for each image, as the chat template writes it and vLLM wants it
    vision: Vision

    @property
    def num_tokens(self) -> list[int]:
        return [height * width // self.vision.merge_size**2 for _, height, width in self.grids]

    @property
    def prompt(self) -> np.ndarray:
        """The prompt as the model sees it: as many tokens for an image as it has embeddings."""
        counts = np.ones(len(self.template_ids), dtype=np.int64)
        counts[self.template_ids == self.vision.image_token] = self.num_tokens
        return np.repeat(self.template_ids, counts)

    def is_image(self) -> np.ndarray:
        """bool, one per token of the prompt. A completion may hold the same token, sampled as text: it is no image."""
        return self.prompt == self.vision.image_token

    def positions(self, length: int) -> np.ndarray:
        """Shape [3, length], int64: time, row and column of each token of prompt and completion, for the rotary embedding.

        Text counts on in all three. The tokens of an image share the time at which it starts and differ in row and column; it takes as
        many positions as its longer side has tokens (arXiv 2409.12191, section 2.1).
        """
        pieces, position, end = [], 0, 0
        for (_, height, width), count in zip(self.grids, self.num_tokens, strict=True):
            start = end + int(np.argmax(self.is_image()[end:]))
            rows, columns = height // self.vision.merge_size, width // self.vision.merge_size
            pieces.append(position + np.tile(np.arange(start - end), (3, 1)))
            position += start - end
            pieces.append(
                position + np.stack([np.zeros(count, dtype=np.int64), *np.indices((rows, columns)).reshape(2, -1)])
            )
            position, end = position + max(rows, columns), start + count
        return np.concatenate([*pieces, position + np.tile(np.arange(length - end), (3, 1))], axis=1)

    def decoded(self) -> list[Image.Image]:
        return [decode(image) for image in self.encoded]

    def pixels(self) -> list[Tensor]:
        """Of each image [patches, 3 x 2 x patch_size^2], float32, on the host. Shared by all micro-batches that hold them meanwhile."""
        found, kept = [], self.vision.kept
        for encoded, grid in zip(self.encoded, self.grids, strict=True):
            if (pixels := kept.get(encoded)) is None:
                output = self.vision.processor.image_processor(
                    decode(encoded), size=self.vision.size, return_tensors="pt"
                )
                assert output["image_grid_thw"].tolist() == [list(grid)], "the processor scales images as `_grid` says"
                pixels = kept[encoded] = output["pixel_values"]
            found.append(pixels)
        return found


def check_images(args: Namespace, config: PretrainedConfig) -> None:
    """Raises ValueError for --image_column without a model that sees, and for --max_pixels without images or beyond the prompt."""
    if args.image_column is not None and config.model_type not in KNOWN:
        raise ValueError(
            f"--image_column {args.image_column!r}: --model {args.model} is of the type {config.model_type!r}; images are implemented for "
            f"{', '.join(KNOWN)}. Use such a model, or leave the flag out."
        )
    if args.max_pixels is None:
        return
    if args.image_column is None:
        raise ValueError(
            f"--max_pixels {args.max_pixels} has no effect without --image_column; leave it out, or name the column."
        )
    pixels_per_token = (config.vision_config.patch_size * config.vision_config.spatial_merge_size) ** 2
    if args.max_pixels < pixels_per_token:
        raise ValueError(
            f"--max_pixels {args.max_pixels}: an image has at least one token, of {pixels_per_token} pixels; use more."
        )
    _check_room(args, args.max_pixels, pixels_per_token, f"--max_pixels {args.max_pixels}")


def _check_room(args: Namespace, max_pixels: int, pixels_per_token: int, given: str) -> None:
    tokens = max_pixels // pixels_per_token
    if tokens >= args.max_prompt_tokens:
        raise ValueError(
            f"--max_prompt_tokens {args.max_prompt_tokens} cannot hold an image of {given} = {tokens} tokens and a prompt; raise the one, "
            f"or use --max_pixels {(args.max_prompt_tokens - 1) * pixels_per_token // 2} or so."
        )


def load_processor(args: Namespace, config: PretrainedConfig | None) -> tuple[PreTrainedTokenizerBase, Vision | None]:
    """The tokenizer, and what reads images: None if the model sees none, or if there is no model but a tokenizer to look at data with.

    Raises ValueError for image flags that do not suit the model, and if it has no tokenizer or processor.
    """
    sees = config is not None and config.model_type in KNOWN
    if config is not None:
        check_images(args, config)
    try:
        processor = (AutoProcessor if sees else AutoTokenizer).from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model {args.model!r} has no {'processor' if sees else 'tokenizer'} that could be read: {error}"
        ) from None
    if not sees:
        return processor, None
    tokenizer, images = processor.tokenizer, processor.image_processor
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    smallest, largest = images.size["shortest_edge"], images.size["longest_edge"]
    pixels_per_token = (images.patch_size * images.merge_size) ** 2
    if args.max_pixels is not None and args.max_pixels < max(smallest, pixels_per_token):
        raise ValueError(
            f"--max_pixels {args.max_pixels}: the processor of --model {args.model} scales images to at least {smallest}."
        )
    if args.image_column is not None and args.max_pixels is None:
        _check_room(args, largest, pixels_per_token, f"{largest} pixels, the processor's own limit,")
    limits = (smallest, args.max_pixels or largest)
    return tokenizer, Vision(processor, processor.image_token_id, images.patch_size, images.merge_size, *limits)


def find_images(vision: Vision, encoded: tuple[bytes, ...], template_ids: np.ndarray) -> PromptImages:
    """The images of a prompt with their sizes. Raises ValueError if one cannot be scaled, or if the text holds the image token itself."""
    num_tokens = int((template_ids == vision.image_token).sum())
    if num_tokens != len(encoded):
        raise ValueError(
            f"the prompt has {num_tokens} image tokens for {len(encoded)} images: its text must not hold one"
        )
    return PromptImages(encoded, tuple(_grid(vision, image) for image in encoded), template_ids, vision)


def most_images(images: Iterable[PromptImages | None]) -> int:
    """How many images a prompt has at most."""
    return max((len(each.encoded) for each in images if each is not None), default=0)


class UnreadableImage(ValueError):
    """A value is no image."""


def encoded_images(value: object, folder: Path) -> tuple[bytes, ...]:
    """Of null, or one or a list of: path, bytes, {"bytes": ..., "path": ...} as in parquet files. Raises UnreadableImage."""
    images = []
    for item in value if isinstance(value, list) else [] if value is None else [value]:
        item = (item.get("bytes") or item.get("path")) if isinstance(item, dict) else item
        try:
            if not isinstance(item, (bytes, str)):
                raise TypeError(f"{type(item).__name__} is neither a path nor bytes")
            images.append(item if isinstance(item, bytes) else (folder / item).read_bytes())
            decode(images[-1])  # whole: a file that is cut off would end the run when its turn comes
        except (
            OSError,
            SyntaxError,
            TypeError,
            ValueError,
            EOFError,
            Image.DecompressionBombError,
            struct.error,
        ) as error:  # by fuzzing PIL
            raise UnreadableImage(str(error)) from None
    return tuple(images)


def decode(encoded: bytes) -> Image.Image:
    """The image in RGB, upright as its EXIF data say, transparent parts white. Raises what PIL raises for files that are none."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _grid(vision: Vision, encoded: bytes) -> tuple[int, int, int]:
    """(1, height, width) in patches of the scaled image, by its header alone."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    with Image.open(io.BytesIO(encoded)) as image:
        width, height = image.size
        if image.getexif().get(ORIENTATION) in QUARTER_TURNS:
            width, height = height, width
    patch = vision.patch_size
    height, width = smart_resize(height, width, patch * vision.merge_size, vision.min_pixels, vision.max_pixels)
    return 1, height // patch, width // patch
