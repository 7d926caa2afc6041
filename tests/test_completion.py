"""What a reward reads of a completion: special tokens that are tags stay, those that begin, end, pad and part go."""

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from batch import Completion
from extras.turns.turns import Episode, Turns
from flags import Grading, PromptFormat, TurnLimits
from gate.describe import describe_tags
from grading import Case
from grading.verifiers import load_verifier
from helpers.made_up import byte_tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<|begin_of_thought|>", "<|python_tag|>", "[TOOL]"]
OTHERS = ["<|im_start|>", "<|im_end|>", "<|Assistant|>", "<|eom|>", "<pad>"]
# It asks for a thought, opens one, and leaves an empty one in earlier answers.
TEMPLATE = (
    "<bos>Write <think> a thought </think> and <answer>."
    "{% for m in messages %}{{ '<|Assistant|><think>\n\n</think>' if m.role == 'assistant' else '<|im_start|>' }}"
    "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|Assistant|><|begin_of_thought|>{% endif %}"
)


def tokenizer_of(tags: list[str] = TAGS) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in [*tags, *OTHERS]])
    tokenizer.pad_token = "<pad>"
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read(text: str, reason: str = "stop") -> str:
    tokenizer = tokenizer_of()
    return Completion(ids_of(tokenizer, text), finish_reason=reason).read(tokenizer)


@pytest.mark.parametrize(("sampled", "shown"), [
    ("<think>a</think><answer>4</answer><|im_end|>", "<think>a</think><answer>4</answer>"),
    ("<|begin_of_thought|>é</think>4<eos>", "<|begin_of_thought|>é</think>4"),
    ("<|python_tag|>f(2)<|eom|>", "<|python_tag|>f(2)"),  # a stop token that the template does not write
    ("[TOOL]f(2)[TOOL]g<eos>", "[TOOL]f(2)[TOOL]g"),
    ("<answer>4</answer>", "<answer>4</answer>"),  # --stop_tokens </answer>
    ("<bos>4<pad><|im_end|><|im_start|>5<|Assistant|>6<eos>", "456"),
    ("4<eos>", "4"),
    ("a<|eom|>b<eos>", "a<|eom|>b"),  # in the middle it is no end
])  # fmt: skip
def test_tags_are_read_and_what_is_around_messages_is_not(sampled, shown):
    assert read(sampled) == shown


def test_a_characters_tokens_join_around_a_token_left_out():
    tokenizer = tokenizer_of()
    first, second = ids_of(tokenizer, "é")
    ids = [first, tokenizer.pad_token_id, second, tokenizer.eos_token_id]
    assert Completion(ids, finish_reason="stop").read(tokenizer) == "é"


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_without_tags_the_text_has_no_special_tokens(template):
    tokenizer = byte_tokenizer(template and template.replace("<|im_start|>", "<pic>"))
    assert Completion(ids_of(tokenizer, "<bos>a <eos>é<eos>"), finish_reason="stop").read(tokenizer) == "a é"
    assert describe_tags(tokenizer) == []


def test_rewards_see_the_tags_and_the_log_names_them():
    text = read("<think>\\boxed{5}</think><answer>4</answer><|im_end|>")
    for name in ("math", "exact", "gsm8k", "format", "think_format"):
        assert load_verifier(name)(Case(text, "4")).reward == 1.0, name
    assert read("<answer>4<|python_tag|>", "length") == "<answer>4<|python_tag|>", "what was cut off has no end"
    assert load_verifier("math")(Case(read("<think>\\boxed{4}", "length"), "4")).reward == 0.0, "a thought that was cut"
    assert describe_tags(tokenizer_of(["<answer>", "</answer>", "<|box_end|>", "<|python_tag|>"])) == [
        "special tokens that the reward sees: <answer>, </answer>, <|python_tag|>"
    ]
    assert describe_tags(tokenizer_of([])) == []


def test_a_turn_is_read_as_a_completion_is():
    tokenizer = tokenizer_of()
    turns = Turns(TurnLimits("none.py:None", None, 2, None), Grading(), PromptFormat(), tokenizer, num_workers=0)
    episode = Episode()
    for text in ("<think>a</think>b<|im_end|>", "<|python_tag|>c<|eom|>"):
        ids = ids_of(tokenizer, text)
        turns.end_turn(episode, Completion(ids, [0.0] * len(ids), [0] * len(ids), "stop"))
    assert episode.turns == ["<think>a</think>b", "<|python_tag|>c"]
