"""The planner: facts that it must reproduce, runs that must not fit, with flags to change."""

import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from helpers.made_up import flags
from helpers.runs import ENVIRONMENT, ROOT, run_command
from plan import memory
from plan.dry_run import TABLE, config_of, dry_run, rows_of, setup_of
from plan.memory import (
    checkpoint_bytes,
    engine_parts,
    gpu_phases,
    host_phases,
    misfits,
    needed,
    saved_per_layer,
    total,
)
from plan.setup import GIB, Setup, shape_of
from plan.table import report_of
from plan.time import forward_flops, traffic
from runtime.ways_out import WAYS_OUT

COMMON = {
    "total_steps": None, "max_prompt_tokens": 2048, "max_completion_tokens": 2048, "gradient_checkpointing": True,
    "kl_coef": 0.01, "plan_gpus": 8,
}  # fmt: skip
QWQ = COMMON | {
    "model": "Qwen/QwQ-32B", "train_data": "hiyouga/math12k@train", "epochs": 15, "prompts_per_step": 512,
    "group_size": 5, "prompts_per_update": 128, "micro_batch_tokens": 16384, "tensor_parallel_size": 2,
}  # fmt: skip
VISION = COMMON | {
    "model": "Qwen/Qwen2.5-VL-72B-Instruct", "train_data": "lmms-lab/multimodal-open-r1-8k-verified#1000", "epochs": 1,
    "prompts_per_step": 8, "group_size": 8, "max_prompt_tokens": 6144, "tensor_parallel_size": 4,
    "gpu_memory_utilization": 0.5, "plan_gpu": "A100-80GB", "image_column": "image", "max_pixels": 602_112,
}  # fmt: skip
SIMPLERL = COMMON | {
    "model": "Qwen/Qwen2.5-7B", "train_data": "simplelr_qwen_level3to5.parquet", "total_steps": 90,
    "prompts_per_step": 1024, "group_size": 8, "prompts_per_update": 256, "max_prompt_tokens": 1024,
    "max_completion_tokens": 8192, "micro_batch_tokens": 9216, "tensor_parallel_size": 2, "plan_gpus": 16,
    "plan_nodes": 2,
}  # fmt: skip
REFUSED = "google/gemma-3-4b-it"


def setup(values: dict, **changes: object) -> Setup:
    args = flags(**(values | changes))
    return setup_of(args, config_of(args.model))


def on_nodes(host_bytes: float, values: dict) -> Setup:
    usual = setup(values)
    return replace(usual, hardware=replace(usual.hardware, host_bytes=host_bytes))


def test_a_table_that_vllm_pads_is_held_to_the_end_of_a_sync():
    """128,264 rows, no multiple of 64. In vLLM on CPU: of 64 rows the head alone is held, of 72 both."""
    tulu = COMMON | {"model": "allenai/Llama-3.1-Tulu-3-8B-DPO", "total_steps": 10}
    table = 128_264 * 4096 * 2
    servers = {"engine": "server", "generation_gpus": 1}
    for changes, phase, without_it in (({}, "sync", 0), (servers, "server", table + 218_112_000 * 2)):
        assert gpu_phases(setup(tulu, **changes))[phase]["weights arriving"] == table + without_it
    for changes in ({"vocab_size": 128_256}, {"tie_word_embeddings": True}):
        config = config_of(tulu["model"])
        config.update(changes)
        assert gpu_phases(setup_of(flags(**tulu), config))["sync"]["weights arriving"] == 0, changes


def test_the_shapes_have_as_many_parameters_as_the_real_models():
    """Tied heads count once: the files of Qwen3-0.6B and 1.7B hold them twice. Qwen3.5 is without its tower."""
    table = json.loads(TABLE.read_text())
    entries = {name: each for name, each in table.items() if REFUSED not in (name, each.get("as"))}
    shapes = {name: shape_of(config_of(name), name) for name in entries}
    same = {"as", "max_position_embeddings"}  # as another one, but for the context
    sizes = {name: shape.parameters for name, shape in shapes.items() if not entries[name].keys() <= same}
    assert all(shapes[name].parameters == sizes[entry["as"]] for name, entry in entries.items() if entry.keys() <= same)
    assert all(each.keys() <= same or "model_type" in each or len(each) == 2 for each in table.values())
    assert sizes == json.loads((ROOT / "tests" / "plan" / "model_sizes.json").read_text())
    active = {name: shapes[name].active_parameters for name in sizes}
    assert {name: round(each / 1e9, 1) for name, each in active.items() if each != sizes[name]} == {
        "Qwen/Qwen3-30B-A3B": 3.4,  # 3.3 by its card
        "allenai/OLMoE-1B-7B-0924": 1.3, "Qwen/Qwen1.5-MoE-A2.7B": 2.7,
    }  # fmt: skip
    assert shapes["Qwen/Qwen3-4B"].projections["q_proj"] == (2560, 4096), "32 heads of 128 are wider than the model"
    assert shapes["Qwen/Qwen2.5-1.5B"].root_parameters == 151_936 * 1536 + 1536, "tied embedding, last norm"
    norms = {name: (shapes[name].norms, shapes[name].norm_bytes) for name in sizes}
    assert {name: each for name, each in norms.items() if each != (2, 6)} == {
        "google/gemma-3-270m": (4, 8), "google/gemma-3-1b-it": (4, 8), "allenai/Olmo-3-1025-7B": (2, 8),
        **dict.fromkeys((name for name in sizes if "Qwen3.5" in name), (2, 8)),
    }  # fmt: skip
    vision = shapes["Qwen/Qwen2.5-VL-72B-Instruct"]
    assert vision.root_parameters - vision.root_trained == 704_573_696


def test_a_mixture_takes_memory_for_all_and_time_for_some_experts():
    """30B-A3B on 8 x 80 GB: all weights are gathered, a token is multiplied by a tenth of them."""
    values = {"model": "Qwen/Qwen3-30B-A3B", "max_completion_tokens": 2048, "gradient_checkpointing": True}
    full = setup(values, plan_gpus=8, tensor_parallel_size=4, offload="optimizer")
    adapted = setup(values, plan_gpus=8, tensor_parallel_size=2, lora_rank=32)
    assert misfits(full) == misfits(adapted) == [] and misfits(setup(values, plan_gpus=8))
    model = full.model
    stacks = 128 * 3 * 768 * 2048  # of a layer
    assert (model.layer_parameters - stacks) / 1e6 == pytest.approx(19.1, abs=0.1), "attention, router and norms"
    assert gpu_phases(full)["sync"]["gathered"] == 2 * stacks * 2 / 3 * (2 + 1 / 8)
    in_matrices = model.active_parameters - model.table  # a row of the embedding is looked up
    assert forward_flops(model, 1, 1) == pytest.approx(2 * in_matrices, rel=1e-3)
    assert adapted.trainable == 48 * 32 * 17_408, "attention alone"
    assert full.flops == pytest.approx(0.4 * 0.42 * full.hardware.flops), "the products are small"
    assert setup(values, plan_gpus=1, lora_rank=8).flops == pytest.approx(0.4 * 0.65 * full.hardware.flops)


def test_routes_are_counted_where_they_stay():
    """By hand, of 30B-A3B: 48 layers x 8 experts, a byte each, of 128 sequences of 8,192 tokens a GPU."""
    values = {"model": "Qwen/Qwen3-30B-A3B", "max_prompt_tokens": 1024, "max_completion_tokens": 7168, "plan_gpus": 8}
    values |= {"prompts_per_step": 128, "group_size": 8, "gradient_checkpointing": True, "total_steps": 1}
    found = [setup(values, router_replay=replays) for replays in (None, True)]
    routes = 48 * 8 * 128 * 8192
    for name, parts in gpu_phases(found[1]).items():
        more = total(parts) - total(gpu_phases(found[0])[name])
        assert more == pytest.approx(0 if name == "load" else routes), name
    for name, parts in host_phases(found[1]).items():
        more = total(parts) - total(host_phases(found[0])[name])
        assert more == pytest.approx(0 if name == "load" else 2 * 8 * routes), name


def test_a_hybrid_has_keys_in_some_layers_and_states_in_the_others():
    """Qwen3.5-9B: 8 of 32 layers have keys and values."""
    values = {"model": "Qwen/Qwen3.5-9B", "max_completion_tokens": 2048, "gradient_checkpointing": True}
    full, adapted = setup(values, plan_gpus=8), setup(values, plan_gpus=8, lora_rank=16)
    model = full.model
    state = 32 * 128 * 128 + 3 * (2 * 16 + 32) * 128  # a matrix a head, the convolution's inputs
    assert model.kv_per_token == 8 * 2 * 4 * 256 and model.state_bytes == 4 * state * (2 * 24 + 8)
    sequence = full.engine.max_model_len * model.kv_per_token * 2 + model.state_bytes
    assert memory.sequences_at_once(full) == pytest.approx(engine_parts(full)["KV cache"] / sequence)
    assert forward_flops(model, 100, 0) == 2 * 100 * 32 * model.layer_matrices + 2 * 8 * 4096 * 100**2
    mlp = 3 * (4096 + 12288)
    attention = (4096 + 8192) + 2 * (4096 + 1024) + 2 * 4096  # queries with their gates; keys, values; output
    linear = (4096 + 8192) + 2 * 4096 + 2 * (4096 + 32) + 2 * 4096  # in one, gates, decays and rates, output
    assert adapted.trainable == 16 * (32 * mlp + 8 * attention + 24 * linear)
    assert setup(values, plan_gpus=8, lora_rank=16, lora_targets="q_proj").trainable == 8 * 16 * (4096 + 8192)
    assert full.trainable == model.parameters


def test_a_known_model_that_cannot_be_planned_is_refused_by_kind():
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config_of(REFUSED))
    assert sum(each.numel() for each in model.parameters()) == 4_300_079_472
    with pytest.raises(ValueError, match="the dry run knows the architectures .*, not 'gemma3'"):
        setup(COMMON | {"model": REFUSED, "train_data": "d", "total_steps": 1, "micro_batch_tokens": 4096})


@pytest.mark.parametrize(("given", "figures"), [
    ("H100-80GB", (79.0, 989, 3.35)), ("h100", (79.0, 989, 3.35)), ("RTX 3090", (23.5, 71, 0.936)),
    ("A10", (22.0, 125, 0.6)), ("L4", (22.0, 121, 0.3)), ("L40S", (44.3, 362, 0.86)), ("B200", (178.0, 2250, 8.0)),
    ("GH200", (94.6, 989, 4.0)), ("a100_40gb", (39.3, 312, 1.56)), ("RTX4090-24GB", (23.5, 165, 1.008)),
    ("24GiB:142TFLOPs:0.94TBs", (24.0, 142.0, 0.94)), ("7.5gib:.5tflops:1tb/s", (7.5, 0.5, 1.0)),
])  # fmt: skip
def test_a_gpu_is_given_by_its_name_or_by_its_figures(given, figures):
    hardware = setup(QWQ, plan_gpu=given).hardware
    found = hardware.gpu_bytes / GIB, hardware.flops / 1e12, hardware.memory_speed / 1e12
    assert found == pytest.approx(figures) and hardware.link_speed >= 25e9


def test_flops_are_those_of_the_published_counter_and_pinned_memory_is_that_of_torch():
    embedding = 6 * 152_064 * 3584 * (512 + 1024 + 2048)  # a matrix to verl: it is looked up
    model = setup(SIMPLERL).model
    forwards = sum(forward_flops(model, length, length) for length in (512, 1024, 2048))
    assert 3 * forwards == 167_073_690_943_488 - embedding, "with the backward passes"
    assert forward_flops(model, 100, 40) - forward_flops(model, 100, 0) == 2 * 152_064 * 3584 * 40
    names = ("Qwen/QwQ-32B", "Qwen/Qwen2.5-7B", "allenai/Llama-3.1-Tulu-3-8B-DPO")
    found = [memory.pinned_share(setup({"model": name}, plan_gpus=8), itemsize=2) for name in names]
    assert found == pytest.approx([110.0 / 61.0, 27.0 / 14.2, 1.10], rel=0.02)


def test_neither_qwq_as_in_its_source_nor_full_logits_nor_the_whole_model_in_a_sync_fit(monkeypatch):
    on_gpu = " ".join(misfits(setup(QWQ)))
    assert "GPU, rollout" in on_gpu and "GPU, update" in on_gpu and "host" not in on_gpu
    offloads = {"offload": "all", "offload_reference": True}
    offloaded = misfits(on_nodes(512e9, QWQ | offloads))
    assert offloaded and all(words.startswith("host RAM") for words in offloaded)
    assert not misfits(setup(QWQ | offloads)), "with the 1 TB that the document asks for"
    vision = setup(VISION, lora_rank=8)
    sync = gpu_phases(vision)["sync"]
    assert needed(sync) <= vision.hardware.gpu_bytes < needed(sync | {"gathered": 2 * vision.model.parameters})
    as_we_run_it = {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.5, "param_dtype": "bfloat16"}
    qwq = setup(QWQ | as_we_run_it | {"micro_batch_tokens": 20_480, "head_dtype": "float32"}, offload_reference=True)
    assert misfits(qwq) == []
    monkeypatch.setattr(memory, "HEAD_CHUNK_LOGITS", 20_480 * 152_064)  # a micro-batch at a time
    assert "GPU, update" in misfits(qwq)[0]


def test_communicating_once_moves_less():
    plain, once = (traffic(setup(QWQ, communicate_once=flag)) for flag in (None, True))
    assert once["reduce-scatter"] < plain["reduce-scatter"]
    assert once["all-gather, update"] < 0.5 * plain["all-gather, update"]


def test_each_phase_that_does_not_fit_has_its_flags():
    """They are those that a run out of memory names; taking them makes it fit."""
    wide = QWQ | {"offload_reference": True, "tensor_parallel_size": 8}
    wide |= {"gradient_checkpointing": None, "gpu_memory_utilization": 0.35}
    (update,) = misfits(on_nodes(300 * GIB, wide))
    assert "GPU, update: needs" in update and f"; {WAYS_OUT['update'][0]}, or --compile without" in update
    fits = wide | {"gradient_checkpointing": True, "param_dtype": "bfloat16"}
    assert misfits(on_nodes(300 * GIB, fits)) == []
    (rollout,) = misfits(on_nodes(300 * GIB, fits | {"gpu_memory_utilization": 0.9}))
    assert "GPU, rollout: needs" in rollout and rollout.endswith(f"; {WAYS_OUT['sample'][0]}")
    (too_small,) = misfits(setup(SIMPLERL | {"gpu_memory_utilization": 0.14}))
    assert "not enough for one sequence of 9216 tokens" in too_small
    assert too_small.endswith("; raise --gpu_memory_utilization or --tensor_parallel_size")
    on_host = misfits(on_nodes(200 * GIB, fits))
    assert on_host and all(words.endswith("; use less of --offload, or start fewer ranks") for words in on_host)


def test_compiled_layers_keep_less_for_the_backward_pass():
    """Qwen2.5-1.5B, of a token and layer: 103.5 KB in eager mode, 73.2 compiled; recomputed 3."""
    values = COMMON | {"model": "Qwen/Qwen2.5-1.5B", "train_data": "d", "total_steps": 1, "plan_gpus": 1}
    values |= {"gradient_checkpointing": None, "micro_batch_tokens": 4096}
    kept = [saved_per_layer(setup(values, compile=flag)) / 4096 for flag in (None, True)]
    attention = 4 * 1536 + 4 * 256 + 4 * 12
    assert kept == [8 * 8960 + 16 * 1536 + attention, 6 * 8960 + 8 * 1536 + attention]
    assert saved_per_layer(setup(values, compile=True, model="Qwen/Qwen3-0.6B")) / 4096 == (
        6 * 3072 + 8 * 1024 + 4 * 2048 + 4 * 1024 + 4 * 16 + 2 * (2048 + 1024)
    ), "and norms of heads"
    (update,) = [words for words in misfits(setup(values, micro_batch_tokens=32_768)) if "GPU, update" in words]
    eager, compiled = re.findall(r"needs (\S+) GiB", update)
    assert "which needs " + compiled in update and float(compiled) < float(eager)
    recomputed = misfits(setup(values, micro_batch_tokens=524_288, gradient_checkpointing=True))
    assert "GPU, update" in recomputed[0] and "--compile" not in recomputed[0], "it would keep more"


def test_a_command_is_planned_for_the_ranks_that_it_starts(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    started = QWQ | {"plan_gpus": None, "tensor_parallel_size": 1, "dry_run": True}
    assert setup(started).hardware.gpus == 1, "python train_grpo.py"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    launched, given = setup(started), setup(started, plan_gpus=16, plan_nodes=2)
    assert (launched.hardware.gpus, launched.hardware.nodes) == (16, 2) and launched == given


def test_rows_come_from_the_source_the_disk_or_a_table(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    sources = [str(file)], ["hiyouga/math12k"], ["owner/name#70", "hiyouga/math12k@test"], ["owner/name"]
    assert [rows_of(each) for each in sources] == [2, 12_000, 570, None]
    assert report_of(setup(QWQ, train_data="owner/name#520"))["steps_per_epoch"] == 1
    assert report_of(setup(SIMPLERL, train_data="owner/name"))["steps_per_epoch"] is None


@pytest.mark.parametrize(("changes", "words"), [
    ({"tensor_parallel_size": 3}, "3 does not divide the world size 8; use one of 1, 2, 4, 8"),
    ({"plan_completion_tokens": 2049}, "2049 is the mean; use at most --max_completion_tokens 2048"),
    ({"plan_gpus": 12, "plan_nodes": 5}, "--plan_gpus 12 is not divisible by --plan_nodes 5"),
    ({"max_completion_tokens": 60_000, "micro_batch_tokens": 70_000}, "the context of --model .*, 40960 tokens"),
    ({"train_data": "owner/name"}, "give owner/name#ROWS"),
])  # fmt: skip
def test_what_could_not_run_anywhere_is_an_error_with_a_way_out(changes, words):
    with pytest.raises(ValueError, match=words):
        dry_run(flags(**(QWQ | changes)))


@pytest.mark.parametrize(("changes", "words"), [
    ({"stop_tokens": "im_end"}, "--stop_tokens 'im_end': no token of the tokenizer"),
    ({"eval_data": "x.jsonl", "eval_every": 1, "eval_samples": 4, "eval_temperature": 0}, "are 4 times the same"),
    ({"reward": "maths"}, "--reward 'maths': 'maths' is neither built in"),
    ({"reward": "absent.py:score"}, "the file '.*absent.py' does not exist"),
    ({"reward": f"{ROOT}/docs/rewards/unit_tests.py:absent"}, "--reward .*unit_tests.py:absent cannot be loaded"),
    ({"tools": f"{ROOT}/docs/environments/calculator.py:absent"}, "--tools .*:absent cannot be loaded"),
    ({"environment": "absent.py:Env"}, "--environment absent.py:Env cannot be loaded"),
    ({"system_prompt": "absent.txt"}, "--system_prompt 'absent.txt': no such file"),
    ({"template_args": "enable_thinking=false"}, "--template_args enable_thinking=false: give NAME=VALUE, with a"),
])  # fmt: skip
def test_the_dry_run_refuses_flags_that_a_start_refuses(changes, words):
    """What depends on a tokenizer, where the model's folder has one."""
    tiny = {"model": str(ROOT / "scripts" / "tiny_policy"), "max_prompt_tokens": 16, "max_completion_tokens": 48}
    given = tiny | {"train_data": "d#64", "plan_gpus": 1, "epochs": None, "total_steps": 4}
    assert setup(given).run
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        setup(given | changes)


def test_a_config_alone_will_do_for_a_dry_run(tmp_path):
    shutil.copy(ROOT / "scripts" / "tiny_policy" / "config.json", tmp_path)
    assert setup({"model": str(tmp_path), "train_data": "d#64", "plan_gpus": 1, "max_prompt_tokens": 16} | {
        "max_completion_tokens": 48, "total_steps": 4}).run  # fmt: skip


def test_the_dry_run_needs_no_network_gpu_or_data(tmp_path):
    given = f"--model {VISION['model']} --train_data {VISION['train_data']} --out_dir {tmp_path}/run --epochs 1"
    given += " --prompts_per_step 8 --max_prompt_tokens 6144 --gradient_checkpointing --dry_run --json --plan_gpus 8"
    environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = run_command([sys.executable, "train_grpo.py", *given.split()], environment)
    assert done.returncode == 3
    answer = json.loads(done.stdout)
    assert not answer["fits"] and answer["misfits"] and answer["gpu_peak_phase"] in answer["gpu_gib"]
    assert not (tmp_path / "run").exists()


def test_a_plan_that_does_not_fit_has_no_times_and_its_text_says_so(capsys):
    found = report_of(setup(QWQ))
    times = ("step_seconds", "total_hours", "total_gpu_hours", "seconds")
    assert found["fits"] is False and [found[name] for name in times] == [None, None, None, {}]
    (lacks,) = misfits(setup(SIMPLERL | {"gpu_memory_utilization": 0.08}))
    expected = "--gpu_memory_utilization 0.08 is 6.3 GiB, of which the engine needs 11.1 without its cache: not enough"
    assert expected in lacks, lacks  # 15.2 GB of weights on two GPUs, and 4 GiB
    assert (dry_run(flags(**SIMPLERL)), dry_run(flags(**QWQ))) == (0, 3)
    fits, _, does_not = capsys.readouterr().out.partition("\ndry run:")
    assert "\nfits: rollout needs" in fits and "does not fit:\nGPU, rollout: needs" in does_not
    assert " s per step: " in fits and "time        none is estimated, because the run does not fit\n" in does_not
    assert re.search(r"GPU, update: needs \d+\.\d GiB of 79\.0, \d+\.\d GiB too many; lower --micro", does_not)
    assert not re.search(r"-\d+\.\d", does_not), "no part takes less than nothing"


@pytest.mark.parametrize(("changes", "words"), [
    ({"group_size": 2, "micro_batch_tokens": 8192},
     ["8 prompts x 2 = 16 completions", "8 engines of 1 GPU, 2 ", "in 1 micro-batch of"]),
    ({"plan_gpus": 2, "tensor_parallel_size": 2, "prompts_per_step": 1, "group_size": 2},
     ["1 prompt x 2 = 2 completions", "1 engine of 2 GPUs, 2 ", "2 steps, 2 updates"]),
    ({"train_data": "d#8", "total_steps": 1}, ["1 step per epoch of 8 rows; 1 step, 1 update, "]),
])  # fmt: skip
def test_one_is_not_many(changes, words, capsys):
    small = COMMON | {"model": "Qwen/Qwen3-0.6B", "train_data": "d", "total_steps": 2, "prompts_per_step": 8}
    dry_run(flags(**(small | {"micro_batch_tokens": 4096, "kl_coef": 0} | changes)))
    shown = capsys.readouterr().out
    assert [word for word in words if word not in shown] == [], shown


def test_a_teacher_of_another_size_has_its_own_bytes_and_time():
    """1.5B on one GPU: alone, with a teacher of 3B (in bf16 5.75 GiB), with its adapter."""
    small = COMMON | {
        "model": "Qwen/Qwen2.5-1.5B-Instruct", "total_steps": 10, "prompts_per_step": 8,
        "plan_gpus": 1, "micro_batch_tokens": 4096, "kl_coef": 1,
    }  # fmt: skip
    larger = {"reference": "Qwen/Qwen2.5-3B-Instruct"}
    adapter = larger | {"lora_rank": 8}
    ways = {}, larger, adapter, adapter | {"kl_over": "vocabulary"}
    own, other, lora, over = (report_of(setup(small, **changes)) for changes in ways)
    assert [each["gpu_gib"]["rollout"]["reference"] for each in (own, other, lora)] == [2.88, 5.75, 5.75]
    assert other["seconds"]["logprobs"] > 1.3 * own["seconds"]["logprobs"]
    assert "logprobs" in lora["gpu_gib"] and "logprobs" not in over["gpu_gib"], "it runs beside the update"
    moved = lora["seconds"]["logprobs"]  # all of it is the reference's
    assert over["seconds"]["update"] == pytest.approx(lora["seconds"]["update"] + moved, abs=0.11)
    table = 151_936 * 2_048 * 2 + 4_096 * 2_048 * 2  # its head and its last hidden states
    assert over["gpu_gib"]["update"]["teacher"] == pytest.approx(table / GIB, abs=0.01)


def test_a_critic_has_its_own_bytes_and_time():
    """8B without its head: 16 bytes for each of 7.5 B parameters over 7 GPUs are 16 GiB; in bf16 10."""
    tulu = COMMON | {"model": "allenai/Llama-3.1-Tulu-3-8B-DPO", "total_steps": 10, "prompts_per_step": 28}
    tulu |= {"prompts_per_update": 28, "plan_gpus": 7, "micro_batch_tokens": 8192}
    critic = {"critic": "allenai/Llama-3.1-Tulu-3-8B-RM"}
    own, two, bf16, host = (
        report_of(setup(tulu, **changes))
        for changes in (
            {},
            critic | {"critic": "policy:passes=2"},
            critic | {"param_dtype": "bfloat16"},
            critic | {"offload": "all"},
        )
    )
    count = two["critic_parameters"]
    assert count == 8_030_326_784 - 128_264 * 4096 + 4096 and own["critic_parameters"] is None
    for report, kept in ((two, 12), (bf16, 8)):  # gradients, 4 and 2 bytes more, are there in its own update alone
        found = report["gpu_gib"]["update"]["critic"] + report["gpu_gib"]["update"]["critic's optimizer"]
        assert found == pytest.approx(kept * count / 7 / GIB, abs=0.02)
    assert "critic" in host["host_gib"]["run"] and "critic" not in host["gpu_gib"]["update"]
    assert two["checkpoint_gib"] - own["checkpoint_gib"] == pytest.approx(14 * count / GIB, abs=0.02)
    assert two["seconds"]["critic"] > 2 * 0.9 * own["seconds"]["update"] and "critic" not in own["seconds"]


def test_a_reference_that_moves_is_counted_in_checkpoints_and_a_mean_in_fp32():
    """With bf16 masters the table of a mean is the largest tensor that is loaded."""
    bf16 = QWQ | {"param_dtype": "bfloat16", "offload": "optimizer"}
    still, moving = setup(bf16), setup(bf16, reference_every=1)
    mean = setup(bf16, reference_every=1, reference_mixup=0.05)
    parameters = still.model.parameters
    sizes = [gpu_phases(each)["update"]["reference"] * 8 / parameters for each in (still, moving, mean)]
    assert sizes == pytest.approx([2, 2, 4])
    more = [checkpoint_bytes(each) - checkpoint_bytes(still) for each in (moving, mean)]
    assert more == pytest.approx([2 * parameters, 4 * parameters])
    tables = [gpu_phases(each)["load"]["one tensor"] for each in (still, mean)]
    assert tables == [2 * still.model.table, 4 * still.model.table]
