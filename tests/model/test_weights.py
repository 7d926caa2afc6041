"""Loading weights into shards: the same bits as `from_pretrained`, and no rank that ever holds the whole model."""

import itertools
import json
import re
import shutil
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fsdp_utils import World, gather_from_ranks
from helpers.distributed import on_ranks, watched
from helpers.made_up import load_policy, make_model_of_family
from helpers.runs import ROOT, run_ranks, training_flags
from policy import Policy, empty_policy, shard_and_fill


@pytest.fixture(scope="module")
def folders(policy, untied_policy, tmp_path_factory):
    root = tmp_path_factory.mktemp("forms")
    made = {name: root / name for name in ("several_files", "bfloat16", "bare_names", "experts")}
    model = AutoModelForCausalLM.from_pretrained(untied_policy, dtype=torch.float32)
    model.save_pretrained(made["several_files"], max_shard_size="200KB")
    assert len(list(made["several_files"].glob("*.safetensors"))) == 3
    config = made["several_files"] / "config.json"  # the files decide on the dtype: they have more digits than it says
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    old = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}  # in files of old versions: computed, not loaded
    with_weights(policy, made["bare_names"], lambda named: {x.removeprefix("model."): named[x] for x in named} | old)
    AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(made["bfloat16"])
    # Of each expert the files have a matrix; 10 comes before 2 by its name. Two ranks have unequal parts of 11.
    make_model_of_family(made["experts"], "qwen3_moe", num_experts=11, moe_intermediate_size=8)
    assert "model.layers.1.mlp.experts.10.up_proj.weight" in load_file(made["experts"] / "model.safetensors")
    return {"tied": policy, "untied": untied_policy} | made


def with_weights(policy, folder, change):
    """The path of a copy of the policy; its file has what `change` returns."""
    shutil.copytree(policy, folder)
    weights = change(load_file(policy / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def without(name):
    return lambda named: {each: weight for each, weight in named.items() if each != name}


def loaded(path: str, dtype: torch.dtype, on_host: bool, world: World) -> Policy:
    return shard_and_fill(empty_policy(path, dtype, dtype), path, world, on_host)


def differences(path: str, dtype: torch.dtype, on_host: bool, world: World) -> list[str]:
    """Names of parameters and buffers that are not, bit for bit, what from_pretrained gives."""
    policy = loaded(path, dtype, on_host, world)
    wanted = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    found = dict(policy.full_weights()) | dict(policy.model.named_buffers())
    expected = dict(wanted.named_parameters()) | dict(wanted.named_buffers())
    assert found.keys() == expected.keys()
    return [name for name, x in expected.items() if found[name].dtype != x.dtype or not found[name].equal(x)]


def most_held_in_a_sync(path: str, world: World) -> float:
    """The most bytes of gathered or streamed parameters alive at a time, in decoder layers."""
    policy = loaded(path, torch.float32, False, world)
    policy.dtype = torch.bfloat16
    alive, most = {}, 0

    def watch(tensor: torch.Tensor, *_: object) -> None:
        nonlocal most
        storage = tensor.untyped_storage()
        if id(storage) not in alive:
            alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, alive.pop, id(storage))
            most = max(most, sum(alive.values()))

    with watched("all_gather_single", watch):
        for _, tensor in policy.full_weights():
            watch(tensor)
    return most / sum(2 * parameter.numel() for parameter in policy.layers[0].parameters())


def bytes_grown(small: str, large: str, world: World) -> int:
    """By loading the large policy, at most: what a first load imports and starts is not its own."""
    loaded(small, torch.float32, False, world)
    seen, is_over = [], threading.Event()

    def look() -> None:
        """Resident memory without mapped files, which the system takes back when it needs to."""
        _, _, rest = Path("/proc/self/status").read_text().partition("RssAnon:")
        seen.append(int(rest.split()[0]) * 1024)

    def look_again() -> None:
        while not is_over.wait(0.0005):  # as often as Python lets it
            look()

    look()
    thread = threading.Thread(target=look_again)
    thread.start()
    loaded(large, torch.float32, False, world)
    is_over.set()
    thread.join()
    look()
    return max(seen) - seen[0]


def loading(world: World, large: str, *folders: str) -> list[dict[str, object]]:
    """The findings of each rank. Memory comes first, before what others leave."""
    found = {"grown": bytes_grown(folders[0], large, world)}
    cases = itertools.product(folders, (torch.float32, torch.bfloat16), (False, True))
    found |= {str(case): differences(*case, world) for case in cases}
    return gather_from_ranks(found | {"held": most_held_in_a_sync(folders[0], world)})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_shards_are_loaded_bit_for_bit_without_the_whole_model(folders, num_ranks, tmp_path):
    heads = dict.fromkeys(["num_attention_heads", "num_key_value_heads"], 8)
    config = Qwen2Config(vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=10, **heads)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path / "large")
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert max(sizes) < 0.03 * sum(sizes)
    for results in on_ranks(num_ranks, loading, tmp_path / "large", *folders.values()):
        # Half of the model are the shards, a parameter is 0.025 of it; 0.56 to 0.59 was seen. A rank that reads the
        # whole model has 1 or more.
        share = results.pop("grown") / sum(sizes)
        assert num_ranks == 1 or 0.5 <= share < 0.7
        # The one in use, the one before that a loop still names, and between ranks the next one, too.
        assert 0.2 < results.pop("held") <= 0.5 * num_ranks
        assert len(results) == 4 * len(folders) and not any(results.values()), results


def test_files_that_do_not_fit_the_model_are_refused_by_name(policy, untied_policy, folders, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    changes = {  # message -> change
        f"missing keys: {name}.": without(name),
        "unexpected keys: other.": lambda named: named | {"other": torch.ones(1)},
        f"mismatched keys: ('{name}', torch.Size([3, 2])": lambda named: named | {name: torch.ones(3, 2)},
        "missing keys: lm_head.weight.": without("lm_head.weight"),
        "they cannot be stacked": without("model.layers.1.mlp.experts.3.up_proj.weight"),
    }  # fmt: skip
    for number, (message, change) in enumerate(changes.items()):
        folder = tmp_path / str(number)
        origin = folders["experts"] if "stacked" in message else untied_policy if "lm_head" in message else policy
        with pytest.raises(ValueError, match=re.escape(message)):
            load_policy(with_weights(origin, folder, change))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])  # a download that was cut off
    with pytest.raises(ValueError, match="a file is damaged"):
        load_policy(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="no file named model.safetensors"):
        load_policy(folder)


def test_weights_that_do_not_fit_end_a_run_with_a_sentence(policy, tmp_path):
    path = with_weights(policy, tmp_path / "policy", without("model.norm.weight"))
    done = run_ranks(2, str(ROOT / "train_grpo.py"), training_flags(Path(path), tmp_path / "run"))
    assert done.returncode != 0
    missing = "missing keys: model.norm.weight."
    assert f"error: the model {path!r}: its files do not fit its config.json: {missing}" in done.stderr
    assert 'train_grpo.py", line' not in done.stderr
