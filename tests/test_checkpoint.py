"""Checkpoints on one rank: saved whole or not at all, restored to the bit with the state of the loop."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import checkpoint
from batch import pack
from helpers import ALONE, make_rollout, unpacked_logprobs
from model.engine_options import stop_ids
from model.weights import load_generation_config
from policy import load_policy


@pytest.fixture(scope="module")
def tokenizer(policy):  # of all tiny policies
    return AutoTokenizer.from_pretrained(policy)


def trained(policy, seed: int):
    """A policy and its optimizer after a step on random gradients."""
    model = load_policy(str(policy), torch.float32)
    model.dtype = torch.bfloat16  # of the engine
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def writer(out_dir, tokenizer, keep: int = 0, in_background: bool = False) -> checkpoint.Writer:
    return checkpoint.Writer(out_dir, [tokenizer], keep, in_background, ALONE)


def test_what_was_saved_comes_back_to_the_bit_with_the_state_of_the_loop(policy, tokenizer, tmp_path):
    model, optimizer = trained(policy, seed=1)
    writer(tmp_path, tokenizer).save(7, model, optimizer, {"prompts_drawn": 56})
    assert json.loads((tmp_path / "step_7" / "trainer" / "progress.json").read_text()) == {"prompts_drawn": 56}
    other, other_optimizer = trained(policy, seed=2)
    assert checkpoint.load(tmp_path / "step_7", other, other_optimizer) == {"prompts_drawn": 56}
    for (name, expected), found in zip(model.named_parameters(), other.parameters(), strict=True):
        assert found.equal(expected), name
        for key, value in optimizer.state[expected].items():
            assert other_optimizer.state[found][key].equal(value), f"{key} of {name}"


@pytest.mark.parametrize("name", ["policy", "qwen3_policy", "untied_qwen3_policy"])
def test_the_exported_policy_is_the_trained_one_in_the_dtype_of_the_engine(name, request, tokenizer, tmp_path):
    model, optimizer = trained(request.getfixturevalue(name), seed=1)
    writer(tmp_path, tokenizer).save(1, model, optimizer, {})
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")
    assert exported.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "step_1").get_vocab() == tokenizer.get_vocab()
    for (name, found), expected in zip(exported.named_parameters(), model.model.parameters(), strict=True):
        assert found.equal(expected.to(torch.bfloat16)), name
    assert not (tmp_path / "step_1" / "adapter").exists(), "without LoRA there is none"
    rollout, again = make_rollout(), load_policy(str(tmp_path / "step_1"), torch.float32)
    batch = pack(rollout, list(range(8)))
    with torch.no_grad():
        found, expected = again(batch, 1.0)[0][batch.loss_mask_N], unpacked_logprobs(exported.float(), rollout, 1.0)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_exported_policy_ends_where_it_was_sampled_to_end(policy, tokenizer, tmp_path):
    model, optimizer = trained(policy, seed=1)
    folder, config = tmp_path / "base", model.model.config
    GenerationConfig(eos_token_id=[3, 5], temperature=0.6, do_sample=True).save_pretrained(folder)
    invalid, without_end = tmp_path / "invalid", tmp_path / "without_end"
    for other, content in ((invalid, {"eos_token_id": 2, "temperature": 0.6}), (without_end, {"top_k": 5})):
        other.mkdir()
        (other / "generation_config.json").write_text(json.dumps(content))
    (stop,) = stop_ids(tokenizer, ["7"])
    for path, ids, expected in (
        (folder, [], [3, 5]),
        (folder, [5, stop], [3, 5, stop]),
        (policy / "absent", [stop], [config.eos_token_id, stop]),
        (invalid, [5, stop], [2, 5, stop]),
        (invalid, [], 2),
        (without_end, [], config.eos_token_id),
    ):
        companions = [tokenizer, load_generation_config(str(path), config, ids)]
        saving = checkpoint.Writer(tmp_path / "runs", companions, 0, False, ALONE)
        saving.save(len(list((tmp_path / "runs").glob("*"))), model, optimizer, {})
        exported = checkpoint.latest(tmp_path / "runs")[1]
        found = json.loads((exported / "generation_config.json").read_text())
        assert found["eos_token_id"] == expected
        assert ("temperature" in found) == (path == folder)


def test_only_the_newest_are_kept_and_the_one_that_final_points_to(policy, tokenizer, tmp_path):
    model, optimizer = trained(policy, seed=1)
    (tmp_path / "unfinished_step_1").mkdir()  # of a killed run
    assert checkpoint.latest(tmp_path) == (0, None)
    saving = writer(tmp_path, tokenizer, keep=2)
    for step in (1, 2, 3, 4):
        saving.save(step, model, optimizer, {})
        if step == 1:
            checkpoint.link_final(tmp_path, 1)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [1, 3, 4]
    assert checkpoint.latest(tmp_path) == (4, tmp_path / "step_4")
    assert not list(tmp_path.glob("unfinished*"))
    checkpoint.link_final(tmp_path, 4)
    assert (tmp_path / "final").resolve() == (tmp_path / "step_4").resolve()


def test_the_order_is_that_of_the_steps_not_of_the_names(tmp_path):
    for name in ("step_9", "step_10", "step_x", "unfinished_step_11"):
        (tmp_path / name).mkdir()
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [9, 10]


def test_in_the_background_weights_are_those_of_the_call_and_failures_are_told(
    policy, tokenizer, tmp_path, monkeypatch
):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, optimizer = trained(policy, seed=1)
        before = [parameter.detach().clone() for parameter in model.model.parameters()]
        saving = writer(tmp_path, tokenizer, in_background=True)
        saving.save(1, model, optimizer, {})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        saving.wait()
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")
        for found, expected in zip(exported.parameters(), before, strict=True):
            assert found.equal(expected.to(torch.bfloat16))

        def fail(*arguments: object) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(checkpoint, "export", fail)
        saving.save(2, model, optimizer, {})
        with pytest.raises(OSError, match="No space left"):
            saving.wait()
        assert checkpoint.latest(tmp_path)[0] == 1, "what is not whole has no name that is trusted"
    finally:
        torch.distributed.destroy_process_group()
