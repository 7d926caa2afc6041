"""Sources: files, folders and hub data sets are read as they are, or refused by name and line."""

import gzip
import json
import os
import re
import time
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gate.inputs import read_system_prompt
from helpers.made_up import GOOD, load, prompt_of, write, write_lines, write_math12k, write_parquet
from helpers.runs import ROOT
from runtime.sources import name_of_source, parse_source, read_json_file, read_records

pytestmark = pytest.mark.usefixtures("cache")
ROW = {"problem": "q", "answer": "1"}


def refused(source: object, words: str) -> str:
    """What is said of a source that cannot be loaded."""
    with pytest.raises(ValueError, match=words) as error:
        load(source)
    return str(error.value)


# Files ----------------------------------------------------------------------------------------------------------------

BYTES, BOM = GOOD.encode(), b"\xef\xbb\xbf"
LINES, ARRAY = "the file must be one JSON object per line", "an array of objects, one object, or one object per line"


@pytest.mark.parametrize(("end", "content", "said"), [  # said: behind the name
    (".jsonl", GOOD + '{"problem": "1+1", "ans', "line 2: not valid JSON.*in UTF-8"),
    (".jsonl", BYTES + b'{"problem": "\xff", "answer": "2"}\n', "line 2: not valid JSON.*utf-8.*in UTF-8"),
    (".jsonl", GOOD + "\n" + '{"problem": "a\0b", "answer": "2"}\n', "line 3: not valid JSON"),
    (".jsonl", GOOD.encode("utf-16"), "line 1: not valid JSON.*in UTF-8"),
    (".jsonl", GOOD + '\n["1+1", "2"]\n', "line 3: expected a JSON object, found list"),
    (".jsonl", GOOD + "[" * 100_000 + "\n", "line 2: not valid JSON"),
    (".jsonl", GOOD + '{"problem": "1+1"}\n', "line 2: .*'answer' .--answer_column.*this row has 'problem'[.]"),
    (".jsonl", "[\n" + GOOD + "]", f"line 1: not valid JSON.*{LINES}"),
    (".jsonl", "", "holds no rows"),
    (".json", '{\n"data": [\n' + GOOD + "]}", "row 0: no column 'problem' .*this row has 'data'"),
    (".json", '{\n"problem": "1+1",\n"answer": "2"', f": not valid JSON.*{ARRAY}"),
    (".json", GOOD + '{\n"problem": "1+1"}', f"line 2: not valid JSON.*{ARRAY}"),
    (".jsonl", '{\n"problem": "1+1",\n"answer": "2"}', f"line 1: not valid JSON.*{LINES}"),
    (".jsonl", '{"problem": "é"}'.encode("latin-1"), "line 1: not valid JSON.*in UTF-8"),
    (".json", "[" + GOOD + ",", "not valid JSON"),
    (".json", "[" + GOOD + ", 3]", "row 1: expected a JSON object, found int"),
    (".csv", "problem,answer\n", r"not read; .*needed is a file .\.jsonl, \.json, \.parquet"),
    (".jsonl.gz", gzip.compress(BYTES, mtime=0), "a file of this kind is not read; convert or unpack it"),
    *((".parquet", content, "cannot be loaded") for content in (b"", b"PAR1 no parquet", BYTES)),
])  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_by_line(end, content, said, tmp_path):
    assert len(refused(write(tmp_path, content, f"rows{end}"), f"rows{end}\\b.*{said}")) < 800


@pytest.mark.parametrize(("end", "content", "rows"), [  # each row: place and prompt
    (".jsonl", BOM + BYTES, {"line 1": "1+1"}),
    (".jsonl", GOOD.replace("\n", "\r\n") * 2, {"line 1": "1+1", "line 2": "1+1"}),
    (".jsonl", GOOD + "\n\n" + GOOD.rstrip("\n"), {"line 1": "1+1", "line 4": "1+1"}),
    (".jsonl", '{"problem": "a", "answer": "1", "level": NaN, "score": -Infinity}\n', {"line 1": "a"}),
    (".jsonl", '{"problem": "a\\u0000\\u2028b", "answer": "1"}\n', {"line 1": "a\0\u2028b"}),
    (".json", "[" + GOOD + ",\n" + GOOD.replace("1+1", "2+2") + "]", {"row 0": "1+1", "row 1": "2+2"}),
    (".json", BOM + b" [" + BYTES + b"]", {"row 0": "1+1"}),
    (".json", json.dumps(json.loads(GOOD), indent=2), {"row 0": "1+1"}),
    (".json", json.dumps([json.loads(GOOD)] * 2, indent=2), {"row 0": "1+1", "row 1": "1+1"}),
    (".json", GOOD * 2, {"line 1": "1+1", "line 2": "1+1"}),
])  # fmt: skip
def test_what_is_unusual_but_clear_is_loaded(end, content, rows, tmp_path):
    path = write(tmp_path, content, f"rows{end}")
    assert {row.where.removeprefix(f"{path}, "): prompt_of(row) for row in load(path).rows} == rows


def test_rows_keep_all_columns_and_long_lines_are_read(tmp_path):
    long = {"problem": "2+2", "answer": 4, "notes": "x" * 10_000_000}
    rows = [{"problem": "é", "answer": 4, "level": 3}, long | {"problem": "1+1 " * 50_000}, long]
    loaded = load(write(tmp_path, GOOD + "\n" + "".join(f"{json.dumps(row)}\n" for row in rows)), max_prompt_tokens=100)
    assert [(prompt_of(row), row.answer) for row in loaded.rows] == [("1+1", "2"), ("é", "4"), ("2+2", "4")]
    assert [row.columns for row in loaded.rows[1:]] == [rows[0], long]
    assert loaded.rows[1].where == f"{tmp_path}/rows.jsonl, line 3"
    assert (loaded.name, loaded.num_too_long, loaded.excluded) == ("rows", 1, [])


def test_what_nobody_or_only_one_process_could_read_is_refused(tmp_path):
    (tmp_path / "mem.jsonl").symlink_to("/proc/self/mem")  # opens, but does not read, not even for root
    refused(tmp_path / "mem.jsonl", "mem.jsonl cannot be read: Input/output error")
    os.mkfifo(tmp_path / "rows.jsonl")
    os.mkfifo(tmp_path / "63")  # as <(head -100 x.jsonl)
    (tmp_path / "link.jsonl").symlink_to("/dev/null")
    for source in ("/dev/null", tmp_path / "rows.jsonl", tmp_path / "63", tmp_path / "link.jsonl"):
        refused(source, f"{source} is a pipe or a device, .*write it to a file first")
        with pytest.raises(ValueError, match="write it to a file first"):
            read_json_file(Path(source))


@pytest.mark.parametrize(("name", "content", "words"), [
    ("rows.jsonl", gzip.compress(BYTES, mtime=0), "is compressed; unpack it"),
    ("rows.parquet", b"\x28\xb5\x2f\xfd\x04\x00", "is compressed; unpack it"),
    ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS.*lfs pull"),
    ("rows.jsonl", BOM + b"\n <!DOCTYPE html>\n<html>", "is a page of HTML or XML"),
])  # fmt: skip
def test_a_file_that_belies_its_name_is_refused_by_its_content(name, content, words, tmp_path):
    path = write(tmp_path, content, name)
    for source in (path, tmp_path):
        refused(source, f"{name} {words}")


# Sources --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "parts", "name"), [
    ("x/math500.jsonl", ("x/math500.jsonl", None, None), "math500"),
    ("x/math.v2.parquet@train#5", ("x/math.v2.parquet", "train", 5), "math.v2_train"),
    ("hiyouga/math12k@test#100", ("hiyouga/math12k", "test", 100), "math12k_test"),
    ("o/n@train[:10%]", ("o/n", "train[:10%]", None), "n_train[:10%]"),
    ("runs/a@b/rows.jsonl", ("runs/a@b/rows.jsonl", None, None), "rows"),
    ("folder/", ("folder/", None, None), "folder"),
])  # fmt: skip
def test_a_source_is_split_into_path_split_and_number_of_rows(source, parts, name, tmp_path):
    assert (parse_source(source), name_of_source(source)) == (parts, name)
    assert parse_source(path := write(tmp_path, GOOD, "a@test#2")) == (path, None, None)


def test_a_mistyped_path_is_not_looked_for_on_the_hub(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: pytest.fail("looked for on the hub"))
    for source in ("absent.jsonl", "dta/math.json@test", "a/b/c/d", "./here", "~/x", "tests/absent", "o/n#0", "#5"):
        with pytest.raises(FileNotFoundError, match="does not exist .*WHAT.*owner/name"):
            load(source)


def test_a_hub_data_set_is_named_in_its_rows_and_gets_the_split(tmp_path, monkeypatch):
    write_math12k(tmp_path / "math12k")
    original, asked = datasets.load_dataset, []

    def load_dataset(name: str, configuration: str | None, split: str | None) -> object:
        asked.append((name, configuration))
        return original(str(tmp_path / name.partition("/")[2]), split=split)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    places = [row.where for row in load("hiyouga/math12k@test").rows]
    assert places == ["hiyouga/math12k@test, row 0", "hiyouga/math12k@test, row 1"]
    assert load("hiyouga/math12k").rows[2].where == "hiyouga/math12k@train, row 2"
    assert [prompt_of(row) for row in load("hiyouga/math12k@train[1:]").rows] == ["train 1?", "train 2?"]
    assert load("openai/math12k/main@test").name == "math12k_test"
    assert asked[0] == ("hiyouga/math12k", None) and asked[-1] == ("openai/math12k", "main")


def test_a_hub_that_cannot_be_reached_is_told_within_seconds(monkeypatch):
    class Unreachable:
        def head(self, url: str, timeout: float) -> None:
            raise huggingface_hub.errors.HTTPError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", Unreachable)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(time, "sleep", (slept := []).append)
    for rest, folder in {"@test#5": "that folder", "/main@test": "FOLDER/main, or where its files are"}.items():
        advice = f"hf download --repo-type dataset hiyouga/absent --local-dir FOLDER, and name {folder}"
        refused(f"hiyouga/absent{rest}", f"'hiyouga/absent{rest}' cannot be loaded: .*reach.*{advice}")
    assert sum(slept) < 10


def test_short_floats_are_read_as_their_shortest_decimals_and_labels_by_their_names(tmp_path):
    numbers = [0.1, 2.5, 12.0, 1e-7, -0.3]
    rows = [{"f32": n, "f16": n, "f64": n, "list": [n, None], "object": {"a": [{"b": n}]}} for n in numbers]
    f32, f64 = datasets.Value("float32"), datasets.Value("float64")
    kinds = {"f32": f32, "f16": datasets.Value("float16"), "list": datasets.List(f32)}
    kinds |= {"object": {"a": datasets.List({"b": f32})}, "f64": f64}
    read = [columns for _, columns, _ in read_records(write_parquet(tmp_path / "rows.parquet", rows, **kinds), seed=0)]
    assert read == rows
    exact = float(np.float32(0.1))  # a number of 64 bits stays as it is
    parquet = write_parquet(tmp_path / "exact.parquet", [{"f64": exact}], f64=f64)
    assert next(iter(read_records(parquet, seed=0))).columns["f64"] == exact == 0.10000000149011612
    label = datasets.ClassLabel(names=["yes", "no"])
    rows = [{"answer": n, "object": {"list": [0, n]}} for n in (1, 0, -1)]
    parquet = write_parquet(tmp_path / "rows.parquet", rows, answer=label, object={"list": datasets.List(label)})
    read = [columns for _, columns, _ in read_records(parquet, seed=0)]
    assert [columns["answer"] for columns in read] == ["no", "yes", None]
    assert [columns["object"]["list"] for columns in read] == [["yes", "no"], ["yes", "yes"], ["yes", None]]


def test_folders_and_files_without_data_are_refused(tmp_path):
    for name in ("", "README.md", "notes/run.py"):  # `datasets` would take .md files for tasks of an agent
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name:
            write(tmp_path, "text", name)
        refused(tmp_path, r"cannot be loaded: the folder does not contain any data files .*\.jsonl, \.parquet")
    for name in ("notes/a.md", "notes/b.md", "notes/few.json"):
        write(tmp_path, GOOD, name)
    refused(tmp_path / "notes", r"2 of its files would be read \(a.md\), others not \(few.json\)")
    (tmp_path / "notes" / "few.json").unlink()
    nothing = datasets.Dataset.from_list([ROW]).select([])
    nothing.to_parquet(empty := tmp_path / "train.parquet")
    for source in (empty, f"{empty}#3", tmp_path):
        refused(source, re.escape(f"data '{source}' cannot be loaded: "))
    table = pyarrow.table({"problem": pyarrow.array([], pyarrow.string())})  # without a group of rows
    pyarrow.parquet.write_table(table, tmp_path / "other.parquet")
    refused(tmp_path / "other.parquet", "cannot be loaded: ")
    nothing.save_to_disk(tmp_path / "saved")
    refused(tmp_path / "saved", "saved' cannot be loaded: ")


def test_rows_are_drawn_at_random_before_the_length_filter(tmp_path):
    rows = [{"problem": "x" * (50 if i % 2 else 1), "answer": str(i)} for i in range(40)]
    path, parquet = write_lines(tmp_path / "rows.jsonl", rows), write_parquet(tmp_path / "rows.parquet", rows)
    loaded = load(f"{path}#20", max_prompt_tokens=40, seed=3)
    assert len(loaded.rows) + loaded.num_too_long == 20 and loaded.num_too_long > 3

    def drawn(source: str, seed: int) -> list[object]:
        return [columns["answer"] for _, columns, _ in read_records(f"{source}#20", seed)]

    answers = drawn(path, 3)
    assert len(set(answers)) == 20 and answers != sorted(answers, key=int)
    assert drawn(path, 3) == drawn(parquet, 3) == answers and set(drawn(path, 4)) != set(answers)
    in_order = [int(record.columns["answer"]) for record in read_records(f"{path}#20", 3, is_shuffled=False)]
    assert in_order == sorted(map(int, answers))
    wheres = [where for where, _, _ in read_records(f"{parquet}#20", seed=3)]
    assert wheres == [f"{parquet}@train, row {answer}" for answer in answers]
    refused(f"{path}#41", "holds 40 rows; .*41")


# Parquet files and folders, by the datasets library -------------------------------------------------------------------


def test_parquet_files_have_slices_and_nested_columns(tmp_path):
    file = tmp_path / "odd[1] name.parquet"
    write_parquet(file, [ROW])  # an older file
    assert load(file).rows[0].answer == "1"
    rows = [{"problem": f"q{i}", "reward_model": {"style": "rule", "ground_truth": str(i)}} for i in range(4)]
    loaded = load(f"{write_parquet(file, rows)}@train[1:3]", answer_column="reward_model.ground_truth")
    assert [row.answer for row in loaded.rows] == ["1", "2"] and loaded.rows[0].columns == rows[1]
    refused(file, r"row 0: no column 'answer' .*'problem', 'reward_model', 'reward_model\.style'")


def test_a_source_has_the_splits_of_its_files(tmp_path):
    write_math12k(tmp_path / "both")
    for file in ("one/test", "two/test", "two/validation"):
        write_parquet(tmp_path / f"{file}.parquet", [ROW])
    saved = datasets.Dataset.from_list([ROW | {"problem": f"q{i}"} for i in range(3)])
    saved.save_to_disk(tmp_path / "single")
    datasets.DatasetDict(train=saved, test=saved.select([2])).save_to_disk(tmp_path / "splits")
    write(tmp_path, GOOD)
    for source, prompts, first in (
        ("both", ["train 0?", "train 1?", "train 2?"], "both@train, row 0"),
        ("one", ["q"], "one@test, row 0"),
        ("single", ["q0", "q1", "q2"], "single@train, row 0"),
        ("splits@test", ["q2"], "splits@test, row 0"),
        ("rows.jsonl@train", ["1+1"], "rows.jsonl, line 1"),
    ):
        loaded = load(tmp_path / source)
        assert ([prompt_of(row) for row in loaded.rows], loaded.rows[0].where) == (prompts, f"{tmp_path}/{first}")
    assert len(load(f"{tmp_path}/single@train#2").rows) == 2
    for source, said in (
        ("both@validation", "validation.*train.*test"),
        ("two", "no split 'train'.*validation, test"),
        ("splits@train[:1]", "no split .*train, test"),
        ("rows.jsonl@test", "no split 'test'.*@SPLIT.*but train; choose"),
    ):
        refused(tmp_path / source, said)


def test_json_files_of_a_folder_are_read_without_guessing_types(tmp_path):
    answers = ["2024-01-01", 1, 2.5]
    rows = [ROW | {"answer": answer, "x": {"y": 1} if answer == 1 else {}} for answer in answers]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "test.jsonl", rows[:1])
    loaded = load(tmp_path)
    assert [row.answer for row in loaded.rows] == ["2024-01-01", "1", "2.5"] and loaded.rows[2].columns == rows[2]
    assert load(f"{tmp_path}@test").rows[0].where == f"{tmp_path}/test.jsonl, line 1"
    refused(f"{tmp_path}@dev", "no split 'dev'.*train, test")
    (tmp_path / "test.jsonl").write_text(GOOD + "{")
    refused(f"{tmp_path}@test", r"test\.jsonl, line 2")


def test_a_folder_of_which_only_a_part_would_be_read_is_refused(tmp_path):
    """`datasets` takes what has a split in its name, as soon as there is one, or the kind of which there are most."""
    write(tmp_path, GOOD, "a.jsonl")
    write(tmp_path, GOOD, "b.jsonl")
    assert len(load(tmp_path).rows) == 2 * GOOD.count("\n")
    for name, left_out in (("train.jsonl", "a.jsonl, b.jsonl"), ("more/c.parquet", "more/c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(GOOD)
        with pytest.raises(ValueError, match=rf"of its files would be read .*others not \({left_out}"):
            load(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize("end", [".csv", ".tsv"])
def test_a_folder_of_tables_without_types_is_refused(end, tmp_path, monkeypatch):
    """As such a file alone is, and a data set of the hub: 007 would be 7, NA null. What was saved has its types."""
    sign = "\t" if end == ".tsv" else ","
    write(tmp_path, sign.join(["problem", "answer"]) + "\n" + sign.join(["q", "007"]) + "\n", f"rows{end}")
    refused(tmp_path / f"rows{end}", "a file of this kind is not read; convert")
    refused(tmp_path, rf"cannot be loaded: rows{end}: in \.csv and \.tsv files numbers would be guessed .* to \.jsonl")
    write_lines(tmp_path / "rows.jsonl", [ROW] * 3)
    refused(tmp_path, rf"rows{end}")
    guessed = datasets.load_dataset("csv", data_files=str(tmp_path / f"rows{end}"), delimiter=sign)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: guessed[split] if split else guessed)
    for source in ("owner/name", "owner/name@train"):
        refused(source, r"cannot be loaded: in \.csv and \.tsv files numbers would be guessed")
    guessed.save_to_disk(tmp_path / "saved")
    assert load(tmp_path / "saved").rows[0].answer == "7"


def test_a_system_prompt_is_a_text_or_a_file(tmp_path):
    for text in (None, "Think.", "", "Answer in <think> </think> tags. " * 50, "Be brief. " * 50):
        assert read_system_prompt(text) == text
    assert read_system_prompt(write(tmp_path, "Think é.\nTwice.\n", "prompt.txt")) == "Think é.\nTwice."
    for absent in ("prompt.txt", "absent/prompt"):
        with pytest.raises(ValueError, match=rf"--system_prompt '{absent}': no such file"):
            read_system_prompt(absent)
    with pytest.raises(ValueError, match="cannot be read as UTF-8"):
        read_system_prompt(write(tmp_path, b"\xff\xfe", "prompt.txt"))
