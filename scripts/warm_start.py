"""Makes the small starting policy of the CPU job, and its data, from nothing, in about a minute on one core.

    python scripts/warm_start.py --out_dir runs/tiny_policy --seed 1

The task is the sum of two 3-digit numbers. The policy, a Qwen2 of 0.6 M parameters, learns to imitate two kinds of
demonstration:

    <user>347+285<assistant>522<eos>                                              most: answers at once
    <user>347+285<assistant><think>7+5=12,4+8+1=13,3+2+1=06</think>632<eos>       a quarter: adds digit by digit

The scratchpads are correct. Answers given at once are those of somebody in a hurry, who forgets every carry: 13 % are
correct. (With more, this recipe ends anywhere between 9 % and 96 % at once, depending on the seed.) The warm-started
policy thinks about every fourth time, is then nearly always correct, and is otherwise mostly incorrect. Nothing tells
it that the one has to do with the other: GRPO has to find that out.

With --task game it is the starting policy of scripts/tiny_turns_cpu.sh: a quarter of the demonstrations of a number
game (docs/environments/guess_number.py) searches well, and the others repeat one guess, whatever they are told.

    <user>game471<assistant>8<eos><user>lower<assistant>4<eos><user>higher<assistant>6<eos>

The numbers are from 1 to 15, and the name of a game says nothing of its number.

With --task hints it is the starting policy of scripts/tiny_sdpo_cpu.sh, which also reads hints: behind a problem with
its solution, in the words of extras/teacher/hints.py, five of six demonstrations think.

The folder is in Hugging Face format (model, tokenizer with chat template), with train.jsonl and heldout.jsonl. All of
it is a function of the flags. The held-out problems are in no demonstration and not in train.jsonl, also not with the
numbers swapped.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers import PreTrainedTokenizerFast as Tokenizer

NUM_DIGITS = 3
NUM_TRAIN, NUM_HELDOUT = 4096, 256
MODEL = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,  # two, so that tensor parallelism over 2 ranks has a whole head for each
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},  # not 10,000: sequences have 40 tokens
    "tie_word_embeddings": True,
}  # fmt: skip
BATCH_SIZE, NUM_GOOD = 64, 16  # demonstrations of an update; with a scratchpad, or of a careful player
NUM_HINTED, NUM_HINTED_GOOD = 24, 20  # beside them: with a hint; with a scratchpad, too
HINT = "\nCorrect solution:\n\n{}\n\nCorrectly solve the original question."  # as in extras/teacher/hints.py
HIGHEST, NUM_GUESSES = 15, 4  # the game's
NAMES = [f"game{number}" for number in range(100, 1000)]
PEAK_LR = 6e-3  # for Muon (the matrices inside the blocks) and for AdamW (embedding, norms, biases)
WARMUP_UPDATES = 50

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def demonstration(a: int, b: int, is_thinking: bool) -> str:
    """The scratchpad has the units first: column + carry = two digits. In a hurry every carry is forgotten."""
    scratchpad, hurried, carry = [], "", 0
    for i in range(NUM_DIGITS):
        x, y = a // 10**i % 10, b // 10**i % 10
        total = x + y + carry
        scratchpad.append(f"{x}+{y}" + (f"+{carry}" if i else "") + f"={total:02d}")
        hurried, carry = f"{(x + y) % 10}{hurried}", total // 10
    completion = f"<think>{','.join(scratchpad)}</think>{a + b}" if is_thinking else hurried
    return f"<user>{a}+{b}<assistant>{completion}<eos>"


def game(secret: int, is_careful: bool, rng: np.random.Generator) -> str:
    """A careful player halves what is left; four guesses are enough for 15 numbers. Another one insists."""
    low, high, text = 1, HIGHEST, f"<user>{NAMES[rng.integers(len(NAMES))]}"
    favourite = int(rng.integers(1, HIGHEST + 1))
    for _ in range(NUM_GUESSES):
        guess = (low + high) // 2 if is_careful else favourite
        text += f"<assistant>{guess}<eos>"
        if guess == secret:
            return text
        text += f"<user>{'higher' if guess < secret else 'lower'}"
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return text.rpartition("<user>")[0]


def draw_problems(rng: np.random.Generator, count: int, excluded: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """`count` pairs of numbers, none of them in `excluded` in either order."""
    problems: list[tuple[int, int]] = []
    while len(problems) < count:
        a, b = rng.integers(10 ** (NUM_DIGITS - 1), 10**NUM_DIGITS, size=2).tolist()
        if (a, b) not in excluded and (b, a) not in excluded:
            problems.append((a, b))
    return problems


def draw_demonstrations(task: str, rng: np.random.Generator, heldout: set[tuple[int, int]]) -> list[list[str]]:
    """Those of an update, in parts: with a scratchpad, or careful; the others; then the same with hints."""
    if task == "game":
        secrets = rng.integers(1, HIGHEST + 1, size=BATCH_SIZE).tolist()
        texts = [game(secret, i < NUM_GOOD, rng) for i, secret in enumerate(secrets)]
    else:
        problems = draw_problems(rng, BATCH_SIZE, heldout)
        texts = [demonstration(a, b, i < NUM_GOOD) for i, (a, b) in enumerate(problems)]
    parts = [texts[:NUM_GOOD], texts[NUM_GOOD:]]
    if task == "hints":
        hinted = []
        for i, (a, b) in enumerate(draw_problems(rng, NUM_HINTED, heldout)):
            text = demonstration(a, b, i < NUM_HINTED_GOOD)
            hinted.append(text.replace("<assistant>", HINT.format(a + b) + "<assistant>"))
        parts += [hinted[:NUM_HINTED_GOOD], hinted[NUM_HINTED_GOOD:]]
    return parts


def draw_rows(task: str, rng: np.random.Generator) -> tuple[dict[str, list[dict[str, str]]], set[tuple[int, int]]]:
    """The rows of train.jsonl and heldout.jsonl, and the held-out pairs of numbers, which no demonstration may have."""
    if task == "game":
        games = [{"problem": name, "answer": str(i % HIGHEST + 1)} for i, name in enumerate(rng.permutation(NAMES))]
        return {"train": games[120:], "heldout": games[:120]}, set()
    seen: set[tuple[int, int]] = set()  # no pair of numbers appears twice, in either order
    for _ in range(NUM_TRAIN + NUM_HELDOUT):
        seen.update(draw_problems(rng, 1, excluded=seen))
    pairs = [(a, b) for a, b in rng.permutation(sorted(seen)).tolist()]
    rows = [{"problem": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]
    return {"train": rows[NUM_HELDOUT:], "heldout": rows[:NUM_HELDOUT]}, set(pairs[:NUM_HELDOUT])


def build_tokenizer() -> Tokenizer:
    """A tokenizer of 64 tokens, one per character: the whole embedding is in use, and every sampled id has a text.

    <think> and </think> are no special tokens, so rewards and readers see them.
    """
    special = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>"]
    characters = string.digits + "+=," + string.ascii_lowercase + " -*/().:;?!<>[]|%^"
    vocabulary = {token: i for i, token in enumerate([*special, "<think>", "</think>", *characters])}
    assert len(vocabulary) == 64, f"{len(vocabulary)} tokens; tensor parallelism needs a multiple of 64"
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # no spaces between tokens
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    return Tokenizer(
        tokenizer_object=backend, chat_template=CHAT_TEMPLATE, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        extra_special_tokens=["<user>", "<assistant>"], clean_up_tokenization_spaces=False,
        model_max_length=MODEL["max_position_embeddings"],
    )  # fmt: skip


def build_policy(tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """A random policy in float32, whose generation config is plain sampling."""
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    policy = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **MODEL, **ids))
    policy.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ids)
    return policy


class Muon:
    """Muon (Jordan et al., 2024): momentum, then every singular value of an update is brought close to 1.

    It needs less than half the updates of AdamW. torch.optim.Muon computes in bfloat16, slowly on most CPUs.
    """

    def __init__(self, matrices: list[Tensor], momentum: float = 0.95) -> None:
        self.matrices, self.momentum = matrices, momentum
        self.averages = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Updates in place. An entry of an update is about 0.2 lr, as with AdamW, whatever the shape of its matrix."""
        for matrix, average in zip(self.matrices, self.averages, strict=True):
            average.lerp_(matrix.grad, 1 - self.momentum)
            update = matrix.grad.lerp(average, self.momentum)  # Nesterov
            update = update.T if update.shape[0] > update.shape[1] else update
            update = update / update.norm().clamp(min=1e-7)
            for _ in range(5):  # Newton-Schulz: odd polynomials of the matrix, so its singular vectors stay
                gram = update @ update.T
                update = 3.4445 * update + (-4.775 * gram + 2.0315 * gram @ gram) @ update
            update = update.T if matrix.shape[0] > matrix.shape[1] else update
            matrix.sub_(update, alpha=0.2 * lr * math.sqrt(max(matrix.shape)))


def completion_loss(policy: Qwen2ForCausalLM, tokenizer: Tokenizer, texts: list[str]) -> tuple[Tensor, int]:
    """The summed cross-entropy of the completions' tokens, <eos> included, and their number."""
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    is_prompt = (batch.input_ids == tokenizer.convert_tokens_to_ids("<assistant>")).cumsum(dim=1) == 0
    start = int(is_prompt.sum(dim=1).min())  # prompts without a hint have one length, so no padding
    labels = batch.input_ids.masked_fill(is_prompt | (batch.attention_mask == 0), -100)[:, start + 1 :]
    labels = labels.masked_fill(is_prompt[:, start:-1], -100)  # nor does it learn to end a prompt
    # Padding is on the right, where causal attention never looks: no attention mask is needed.
    logits = policy(input_ids=batch.input_ids, use_cache=False).logits[:, start:-1]
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, int((labels != -100).sum())


def train(policy: Qwen2ForCausalLM, tokenizer: Tokenizer, draw: Callable[[], list[list[str]]], updates: int) -> None:
    """Imitates new demonstrations in every update: `draw` returns them in parts of similar length."""
    matrices = [each for name, each in policy.named_parameters() if each.ndim == 2 and "embed_tokens" not in name]
    vectors = [each for name, each in policy.named_parameters() if each.ndim == 1 or "embed_tokens" in name]
    muon, adamw = Muon(matrices), torch.optim.AdamW(vectors, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for update in (progress := tqdm(range(updates), desc="warm start", unit="update", mininterval=1.0)):
        # A forward pass each: in one, the short completions would be padded to the length of the long ones.
        kinds = [completion_loss(policy, tokenizer, texts) for texts in draw()]
        loss = sum(loss for loss, _ in kinds) / sum(count for _, count in kinds)  # over the completion tokens of both
        policy.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vectors, 1.0)  # Muon's updates have the same size whatever the gradient's
        decay = 0.5 * (1 + math.cos(math.pi * update / updates))  # to zero: the last slips go
        lr = PEAK_LR * (min(1.0, (update + 1) / WARMUP_UPDATES) * decay)
        muon.step(lr)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def save(policy: Qwen2ForCausalLM, tokenizer: Tokenizer, rows: dict[str, list], out_dir: Path) -> None:
    """Writes a sibling folder and renames it: `out_dir` is complete or not there."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = out_dir.with_name(f"{out_dir.name}.partial.{time.time_ns()}")
    policy.save_pretrained(partial)
    tokenizer.backend_tokenizer.no_padding()  # which training has switched on
    tokenizer.save_pretrained(partial)
    for name, file_rows in rows.items():
        (partial / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in file_rows), "utf-8")
    partial.rename(out_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out_dir", type=Path, required=True, help="folder to write, which must not exist")
    add("--seed", type=int, default=1, help="random seed for weights, demonstrations, data and sampling")
    add(
        "--task", default="addition", choices=("addition", "game", "hints"), help="sums; a number game; sums with hints"
    )
    add("--num_updates", type=int, help="optimizer updates (default: 650; game: 200)")
    args = parser.parse_args()
    if args.out_dir.exists():
        parser.error(f"--out_dir {args.out_dir} exists already. Remove it or choose another folder.")
    # As fast as 2 at this size, and not slowed down many times over when another program wants a core.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    tokenizer = build_tokenizer()
    if args.task == "hints":  # as transformers reads it beside a Qwen2: it divides words in another way
        tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent / "tiny_policy")
    policy, (rows, heldout) = build_policy(tokenizer), draw_rows(args.task, rng)
    num_updates = args.num_updates or (200 if args.task == "game" else 650)
    train(policy, tokenizer, lambda: draw_demonstrations(args.task, rng, heldout), num_updates)
    save(policy, tokenizer, rows, args.out_dir)
    print(f"made {args.out_dir}: {policy.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
