"""What is kept of a bad update, in OUT_DIR/bad_updates/step_N_update_I:

    update.json    what is wrong, and the metrics of the update
    config.json    the flags of the run
    rank_R.pt      the micro-batches of rank R that may be at fault, the likeliest first: tensors alone
    rank_R.json    their part of the metrics, their prompts and completions as text

scripts/replay_update.py reads them. The weights are not among them: those of the moment exist where a checkpoint was
written just before, after the step before with --save_every 1, say.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_utils import World, gather_from_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from batch import Batch, Pass

MOST_UPDATES = 10  # that are kept of a run, for each metric
MOST_MICRO_BATCHES = 8  # of an update and rank
MOST_BYTES = 2**26  # of them together; the first one is kept whatever its size


class Fault(NamedTuple):
    """What is wrong with an update."""

    metric: str  # that is beyond its bound
    reason: str  # in words
    bound: float = 0.0  # of a micro-batch: at or below it, it is not at fault


def keep_evidence(
    folder: Path, fault: Fault, metrics: dict[str, float], passes: list[Pass],
    tokenizer: PreTrainedTokenizerBase, world: World,
) -> str:  # fmt: skip
    """Writes the folder, all ranks together. Returns what to say of it; a full disk, say, does not end the run."""
    records = folder.parent.glob("step_*/update.json") if world.is_main else ()
    same = [path for path in records if path.parent != folder and f'"metric": "{fault.metric}"' in path.read_text()]
    if gather_from_ranks(len(same))[0] >= MOST_UPDATES:
        return f" (not kept: {folder.parent} holds {MOST_UPDATES} of the kind)"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if world.is_main:
            record = {"metric": fault.metric, "reason": fault.reason, "metrics": for_json(metrics)}
            (folder / "update.json").write_text(json.dumps(record, indent=2) + "\n")
            shutil.copy(folder.parent.parent / "config.json", folder)
        write_passes(folder / f"rank_{world.trainer_rank}", suspects(fault, passes), tokenizer)
        problem = None
    except OSError as error:
        problem = f" (not kept in {folder}: {error.strerror})"
    problems = [each for each in gather_from_ranks(problem) if each]  # and no rank ends before all have written
    return problems[0] if problems else f" (kept in {folder})"


def suspects(fault: Fault, passes: list[Pass]) -> list[Pass]:
    """Those of this rank's micro-batches that may be at fault, the likeliest first; not more than are kept."""
    scored = sorted(((suspicion(fault.metric, each), i) for i, each in enumerate(passes)), key=lambda x: -x[0])
    found, size = [], 0
    for score, i in scored[:MOST_MICRO_BATCHES]:
        size += sum(tensor.nbytes for tensor in tree_leaves(tensors_of(passes[i])) if isinstance(tensor, Tensor))
        if score > fault.bound and (size <= MOST_BYTES or not found):
            found.append(passes[i])
    return found


def suspicion(metric: str, each: Pass) -> float:
    """How much the micro-batch has to do with a metric that is too large; inf where it is nan.

    What it adds to the gradient norm is not known: a bound on the weights of its log-probs in the loss stands for it.
    """
    if metric == "policy/loss":
        return float(not each.sums[metric].isfinite())
    if metric == "optim/grad_norm":
        of_tokens = (each.batch.advantages_N * each.batch.loss_weights_N).abs()
        value = torch.where(each.batch.loss_mask_N, of_tokens, 0.0).sum()
    else:
        value = (each.sums | each.maxima)[metric]
    return value.nan_to_num(nan=math.inf, posinf=math.inf).item()


def tensors_of(each: Pass) -> dict[str, object]:
    """The micro-batch, and the log-probs of the moment: tensors, lists and dicts of them."""
    batch = each.batch
    fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    fields["segments_S"] = torch.tensor([[-1 if x is None else x for x in segment] for segment in batch.segments_S])
    images = {"images": dict(vars(batch.images))} if batch.images else {}
    return fields | images | {"logprobs_N": each.logprobs_N, "old_logprobs_N": each.old_logprobs_N}


def write_passes(file: Path, passes: list[Pass], tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes FILE.pt and FILE.json; nothing if there are none. Raises OSError."""
    if not passes:
        return
    on_host = tree_map_only(Tensor, lambda x: x.detach().cpu().clone(), [tensors_of(each) for each in passes])
    saved = io.BytesIO()
    torch.save(on_host, saved)
    file.with_suffix(".pt").write_bytes(saved.getvalue())
    values = [{name: x.item() for name, x in (each.sums | each.maxima).items()} for each in passes]
    texts = [texts_of(each.batch, tokenizer) for each in passes]
    records = [{"metrics": for_json(x), "sequences": text} for x, text in zip(values, texts, strict=True)]
    file.with_suffix(".json").write_text(json.dumps(records, indent=2) + "\n")


def for_json(values: dict[str, float]) -> dict[str, float | str]:
    """The values; what is not finite, which JSON does not know, as text."""
    return {name: value if math.isfinite(value) else str(value) for name, value in values.items()}


def texts_of(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, object]]:
    """Of each sequence: its place in the rollout, its prompt and what follows, with special tokens."""
    ids_S = [x.tolist() for x in batch.input_ids_N.cpu().split(batch.lengths_S)]
    labels_S = [x.tolist() for x in batch.labels_N.cpu().split(batch.lengths_S)]
    masks_S = [x.tolist() for x in batch.loss_mask_N.cpu().split(batch.lengths_S)]
    texts = []
    for ids, labels, mask, segment in zip(ids_S, labels_S, masks_S, batch.segments_S, strict=True):
        shared = [] if segment.prefix is None else ids_S[segment.prefix][: segment.start]
        first = mask.index(True) if any(mask) else len(mask)  # left out of the loss: all of it is shown as prompt
        prompt, completion = shared + ids[: first + 1], labels[first:]
        texts.append({
            "sequence": segment.index, "prompt": tokenizer.decode(prompt), "completion": tokenizer.decode(completion),
        })  # fmt: skip
    return texts
