"""Runs the micro-batches of a bad update again, on one process, and says which sequences and tokens are at fault.

    python scripts/replay_update.py runs/mine/bad_updates/step_7_update_1 [--checkpoint runs/mine/step_6]

The weights are by default those of the last checkpoint before the step, or the model that the run started from. They
are those of the moment where they give the log-probs of the moment, which are kept: the largest difference is shown.
LoRA adapters are merged, dropout is off.
"""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).parent.parent))

import grpo
from batch import Batch, Update
from flags import FLAGS, Memory, UpdateStep, take
from fsdp_utils import World
from grpo import Algorithm
from guards.files import checkpoints
from inputs.choices import algorithm_of
from inputs.machine import prepare_cpu
from model.packed import Segment
from model.vision import BatchImages
from policy import Policy, add_packing, load_policy
from update import add_gradients


def flags_of(folder: Path) -> Namespace:
    """The flags of the run; of one that is newer than the run, the default."""
    defaults = {name.removeprefix("--"): each.value for name, each in FLAGS.items()}
    return Namespace(**defaults | json.loads((folder / "config.json").read_text()))


def weights_before(folder: Path, args: Namespace) -> str:
    """The last checkpoint of the run before the step of this bad update; without any, the starting policy."""
    step = int(folder.name.split("_")[1])
    found = [path for number, path in checkpoints(folder.parent.parent) if number < step]
    return str(found[-1]) if found else args.model


def to_batch(saved: dict[str, Tensor | dict], device: torch.device) -> Batch:
    """The micro-batch, with the old log-probs of the moment, ready for a pass."""
    known = {each.name: saved[each.name] for each in fields(Batch) if each.name in saved}
    segments = [[None if x < 0 else x for x in segment] for segment in saved["segments_S"].tolist()]
    known["segments_S"] = tuple(Segment(*segment) for segment in segments)
    if "images" in saved:
        known["images"] = BatchImages.__new__(BatchImages)
        vars(known["images"]).update(saved["images"])
    return add_packing(Batch(**known).to(device))


def gradient_norms(policy: Policy) -> dict[str, float]:
    """The norm of the gradient of each decoder layer, and of each other module."""
    squares = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            before, layers, after = name.removeprefix("model.").partition("layers.")
            group = layers + after.partition(".")[0] if layers else before.rpartition(".")[0]
            squares[group] = squares.get(group, 0.0) + parameter.grad.double().square().sum().item()
    return {"all": sum(squares.values()) ** 0.5} | {group: square**0.5 for group, square in squares.items()}


def badness(metric: str, batch: Batch, logprobs_N: Tensor, loss_N: Tensor) -> Tensor:
    """Shape N: how much a token has to do with the metric that was beyond its bound; nan counts most."""
    moved_N = batch.old_logprobs_N - logprobs_N
    by_metric = {"policy/approx_kl": moved_N, "policy/ratio_max": -moved_N}
    found_N = by_metric.get(metric, (loss_N * batch.loss_weights_N).abs())
    return torch.where(batch.loss_mask_N, found_N.nan_to_num(nan=torch.inf), -torch.inf)


def replay(policy: Policy, batch: Batch, then_N: Tensor, algorithm: Algorithm, args: Namespace) -> tuple[str, Tensor]:
    """What the passes give now, as words, and the loss of each token. `then_N`: the log-probs of the moment."""
    world = World(rank=0, size=1, tp_size=1, device=batch.labels_N.device)
    step = UpdateStep(index=0, rate=0.0, is_first=False, max_grad_norm=args.max_grad_norm, seed=args.seed)
    policy.zero_grad()
    one = Update([batch], max(len(batch.trained_K), 1), num_prompts=1)
    (found,) = add_gradients(policy, one, algorithm, step, take(Memory, args), world)
    values = {name: value.item() for name, value in (found.sums | found.maxima).items()}
    trained, now = batch.trained_K, found.logprobs_N[batch.trained_K]
    with torch.no_grad():
        loss_N, _, _ = grpo.total_loss(batch, then_N, batch.old_logprobs_N, torch.zeros_like(then_N), algorithm)
    lines = [
        f"  loss {values['policy/loss']:.4g} | KL {values['policy/approx_kl']:.4g} | ratio "
        f"{-values['policy/ratio_min']:.4g} to {values['policy/ratio_max']:.4g} | log-probs {now.min().item():.4g} to "
        f"{now.max().item():.4g}, off those of the moment by up to {(now - then_N[trained]).abs().max().item():.3g}",
        "  gradient norms: " + ", ".join(f"{group} {norm:.3g}" for group, norm in gradient_norms(policy).items()),
    ]
    return "\n".join(lines), loss_N


def worst_of_sequences(batch: Batch, badness_N: Tensor, most: int) -> list[int]:
    """The worst token of each sequence, those of the worst sequences first, at most so many."""
    found: dict[int, int] = {}
    for n in badness_N.argsort(descending=True, stable=True).tolist()[: len(batch.trained_K)]:
        found.setdefault(int(batch.sequence_ids_N[n]), n)
    return list(found.values())[:most]


def describe_token(batch: Batch, n: int, then_N: Tensor, loss_N: Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token at position n, and what was known of it at the moment."""
    s = batch.sequence_ids_N[n]
    first = int(torch.nonzero((batch.sequence_ids_N == s) & batch.loss_mask_N)[0])
    known = {"loss": loss_N, "advantage": batch.advantages_N, "log-prob": then_N, "old": batch.old_logprobs_N}
    values = ", ".join(f"{name} {values_N[n].item():.4g}" for name, values_N in known.items())
    return f"token {n - first + 1}, {tokenizer.decode([int(batch.labels_N[n])])!r}: {values}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="OUT_DIR/bad_updates/step_N_update_I")
    parser.add_argument("--checkpoint", help="checkpoint or model to replay under; default: the last one before")
    parser.add_argument("--show", type=int, default=3, help="number of sequences to show of a micro-batch (default: 3)")
    options = parser.parse_args()
    prepare_cpu()
    try:
        args, fault = flags_of(options.folder), json.loads((options.folder / "update.json").read_text())
        algorithm, weights = algorithm_of(args), options.checkpoint or weights_before(options.folder.resolve(), args)
        policy, tokenizer = load_policy(weights, getattr(torch, args.dtype)), AutoTokenizer.from_pretrained(weights)
    except (ValueError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    policy.head_dtype = getattr(torch, args.head_dtype or args.dtype)
    policy.to(device := torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"{options.folder.name}: {fault['reason']}\nweights: {weights}")
    for file in sorted(options.folder.glob("rank_*.pt")):
        texts = json.loads(file.with_suffix(".json").read_text())
        for i, saved in enumerate(torch.load(file, weights_only=True)):
            batch, then_N = to_batch(saved, device), saved["logprobs_N"].to(device)
            words, loss_N = replay(policy, batch, then_N, algorithm, args)
            sizes = f"{len(batch.segments_S)} sequences, {len(then_N)} tokens"
            print(f"{file.stem}, micro-batch {i + 1}: {sizes}\n{words}")
            badness_N = badness(fault["metric"], batch, then_N, loss_N)
            for n in worst_of_sequences(batch, badness_N, options.show):
                text = texts[i]["sequences"][int(batch.sequence_ids_N[n])]
                print(f"  sequence {text['sequence']}: {text['prompt']!r} -> {text['completion']!r}")
                print(f"    {describe_token(batch, n, then_N, loss_N, tokenizer)}")


if __name__ == "__main__":
    main()
