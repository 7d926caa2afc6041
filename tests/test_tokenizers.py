"""Where tokenizer.json exists, it decides: in prompts, in texts that rewards see, and in what a run exports."""

import json
from itertools import product
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import show_data
from engine.options import engine_options, stop_ids
from flags import EngineSettings
from helpers.made_up import CHAT_TEMPLATE, make_model, write_lines
from helpers.runs import lines, torchrun, training_flags
from model.weights import load_tokenizer

CLASSES = [
    "LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer",
    "PreTrainedTokenizerFast", "TokenizersBackend", None,
]  # fmt: skip
TYPES = [
    "llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "starcoder2", "exaone4", "gpt_neox", "gemma3_text", "olmo3",
    "phi3",
]  # fmt: skip
TEXT = "a b\n\n12345  \u00c5\ufb01x\t<think> if<eos>"
PROBLEM = "a b\n12345"


def make_tokenizer(folder: Path, kind: str = "bytes", **named: object) -> Tokenizer:
    """Saves a tokenizer.json of its own, and a tokenizer_config.json that names no class unless told to."""
    special = ["<bos>", "<eos>", "<think>"]
    if kind == "bytes":  # as DeepSeek's: digits three by three, and no form of Unicode
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: i for i, token in enumerate([*special, *alphabet, "12", "45", "\u0120b"])}
        tokenizer = Tokenizer(models.BPE(vocabulary, [("1", "2"), ("4", "5"), ("\u0120", "b")]))
        digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(False)])
        tokenizer.decoder = decoders.ByteLevel()
        begin = [("<bos>", 0)]
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    else:  # as Llama 2's: spaces are a character, other characters bytes
        pieces = [*special, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581ab12345xif", "\u2581b"]
        vocabulary = {token: i for i, token in enumerate(pieces)}
        merges = [("\u2581", "b")]
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "\u2581")])
        spaces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(spaces)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHAT_TEMPLATE} | named
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_ids_and_texts_are_those_of_the_file(kind, tmp_path):
    """For each type of model and each class that tokenizer_config.json may name."""
    for model_type, name in product(TYPES, CLASSES):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        source = make_tokenizer(tmp_path, kind, tokenizer_class=name)
        tokenizer = load_tokenizer(str(tmp_path))
        found = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
        assert found == source.encode(TEXT, add_special_tokens=False).ids, (model_type, name)
        assert tokenizer(TEXT)["input_ids"] == source.encode(TEXT).ids, (model_type, name)
        assert tokenizer.decode(found) == source.decode(found, skip_special_tokens=False), (model_type, name)
        assert tokenizer.eos_token_id == 1


def test_the_spaces_of_a_text_stay_before_marks(tmp_path):
    """Also of vocabularies for which transformers would take them out: pieces with likelihoods, and words."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in "\u2581ab.,"], unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": True}))
    ours = load_tokenizer(str(tmp_path))
    assert ours.decode(ours("a . b , a")["input_ids"]) == "a . b , a"


@pytest.mark.parametrize("settings", [
    {"added_tokens_decoder": {"2": {"content": "<think>", "lstrip": True, "rstrip": True, "special": True}}},
    {"added_tokens_decoder": {"999": {"content": "if", "special": True}}},
    {"split_special_tokens": True}, {"add_prefix_space": True}, {"add_bos_token": False}, {"add_eos_token": True},
    {"clean_up_tokenization_spaces": True, "model_max_length": 2, "legacy": True},
])  # fmt: skip
def test_other_settings_do_not_change_what_the_file_says(settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    source = make_tokenizer(tmp_path, tokenizer_class="LlamaTokenizer", **settings)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"b": 5}))
    tokenizer = load_tokenizer(str(tmp_path))
    for adds in (False, True):
        found = tokenizer(TEXT, add_special_tokens=adds)["input_ids"]
        assert found == source.encode(TEXT, add_special_tokens=adds).ids
        assert tokenizer.decode(found) == source.decode(found, skip_special_tokens=False)


@pytest.mark.parametrize("settings", [
    {}, {"eos_token": "<eos>"}, {"eos_token": "<eos>", "pad_token": "<pad>"},
    {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "eos_token": "</s>"},
])  # fmt: skip
def test_a_folder_without_a_vocabulary_has_no_tokenizer(settings, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="has no tokenizer; copy that of the base model into it"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(("file", "content"), [
    ("tokenizer.json", ""), ("tokenizer.json", "<html>"), ("tokenizer.json", '{"version": "1.0"}'),
    ("tokenizer_config.json", "[]"), ("tokenizer_config.json", '{"eos_token": 1}'),
])  # fmt: skip
def test_damaged_files_of_a_tokenizer_are_told_in_a_sentence(file, content, tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=f"^--model '{tmp_path}' has no tokenizer that could be read: "):
        load_tokenizer(str(tmp_path))


def test_the_engine_has_no_tokenizer_of_its_own_and_ends_where_ours_does(policy):
    options = engine_options(str(policy), EngineSettings(max_model_len=64), False, 1)
    assert options["skip_tokenizer_init"] is True
    tokenizer = load_tokenizer(str(policy))
    assert stop_ids(tokenizer, ["7"]) == [tokenizer.convert_tokens_to_ids("7"), tokenizer.eos_token_id]
    tokenizer.eos_token = None
    assert stop_ids(tokenizer, []) == []


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A tiny model whose tokenizer_config.json names a class that is not the file's, as DeepSeek's, and its data."""
    folder = tmp_path_factory.mktemp("deepseek")
    make_model(folder, vocab_size=320)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).unlink()
    make_tokenizer(folder, tokenizer_class="LlamaTokenizerFast", legacy=True, add_bos_token=True)
    write_lines(folder / "spaced.jsonl", [{"problem": PROBLEM, "answer": "1"}] * 16)
    return folder


def test_a_run_sees_spaces_and_exports_the_tokenizer_as_it_is(deepseek, tmp_path):
    (tmp_path / "reward.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "def score(completion, token_ids):\n"
        f"    tokenizer = PreTrainedTokenizerFast(tokenizer_file={str(deepseek / 'tokenizer.json')!r})\n"
        "    text = tokenizer.decode(token_ids, skip_special_tokens=True)\n"
        "    return float(completion.replace('<think>', '') == text.replace('<think>', ''))\n"
    )
    changes = dict.fromkeys(["eval_data", "eval_every", "eval_before_training"]) | {"total_steps": 1, "save_every": 1}
    changes |= {"train_data": deepseek / "spaced.jsonl", "max_prompt_tokens": 40}
    changes["reward"] = f"{tmp_path}/reward.py:score"
    done = torchrun(1, "train_grpo.py", *training_flags(deepseek, tmp_path / "run", **changes))
    assert f"first prompt: {f'[user]{PROBLEM}[assistant]'!r}\n" in done.stdout
    (line,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert line["reward/mean"] == 1.0, "a completion reached the reward with other characters than its ids have"
    source, again = (Tokenizer.from_file(str(deepseek / "tokenizer.json")), load_tokenizer(f"{tmp_path}/run/final"))
    assert again(TEXT, add_special_tokens=False)["input_ids"] == source.encode(TEXT, add_special_tokens=False).ids


def test_show_data_shows_what_the_ids_say(deepseek, tmp_path, monkeypatch, capsys):
    given = f"show_data.py --model {deepseek} --data {deepseek}/spaced.jsonl --show 1"
    for flags, prompt in (("", f"[user]{PROBLEM}[assistant]"), (" --prompt_format raw", f"<bos>{PROBLEM}")):
        monkeypatch.setattr("sys.argv", (given + flags).split())
        show_data.main()
        assert f"line 1\n{prompt}\n--- answer" in capsys.readouterr().out
