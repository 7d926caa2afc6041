"""An LLM judge behind an OpenAI-compatible address: --reward docs/rewards/judge.py:score

    JUDGE_URL=http://host:8000/v1 JUDGE_MODEL=judge ... --reward_timeout 120 --reward_in_flight 32

Many completions of a worker wait at a time, as coroutines of one event loop. An answer that is no number from 0 to 10
is asked for three times; then, and if the server does not answer, the completion is left out: docs/rewards.md.
"""

import asyncio
import json
import os
import re
import urllib.request

QUESTION = """Grade the answer to a problem from 0 (wrong) to 10 (right and clear). Say the number alone.
Problem: {prompt}
Right answer: {answer}
Answer to grade: {completion}"""


def ask(text: str) -> str:
    """The judge's answer. Raises OSError if it cannot be reached or takes more than 30 s."""
    body = {"model": os.environ["JUDGE_MODEL"], "messages": [{"role": "user", "content": text}], "temperature": 0}
    request = urllib.request.Request(
        os.environ["JUDGE_URL"] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["choices"][0]["message"]["content"]


async def score(completion, answer, prompt):
    for _ in range(3):
        said = await asyncio.to_thread(ask, QUESTION.format(prompt=prompt, answer=answer, completion=completion))
        number = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:/ ?10)?\.?\s*", said)
        if number and float(number[1]) <= 10:
            return float(number[1]) / 10
    raise ValueError(f"the judge gives no grade: {said[:100]!r}")
