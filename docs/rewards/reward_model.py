"""A trained reward model behind vLLM: --reward docs/rewards/reward_model.py:score

    vllm serve Skywork/Skywork-Reward-V2-Qwen3-0.6B --runner pooling            # on a GPU that no rank uses
    REWARD_MODEL_URL=http://host:8000 ... --reward_timeout 120 --reward_in_flight 32

The reward is the model's number as it is, without the sigmoid: --advantage grpo cares for differences alone. Prompt and
completion are rendered by the reward model's own template. Many completions of a worker wait at a time. If the server
does not answer, the completion is left out: docs/rewards.md.
"""

import asyncio
import json
import os
import urllib.request


def ask(messages: list[dict[str, str]]) -> float:
    """The reward model's number. Raises OSError if the server cannot be reached or takes more than 60 s."""
    body = {"messages": messages, "use_activation": False}
    request = urllib.request.Request(
        os.environ["REWARD_MODEL_URL"] + "/classify", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        (number,) = json.load(response)["data"][0]["probs"]
    return number


async def score(completion, answer, prompt):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return await asyncio.to_thread(ask, messages)
