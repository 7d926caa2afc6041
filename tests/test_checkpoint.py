"""Checkpoints on one rank: whole or not at all; short files, a full disk. Bits: test_reshard.py."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import checkpoint
from command_line import parse_flags
from engine.options import stop_ids
from flags import Saving
from gate.inputs import Inputs
from helpers.made_up import ALONE, load_policy, make_rollout, unpacked_logprobs, write_lines
from helpers.runs import largest_file, training_flags
from model.weights import load_config, load_tokenizer
from packing import pack
from runtime.files import DiskError, checkpoints, write_sizes
from runtime.rank import RunError

METRIC = "eval/set/avg@4"


def trained(path):
    """A policy and its optimizer after a step on random gradients."""
    model = load_policy(path)
    model.dtype = torch.bfloat16  # the engine's
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def pair(policy):  # which no test changes
    return trained(policy)


@pytest.fixture(scope="module")
def companions(policy):
    return checkpoint.files_of(str(policy), torch.bfloat16)


def writer(out_dir, companions: dict[str, bytes], say=print, **saving: object) -> checkpoint.Writer:
    out_dir.mkdir(exist_ok=True)
    return checkpoint.Writer(out_dir, companions, Saving(**{"keep_checkpoints": 0} | saving), ALONE, say)


def log(out_dir: Path, step: int, accuracy: float | None) -> None:
    with (out_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, METRIC: accuracy}) + "\n")


def latest(out_dir, say=print):
    return checkpoint.latest(out_dir, ALONE, say)


@pytest.mark.parametrize("name", ["policy", "qwen3_policy", "untied_qwen3_policy"])
def test_the_exported_policy_is_the_trained_one(name, request, tmp_path):
    """In the dtype of the engine."""
    path = request.getfixturevalue(name)
    model, optimizer = trained(path)
    writer(tmp_path, checkpoint.files_of(str(path), torch.bfloat16)).save(1, model, optimizer, {})
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")
    assert exported.dtype == torch.bfloat16
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "step_1" / file).read_bytes() == (path / file).read_bytes()
    for (name, found), expected in zip(exported.named_parameters(), model.model.parameters(), strict=True):
        assert found.equal(expected.to(torch.bfloat16)), name
    assert not (tmp_path / "step_1" / "adapter").exists(), "without LoRA there is none"
    rollout, again = make_rollout(), load_policy(tmp_path / "step_1")
    batch = pack(rollout, list(range(8)))
    with torch.no_grad():
        found, expected = again(batch, 1.0)[0][batch.loss_mask_N], unpacked_logprobs(exported.float(), rollout, 1.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_exported_policy_ends_where_it_was_sampled_to_end(policy, tmp_path, capsys):
    """What is invalid in a generation_config.json is left out, and said."""
    config = load_config(str(policy))
    GenerationConfig(eos_token_id=[3, 5], temperature=0.6, do_sample=True).save_pretrained(tmp_path / "base")
    settings = {"eos_token_id": 2, "temperature": 0.6, "repetition_penalty": 1.1}  # no temperature without do_sample
    settings |= {"output_scores": True, "return_dict_in_generate": True}  # the first needs the second
    settings |= {"num_return_sequences": 3, "watermarking_config": {"a": 1}}
    write_lines(tmp_path / "invalid" / "generation_config.json", [settings])
    stop, end = stop_ids(load_tokenizer(str(policy)), ["7"])
    for name, ids, expected in (
        ("base", [], [3, 5]), ("base", [5, stop], [3, 5, stop]), ("absent", [stop, end], [config.eos_token_id, stop]),
        ("invalid", [5, stop], [2, 5, stop]),
    ):  # fmt: skip
        generation = checkpoint.load_generation_config(str(tmp_path / name), config, ids)
        said = "warning: generation_config of --model: left out as invalid: temperature = 0.6, "
        said += "num_return_sequences = 3, watermarking_config = {'a': 1}\n"
        assert capsys.readouterr().out == (said if name == "invalid" else "")
        generation.save_pretrained(tmp_path / "saved")
        found = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
        assert found["eos_token_id"] == expected and ("temperature" in found) == (name == "base")
        assert found.get("repetition_penalty") == (1.1 if name == "invalid" else None)
        assert found.get("output_scores") == (True if name == "invalid" else None)
    files = checkpoint.files_of(str(policy), torch.bfloat16, [stop, end])
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [end, stop]


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
LONGROPE = {"rope_type": "longrope", "type": "longrope", "factor": 8.0}
BEFORE = {"original_max_position_embeddings": 4096}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
OLD_NAMES = {
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "rotary_emb_base", "rotary_pct",
    "original_max_position_embeddings",
}  # fmt: skip


def angles(kind: str, theta: float = 5e5, **others: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": theta} | others


@pytest.mark.parametrize(("model_type", "given", "old"), [  # old: what transformers 4 reads
    ("qwen2", {"rope_parameters": angles("default")}, {"rope_theta": 5e5}),
    ("llama", {"rope_parameters": angles("llama3", **LLAMA3)},
     {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "type": "llama3"} | LLAMA3}),
    ("qwen3", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn"} | YARN},  # as in older files
     {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "type": "yarn"} | YARN}),
    ("glm4", {"rope_theta": 2e4, "partial_rotary_factor": 0.25}, {"rope_theta": 2e4, "partial_rotary_factor": 0.25}),
    ("gpt_neox", {"rotary_emb_base": 2e4, "rotary_pct": 0.5}, {"rotary_emb_base": 2e4, "rotary_pct": 0.5}),
    # It wants exactly these three.
    ("phi3", {"hidden_size": 96, "num_attention_heads": 4, "rope_scaling": {"type": "longrope"} | LONG},
     {"rope_theta": 1e4, "partial_rotary_factor": 1.0, "rope_scaling": {"type": "longrope"} | LONG} | BEFORE),
    # The scale of attention is computed from the length that stands beside the others.
    ("llama", {"rope_parameters": angles("longrope", factor=8.0, **LONG, **BEFORE)},
     {"rope_theta": 5e5, "rope_scaling": LONGROPE | LONG | BEFORE} | BEFORE),
    ("apertus", {"rope_parameters": angles("default")}, {"rope_theta": 5e5}),  # which would have llama3 for no value
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4} | KINDS,
     {"rope_theta": 1e6, "rope_local_base_freq": 2e4,
      "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 8.0}}),
    ("olmo3", {"rope_parameters": {"full_attention": angles("yarn", **YARN), "sliding_attention": angles("default")},
               **KINDS},
     {"rope_theta": 5e5, "rope_local_base_freq": 5e5, "rope_scaling": {"rope_type": "yarn", "type": "yarn"} | YARN}),
    ("gpt2", {}, {}),
])  # fmt: skip
def test_an_exported_config_has_its_angles_under_old_and_new_names(model_type, given, old, tmp_path):
    """And the present release reads both together as the new ones alone."""
    config = AutoConfig.for_model(model_type, **given)
    config.save_pretrained(tmp_path)
    named = checkpoint.with_old_names(json.loads((tmp_path / "config.json").read_text()))
    expected = {"rope_scaling": None} | old if old else {}
    assert {name: value for name, value in named.items() if name in OLD_NAMES} == expected
    (tmp_path / "config.json").write_text(json.dumps(named))
    again = AutoConfig.from_pretrained(tmp_path)
    if hasattr(config, "rope_parameters"):
        assert without_type(again.rope_parameters) == without_type(config.rope_parameters)


def without_type(angles: dict[str, object]) -> dict[str, object]:
    """Without the oldest name of `rope_type`."""
    kept = {name: value for name, value in angles.items() if name != "type"}
    return {name: without_type(value) if isinstance(value, dict) else value for name, value in kept.items()}


@pytest.mark.parametrize("settings", [{"output_attentions": True}, {"pad_token_id": -1}])
def test_a_config_that_cannot_be_saved_ends_the_run_at_its_start(settings, policy, tmp_path):
    model = shutil.copytree(policy, tmp_path / "model")
    write_lines(model / "config.json", [json.loads((model / "config.json").read_text()) | settings])
    with pytest.raises(ValueError, match=f"--model {model}: .* config.json"):
        Inputs.load(parse_flags(training_flags(model, tmp_path / "run")))


def test_a_policy_of_which_nothing_is_finite_is_not_saved(companions, tmp_path):
    said = []
    saving = writer(tmp_path / "run", companions, say=said.append)
    saving.save(3, None, None, {"is_broken": True})
    assert re.fullmatch("warning: step 3 is not saved, .* the start is the last checkpoint[.]", said[0])
    with pytest.raises(RunError, match="none of its updates was finite.*--learning_rate"):
        saving.save(4, None, None, {"is_broken": True}, is_required=True)
    assert not list((tmp_path / "run").iterdir())


def test_only_the_newest_and_the_final_checkpoint_are_kept(pair, companions, tmp_path):
    (tmp_path / "unfinished_step_1").mkdir()  # a killed run has left it
    assert latest(tmp_path) == (0, None)
    saving = writer(tmp_path, companions, keep_checkpoints=2)
    for step in (1, 2, 9, 10):
        saving.save(step, *pair, {})
        if step == 1:
            checkpoint.set_link(tmp_path / "final", tmp_path / "step_1")
    (tmp_path / "step_x").mkdir()
    assert [step for step, _ in checkpoints(tmp_path)] == [1, 9, 10], "not in the order of the names"
    assert latest(tmp_path) == (10, tmp_path / "step_10") and not list(tmp_path.glob("unfinished*"))
    checkpoint.set_link(tmp_path / "final", tmp_path / "step_10")
    assert (tmp_path / "final").samefile(tmp_path / "step_10")


@pytest.fixture(scope="module")
def run_folder(pair, companions, tmp_path_factory):
    """Two checkpoints, of which `final` and `best` point to the second."""
    folder = tmp_path_factory.mktemp("checkpoints")
    saving = writer(folder, companions, keep_best=METRIC)
    for step in (1, 2):
        log(folder, step, float(step))
        saving.save(step, *pair, {"prompts_drawn": step})
    checkpoint.set_link(folder / "final", folder / "step_2")
    return folder


@pytest.mark.parametrize(("then", "now", "said"), [
    ("", "layers.0.", r"12 parameters were trained and are frozen now, such as model.layers.0.input_layernorm.weight"),
    ("layers.0.", "", r"12 parameters were frozen and are trained now, such as model.layers.0.input_layernorm.weight"),
    ("layers.0.", "layers.1.",
     "12 .* were trained and are frozen now, .*layers.1.* and 12 .* were frozen and are trained now, .*"),
    ("", "embed_tokens", "2 parameters were trained and are frozen now, such as lm_head.weight; train the same again"),
])  # fmt: skip
def test_a_resume_with_other_trained_parameters_is_refused_with_the_way_on(
    then, now, said, policy, companions, tmp_path
):
    """And nothing of the policy is set back; with the same ones it continues."""

    def frozen(part: str):
        model, optimizer = trained(policy)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not part or part not in name)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    writer(tmp_path, companions).save(2, *frozen(then), {"prompts_drawn": 2})
    folder = tmp_path / "step_2"
    with pytest.raises(DiskError, match=f"^{folder} cannot be loaded: {said}.*--model {folder} with another --out_dir"):
        checkpoint.load(folder, *frozen(now))
    assert checkpoint.load(folder, *frozen(then)) == {"prompts_drawn": 2}


def test_shards_of_another_policy_are_refused(run_folder, qwen3_policy):
    with pytest.raises(DiskError, match="step_2 cannot be loaded: Size mismatch between saved"):
        checkpoint.load(run_folder / "step_2", *trained(qwen3_policy))


def cut(file: Path, at: float = 0.5) -> None:
    os.truncate(file, int(file.stat().st_size * at))


@pytest.mark.parametrize("damage", [cut, partial(cut, at=0), Path.unlink])
def test_damage_is_named_and_the_checkpoint_before_is_used(damage, run_folder, tmp_path):
    last = run_folder / "step_2"
    files = [str(path.relative_to(last)) for path in last.rglob("*") if path.is_file()]
    expected = {"model.safetensors", "config.json", "tokenizer.json", "trainer/.metadata", "trainer/__0_0.distcp"}
    assert expected | {"trainer/progress.json", "sizes.json"} <= set(files)
    assert len({(last / name).stat().st_mode for name in files}) == 1, "who reads one reads all"
    for number, name in enumerate(files):
        folder, said = shutil.copytree(run_folder, tmp_path / str(number), symlinks=True), []
        damage(folder / "step_2" / name)
        assert latest(folder, said.append) == (1, folder / "step_1"), name
        (line,) = said
        assert all(part in line for part in (f"{folder}/step_2 is damaged: ", f"now {folder}/damaged_step_2", name))
        assert {path.name for path in folder.glob("*step*")} == {"damaged_step_2", "step_1"}


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"", b"[" * 100_000])
def test_a_state_that_is_no_state_is_damage(content, run_folder, tmp_path):
    """Of whatever size: the checkpoint before is used."""
    folder, said = shutil.copytree(run_folder, tmp_path / "run", symlinks=True), []
    (folder / "step_2" / "trainer" / "progress.json").write_bytes(content)
    (folder / "step_2" / "sizes.json").unlink()
    write_sizes(folder / "step_2")
    assert latest(folder, said.append) == (1, folder / "step_1")
    assert "step_2 is damaged: trainer/progress.json cannot be read: " in said[0]


def test_with_damaged_checkpoints_alone_nothing_starts_again(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run", symlinks=True)
    for step in (1, 2):
        cut(folder / f"step_{step}" / "model.safetensors")
    for _ in range(2):  # also at the next start
        with pytest.raises(DiskError, match=r"no checkpoint that is whole, only damaged_step_1, damaged_step_2; put"):
            latest(folder)
    shutil.copytree(run_folder / "step_2", folder / "step_2")
    assert latest(folder) == (2, folder / "step_2")
    cut(folder / "step_2" / "config.json")
    with pytest.raises(DiskError, match="only damaged_step_1, damaged_step_2;"):
        latest(folder)
    for path in folder.glob("damaged_*"):
        shutil.rmtree(path)
    assert latest(folder) == (0, None)


def test_a_model_folder_with_code_is_refused(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whatever a terminal answers
    model = shutil.copytree(policy, tmp_path / "model")
    (model / "evil.py").write_text(f"import os\nos.system('touch {tmp_path}/executed')\nclass C: pass\n")
    for name, code in (("tokenizer_config", {"AutoTokenizer": ["evil.C", None]}), ("config", {"AutoConfig": "evil.C"})):
        config = json.loads((file := model / f"{name}.json").read_text()) | {"model_type": "evil", "auto_map": code}
        file.write_text(json.dumps(config))
        if name == "tokenizer_config":
            load_tokenizer(str(model))
    with pytest.raises(ValueError, match="needs code of its own, which is never run"):
        load_config(str(model))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("fails_in", "limit"), [("the shards", 1_000_000), ("the policy", 100_000)])
def test_a_full_disk_costs_a_checkpoint_that_may_be_missed(fails_in, limit, pair, companions, tmp_path, monkeypatch):
    folder, said = tmp_path / "run", []
    saving = writer(folder, companions, say=said.append, keep_checkpoints=1, save_every=10)
    saving.save(10, *pair, {})
    if fails_in == "the policy":  # safetensors of 0.2 MB; the shards, of 1.5 MB, come first
        monkeypatch.setattr(checkpoint.dcp, "save", lambda *_, **__: None)
    with largest_file(limit):
        saving.save(20, *pair, {})
        assert [path.name for path in folder.iterdir()] == ["step_10"], "nothing half-written is left"
        refused = "the checkpoint of step {} could not be written: .* \\(.*GiB are free in .*\\); "
        assert re.fullmatch(refused.format(20) + f"the run continues, and {folder}/step_10 .*", said[0][9:]), said
        with pytest.raises(DiskError, match=refused.format(24) + f"make room, and .* from {folder}/step_10."):
            saving.save(24, *pair, {}, is_required=True)
    assert [step for step in range(11, 35) if saving.is_due(step, is_last=step == 34)] == [20, 30, 34], "at its turn"
    monkeypatch.undo()
    for step in (30, 30, 0):  # a signal came right after it, or before the first step
        saving.save(step, *pair, {}, is_required=True)
    assert [path.name for path in folder.iterdir()] == ["step_30"] and len(said) == 1


def test_three_checkpoints_in_a_row_that_the_disk_refuses_end_the_run(pair, companions, tmp_path):
    """One that is written between them begins the count anew."""
    saving = writer(tmp_path / "run", companions, say=(said := []).append)
    for step in (1, 2, 3, 4, 5, 6):
        with largest_file(10**9 if step == 3 else 1_000_000):
            if step == 6:
                with pytest.raises(DiskError, match=r"step 6 could not be .*make room, and .* from .*/run/step_3\."):
                    saving.save(step, *pair, {})
            else:
                saving.save(step, *pair, {})
    assert [re.search(r"of step (\d)", text)[1] for text in said] == ["1", "2", "4", "5"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_3"]


def test_the_best_checkpoint_is_kept_and_linked_across_a_resume(pair, companions, tmp_path):
    kept = []
    for step, accuracy in enumerate([0.5, 0.8, 0.8, 0.6, None, 0.9, 0.1], start=1):
        saving = writer(tmp_path / "run", companions, keep_checkpoints=1, keep_best=METRIC)  # a start for each step
        log(tmp_path / "run", step, accuracy)
        saving.save(step, *pair, {})
        best = int((tmp_path / "run" / "best").resolve().name.removeprefix("step_"))
        kept.append(([number for number, _ in checkpoints(tmp_path / "run")], best))
    assert kept == [([1], 1), ([2], 2), ([2, 3], 2), ([2, 4], 2), ([2, 5], 2), ([6], 6), ([6, 7], 6)]


def test_a_checkpoint_is_whole_even_if_the_best_cannot_be_told(pair, companions, tmp_path, monkeypatch, capsys):
    for trouble in ("damaged log", "no link"):
        saving = writer(run := tmp_path / trouble, companions, keep_best=METRIC)
        log(run, 1, 0.5)
        if trouble == "damaged log":
            (run / "metrics.jsonl").write_text('{"step: 1}\n')
        else:
            monkeypatch.setattr(checkpoint, "set_link", Mock(side_effect=OSError(28, "No space left on device")))
        saving.save(1, *pair, {}, is_required=True)
        assert latest(run)[0] == 1 and capsys.readouterr().out.count("/best could not be written") == 1
