"""Images: tokens, positions and pixel values in trainer and engine, a rank without any, checkpoints, mistakes."""

import io
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin

import checkpoint
from algorithm import algorithm_of
from batch import Rollout, Row
from data import PromptData
from engine.options import EngineDemand
from extras.models.vision import decode
from flags import Sampling
from fsdp_utils import World, gather_from_ranks
from gate.checks import check_flags
from gate.inputs import Inputs
from helpers import made_up
from helpers.distributed import Result, findings, gaps, on_ranks, recorded, sharded, start_engine, weights_of
from helpers.made_up import ALONE, load_policy, pack_with_images, policy_of, vision_data, vision_flags, vision_rollout
from helpers.runs import torchrun
from packing import shared_positions
from policy import Policy
from update import add_logprobs, with_advantages

WITH_IMAGES, WITHOUT = [[0], [2, 4]], [[1], [3]]  # micro-batches of two ranks: the second has no image at all


def vision_gradient(policy: Policy, args: Namespace, world: World, micros: list[list[int]]) -> Result:
    """Of an update on these micro-batches, after a pass of the reference."""
    rollout = made_up.vision_rollout(made_up.vision_data(args))
    batches = [replace(made_up.pack_with_images(rollout, x), update_tokens=29) for x in micros]
    update = [with_advantages(rollout, batch) for batch in batches]
    (update,) = add_logprobs([update], policy, policy, algorithm_of(args))
    return recorded(policy, update, args, world)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return made_up.make_vision_model(tmp_path_factory.mktemp("vision"))


def images(world: World, path: str, exported: str) -> dict[str, object]:
    """Gradients, and gaps between sampler and trainer. Also exports the policy with LoRA."""
    found = {"gradients": {}}
    for name, changes in (("all weights", {}), ("LoRA", {"lora_rank": 4, "gradient_checkpointing": True})):
        args = made_up.vision_flags(path, **changes)
        policy, micros = sharded(policy_of(args), world), WITHOUT if world.trainer_rank else WITH_IMAGES
        found["gradients"][name] = vision_gradient(policy, args, world, micros)

    data = made_up.vision_data(args)
    vision = data.rows[0].images.vision
    demand = EngineDemand(images=vision.engine_options(3))
    engine = start_engine(path, world, demand, dtype="float32", max_model_len=48)
    engine.sync(policy.full_weights())
    rows = [data.rows[i] for i in (0, 2, 4, 1, 3)]  # the second engine's share is two texts
    rollout = engine.sample(rows, Sampling(2, 0.7, 8), (1, 1))

    def largest_gaps(rows: list[Row]) -> list[float]:
        """The largest gap in each completion, if the trainer sees these rows."""
        seen = replace(rollout, rows=rows)
        return [gaps(policy, seen.select(np.array([b]))).max().item() for b in range(len(rows))]

    found["gaps"] = largest_gaps(rollout.rows)
    three = rows[1].images
    # An image of the same size: only pixels differ.
    swapped = replace(rows[1], images=replace(three, encoded=(three.encoded[0], three.encoded[2], three.encoded[1])))
    found["gaps, images swapped"] = largest_gaps([swapped if row is rows[1] else row for row in rollout.rows])
    found["prompts"] = [row.ids for row in rollout.rows]
    found["on all ranks the same"] = len(set(map(tuple, gather_from_ranks(rollout.texts)))) == 1
    weights = checkpoint.gather_weights(policy, world)
    if world.is_main:
        checkpoint.export(policy, weights, checkpoint.files_of(str(path), policy.dtype), Path(exported))
    found["merged"] = weights_of(policy)
    found |= findings(engine)
    engine.close()
    return found


@pytest.fixture(scope="module")
def found(model, tmp_path_factory) -> dict:
    exported = tmp_path_factory.mktemp("found") / "exported"
    return on_ranks(2, images, model, exported) | {"exported": exported}


def reference_logprobs(
    hugging_face: nn.Module, processor: ProcessorMixin, data: PromptData, rollout: Rollout, b: int
) -> torch.Tensor:
    """Completion b by transformers alone: its processor makes tokens and pixels, its model the positions."""
    images = [decode(image) for image in data.rows[b].encoded_images]
    size = data.rows[0].images.vision.size
    text = processor.apply_chat_template(data.rows[b].messages, add_generation_prompt=True)
    pictures = {"images": images, "images_kwargs": {"size": size}} if images else {}
    inputs = processor(text=[text], return_tensors="pt", **pictures)
    assert inputs["input_ids"][0].tolist() == rollout.rows[b].ids.tolist()
    completion = torch.from_numpy(rollout.completions[b]).long()[None]
    ids = torch.cat([inputs["input_ids"], completion], dim=1)
    kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(completion)], dim=1)
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    logprobs = (hugging_face(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0] / 0.7).log_softmax(-1)
    return logprobs[:-1].gather(-1, ids[0, 1:, None])[-completion.shape[1] :, 0]


def assert_near(found: torch.Tensor, wanted: torch.Tensor, share_of_largest: float) -> None:
    tolerance = {"atol": share_of_largest * wanted.abs().max().item(), "rtol": 10 * share_of_largest}
    torch.testing.assert_close(found, wanted, **tolerance)


def test_packed_logprobs_and_gradients_are_those_of_the_unpacked_model(model):
    data = vision_data(vision_flags(model))
    rollout = vision_rollout(data)
    rollout.completions[0][3] = 7  # transformers would take a sampled image token for an image
    hugging_face = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model)
    policy, order = load_policy(model), [3, 0, 2, 1, 4]
    wanted = torch.cat([reference_logprobs(hugging_face, processor, data, rollout, b) for b in order])
    batch = pack_with_images(rollout, order)
    found = policy(batch, 0.7)[0][batch.loss_mask_N]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    wanted.square().sum().backward()
    found.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in hugging_face.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        if ".visual." in name:
            assert parameter.grad is None and not parameter.requires_grad
        else:
            assert_near(parameter.grad, gradients[name], 1e-4)


def test_a_shared_image_prompt_equals_its_completions_alone(model):
    """fp32, 1e-5 of the largest number. One image, several, none; the tower sees a shared prompt's pixels once."""
    data = vision_data(vision_flags(model))
    rollout = vision_rollout(data).select(np.array([0, 0, 2, 2, 4, 4]))
    rollout.completions[1] = rollout.completions[1][::-1]
    for field in (rollout.completions, rollout.is_sampled, rollout.rollout_logprobs):
        field[1] = field[1][:6]
    policy, found = load_policy(model), []
    for group_size in (1, 2):
        batch = pack_with_images(rollout, list(range(6)), group_size)
        logprobs = policy(batch, 0.7)[0][batch.loss_mask_N]
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        numbers = [logprobs.detach(), *torch.autograd.grad(logprobs.square().sum(), trained)]
        found.append((numbers, len(batch.labels_N), len(batch.parts[0].pixels)))
    (alone, positions, images), (shared, fewer_positions, fewer_images) = found
    assert images == 2 * fewer_images > 0
    assert positions - fewer_positions == sum(len(rollout.rows[b].ids) - 1 for b in (0, 2, 4))
    for a, b in zip(alone, shared, strict=True):
        assert_near(b, a, 1e-5)


def test_a_prompt_that_ends_with_an_image_is_not_shared(model):
    """Its last token would be in each completion's own positions, and the image's other tokens in the shared ones."""
    data = vision_data(vision_flags(model))
    rollout = vision_rollout(data).select(np.array([0, 0]))
    images, token = rollout.rows[0].images, rollout.rows[0].images.vision.image_token
    last, last_of_template = (int(np.flatnonzero(x == token)[-1]) for x in (images.prompt, images.template_ids))
    images = replace(images, template_ids=images.template_ids[: last_of_template + 1])
    assert shared_positions(rollout, 0) == len(rollout.rows[0].ids) - 1
    cut = replace(rollout, rows=[replace(row, ids=row.ids[: last + 1], images=images) for row in rollout.rows])
    assert shared_positions(cut, 0) == 0
    assert pack_with_images(cut, [0, 1], 2).lengths_S == pack_with_images(cut, [0, 1]).lengths_S


def test_engine_and_trainer_agree_on_one_image_several_and_none(found):
    """fp32: probabilities differ by rounding; with two images of a prompt exchanged by far more."""
    assert max(found["gaps"]) < 2e-5
    assert found["gaps"][:2] == found["gaps, images swapped"][:2] and min(found["gaps, images swapped"][2:4]) > 0.01
    lengths = [24, 24, 36, 36, 22, 22, 16, 16, 16, 16]  # 6; 6 + 4 + 4; 4 image tokens
    assert [len(prompt) for prompt in found["prompts"]] == lengths
    assert found["on all ranks the same"]
    assert found["hidden"] == [] and len(found["planted"]) == 1, "what an engine on CUDA would lose in its sleep"


@pytest.mark.parametrize(("name", "changes"), [("all weights", {}), ("LoRA", {"lora_rank": 4})])
def test_a_rank_without_images_keeps_up_with_the_same_gradient(name, changes, model, found):
    args = vision_flags(model, **changes)
    metrics, wanted = vision_gradient(policy_of(args), args, ALONE, WITH_IMAGES + WITHOUT)
    sharded_metrics, gradients = found["gradients"][name]
    for each in ("policy/loss", "optim/grad_norm"):
        assert sharded_metrics[each] == pytest.approx(metrics[each], rel=1e-4)
    assert gradients.keys() == wanted.keys() and not any(".visual." in key for key in wanted)
    for key, value in gradients.items():
        assert_near(value, wanted[key], 1e-4)


def test_an_exported_vision_policy_loads_in_both_libraries(model, found, tmp_path):
    exported = AutoModelForImageTextToText.from_pretrained(found["exported"], dtype=torch.float32)
    torch.testing.assert_close(dict(exported.named_parameters()), found["merged"], atol=0, rtol=0)
    flags = {
        "model": found["exported"], "data": model / "train.parquet", "out_dir": tmp_path / "out", "reward": "exact",
        "image_column": "images", "max_pixels": 56 * 84, "max_prompt_tokens": 40, "max_completion_tokens": 4,
    }  # fmt: skip
    torchrun(1, "evaluate.py", *made_up.command_line(flags))
    assert json.loads((tmp_path / "out" / "results.json").read_text())["sets"]["train"]["problems"] == 5


def test_a_sampled_image_token_is_text_in_the_position_ids(model):
    data = vision_data(vision_flags(model))
    rollout = vision_rollout(data)
    batch = pack_with_images(rollout, [0, 1])
    token = data.rows[0].images.vision.image_token
    assert int((batch.input_ids_N == token).sum()) == 7 and len(batch.parts[0].places_I) == 6
    length, start = len(data.rows[0].ids) + 7, data.rows[0].ids.tolist().index(token)
    columns = [[start] * 6, [start + i // 2 for i in range(6)], [start, start + 1] * 3]
    assert batch.position_ids_N[:, start : start + 6].tolist() == columns
    assert batch.position_ids_N[:, start + 6].tolist() == [start + 3] * 3, "an image takes as many as its longer side"
    assert batch.position_ids_N[:, length:].tolist() == [list(range(len(data.rows[1].ids) + 4))] * 3
    texts = pack_with_images(rollout, [1, 3])
    assert texts.position_ids_N.dim() == 1 and texts.parts == ()


def test_pixel_values_are_shared_and_stay_on_the_host(model):
    data = vision_data(vision_flags(model))
    rollout = vision_rollout(data)
    batches = pack_with_images(rollout, [0]), pack_with_images(rollout, [0, 1]).to(torch.device("meta"))
    first, second = (batch.parts[0].pixels[0] for batch in batches)
    assert first is second and first.device.type == "cpu" and first.shape == (24, 3 * 2 * 14 * 14)
    kept = data.rows[0].images.vision.kept
    assert len(kept) == 1
    del batches, first, second
    assert len(kept) == 0


@pytest.mark.parametrize("changes", [{"lora_rank": 4, "share_prompts": True, "group_size": 2}, {}])
def test_the_passes_with_images_never_wait_for_the_device(changes, model):
    args = vision_flags(model, micro_batch_tokens=80, **changes)
    rollout = vision_rollout(vision_data(args)).select(np.array([0, 0, 2, 2, 4, 4, 1, 1]))
    assert made_up.run_passes(policy_of(args), args, rollout) > 1


def test_images_of_the_datasets_library_are_read_and_counted(model, tmp_path):
    wide, large = Image.new("RGB", (600, 2)), Image.new("RGB", (84, 56))
    problems = ["one?", "wide?", "large?", "<|image_pad|>?", "text?"]
    rows = {"problem": problems, "answer": ["1"] * 5, "image": [Image.new("RGB", (56, 56)), wide, large, None, None]}
    kinds = dict.fromkeys(("problem", "answer"), datasets.Value("string")) | {"image": datasets.Image()}
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).save_to_disk(tmp_path / "pil")
    data = vision_data(vision_flags(model, image_column="image"), tmp_path / "pil")
    assert [made_up.prompt_of(row) for row in data.rows] == ["<image>one?", "<image>large?", "text?"]
    assert [reason for _, reason in data.excluded] == [
        "absolute aspect ratio must be smaller than 200, got 300.0",
        "the prompt has 1 image tokens for 0 images: its text must not hold one",
    ]
    assert [row.images and row.images.is_image().sum() for row in data.rows] == [4, 6, None]
    mixed = PromptData.mix([data, data])
    assert [row.images for row in mixed.rows] == [row.images for row in data.rows] * 2
    args = vision_flags(model, image_column="image", max_prompt_tokens=len(data.rows[0].ids))
    shorter = vision_data(args, tmp_path / "pil")
    assert [made_up.prompt_of(row) for row in shorter.rows] == ["<image>one?", "text?"] and shorter.num_too_long == 1


def test_an_image_is_upright_rgb_of_8_bits_and_white_where_transparent():
    def encoded(image: Image.Image, **options: object) -> bytes:
        out = io.BytesIO()
        image.save(out, "PNG", **options)
        return out.getvalue()

    image, exif = Image.new("RGB", (8, 4)), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decode(encoded(image, exif=exif)).size == (4, 8)
    palette = Image.new("P", (2, 2))
    palette.putpalette([255, 0, 0] * 256)
    clear = [Image.new("RGBA", (2, 2), (255, 0, 0, 0)), Image.new("LA", (2, 2), (0, 0)), palette]
    for image in clear:
        options = {"transparency": 0} if image.mode == "P" else {}
        assert decode(encoded(image, **options)).getpixel((0, 0)) == (255, 255, 255), image.mode
    assert decode(encoded(palette)).getpixel((0, 0)) == (255, 0, 0)
    assert decode(encoded(Image.new("1", (2, 2), 1))).getpixel((0, 0)) == (255, 255, 255)
    for kind in ("u2", "i4", "f4"):
        Image.fromarray(np.ones((1, 3), dtype=kind)).save(out := io.BytesIO(), "TIFF")
        with pytest.raises(ValueError, match="more than 8 bits; save it with 8"):
            decode(out.getvalue())


@pytest.mark.parametrize(("changes", "words"), [
    ({"max_pixels": 3000}, "--max_pixels 3000.*at least 3136"),
    ({"max_completion_tokens": 1000, "micro_batch_tokens": 2000}, "_tokens 40.*beyond the context.*1024 tokens.*by 16"),
])  # fmt: skip
def test_a_mistake_with_images_is_told_before_anything_is_loaded(changes, words, model):
    args = vision_flags(model, train_data=model / "train.parquet", prompts_per_step=4, reward="exact", **changes)
    with pytest.raises(ValueError, match=words):
        check_flags(args)
        Inputs.load(args)
