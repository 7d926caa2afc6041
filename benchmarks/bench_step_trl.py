"""TRL's part of bench_step.py, in an environment of its own: GRPOTrainer on the same model, prompts and lengths.

It takes its settings as a JSON object and imports nothing of this project. What TRL needs on CPU is patched here; TRL's
code stays as it is.

- Colocated vLLM: version 0.32 is newer than TRL 1.16 admits (a warning). It gets eager mode instead of its compiler, a
  cache of the size of ours, and new weights through `reload_weights`: TRL calls `load_weights`, which does not fit the
  repacked weights that vLLM keeps on CPU.
- FSDP2: accelerate 1.15 ignores it on CPU without a word and trains with DDP. So it is switched on behind accelerate's
  back and looked for after the training, and `generate` gets the flag that keeps the ranks together.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
import torch._dynamo
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation


class Clock(TrainerCallback):
    """The wall time at the end of each step."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


def patch_vllm_for_cpu(cache_bytes: int, cache_block: int) -> None:
    if "AMX" not in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX"):
        torch.cpu._is_amx_tile_supported = lambda: False  # what vLLM asks before it chooses its attention kernel
    torch._dynamo.config.disable = True
    engine = vllm_generation.LLM
    settings = {"enforce_eager": True, "dtype": "float32", "disable_log_stats": True}
    settings |= {"kv_cache_memory_bytes": cache_bytes, "block_size": cache_block}
    vllm_generation.LLM = lambda **options: engine(**options, **settings)

    def sync_weights(self: vllm_generation.VLLMGeneration) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
        self.llm.reset_prefix_cache()

    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def patch_accelerate_for_cpu() -> None:
    """Accelerate's state takes the FSDP plugin of ranks on a GPU only."""
    plain_init = AcceleratorState.__init__

    def init(self: AcceleratorState, *args: object, fsdp_plugin: object = None, **kwargs: object) -> None:
        plain_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def score(completions: list[str], **_: object) -> list[float]:
    """What bench_common.REWARD computes."""
    return [completion.count("1") / max(len(completion), 1) for completion in completions]


def make_trainer(args: SimpleNamespace, clock: Clock) -> GRPOTrainer:
    completions = args.prompts * args.group_size // int(os.environ.get("WORLD_SIZE", "1"))
    micro_batch = min(32, completions)  # with which it is fastest
    options = {}
    if args.fsdp:
        (architecture,) = AutoConfig.from_pretrained(args.model).architectures
        layer = architecture.replace("ForCausalLM", "DecoderLayer")
        options |= {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [layer]}}
    if args.vllm:
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": args.longest}
    config = GRPOConfig(
        output_dir=f"{args.out}_trainer", use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=1,
        seed=1, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=completions // micro_batch,
        num_generations=args.group_size, max_completion_length=args.max_tokens, max_steps=args.steps,
        learning_rate=1e-6, lr_scheduler_type="constant", beta=0.0, temperature=1.0, top_k=0,
        gradient_checkpointing=False, disable_tqdm=True, dataloader_pin_memory=False,
        ddp_find_unused_parameters=False, model_init_kwargs={"dtype": "float32"}, **options,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
    chats = [[{"role": "user", "content": row["problem"]}] for row in rows]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    data = Dataset.from_dict({"prompt": prompts})
    common = {"args": config, "train_dataset": data, "processing_class": tokenizer, "callbacks": [clock]}
    return GRPOTrainer(args.model, score, **common)


def main() -> None:
    args = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(args.threads)
    if args.vllm:
        patch_vllm_for_cpu(args.cache_bytes, args.cache_block)
    if args.fsdp:
        patch_accelerate_for_cpu()
    trainer = make_trainer(args, clock := Clock())
    # `generate` goes on until all ranks are done: they gather for each token.
    trainer.model._is_fsdp_managed_module = args.fsdp
    trainer.train()
    if any(isinstance(layer, FSDPModule) != args.fsdp for layer in trainer.model.model.layers):
        raise RuntimeError(f"--fsdp is {args.fsdp}, but that is not how the layers of the trained model were sharded")
    if int(os.environ.get("RANK", "0")) == 0:
        # The first step is warm-up.
        seconds = [after - before for before, after in zip(clock.ends[1:], clock.ends[2:], strict=False)]
        key = "completions/mean_length"
        lengths = [record[key] for record in trainer.state.log_history if key in record]
        Path(args.out).write_text(json.dumps({"seconds": seconds, "tokens": lengths[1:]}))
    os._exit(0)  # vLLM and TRL do not agree on who ends the process group


if __name__ == "__main__":
    main()
