"""The figures of GPUs, for the dry run and the share of the limit that a run reaches."""

import json
import re
from pathlib import Path

# Name -> memory that a process can take (GiB), dense bf16 TFLOP/s, memory TB/s, and GB/s in one direction to the other
# GPUs of the node and to host RAM. All of them have bf16 and FlashAttention 2: Ampere or newer.
CARDS = json.loads(Path(__file__).with_name("cards.json").read_text("utf-8"))  # with the source of each
GPUS = {name: tuple(card.values())[:5] for name, card in CARDS.items()}
OWN_GPU = re.compile(r"(\d*\.?\d+)GiB:(\d*\.?\d+)TFLOPs:(\d*\.?\d+)TB/?s", re.IGNORECASE)


def gpu_figures(name: str) -> tuple[float, ...]:
    """The figures of a card in `GPUS`, which its first part may name alone, or of one's own. Raises ValueError."""
    own = OWN_GPU.fullmatch(name)
    if own and all(figures := tuple(map(float, own.groups()))):
        return *figures, *GPUS["RTX4090-24GB"][3:]  # PCIe
    plain = re.sub(r"[\s_-]", "", name).upper()
    cards = [card for card in GPUS if plain in (card.replace("-", ""), card.partition("-")[0])]
    if len(cards) == 1:
        return GPUS[cards[0]]
    raise ValueError(
        f"--plan_gpu {name}: use {', '.join(cards or GPUS)}, or memory, dense bf16 speed and bandwidth "
        "of another one, such as 23.5GiB:71TFLOPs:0.94TBs."
    )
