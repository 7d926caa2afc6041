"""The bytes of tokens, from two kinds of tokenizers."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from watch.rollouts import bytes_of_tokens

SMILE = "\N{SMILING FACE WITH OPEN MOUTH}"  # four bytes, of which each is a token


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_the_bytes_of_the_tokens_are_those_of_the_text(kind):
    text = f"The sum is 12, caf\u00e9 {SMILE}\n\tdone \u4e2d\u6587"
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([text], trainer)
    else:
        words = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] + [("\u2581", -2.0), ("\u2581sum", -1.0)]
        tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *words, *((c, -3.0) for c in "Thesumi12,")], 0, True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    tokenizer.add_special_tokens(["<\uff5cend\uff5c>"])
    ids = tokenizer.encode(f"{text}<\uff5cend\uff5c>").ids
    known = bytes_of_tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert b"".join(known[i] for i in ids).decode() == f"{text}<\uff5cend\uff5c>"
    assert len(known) == tokenizer.get_vocab_size()


def test_unknown_ids_are_empty_and_other_texts_taken_as_they_are():
    tokenizer = Tokenizer(models.BPE({"a": 0, "\u2192": 1, "\u0120b": 3}, []))
    tokenizer.decoder = decoders.ByteLevel()
    known = bytes_of_tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert known == [b"a", "\u2192".encode(), b"", b" b"]
