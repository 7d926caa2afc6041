"""Data: broken lines are named, long prompts are dropped by tokens, and every epoch sees every row at most once."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from data import PromptData, read_rows

GOOD = '{"problem": "1+1", "answer": "2"}\n'


@pytest.fixture(scope="module")
def tokenizer(policy):
    return AutoTokenizer.from_pretrained(policy)


def write(folder, content: str | bytes) -> str:
    file = folder / "rows.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def test_rows_keep_all_their_columns_and_numbers_are_accepted_as_answers(tmp_path):
    rows = read_rows(write(tmp_path, GOOD + "\n" + '{"problem": "é", "answer": 4, "level": 3}\n'), "problem", "answer")
    assert [(row.prompt, row.answer) for row in rows] == [("1+1", "2"), ("é", "4")]
    assert rows[1].columns == {"problem": "é", "answer": 4, "level": 3}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD + '{"problem": "1+1", "ans', ["line 2", "not valid JSON"]),
        (GOOD.encode() + b'{"problem": "\xff", "answer": "2"}\n', ["line 2", "not valid JSON"]),
        (GOOD + '\n["1+1", "2"]\n', ["line 3", "JSON object", "list"]),
        (GOOD + '{"problem": "1+1"}\n', ["line 2", "'answer'", "--answer_column", "'problem'"]),
        (GOOD + '{"problem": "", "answer": "2"}\n', ["line 2", "'problem'", "non-empty"]),
        (GOOD + '{"problem": "1+1", "answer": null}\n', ["line 2", "'answer'", "None"]),
        (GOOD + '{"problem": "1+1", "answer": true}\n', ["line 2", "'answer'", "True"]),
        ("", ["no rows"]),
        ("\n\n", ["no rows"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_line(content, words, tmp_path):
    with pytest.raises(ValueError) as error:
        read_rows(write(tmp_path, content), "problem", "answer")
    for word in ["rows.jsonl", *words]:
        assert word in str(error.value)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
        read_rows("absent.jsonl", "problem", "answer")


def test_prompts_are_rendered_by_the_chat_template_and_dropped_by_token_count(tokenizer, tmp_path):
    path = write(
        tmp_path, '{"problem": "1+1", "answer": "2"}\n{"problem": "100+100", "answer": "200"}\n{"problem": "1+2", "answer": "3"}\n'
    )
    data = PromptData.load(path, "problem", "answer", tokenizer, max_prompt_tokens=5)
    assert [row.prompt for row in data.rows] == ["1+1", "1+2"]
    assert data.num_dropped == 1
    assert data.name == "rows"
    assert tokenizer.decode(data.prompts[1].tolist()) == "<user>1+2<assistant>"
    assert len(data.prompts[1]) == 5
    with pytest.raises(ValueError, match="all 3 prompts are longer than --max_prompt_tokens 4; the shortest has 5"):
        PromptData.load(path, "problem", "answer", tokenizer, max_prompt_tokens=4)


def test_without_a_chat_template_the_prompt_is_the_problem(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    data = PromptData.load(write(tmp_path, GOOD), "problem", "answer", tokenizer, max_prompt_tokens=3)
    assert tokenizer.decode(data.prompts[0].tolist()) == "1+1"


def test_each_epoch_is_a_new_permutation_and_a_step_is_a_function_of_the_seed(tokenizer, tmp_path):
    content = "".join(json.dumps({"problem": f"{i}", "answer": f"{i}"}) + "\n" for i in range(10))
    data = PromptData.load(write(tmp_path, content), "problem", "answer", tokenizer, max_prompt_tokens=8)
    epochs = [np.concatenate([data.indices_of_step(step, 3, seed=5) for step in (3 * e + 1, 3 * e + 2, 3 * e + 3)]) for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 9, "no row twice in an epoch; the last partial step is dropped"
    assert epochs[0].tolist() != epochs[1].tolist() != epochs[2].tolist()
    assert data.indices_of_step(5, 3, seed=5).tolist() == epochs[1][3:6].tolist()
    assert data.indices_of_step(5, 3, seed=6).tolist() != epochs[1][3:6].tolist()
    assert set(np.concatenate(epochs).tolist()) == set(range(10)), "the row that one epoch drops comes in another"
    for i, row in enumerate(data.rows):
        assert row.answer == row.prompt
        assert tokenizer.decode(data.prompts[i].tolist()) == f"<user>{row.prompt}<assistant>"
