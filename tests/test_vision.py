"""Images: tokens, positions and pixel values in trainer and engine, a step in which a rank has none, checkpoints, mistakes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from batch import Rollout, pack
from policy import load_policy
from vision import decode
from vision_models import make_vision_model, vision_data, vision_flags, vision_rollout


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision"))


def unpacked_logprobs(path: Path, rollout: Rollout, rows: list, b: int, temperature: float) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model as it comes from transformers, with its own processor, on one conversation."""


def reference_logprobs(hugging_face, processor, data, rollout: Rollout, b: int, temperature: float) -> torch.Tensor:
    """Of completion b by transformers alone: its processor makes tokens and pixels of the conversation, its model the positions."""
    images = [decode(image) for image in data.rows[b].images]
    size = {"longest_edge": data.images[0].vision.max_pixels, "shortest_edge": 56 * 56}
    text = processor.apply_chat_template(data.rows[b].messages, add_generation_prompt=True)
    inputs = processor(text=[text], images=images or None, return_tensors="pt", **({"images_kwargs": {"size": size}} if images else {}))
    assert inputs["input_ids"][0].tolist() == rollout.prompts[b].tolist()
    completion = torch.from_numpy(rollout.completions[b]).long()[None]
    ids = torch.cat([inputs["input_ids"], completion], dim=1)
    kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(completion)], dim=1)
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    logprobs = (hugging_face(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0] / temperature).log_softmax(-1)
    return logprobs[:-1].gather(-1, ids[0, 1:, None])[-completion.shape[1] :, 0]


def test_packed_logprobs_and_gradients_are_those_of_the_unpacked_model(model):
    data = vision_data(vision_flags(model))
    rollout = vision_rollout(data)
    rollout.completions[0][3] = 7  # transformers would take a sampled image token for an image
    hugging_face = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(model)
    wanted = [reference_logprobs(hugging_face, processor, data, rollout, b, 0.7) for b in range(5)]
    policy = load_policy(str(model), torch.float32)
    batch = pack(rollout, [3, 0, 2, 1, 4])
    logprobs_N, _ = policy(batch, 0.7)
    found = logprobs_N[batch.loss_mask_N].split([len(rollout.completions[b]) for b in batch.indices_S])
    for b, logprobs in zip(batch.indices_S, found, strict=True):
        torch.testing.assert_close(logprobs, wanted[b], atol=1e-4, rtol=1e-4)
    torch.cat(wanted).square().sum().backward()
    logprobs_N.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in hugging_face.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        if ".visual." in name:
            assert parameter.grad is None and not parameter.requires_grad
        else:
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-4 * gradients[name].abs().max().item(), rtol=1e-3)
