"""--image_column: images of Qwen2.5-VL, as parts of rows (`PromptImages`) and of batches (`BatchImages`).

The processor scales an image to multiples of 28 pixels, at most --max_pixels in all, and cuts it
into patches of 14 x 14. Four patches become one token. The chat template writes one `<|image_pad|>`
an image; our prompts repeat it for each token, so length limits, packing and the token cap count
them. The engine repeats it by itself, and `rollout.py` compares its prompt with ours. Images are
kept encoded; pixel values are computed for the micro-batches of a step.
"""

from __future__ import annotations

import base64
import copy
import io
import os
import re
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto import AutoProcessor
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from batch import IMAGE, Batch, Messages, Rollout
from data import UnusableRow, look_up
from flags import PromptFormat
from model.weights import load_tokenizer, tower_of
from runtime.sources import Record

KNOWN = ("qwen2_5_vl",)  # model types
# What PIL raises for damaged files, found by fuzzing.
DAMAGED = (OSError, SyntaxError, TypeError, ValueError, EOFError, Image.DecompressionBombError, struct.error)


@dataclass(frozen=True, eq=False, kw_only=True)
class Vision:
    """The processor of a vision-language model and the limits under which it is called."""

    processor: ProcessorMixin
    image_token: int  # id of `<|image_pad|>`
    patch_size: int  # in pixels
    merge_size: int  # patches along each side of a token
    # The limits as the processor wants them, here and in vLLM: numbers of pixels, whatever the names say.
    size: dict[str, int]  # "shortest_edge" and "longest_edge"
    window_size: int  # in pixels: most layers of the tower attend within squares of this side
    # Encoded image -> pixel values, while a micro-batch holds them.
    kept: WeakValueDictionary[bytes, Tensor] = field(default_factory=WeakValueDictionary)

    def process(self, encoded: bytes, grid: tuple[int, int, int]) -> Tensor:
        """The pixel values of one image, which `_grid` has said to have this grid."""
        output = self.processor.image_processor(decode(encoded), size=self.size, return_tensors="pt")
        assert output["image_grid_thw"].tolist() == [list(grid)], "the processor scales images as `_grid` says"
        pixels = output["pixel_values"]
        return pixels.pin_memory() if torch.cuda.is_available() else pixels

    def find_images(self, encoded: tuple[bytes, ...], template_ids: np.ndarray) -> PromptImages:
        """The images of a prompt. Raises ValueError if one cannot be scaled, or if the text holds the image token."""
        count = int((template_ids == self.image_token).sum())
        if count != len(encoded):
            raise ValueError(
                f"the prompt has {count} image tokens for {len(encoded)} images: its text must not hold one"
            )
        return PromptImages(encoded, tuple(_grid(self, image) for image in encoded), template_ids, self)

    def engine_options(self, most_images: int) -> dict[str, object]:
        """The arguments of `vllm.LLM` for prompts of at most so many images."""
        return {
            "limit_mm_per_prompt": {"image": most_images, "video": 0},
            "mm_processor_kwargs": {"size": self.size},
            "mm_device_do_normalize": False,  # mean and std would be buffers of the model: random, as the weights
            "mm_processor_cache_gb": 1,  # a prompt's completions follow each other; the default is 4 in each rank
        }


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt."""

    encoded: tuple[bytes, ...]
    grids: tuple[tuple[int, int, int], ...]  # (1, height, width) of each in patches
    template_ids: np.ndarray  # int32, with one token for each image, as the chat template writes it and vLLM wants it
    vision: Vision

    @property
    def prompt(self) -> np.ndarray:
        """The prompt as the model sees it: as many tokens for an image as it has embeddings."""
        counts = np.ones(len(self.template_ids), dtype=np.int64)
        patches_per_token = self.vision.merge_size**2
        num_tokens = [height * width // patches_per_token for _, height, width in self.grids]
        counts[self.template_ids == self.vision.image_token] = num_tokens
        return np.repeat(self.template_ids, counts)

    def decoded(self) -> list[Image.Image]:
        """The images, for the engine."""
        return [decode(image) for image in self.encoded]

    def is_image(self) -> np.ndarray:
        """bool, one per token of the prompt. A completion may hold the same token, sampled as text: it is no image."""
        return self.prompt == self.vision.image_token

    def positions(self, length: int) -> np.ndarray:
        """Shape [3, length], int64: time, row, column of each token of prompt and completion, for the rotary embedding.

        Text counts on in all three. The tokens of an image share the time at which it starts and
        differ in row and column; it takes as many positions as its longer side has tokens (arXiv
        2409.12191, section 2.1).
        """
        positions = np.tile(np.arange(length), (3, 1))
        is_image, end = self.is_image(), 0
        for _, height, width in self.grids:
            rows, columns = height // self.vision.merge_size, width // self.vision.merge_size
            start = end + int(np.argmax(is_image[end:]))  # the next image token, behind the image before
            end = start + rows * columns
            positions[:, start:end] = positions[0, start] + np.indices((1, rows, columns)).reshape(3, -1)
            positions[:, end:] += max(rows, columns) - rows * columns
        return positions

    def pixels(self) -> list[Tensor]:
        """The values of each image [patches, 3 x 2 x patch_size^2], float32, on the host; micro-batches share them.

        With a GPU they are in page-locked memory: the host would wait for the copy of any other.
        """
        kept = self.vision.kept
        pixels_I = []
        for encoded, grid in zip(self.encoded, self.grids, strict=True):
            pixels = kept.get(encoded)
            if pixels is None:
                pixels = kept[encoded] = self.vision.process(encoded, grid)
            pixels_I.append(pixels)
        return pixels_I


class BatchImages:
    """The images of a micro-batch, and where they go: made once, for all passes over it.

    No dataclass: FSDP casts all tensors that it finds in one, in each pass, and the host would do
    it for pixel values.
    """

    is_for_reference = True

    def __init__(self, images: list[PromptImages], places_I: Tensor) -> None:
        """`places_I`: int64, the packed position of each image token."""
        vision = images[0].vision
        merge, window, patch = vision.merge_size, vision.window_size, vision.patch_size
        self.pixels = [pixels for prompt in images for pixels in prompt.pixels()]  # one tensor an image, on the host
        self.grids = torch.tensor([grid for prompt in images for grid in prompt.grids])
        self.places_I = places_I
        # The tower would make these in each pass. It reads lengths, which stay on the host.
        window_index, window_lengths = get_vision_window_index(self.grids, merge, window, patch)
        self.lengths = {"cu_seqlens": get_vision_cu_seqlens(self.grids), "cu_window_seqlens": window_lengths}
        positions = get_vision_position_ids(self.grids, merge)
        self.orders = {"position_ids": positions, "window_index": window_index}  # the patches'

    def to(self, device: torch.device) -> BatchImages:
        """The images with their orders and places on the device."""
        moved = copy.copy(self)
        moved.places_I = self.places_I.to(device, non_blocking=True)
        moved.orders = {name: order.to(device, non_blocking=True) for name, order in self.orders.items()}
        return moved

    def inputs(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor | None]:
        """Embeddings [1, N, D] of the tokens, and of the images in the place of theirs.

        The tower is frozen, and its parameters are gathered with the rest of the root unit before this
        runs: a rank without images has no collective to miss.
        """
        embedded_ND, tower = model.get_input_embeddings()(batch.input_ids_N), tower_of(model)
        device = self.places_I.device
        pixels = torch.cat([values.to(device, tower.dtype, non_blocking=True) for values in self.pixels])
        with torch.no_grad():
            embedded_ID = tower(pixels, grid_thw=self.grids, **self.lengths, **self.orders).pooler_output
        embedded_ND = embedded_ND.index_copy(0, self.places_I, embedded_ID.to(embedded_ND.dtype))
        return {"input_ids": None, "inputs_embeds": embedded_ND[None]}


def add_images(batch: Batch, rollout: Rollout) -> Batch:
    """The batch with the images of its sequences, their places, and positions in three rows."""
    segments = batch.segments_S
    images_S = [None if segment.index is None else rollout.rows[segment.index].images for segment in segments]
    if not any(images_S):
        return batch
    positions_S, is_image_S, prompts = [], [], []
    for segment, images in zip(segments, images_S, strict=True):
        positions, is_image = np.tile(np.arange(segment.stop), (3, 1)), np.zeros(segment.stop, dtype=bool)
        if images is not None:
            positions, flags = images.positions(segment.stop), images.is_image()
            is_image[: len(flags)] = flags
            if segment.prefix is None:  # sequences that share a prompt have its images once
                prompts.append(images)
        positions_S.append(positions[:, segment.start :])
        is_image_S.append(is_image[segment.start :])
    places_I = torch.from_numpy(np.flatnonzero(np.concatenate(is_image_S)))
    position_ids_N = torch.from_numpy(np.concatenate(positions_S, axis=1))
    return replace(batch, position_ids_N=position_ids_N, parts=(*batch.parts, BatchImages(prompts, places_I)))


def check_images(path: str, config: PretrainedConfig, column: str | None) -> None:
    """Raises ValueError if images are not implemented for the model. `column`: --image_column; None: it has a tower."""
    if config.model_type not in KNOWN:
        asked_by = "its vision tower" if column is None else f"--image_column {column!r}"
        raise ValueError(
            f"{asked_by}: --model {path} is of the type {config.model_type!r}; images are implemented for "
            f"{', '.join(KNOWN)}. Use such a model, or one without images."
        )


def load_processor(
    path: str, config: PretrainedConfig, prompt_format: PromptFormat
) -> tuple[PreTrainedTokenizerBase, Vision]:
    """The tokenizer, and what reads images. Raises ValueError for flags that do not suit the model, or OSError."""
    check_images(path, config, prompt_format.image_column)
    processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    processor.tokenizer = tokenizer = load_tokenizer(path)
    tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
    images, max_pixels = processor.image_processor, prompt_format.max_pixels
    smallest = images.size["shortest_edge"]
    if max_pixels is not None and max_pixels < smallest:
        raise ValueError(f"--max_pixels {max_pixels}: the processor of {path} scales images to at least {smallest}.")
    vision = Vision(
        processor=processor,
        image_token=processor.image_token_id,
        patch_size=images.patch_size,
        merge_size=images.merge_size,
        size={"shortest_edge": smallest, "longest_edge": max_pixels or images.size["longest_edge"]},
        window_size=config.vision_config.window_size,
    )
    return tokenizer, vision


def encoded_images(value: object, folder: Path) -> tuple[bytes, ...]:
    """The images of a value: null, or one or a list of path, bytes, base64, {"bytes", "path"}.

    Raises ValueError, also for a file that is cut off: it would end the run when its turn comes.
    """
    if value is None:
        return ()
    images = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            item = item.get("bytes") or item.get("path")
        try:
            if isinstance(item, str):
                item = read_image(item, folder)
            if not isinstance(item, bytes):
                raise TypeError(f"{type(item).__name__}; needed is a file, bytes, base64 or a data URI")
            decode(item)
        except DAMAGED as error:
            raise ValueError(str(error)) from None
        images.append(item)
    return tuple(images)


def read_image(text: str, folder: Path) -> bytes:
    """The encoded image of a file in the folder, a data URI or a text in base64. Raises OSError or ValueError."""
    if os.path.isfile(folder / text):  # noqa: PTH113  Path.is_file() raises for a name that is too long
        return (folder / text).read_bytes()
    packed = re.sub(r"^data:[^,]*,|\s", "", text)
    if not re.fullmatch(r"[A-Za-z0-9+/]{40,}=*", packed):
        raise ValueError(f"{text:.60} is neither a file in {folder} nor base64; URLs are not fetched")
    return base64.b64decode(packed + "==")


def decode(encoded: bytes) -> Image.Image:
    """The image in RGB, upright as its EXIF data say, transparent parts white. Raises `DAMAGED`."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    if image.mode[0] in "IF":  # `convert` would cut them off at 255
        raise ValueError("its grey values have more than 8 bits; save it with 8")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _grid(vision: Vision, encoded: bytes) -> tuple[int, int, int]:
    """(1, height, width) in patches of the scaled image, by its header alone."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    with Image.open(io.BytesIO(encoded)) as image:
        width, height = image.size
        if image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8):  # `decode` turns it by a quarter
            width, height = height, width
    patch = vision.patch_size
    height, width = smart_resize(height, width, patch * vision.merge_size, *vision.size.values())
    return 1, height // patch, width // patch


def take_images(
    record: Record, messages: Messages, prompt_format: PromptFormat
) -> tuple[tuple[bytes, ...], dict[str, object]]:
    """The images of a record, whose places in the messages are marked, and its columns without them."""
    column = prompt_format.image_column
    value = look_up(record, column, "--image_column")
    try:
        encoded = encoded_images(value, record.folder)
    except ValueError as error:
        raise UnusableRow(f"column {column!r} cannot be read as an image ({str(error)[:200]})") from None
    place_images(messages, len(encoded))
    return encoded, {name: value for name, value in record.columns.items() if name != column}


def place_images(messages: Messages, num_images: int) -> None:
    """Each `<image>` in the user's texts becomes an image part. Without any, the images come first in the last text."""
    own = [message for message in messages if message["role"] == "user"]
    num_markers = sum(message["content"].count(IMAGE) for message in own)
    if num_markers not in (0, num_images):
        raise UnusableRow(f"{num_markers} {IMAGE} in the text, but {num_images or 'no'} images")
    if not num_markers:
        own[-1]["content"] = IMAGE * num_images + own[-1]["content"]  # the last message is the user's
    for message in own:
        if IMAGE in message["content"]:
            pieces = [piece for piece in re.split(f"({IMAGE})", message["content"]) if piece]
            message["content"] = [
                {"type": "image"} if piece == IMAGE else {"type": "text", "text": piece} for piece in pieces
            ]
