"""Sources: files, folders and hub data sets are read as they are, or refused by name and line."""

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import time
from pathlib import Path

import datasets
import pytest

from data_files import (
    GOOD,
    load,
    write,
    write_lines,
    write_math12k,
    write_parquet,
)
from helpers import ROOT
from inputs import records
from inputs.records import Record, name_of_source, parse_source, read_records, read_system_prompt

pytestmark = pytest.mark.usefixtures("cache")

# Files


def test_rows_keep_all_their_columns_and_numbers_are_accepted_as_answers(tmp_path):
    loaded = load(write(tmp_path, GOOD + "\n" + '{"problem": "é", "answer": 4, "level": 3}\n'))
    assert [(row.prompt, row.answer) for row in loaded.rows] == [("1+1", "2"), ("é", "4")]
    assert loaded.rows[1].columns == {"problem": "é", "answer": 4, "level": 3}
    assert loaded.rows[1].where == f"{tmp_path}/rows.jsonl, line 3"
    assert (loaded.name, loaded.num_too_long, loaded.excluded) == ("rows", 0, [])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD + '{"problem": "1+1", "ans', ["line 2", "not valid JSON", "cut off"]),
        (GOOD.encode() + b'{"problem": "\xff", "answer": "2"}\n', ["line 2", "not valid JSON", "UTF-8"]),
        (GOOD.encode() + b'{"problem": "\xed\xa0\xbd", "answer": "2"}\n', ["line 2", "not valid JSON"]),
        (GOOD + "\n" + '{"problem": "a\0b", "answer": "2"}\n', ["line 3", "not valid JSON", "UTF-16?"]),
        (GOOD.encode() + b"\0" * 4096, ["line 2", "not valid JSON"]),
        (GOOD.encode("utf-16"), ["line 1", "UTF-16", "iconv"]),
        (GOOD.encode("utf-16-le"), ["line 1", "UTF-16", "iconv"]),
        (GOOD + '\n["1+1", "2"]\n', ["line 3", "JSON object", "list"]),
        (GOOD + '"text"\n', ["line 2", "JSON object", "str"]),
        (GOOD + "[" * 100_000 + "\n", ["line 2", "not valid JSON"]),
        (GOOD + '{"problem": "1+1", "answer": "2", "answer": "3"}\n', ["line 2", "appears twice", "'answer'"]),
        (GOOD + '{"problem": "1+1"}\n', ["line 2", "'answer'", "--answer_column", "this row has 'problem'."]),
        (GOOD + "{}\n", ["line 2", "'problem'", "--prompt_column", "none"]),
        ("[\n" + GOOD + "]", ["line 1", "not valid JSON", "one JSON object per line"]),
        ("", ["no rows"]),
        ("\n \r\n", ["no rows"]),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_line(content, words, tmp_path):
    with pytest.raises(ValueError) as error:
        load(write(tmp_path, content))
    for word in ["rows.jsonl", *words]:
        assert word in str(error.value)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize(
    ("content", "prompts"),
    [
        (b"\xef\xbb\xbf" + GOOD.encode(), ["1+1"]),
        (GOOD.replace("\n", "\r\n") * 2, ["1+1", "1+1"]),
        (GOOD + "\n\n" + GOOD.rstrip("\n"), ["1+1", "1+1"]),
        ('{"id": 7, "problem": "a", "answer": "1"}\n{"id": 7, "problem": "b", "answer": "2"}\n', ["a", "b"]),
        ('{"problem": "a", "answer": "1", "level": NaN, "score": -Infinity}\n', ["a"]),
        ('{"problem": "a\\u0000\\u2028b", "answer": "1"}\n', ["a\0\u2028b"]),
        ('{"problem": "a", "answer": "1", "id": 1}\n{"problem": "b", "answer": "1", "id": "x"}\n', ["a", "b"]),
    ],
)
def test_what_is_unusual_but_clear_is_loaded(content, prompts, tmp_path):
    assert [row.prompt for row in load(write(tmp_path, content)).rows] == prompts


def test_a_line_of_10_mb_is_loaded_and_a_prompt_of_200_kb_counted_as_too_long(tmp_path):
    long = {"problem": "1+1 " * 50_000, "answer": "2", "notes": "x" * 10_000_000}
    content = GOOD + json.dumps(long) + "\n" + json.dumps(long | {"problem": "2+2"}) + "\n"
    loaded = load(write(tmp_path, content), max_prompt_tokens=100)
    assert [row.prompt for row in loaded.rows] == ["1+1", "2+2"]
    assert loaded.num_too_long == 1 and loaded.rows[1].columns == long | {"problem": "2+2"}


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        ("[" + GOOD + ",\n" + GOOD.replace("1+1", "2+2") + "]", ["row 0", "row 1"]),
        (b"\xef\xbb\xbf [" + GOOD.encode() + b"]", ["row 0"]),
        (GOOD + GOOD, ["line 1", "line 2"]),
        ('{"data": [' + GOOD + "]}", "an array of objects, or one object per line"),
        ('{\n"data": [\n' + GOOD + "]}", "an array of objects, or one object per line"),
        ('{"data": 1}', "found a single JSON object; the file must be an array"),
        ("[" + GOOD + ",", "not valid JSON"),
        ("[" + GOOD + ", 3]", "row 1: expected a JSON object, found int"),
        ("[]", "holds no rows"),
        ("", "holds no rows"),
    ],
)
def test_a_json_file_is_an_array_of_objects_or_json_lines(content, outcome, tmp_path):
    path = write(tmp_path, content, "rows.json")
    if isinstance(outcome, list):
        assert [row.where for row in load(path).rows] == [f"{path}, {where}" for where in outcome]
        return
    with pytest.raises(ValueError, match=outcome) as error:
        load(path)
    assert "rows.json" in str(error.value)


def test_a_file_that_cannot_be_read_is_a_value_error(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")  # opens, but does not read, not even for root
    with pytest.raises(ValueError, match="rows.jsonl cannot be read: Input/output error"):
        load(tmp_path / "rows.jsonl")
    if os.getuid() != 0:  # root reads everything
        file = Path(write(tmp_path, GOOD, "locked.jsonl"))
        file.chmod(0)
        with pytest.raises(ValueError, match="locked.jsonl cannot be read: Permission denied"):
            load(file)


# Sources


@pytest.mark.parametrize(
    ("source", "parts", "name"),
    [
        ("x/math500.jsonl", ("x/math500.jsonl", None, None), "math500"),
        ("x/math.v2.parquet@train#5", ("x/math.v2.parquet", "train", 5), "math.v2_train"),
        ("hiyouga/math12k@test#100", ("hiyouga/math12k", "test", 100), "math12k_test"),
        ("hiyouga/math12k#1000", ("hiyouga/math12k", None, 1000), "math12k"),
        ("o/n@train[:10%]", ("o/n", "train[:10%]", None), "n_train[:10%]"),
        ("runs/a@b/rows.jsonl", ("runs/a@b/rows.jsonl", None, None), "rows"),
        ("folder/", ("folder/", None, None), "folder"),
    ],
)
def test_a_source_is_what_split_and_number_of_rows(source, parts, name):
    assert parse_source(source) == parts
    assert name_of_source(source) == name


def test_what_exists_as_a_path_is_taken_literally(tmp_path):
    path = write(tmp_path, GOOD * 3, "a@test#2")
    assert parse_source(path) == (path, None, None)
    (tmp_path / "b@c.jsonl").write_text(GOOD * 3)
    assert len(read_records(f"{tmp_path}/b@c.jsonl#2", seed=0)) == 2


def test_a_mistyped_path_is_not_looked_for_on_the_hub(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: pytest.fail("looked for on the hub"))
    paths = "absent.jsonl dta/math.jsonl dta/math.json@test a/b/c/d /abs/name ./here ~/x absent.csv tests/absent"
    for source in [*paths.split(), "o/n#0", "o/n#x", "o/n@", "#5", "o/n.parquet#5"]:
        with pytest.raises(FileNotFoundError, match="does not exist .*WHAT.*owner/name"):
            load(source)


def test_a_file_of_another_kind_and_a_split_of_a_single_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.csv.*not read; needed is a file .\.jsonl, \.json, \.parquet"):
        load(write(tmp_path, "problem,answer\n", "rows.csv"))
    path = write(tmp_path, GOOD)
    assert len(load(f"{path}@train").rows) == 1
    for split in ("test", "train[:1]"):
        with pytest.raises(ValueError, match=rf"no split '{split[:5]}.*@SPLIT.*but train; choose"):
            load(f"{path}@{split}")


def test_another_kind_of_file_needs_one_function_and_one_entry(tmp_path, monkeypatch):
    def read_csv_file(path: Path) -> list[Record]:
        with path.open(newline="") as file:
            return [Record(f"{path}, row {i}", row, path.parent) for i, row in enumerate(csv.DictReader(file))]

    monkeypatch.setitem(records.READERS, ".csv", read_csv_file)
    path = write(tmp_path, 'problem,answer\n1+1,2\n"a,b",01\n', "train.csv")
    for source, name in ((path, "train"), (tmp_path, tmp_path.name)):  # a file, and a folder of such files
        loaded = load(source)
        assert [(row.prompt, row.answer) for row in loaded.rows] == [("1+1", "2"), ("a,b", "01")]
        assert (loaded.rows[1].where, loaded.name) == (f"{path}, row 1", name)
    with pytest.raises(ValueError, match="holds 2 rows; needed are at least 3"):
        load(f"{path}#3")


def test_a_hub_data_set_is_named_in_its_rows_and_gets_the_split(tmp_path, monkeypatch):
    write_math12k(tmp_path / "math12k")
    original = datasets.load_dataset
    asked = []

    def load_dataset(name: str, configuration: str | None, split: str | None) -> object:
        asked.append((name, configuration))
        return original(str(tmp_path / name.partition("/")[2]), split=split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load("hiyouga/math12k@test")
    assert [row.where for row in loaded.rows] == ["hiyouga/math12k@test, row 0", "hiyouga/math12k@test, row 1"]
    assert load("hiyouga/math12k").rows[2].where == "hiyouga/math12k@train, row 2"
    assert [row.prompt for row in load("hiyouga/math12k@train[1:]").rows] == ["train 1?", "train 2?"]
    assert load("openai/math12k/main@test").name == "math12k_test"
    assert asked[0] == ("hiyouga/math12k", None) and asked[-1] == ("openai/math12k", "main")


def test_a_hub_that_cannot_be_reached_is_told_within_seconds(monkeypatch):
    import huggingface_hub

    class Unreachable:
        def head(self, url: str, timeout: float) -> None:
            raise huggingface_hub.errors.HTTPError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", Unreachable)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    started = time.monotonic()
    advice = "hf download --repo-type dataset hiyouga/absent"
    with pytest.raises(ValueError, match=f"'hiyouga/absent@test#5' cannot be loaded: .*reach.*{advice}"):
        load("hiyouga/absent@test#5")
    assert time.monotonic() - started < 10


def test_rows_are_drawn_at_random_before_the_length_filter(tmp_path):
    rows = [{"problem": "x" * (50 if i % 2 else 1), "answer": str(i)} for i in range(40)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    loaded = load(f"{path}#20", max_prompt_tokens=40, seed=3)
    assert len(loaded.rows) + loaded.num_too_long == 20 and loaded.num_too_long > 3
    drawn = [columns["answer"] for _, columns, _ in read_records(f"{path}#20", seed=3)]
    assert len(set(drawn)) == 20 and drawn != sorted(drawn, key=int)
    assert drawn == [columns["answer"] for _, columns, _ in read_records(f"{path}#20", seed=3)]
    assert set(drawn) != {columns["answer"] for _, columns, _ in read_records(f"{path}#20", seed=4)}
    parquet = write_parquet(tmp_path / "rows.parquet", rows)
    records = read_records(f"{parquet}#20", seed=3)
    assert [columns["answer"] for _, columns, _ in records] == drawn
    assert [where for where, _, _ in records] == [f"{parquet}@train, row {answer}" for answer in drawn]
    for source in (path, parquet):
        with pytest.raises(ValueError, match="holds 40 rows; .*41"):
            load(f"{source}#41")


# Parquet files and folders, by the datasets library


def test_parquet_files_have_splits_by_slicing_and_nested_columns(tmp_path):
    rows = [{"problem": f"q{i}", "reward_model": {"style": "rule", "ground_truth": str(i)}} for i in range(4)]
    path = write_parquet(tmp_path / "odd[1] name.parquet", rows)
    loaded = load(f"{path}@train[1:3]", answer_column="reward_model.ground_truth")
    assert [row.answer for row in loaded.rows] == ["1", "2"]
    assert loaded.rows[0].columns == rows[1]
    with pytest.raises(ValueError, match="test.*train"):
        load(f"{path}@test")
    columns = r"'problem', 'reward_model', 'reward_model\.style'"
    with pytest.raises(ValueError, match=f"row 0: no column 'answer' .*{columns}"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"PAR1 no parquet", GOOD.encode()])
def test_a_parquet_file_that_is_none_is_refused(content, tmp_path):
    with pytest.raises(ValueError, match=r"rows\.parquet' cannot be loaded"):
        load(write(tmp_path, content, "rows.parquet"))


def test_data_without_rows_say_so(tmp_path):
    text = datasets.Value("string")
    nothing = datasets.Dataset.from_dict({"problem": [], "answer": []}, datasets.Features(problem=text, answer=text))
    empty = tmp_path / "folder" / "train.parquet"
    empty.parent.mkdir()
    nothing.to_parquet(empty)
    write_parquet(tmp_path / "both" / "test.parquet", [{"problem": "q", "answer": "1"}])
    nothing.to_parquet(tmp_path / "both" / "train.parquet")
    for source in (empty, f"{empty}@train[:5]", f"{empty}#3", empty.parent, tmp_path / "both"):
        with pytest.raises(ValueError, match=re.escape(f"data '{source}' cannot be loaded: ") + ".* no data"):
            load(source)
    nothing.save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved' cannot be loaded: it, or one of its splits, holds no rows"):
        load(tmp_path / "saved")


CONTENTS = [
    # Without the time: all workers of pytest must collect the same names.
    (gzip.compress(GOOD.encode(), mtime=0), "is compressed; unpack it: gzip -dc"),
    (b"\x28\xb5\x2f\xfd\x04\x00", "is compressed; unpack it: zstd -dc"),
    (lzma.compress(GOOD.encode()), "is compressed; unpack it: xz -dc"),
    (bz2.compress(GOOD.encode()), "is compressed; unpack it: bzip2 -dc"),
    (b"PK\x03\x04\x14\x00", "is a zip archive"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n", "is a pointer of Git LFS.*git lfs pull"),
    (b"\xef\xbb\xbf\n <!DOCTYPE html>\n<html>", "is a page of HTML or XML"),
    (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is a page of HTML or XML"),
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.jsonl.gz"])
@pytest.mark.parametrize(("content", "words"), CONTENTS)
def test_a_file_that_is_not_what_its_name_says_is_told_by_its_content(content, words, name, tmp_path):
    path = write(tmp_path, content, name)
    for source in (path, tmp_path):
        with pytest.raises(ValueError, match=f"{name} {words}"):
            load(source)


def test_parquet_under_the_name_of_json_is_told_and_what_has_another_name_is_not_looked_into(tmp_path):
    path = write_parquet(tmp_path / "rows.jsonl", [{"problem": "q", "answer": "1"}])
    with pytest.raises(ValueError, match=r"rows\.jsonl is a Parquet file; give it a name that ends in \.parquet"):
        load(path)
    with pytest.raises(ValueError, match=r"rows\.xlsx': a file of this kind is not read"):
        load(write(tmp_path, b"PK\x03\x04", "rows.xlsx"))  # a zip archive, but nobody would unpack it
    for name in ("rows", "rows.txt", "rows.gz"):
        with pytest.raises(ValueError, match=f"{name} is compressed; unpack it: gzip"):
            load(write(tmp_path, gzip.compress(GOOD.encode()), name))


def test_a_parquet_file_that_was_overwritten_is_read_anew(tmp_path):
    for answer in ("1", "2"):
        path = write_parquet(tmp_path / "rows.parquet", [{"problem": "q", "answer": answer}])
        assert load(path).rows[0].answer == answer


def test_a_folder_has_the_splits_of_its_files(tmp_path):
    write_math12k(tmp_path / "both")
    assert [row.prompt for row in load(tmp_path / "both").rows] == ["train 0?", "train 1?", "train 2?"]
    loaded = load(f"{tmp_path}/both@test[:1]")
    assert [(row.prompt, row.where) for row in loaded.rows] == [("test 0?", f"{tmp_path}/both@test[:1], row 0")]
    with pytest.raises(ValueError, match="validation.*train.*test"):
        load(f"{tmp_path}/both@validation")
    write_parquet(tmp_path / "one" / "test.parquet", [{"problem": "q", "answer": "1"}])
    assert load(tmp_path / "one").rows[0].where == f"{tmp_path}/one@test, row 0"
    for split in ("test", "validation"):
        write_parquet(tmp_path / "two" / f"{split}.parquet", [{"problem": "q", "answer": "1"}])
    with pytest.raises(ValueError, match="no split 'train'.*validation, test"):
        load(tmp_path / "two")


def test_a_folder_of_json_files_is_read_line_by_line_without_guessing_types(tmp_path):
    rows = [
        {"problem": "a", "answer": "2024-01-01"},
        {"problem": "b", "answer": 1, "x": {"y": 1}},
        {"problem": "c", "answer": 2.5, "x": {}},
    ]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "test.jsonl", rows[:1])
    loaded = load(tmp_path)
    assert [row.answer for row in loaded.rows] == ["2024-01-01", "1", "2.5"]
    assert loaded.rows[2].columns == rows[2]
    assert load(f"{tmp_path}@test").rows[0].where == f"{tmp_path}/test.jsonl, line 1"
    with pytest.raises(ValueError, match="no split 'dev'.*train, test"):
        load(f"{tmp_path}@dev")
    (tmp_path / "test.jsonl").write_text(GOOD + "{")
    with pytest.raises(ValueError, match=r"test\.jsonl, line 2"):
        load(f"{tmp_path}@test")


def test_why_json_files_are_not_read_by_the_library(tmp_path):
    """If this fails, the library has changed, and the module's docstring with it."""
    for name, answers in (("dates", ["2024-01-01", "2024-01-02"]), ("numbers", [1, 2.5])):
        path = write_lines(tmp_path / f"{name}.jsonl", [{"answer": answer} for answer in answers])
        guessed = datasets.load_dataset("json", data_files=path, split="train")["answer"][0]
        assert str(guessed) != str(answers[0])


def test_saved_data_sets_are_loaded(tmp_path):
    dataset = datasets.Dataset.from_list([{"problem": f"q{i}", "answer": str(i)} for i in range(3)])
    dataset.save_to_disk(tmp_path / "single")
    datasets.DatasetDict(train=dataset, test=dataset.select([2])).save_to_disk(tmp_path / "splits")
    assert [row.answer for row in load(tmp_path / "single").rows] == ["0", "1", "2"]
    assert len(load(f"{tmp_path}/single@train#2").rows) == 2
    assert load(f"{tmp_path}/splits@test").rows[0].where == f"{tmp_path}/splits@test, row 0"
    for source, there in (("single@test", "train"), ("splits@train[:1]", "train, test")):
        with pytest.raises(ValueError, match=f"no split .*{there}"):
            load(tmp_path / source)


def test_folders_without_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="any data files"):
        load(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"\0")
    with pytest.raises(ValueError, match="data files"):
        load(tmp_path)
    write_parquet(tmp_path / "train.parquet", [{"problem": "q", "answer": "1"}])
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(ValueError, match="cannot be loaded: while parsing"):
        load(tmp_path)
    (tmp_path / "README.md").unlink()
    write_parquet(tmp_path / "train2.parquet", [{"question": "q", "answer": "1"}])
    with pytest.raises(ValueError, match="cannot be loaded: .*column names don't match"):
        load(tmp_path)


def test_a_column_of_mixed_types_is_decoded(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"problem": "q", "answer": 1}, {"problem": "q", "answer": "x"}])
    datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train").save_to_disk(tmp_path / "saved")
    assert [row.answer for row in load(tmp_path / "saved").rows] == ["1", "x"]


def test_a_system_prompt_is_a_text_or_a_file(tmp_path):
    for text in (None, "Think.", "", "Answer in <think> </think> tags. " * 50, "Be brief. " * 50):
        assert read_system_prompt(text) == text
    file = write(tmp_path, "Think é.\nTwice.\n", "prompt.txt")
    assert read_system_prompt(file) == "Think é.\nTwice."
    for absent in ("prompt.txt", "absent/prompt", "notes.md"):
        with pytest.raises(ValueError, match=rf"--system_prompt '{absent}': no such file"):
            read_system_prompt(absent)
    with pytest.raises(ValueError, match="cannot be read as UTF-8"):
        read_system_prompt(write(tmp_path, b"\xff\xfe", "prompt.txt"))
