"""The parts of `check_gpu.py` that touch a GPU: each runs in a process of its own, which leaves nothing on it.

python scripts/check_gpu_parts.py attention runs/check_gpu     # prints one JSON object
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from batch import Rollout, Row, pack
from fsdp_utils import close_world, init_world
from inputs.machine import check_gpu
from model.attention import check_device, kernel_name, make_packing, packed_attention
from policy import load_policy

Found = dict[str, float | str]


def part_gpus(folder: Path) -> dict[str, Found]:
    """Of each visible GPU: its name, free and whole memory in bytes, and what a run would refuse it for."""
    found: dict[str, Found] = {}
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found[str(index)] = {"name": torch.cuda.get_device_name(index), "free": free, "total": total, "refused": ""}
        try:
            check_gpu(index, torch.cuda.device_count(), gpu_memory_utilization=0.4)
        except ValueError as error:
            found[str(index)]["refused"] = str(error)
    return found


def part_attention(folder: Path) -> Found:
    """Packed attention against the definition in fp32, forwards and backwards, with grouped queries."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device, share_prompts=True)  # chooses the kernel, as a run does
    torch.manual_seed(0)
    lengths, heads, kv_heads, dim = (700, 1, 64, 333), 12, 2, 128
    shapes = [(1, n, sum(lengths), dim) for n in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, device=device).bfloat16().requires_grad_() for shape in shapes]
    segments = pack(rollout_of(np.zeros(1, np.int32), lengths), list(range(len(lengths)))).segments_S
    packing = make_packing(segments, device)
    out, _ = packed_attention(torch.nn.Module(), *inputs, None, packing=packing, scaling=dim**-0.5)
    exact = [each.detach().float().requires_grad_() for each in inputs]
    of_sequences = zip(*(each.split(lengths, dim=2) for each in exact), strict=True)
    rows = [F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in of_sequences]
    expected = torch.cat(rows, dim=2).transpose(1, 2)
    gradient = torch.randn_like(expected)
    (out.float() * gradient).sum().backward()
    (expected * gradient).sum().backward()
    pairs = [(each.grad.float().flatten(), other.grad.flatten()) for each, other in zip(inputs, exact, strict=True)]
    cosine = min(F.cosine_similarity(*pair, dim=0).item() for pair in pairs)
    difference = (out.float() - expected).abs().max().item()
    return {"kernel": kernel_name(device), "difference": difference, "cosine": cosine}


def part_packing(folder: Path) -> Found:
    """Log-probs of sequences that are packed together against those of each alone, in bf16, and against fp32."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device, share_prompts=True)
    rollout = rollout_of(np.arange(5, 25, dtype=np.int32), (200, 3, 77, 150, 31, 120))

    def probabilities(dtype: torch.dtype, groups: list[list[int]], on: torch.device) -> torch.Tensor:
        model, found = load_policy(str(folder / "model"), dtype).to(on), []
        for group in groups:
            batch = pack(rollout, group).to(on)
            found.append(model(batch, 1.0)[0][batch.loss_mask_N].exp().float().cpu())
        return torch.cat(found)

    together, alone = [list(range(6))], [[b] for b in range(6)]
    with torch.no_grad():
        packed, single = (probabilities(torch.bfloat16, groups, device) for groups in (together, alone))
        exact = probabilities(torch.float32, together, torch.device("cpu"))
    return {"gap": (packed - single).abs().mean().item(), "gap_of_bf16": (packed - exact).abs().mean().item()}


def rollout_of(prompt: np.ndarray, lengths: tuple[int, ...]) -> Rollout:
    """Random completions of these lengths to the prompt."""
    rng = np.random.default_rng(0)
    return Rollout(
        rows=[Row(messages=[], answer="", columns={}, where="", ids=prompt)] * len(lengths),
        completions=[rng.integers(0, 100, n).astype(np.int32) for n in lengths],
        rollout_logprobs=[np.zeros(n, np.float32) for n in lengths],
        texts=[""] * len(lengths),
        is_truncated_B=np.zeros(len(lengths), bool),
        loss_weights_B=np.ones(len(lengths), np.float32),
    )


def part_bandwidth(folder: Path) -> Found:
    """Bytes that each rank receives in an all-gather over all ranks, in GB/s: the median of five."""
    world = init_world(tp_size=1, timeout_minutes=5)
    numbers = 2**28 if world.device.type == "cuda" else 2**22  # fp32
    own = torch.ones(numbers // world.num_trainers, device=world.device)
    whole = torch.empty(len(own) * world.num_trainers, device=world.device)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        dist.all_gather_single(whole, own)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    close_world()
    return {"gb_per_s": (whole.nbytes - own.nbytes) / statistics.median(seconds[1:]) / 1e9}


PARTS = {
    "gpus": part_gpus,
    "attention": part_attention,
    "packing": part_packing,
    "bandwidth": part_bandwidth,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](Path(sys.argv[2]))))
