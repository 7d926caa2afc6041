"""The bytes of each token id, in the order of the ids: rollouts/tokens.parquet, without which ids are mere numbers.

A run folder that was copied elsewhere has neither the model's tokenizer nor the network.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> list[bytes] | None:
    """Of all ids up to the last one; None of a tokenizer that is not of the library `tokenizers`.

    A token of byte-level BPE may begin or end within a character.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token["content"] for token in spec["added_tokens"]}
    texts = {i: text for text, i in tokenizer.get_vocab().items()}
    is_byte_level = '"ByteLevel"' in json.dumps(spec["decoder"])
    table = {ord(character): byte for character, byte in characters_of_bytes().items()}

    def bytes_of(i: int) -> bytes:
        if i in added or i not in texts:
            return added.get(i, f"<token {i}>").encode()
        if is_byte_level:
            with suppress(UnicodeEncodeError):  # a token that was added by hand
                return texts[i].translate(table).encode("latin-1")
        if match := re.fullmatch("<0x([0-9A-F]{2})>", texts[i]):  # SentencePiece's byte fallback
            return bytes([int(match[1], 16)])
        return texts[i].replace("\u2581", " ").encode()  # SentencePiece's space

    return [bytes_of(i) for i in range(max(texts, default=-1) + 1)]


def characters_of_bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes of Latin-1 stand for themselves, the others for characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
