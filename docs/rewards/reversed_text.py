"""The share of the text that is reversed, as in the reverse-text environment of PrimeIntellect's verifiers.

--reward docs/rewards/reversed_text.py:score --answer_column prompt: the answer is the text that is to be reversed. The
reward is the share of characters, from 0 to 1, that the first <reversed_text> has in common with it, by difflib.
"""

import re
from difflib import SequenceMatcher


def score(completion, answer):
    match = re.search("<reversed_text>(.*?)</reversed_text>", completion, re.DOTALL)
    said = match[1].strip() if match else ""
    return SequenceMatcher(None, said, answer[::-1]).ratio()
