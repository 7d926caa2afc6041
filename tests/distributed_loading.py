"""On ranks: what `fill` puts into the shards, against `from_pretrained`; how many full parameters a sync holds; by how
many bytes the memory of a rank grows, at most, while a policy is loaded.
"""

import itertools
import threading
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fsdp_utils import World, gather_from_ranks
from helpers import HeldInSync
from policy import Policy, empty_policy, shard_and_fill


def sharded(path: str, dtype: torch.dtype, on_host: bool, world: World) -> Policy:
    return shard_and_fill(empty_policy(path, dtype), path, world, on_host)


def differences(path: str, dtype: torch.dtype, on_host: bool, world: World) -> list[str]:
    """Names of parameters and buffers that are not, bit for bit, what from_pretrained gives."""
    policy = sharded(path, dtype, on_host, world)
    wanted = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    found = dict(policy.full_weights()) | dict(policy.model.named_buffers())
    expected = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
    assert found.keys() == expected.keys()
    return [name for name, x in expected.items() if found[name].dtype != x.dtype or not found[name].equal(x)]


def most_held_in_a_sync(path: str, world: World) -> float:
    """The most bytes of full parameters alive at a time, in decoder layers, where the consumer keeps none of them."""
    policy = sharded(path, torch.float32, False, world)
    policy.dtype = torch.bfloat16
    held = HeldInSync()
    for _ in held.stream(policy.full_weights()):
        pass
    return held.most / sum(2 * parameter.numel() for parameter in policy.layers[0].parameters())


def anonymous_bytes() -> int:
    """This process's resident memory without mapped files, which the system takes back when it needs to."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """The highest value of `anonymous_bytes` while it runs, looked at as often as Python lets it."""

    def run(self) -> None:
        self.is_over = threading.Event()
        self.bytes = 0
        while not self.is_over.wait(0.0005):
            self.bytes = max(self.bytes, anonymous_bytes())


def grown(small: str, large: str, world: World) -> int:
    """Bytes, of the loading of the large policy: what the first load imports and starts is not its own."""
    sharded(small, torch.float32, False, world)
    before, peak = anonymous_bytes(), Peak()
    peak.start()
    sharded(large, torch.float32, False, world)
    peak.is_over.set()
    peak.join()
    return max(peak.bytes, anonymous_bytes()) - before


def main(world: World, large: str, *folders: str) -> list[dict[str, object]]:
    """Of each rank. Memory comes first, before what others leave."""
    num_bytes = grown(folders[0], large, world)
    cases = itertools.product(folders, (torch.float32, torch.bfloat16), (False, True))
    results = {str(case): differences(*case, world) for case in cases}
    results["held"] = most_held_in_a_sync(folders[0], world)
    return gather_from_ranks(results | {"grown": num_bytes})
