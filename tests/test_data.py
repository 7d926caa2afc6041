"""Data: broken sources are named, unusable rows are listed, and prompt and answer stay together from file to step."""

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from data import PromptData, order_of_epoch, render
from extras.models.vision import Vision
from extras.sources.variables import template_value
from flags import PromptFormat
from gate.describe import describe_set, describe_template
from gate.keys import without_markers
from helpers import made_up
from helpers.made_up import TOKENIZER, byte_tokenizer, load, load_rows, load_values, numbered, png, texts, user
from helpers.runs import said
from runtime.sources import read_records

pytestmark = pytest.mark.usefixtures("cache")


def assert_whole(loaded: PromptData) -> None:
    """Each row of `numbered` data has its own answer, columns, text, tokens and line."""
    for row in loaded.rows:
        name, number = made_up.prompt_of(row).split()
        assert row.answer == row.columns["answer"] == f"{number} of {name}"
        assert row.columns["problem"] == made_up.prompt_of(row)
        assert row.where.endswith(f"{name}.jsonl, line {int(number) + 1}")
        assert row.text == TOKENIZER.decode(row.ids.tolist()) == f"[user]{made_up.prompt_of(row)}[assistant]"


WITH_IMAGES = {"tokenizer": byte_tokenizer(made_up.VISION_TEMPLATE), "image_column": "image"}


def problems(folder: Path, *values: object, **changes: object) -> PromptData:
    return load_values(folder, "problem", list(values), **changes)


def assert_refused(words: str, folder: Path, *values: object, **changes: object) -> None:
    with pytest.raises(ValueError, match=words):
        problems(folder, *values, **changes)


def prompts(loaded: PromptData) -> list[str]:
    return [made_up.prompt_of(row) for row in loaded.rows]


def test_answers_become_text_or_are_excluded_and_listed(tmp_path):
    good = ["x", 3, 2.5, -0.0, 10**400, ["a", 1], {"f": "é"}, " y "]
    answers = ["x", "3", "2.5", "0", "1" + "0" * 400, '["a", "1"]', '{"f": "é"}', " y "]
    bad = {"null": None, "True": True, "blank": " \n\u200b", "inf": float("inf"), "nan": float("nan")}
    bad |= {"invalid characters": "a\ud83d", "is blank": "\ufe0f\u034f \u0301"}
    loaded = load_values(tmp_path, "answer", [*good, *bad.values()])
    assert [row.answer for row in loaded.rows] == answers
    assert [where for where, _ in loaded.excluded] == [f"{tmp_path}/rows.jsonl, line {i}" for i in range(9, 16)]
    for word, (_, reason) in zip(bad, loaded.excluded, strict=True):
        assert reason.startswith("column 'answer' ") and word in reason


def test_prompts_that_cannot_be_used_are_excluded_and_listed(tmp_path):
    assistant = {"role": "assistant", "content": "b"}
    bad = [None, "", 5, {}, [], ["a"], [assistant], [*user("a"), assistant]]
    bad += [user(""), [{"role": "user"}], [{"content": "a"}], user("\udc00"), "\u200b \ufeff", user("\u00ad\u3000")]
    loaded = problems(tmp_path, "good", *bad)
    assert prompts(loaded) == ["good"] and len(loaded.excluded) == len(bad) == 14
    assert all("column 'problem'" in reason for _, reason in loaded.excluded)
    assert_refused(r"no row can be used\. .*line 1: column 'problem' is null\. .*line 2: .*blank", tmp_path, *bad)


ASKED = [{"role": "system", "content": "Say 'é'.\n\t{1} {2}"}, *user('What is "\\nu"?')]
CALL = {"id": "1", "function": {"name": "f", "arguments": {"city": "Rome"}}}
OTHER = {"function": {"name": "g", "arguments": {"a": [{"b": 1}, {"c": {"d": "x"}}]}}, "kind": "k"}
CALLS = [*user("a"), {"role": "assistant", "tool_calls": [CALL, OTHER]}, {"role": "tool", "content": "b"}, *user("c")]
WITH_CALLS = byte_tokenizer(
    "{% for m in messages %}[{{ m.role }}]{% if m.content is none %}calls {{ m.tool_calls | tojson }}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}[assistant]"
)


def test_nulls_that_a_parquet_file_adds_reach_no_prompt(tmp_path):
    """Parquet gives each object the keys of all others, at every depth. A message that calls tools needs no text."""
    with_null = [CALLS[0], CALLS[1] | {"content": None}, *CALLS[2:]]
    talks = [CALLS, [CALLS[0] | {"name": "n"}], with_null, [CALLS[0], CALLS[1] | {"content": ""}, *CALLS[2:]]]
    parquet = made_up.write_parquet(tmp_path / "rows.parquet", [{"problem": talk, "answer": "1"} for talk in talks])
    (record, *_) = read_records(parquet, seed=0)
    added = record.columns["problem"][1]["tool_calls"][0]["function"]["arguments"]
    assert added == {"city": "Rome", "a": None}, "it does add them"
    read = [load(parquet, tokenizer=WITH_CALLS), problems(tmp_path, *talks, tokenizer=WITH_CALLS)]
    read.append(problems(tmp_path, *map(json.dumps, talks), tokenizer=WITH_CALLS))
    for loaded in read:
        assert [row.messages for row in loaded.rows] == [with_null, talks[1], with_null, talks[3]]
        assert not any("null" in text for text in texts(loaded)) and "[assistant]calls [{" in texts(loaded)[0]
    bad = [[{"role": "user", "tool_calls": [CALL]}], [{"role": "assistant", "tool_calls": []}, *user("a")]]
    assert len(problems(tmp_path, "good", *bad, tokenizer=WITH_CALLS).excluded) == 2


PLAIN = ["[1, 2, 3] is a list. Its sum?", '[{"role": "user", "content": "hi"}] holds how many messages?', "{x: x > 0}",
         "['a', 'b']", '[{"name": "Ann", "age": 3}]', "[", "{}", r"\{a\} has a role: which?"]  # fmt: skip
BROKEN = [
    "[{'role': 'system', 'content': 'a'}\n {'role': 'user', 'content': 'b'}]",  # as NumPy prints an array
    "array([{'role': 'user', 'content': 'b'}], dtype=object)",
    '[{"role": "user", "content": "a" "b": }]',
    json.dumps([{"role": "user"}]), json.dumps([*user("a"), {"role": "assistant", "content": "b"}]),
    json.dumps(user("a")[0]),
]  # fmt: skip


def test_messages_spelled_as_text_are_read_or_refused(tmp_path):
    spelled = [json.dumps(ASKED), json.dumps(ASKED, indent=1, ensure_ascii=False), repr(ASKED), f" {ASKED} \n"]
    loaded = problems(tmp_path, *spelled, *PLAIN, *BROKEN)
    assert texts(loaded)[:4] == texts(problems(tmp_path, ASKED)) * 4
    assert prompts(loaded)[4:] == PLAIN
    assert len(loaded.excluded) == len(BROKEN) and all("column 'problem'" in reason for _, reason in loaded.excluded)
    assert "neither as JSON nor as Python" in loaded.excluded[0][1]


def test_a_column_name_is_literal_first_and_then_a_path(tmp_path):
    rows = [{"problem": "q", "a.b": "literal", "a": {"b": "nested", "c": {"d": 7}}}]
    assert load_rows(tmp_path, rows, answer_column="a.b").rows[0].answer == "literal"
    assert load_rows(tmp_path, rows, answer_column="a.c.d").rows[0].answer == "7"
    columns = r"'problem', 'a\.b', 'a', 'a\.b', 'a\.c'"
    with pytest.raises(ValueError, match=rf"line 1: no column 'a\.x' \(--answer_column\); this row has {columns}"):
        load_rows(tmp_path, rows, answer_column="a.x")
    with pytest.raises(ValueError, match=r"no column 'problem\.x'"):
        load_rows(tmp_path, rows, answer_column="problem.x")
    loaded = load_rows(tmp_path, [*rows, {"problem": "q", "a": None}], answer_column="a.c.d")
    assert loaded.excluded == [(f"{tmp_path}/rows.jsonl, line 2", "column 'a.c.d' is null")]


def load_images(folder: Path, values: list[object], problem: object = "q", **changes: object) -> PromptData:
    (folder / "a.png").write_bytes(png(1))
    rows = [{"problem": problem, "answer": "1", "image": value} for value in values]
    return load(made_up.write_lines(folder / "rows.jsonl", rows), **WITH_IMAGES | changes)


def test_images_come_from_paths_beside_the_data_or_from_bytes(tmp_path):
    one = ["a.png", {"path": "a.png"}, {"bytes": None, "path": "a.png"}, str(tmp_path / "a.png")]
    loaded = load_images(tmp_path, [None, ["a.png", "a.png"], [], *one])
    assert [row.encoded_images for row in loaded.rows] == [(), (png(1), png(1)), (), *[(png(1),)] * 4]
    assert texts(loaded)[1] == "[user]<pic><pic>q[assistant]" and texts(loaded)[0] == "[user]q[assistant]"
    assert loaded.rows[0].messages == user("q")
    pair, kind = [{"bytes": png(i), "path": None} for i in range(2)], {"image": datasets.List(datasets.Image())}
    for image, features, encoded in ((png(1), {}, (png(1),)), (pair, kind, (png(0), png(1)))):
        rows = [{"problem": "q", "answer": "1", "image": image}] * 2
        parquet = made_up.write_parquet(tmp_path / f"{len(encoded)}.parquet", rows, **features)
        assert [row.encoded_images for row in load(parquet, **WITH_IMAGES).rows] == [encoded] * 2


def test_images_are_read_from_base64_and_data_uris(tmp_path):
    packed = base64.b64encode(png(1)).decode()
    (tmp_path / ("f" * 64)).write_bytes(png(2))  # a file, although its name could be base64
    good = [packed, "data:image/png;base64," + packed, packed.rstrip("="), base64.encodebytes(png(1)).decode()]
    loaded = load_images(tmp_path, [*good, {"bytes": packed, "path": None}, "f" * 64])
    assert [row.encoded_images for row in loaded.rows] == [(png(1),)] * 5 + [(png(2),)]
    bad = ["https://x.org/a.png", "data:image/png,%89PNG", "absent.png", packed[:64], "x" * 5000 + ".png"]
    reasons = [reason for _, reason in load_images(tmp_path, ["a.png", *bad]).excluded]
    assert len(reasons) == len(bad) and all("cannot be read as an image" in reason for reason in reasons)
    assert "https://x.org/a.png is neither a file in " in reasons[0] and "URLs are not fetched" in reasons[0]


def test_images_that_do_not_open_are_excluded_and_listed(tmp_path):
    (tmp_path / "cut.png").write_bytes(png()[:50])
    (tmp_path / "damaged.png").write_bytes(png().replace(b"IDATx", b"IDATy"))
    (tmp_path / "text.png").write_text("no image")
    bad = ["cut.png", "damaged.png", "text.png", "absent.png", "", ["a.png", "cut.png"], 5, {"bytes": None}]
    loaded = load_images(tmp_path, ["a.png", *bad])
    assert len(loaded.rows) == 1 and len(loaded.excluded) == len(bad)
    assert all(reason.startswith("column 'image' cannot be read as an image (") for _, reason in loaded.excluded)


def test_image_markers_are_the_places_of_the_images_and_never_text(tmp_path):
    loaded = load_images(tmp_path, [["a.png"] * 2, ["a.png"], ["a.png"] * 3, None], problem="<image>Is it <image>?\n")
    assert texts(loaded) == ["[user]<pic>Is it <pic>?\n[assistant]"] and prompts(loaded) == ["<image>Is it <image>?\n"]
    assert [part["type"] for part in loaded.rows[0].messages[0]["content"]] == ["image", "text", "image", "text"]
    counts = [reason.partition(";")[0] for _, reason in loaded.excluded]
    assert counts == [f"2 <image> in the text, but {n} images" for n in (1, 3, "no")]
    talk = [*user("<image>What?"), {"role": "assistant", "content": "A <image> tag."}, *user("Why?")]
    loaded = load_images(tmp_path, ["a.png"], problem=talk)
    assert texts(loaded) == ["[user]<pic>What?[assistant]A <image> tag.[user]Why?[assistant]"]
    reason = "1 <image> in the text, but no images; --image_column names their column"
    loaded = without_markers(problems(tmp_path, "q", "What is in <image>?"))
    assert prompts(loaded) == ["q"] and loaded.excluded == [(f"{tmp_path}/rows.jsonl, line 2", reason)]


@pytest.mark.parametrize(("message", "reason"), [
    ("{{ '[u]' + m['content'] }}", "the chat template refuses it"),  # TypeError
    ("[u]{{ m['content'] }}", "0 image tokens for 1 images"),  # prints the Python list
])  # fmt: skip
def test_a_template_without_a_place_for_images_is_refused(message, reason, tmp_path):
    tokenizer = byte_tokenizer("{% for m in messages %}" + message + "{% endfor %}[a]")
    vision = Vision(
        processor=None, image_token=tokenizer.convert_tokens_to_ids("<pic>"), patch_size=14, merge_size=2,
        size={"shortest_edge": 56 * 56, "longest_edge": 10**6}, window_size=112,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"no row can be used.*{reason}"):
        load_images(tmp_path, ["a.png"], tokenizer=tokenizer, vision=vision)


def test_prompts_are_rendered_and_dropped_by_token_count(policy, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    given = "1+1", "100+100", "1+2"
    loaded = problems(tmp_path, *given, tokenizer=tokenizer, max_prompt_tokens=5)
    assert prompts(loaded) == ["1+1", "1+2"] and loaded.num_too_long == 1 and loaded.excluded == []
    assert texts(loaded) == ["<user>1+1<assistant>", "<user>1+2<assistant>"]
    assert tokenizer.decode(loaded.rows[1].ids.tolist()) == "<user>1+2<assistant>"
    assert len(loaded.rows[1].ids) == 5 and loaded.rows[1].ids.dtype == np.int32
    words = "all 3 prompts are longer than --max_prompt_tokens 4; the shortest has 5"
    assert_refused(words, tmp_path, *given, tokenizer=tokenizer, max_prompt_tokens=4)


def test_system_prompt_and_suffix_are_part_of_the_conversation(tmp_path):
    talk = [{"role": "system", "content": "old"}, *user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    assert texts(problems(tmp_path, talk)) == ["[system]old[user]a[assistant]b[user]c[assistant]"]
    loaded = problems(tmp_path, "q", talk, system_prompt="new", prompt_suffix=" Box it.")
    new = "[system]new[user]q Box it.[assistant]", "[system]new[user]a[assistant]b[user]c Box it.[assistant]"
    assert texts(loaded) == [*new] and prompts(loaded)[1] == "c Box it."
    assert loaded.rows[1].messages[0] == {"role": "system", "content": "new"}
    assert loaded.rows[1].columns["problem"] == talk, "the columns stay as read"
    assert texts(problems(tmp_path, "q", system_prompt="")) == ["[system][user]q[assistant]"]


WITH_TOKENS = "<bos>{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}[assistant]<think>"


def test_a_prompt_that_is_already_rendered_is_not_rendered_again(tmp_path):
    tokenizer = byte_tokenizer(WITH_TOKENS)
    tokenizer.add_tokens(["<think>"])  # not a special one
    rendered = ["<bos>[user]a<eos>", "[user]a<eos>\n[assistant]", [*user("a<eos>"), *user("b")]]
    ordinary = ["a", "Reason in <think> tags.", "Is <pic> a token?", "<|im_start|>user\na", "[user]a"]
    loaded = problems(tmp_path, *rendered, *ordinary, tokenizer=tokenizer)
    advice = "which the chat template writes itself; give --prompt_format raw, or another --prompt_column"
    held = [f"column 'problem' holds {token!r}, {advice}" for token in ("<bos>", "<eos>", "<eos>")]
    assert prompts(loaded) == ordinary
    assert loaded.excluded == [(f"{tmp_path}/rows.jsonl, line {i}", text) for i, text in enumerate(held, start=1)]
    assert_refused(f"no row can be used. .*line 1: {held[0]}", tmp_path, *rendered, tokenizer=tokenizer)
    words = "--system_prompt holds '<eos>', which the chat template writes itself"
    assert_refused(words, tmp_path, "a", tokenizer=tokenizer, system_prompt="Be brief.<eos>")
    assert texts(problems(tmp_path, *rendered[:2], tokenizer=tokenizer, prompt_format="raw")) == rendered[:2]


def test_raw_prompts_are_the_text_with_special_tokens_but_no_end(tmp_path):
    talk = [*user("a"), {"role": "assistant", "content": "b"}, *user("c")]
    loaded = problems(tmp_path, "q", user("r"), talk, prompt_format="raw", prompt_suffix="!")
    assert texts(loaded) == ["q!", "r!"] and TOKENIZER.decode(loaded.rows[0].ids.tolist()) == "<bos>q!"
    assert loaded.excluded == [(f"{tmp_path}/rows.jsonl, line 3", "3 messages need --prompt_format chat")]
    mixed = problems(tmp_path, "q", "<bos>q", prompt_format="raw")
    assert [TOKENIZER.decode(row.ids.tolist()) for row in mixed.rows] == ["<bos>q", "<bos>q"], "one BOS each"


@pytest.mark.parametrize(("template", "before"), [
    ("<bos> $A <eos>", "<bos>"), ("$A <pic>", ""), ("<bos> $A <eos> <eos>", "<bos>"), ("$A <pic> <eos>", ""),
    ("<pic> <bos> $A <eos> <pic>", "<pic><bos>"),
])  # fmt: skip
def test_nothing_that_a_tokenizer_puts_behind_a_raw_prompt_stays(template, before, tmp_path):
    """Whichever tokens it puts there. The text's own stay, and those in front."""
    tokenizer, special = byte_tokenizer(), [("<bos>", 0), ("<eos>", 1), ("<pic>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    given = ["q", "q<eos>", "q<pic><eos>", "<eos>"]
    loaded = problems(tmp_path, *given, tokenizer=tokenizer, prompt_format="raw")
    assert [tokenizer.decode(row.ids.tolist()) for row in loaded.rows] == [before + text for text in given]


def test_a_missing_chat_template_is_refused_and_a_row_that_one_refuses_is_excluded(tmp_path):
    bare = byte_tokenizer(chat_template=None)
    assert_refused("has no chat template; .*--prompt_format raw", tmp_path, "1+1", tokenizer=bare)
    loaded = problems(tmp_path, "1+1", tokenizer=bare, prompt_format="raw")
    assert texts(loaded) == ["1+1"] and bare.decode(loaded.rows[0].ids.tolist()) == "<bos>1+1"
    lone = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    talk = [{"role": "system", "content": "s"}, *user("q")]
    loaded = problems(tmp_path, talk, "q", tokenizer=byte_tokenizer(lone + WITH_TOKENS))
    assert texts(loaded) == ["<bos>[system]s<eos>[user]q<eos>[assistant]<think>"]
    assert loaded.excluded == [(f"{tmp_path}/rows.jsonl, line 2", "the chat template refuses it (no system)")]


def permutations(seed: int, size: int, count: int) -> list[list[int]]:
    return [np.random.default_rng([seed, epoch]).permutation(size).tolist() for epoch in range(count)]


def test_each_epoch_is_a_new_permutation_of_the_seed(tmp_path):
    loaded = numbered(tmp_path, 10)
    steps = [loaded.indices_of_step(step, 3, seed=5).tolist() for step in range(1, 10)]
    epochs = [sum(steps[i : i + 3], []) for i in (0, 3, 6)]
    assert epochs == [epoch[:9] for epoch in permutations(5, 10, 3)], "the last partial step is dropped"
    assert steps[4] != loaded.indices_of_step(5, 3, seed=6).tolist()
    assert set(sum(epochs, [])) == set(range(10)), "the row that one epoch drops comes in another"
    assert_whole(loaded)
    for prompts_per_step in (1, 3, 7, 10, 23):  # with keep_last the steps run through the epochs and drop nothing
        steps = [loaded.indices_of_step(step, prompts_per_step, 2, keep_last=True).tolist() for step in range(1, 21)]
        assert {len(indices) for indices in steps} == {prompts_per_step}
        assert sum(steps, []) == sum(permutations(2, 10, 2 * prompts_per_step), [])


def test_unshuffled_rows_keep_their_order_in_each_epoch(tmp_path):
    loaded = replace(numbered(tmp_path, 10), is_shuffled=False)
    epoch = list(range(10))
    assert sum([loaded.indices_of_step(step, 3, 5).tolist() for step in range(1, 7)], []) == epoch[:9] * 2
    steps = [loaded.indices_of_step(step, 7, 5, keep_last=True).tolist() for step in range(1, 11)]
    assert sum(steps, []) == epoch * 7
    assert loaded.indices_from(8, 5, 5).tolist() == [8, 9, 0, 1, 2]
    drawn = PromptData.load(f"{tmp_path}/rows.jsonl#6", PromptFormat(), TOKENIZER, 0, is_shuffled=False)
    mixture = PromptData.mix([drawn, loaded]).exclude({0: "bad"})
    numbers = [int(prompt.split()[1]) for prompt in prompts(mixture)]
    assert numbers[:5] == sorted(numbers[:5]) and numbers[5:] == epoch
    assert mixture.indices_of_step(1, 15, 3).tolist() == list(range(15))


def test_excluded_rows_join_the_list_and_leave_the_others_whole(tmp_path):
    loaded = numbered(tmp_path, 6)
    where = [f"{tmp_path}/rows.jsonl, line {i}" for i in range(1, 7)]
    rest = loaded.exclude({4: "answer cannot be parsed", 1: "no"})
    assert prompts(rest) == ["rows 0", "rows 2", "rows 3", "rows 5"]
    assert rest.excluded == [(where[1], "no"), (where[4], "answer cannot be parsed")]
    assert rest.exclude({0: "late"}).excluded == [*rest.excluded, (where[0], "late")]
    assert len(loaded.rows) == 6 and loaded.excluded == []
    with pytest.raises(ValueError, match="no row can be used.*line 1: bad"):
        loaded.exclude(dict.fromkeys(range(6), "bad"))


@pytest.mark.parametrize("seed", range(4))
def test_prompt_and_answer_stay_together_from_draw_to_resume(seed, tmp_path):
    rng = np.random.default_rng(seed)
    parts = []
    for name in ("a", "long_name", "c"):
        numbered(tmp_path, 120, name)
        limit = len(f"[user]{name} 99[assistant]")
        part = load(f"{tmp_path}/{name}.jsonl#60", max_prompt_tokens=limit, seed=seed)
        assert 0 < part.num_too_long < 20, "numbers from 100 on are too long"
        part = part.exclude({int(i): "bad" for i in rng.choice(len(part.rows), 7, replace=False)})
        assert len(part.rows) + part.num_too_long + len(part.excluded) == 60
        assert not {row.where for row in part.rows} & {where for where, _ in part.excluded}
        parts.append(part)
    mixture = PromptData.mix(parts).exclude({3: "bad", 50: "bad"})
    assert mixture.num_too_long == sum(part.num_too_long for part in parts)
    assert mixture.name == "a+long_name+c" and PromptData.mix(parts[:1]) is parts[0]
    epoch = mixture.indices_of_step(2, len(mixture.rows), seed)
    assert epoch.tolist() == permutations(seed, len(mixture.rows), 2)[1], "every row of every source once"
    assert len(mixture.excluded) == 23
    assert_whole(mixture)
    for keep_last in (False, True):
        whole = [mixture.indices_of_step(step, 16, seed, keep_last).tolist() for step in range(1, 31)]
        order_of_epoch.cache_clear()
        resumed = [mixture.indices_of_step(step, 16, seed, keep_last).tolist() for step in range(18, 31)]
        assert resumed == whole[17:], "a resumed run goes on as the uninterrupted one would"


def test_the_description_counts_and_names(tmp_path):
    rows = [{"problem": f"q{i}", "answer": "1" if i < 2 else None} for i in range(9)]
    loaded = load_rows(tmp_path, [*rows, {"problem": "q" * 99, "answer": "1"}], max_prompt_tokens=40)
    lines = describe_set(loaded, "excluded_rows.jsonl")
    assert lines[0] == "data rows: 2 rows; 1 dropped (too many tokens), 7 excluded"
    listed = [f"  excluded: {tmp_path}/rows.jsonl, line {i}: column 'answer' is null" for i in range(3, 10)]
    assert lines[1:] == [*listed[:5], "  excluded: 2 more; all are in excluded_rows.jsonl"]
    assert describe_set(loaded)[1:] == listed, "without a file that has them, all are told"


def test_the_command_shows_the_data_without_importing_datasets(tmp_path):
    byte_tokenizer(made_up.VISION_TEMPLATE).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"problem": f"What is {i}?", "answer": i, "image": "a.png"} for i in range(3)]
    path = made_up.write_lines(tmp_path / "rows.jsonl", rows)
    flags = f"show_data.py --model {tmp_path}/tokenizer --image_column image --data {path} --show 1".split()
    code = f"import runpy, sys; sys.argv = {flags}; runpy.run_path('scripts/show_data.py', run_name='__main__')"
    shown = said([sys.executable, "-c", f"{code}; print('imported' * ('datasets' in sys.modules))"])
    assert "imported" not in shown, "reading .jsonl files imports `datasets`, which takes a second"
    expected = ["data rows: 3 rows; 0 dropped", "prompt tokens: shortest 28, median 28"]
    for text in [*expected, f"1 images of {len(png())} bytes", "[user]<pic>What is 0?[assistant]", "answer: 0"]:
        assert text in shown
    assert "What is 1?" not in shown


def test_known_variables_reach_the_chat_template_and_the_same_date_each_day(tmp_path):
    template = TOKENIZER.chat_template + "{% if enable_thinking is defined and not enable_thinking %}none{% endif %}"
    tokenizer = byte_tokenizer(template + "{{ style | default('') }}")
    cases = (), ("enable_thinking=true",), ("enable_thinking=false", "style=a=b")
    found = [texts(problems(tmp_path, "q", tokenizer=tokenizer, template_args=args)) for args in cases]
    assert found == [["[user]q[assistant]"], ["[user]q[assistant]"], ["[user]q[assistant]nonea=b"]]
    for given in ("enable_thoughts=false", "enable_thinking", "add_generation_prompt=false"):
        words = f"--template_args {given}: give NAME=VALUE, with a variable that"
        assert_refused(words, tmp_path, "q", tokenizer=tokenizer, template_args=(given,))
    tokenizer = byte_tokenizer("{{ strftime_now('%d %b %Y %H:%M') }}" + TOKENIZER.chat_template)
    assert render(user("q"), PromptFormat(), tokenizer) == "01 Jan 2026 00:00[user]q[assistant]"


@pytest.mark.parametrize(("texts", "value"), [
    (("false", "False", "FALSE", "no", "No", "off"), False),
    (("true", "True", "TRUE", "yes", "on", "ON"), True),
    (("null", "None", "none"), None),
    (("0", "-0"), 0),
    (("2.5", "2.50", "25e-1"), 2.5),
    *(((text,), text) for text in ("", "low", "falsely", "nope", "26 Jul 2024", "2024-07-26", "12:30", "007", "nan")),
    *(((text,), text) for text in ("[1]", '"5"')),
])  # fmt: skip
def test_a_variable_of_the_template_is_what_its_text_spells(texts, value):
    assert [(template_value(text), type(template_value(text))) for text in texts] == [(value, type(value))] * len(texts)


def test_a_number_for_a_boolean_of_the_template_is_refused():
    """`0 is false` is not true in a template."""
    condition = "{% if enable_thinking is defined and enable_thinking is false %}none{% endif %}{{ depth }}"
    tokenizer = byte_tokenizer(TOKENIZER.chat_template + condition)
    with pytest.raises(ValueError, match="--template_args enable_thinking=0: .* asks for true or false"):
        describe_template(PromptFormat(template_args=("enable_thinking=0",)), tokenizer)
    assert describe_template(PromptFormat(template_args=("depth=0",)), tokenizer)
    form = PromptFormat(template_args=("enable_thinking=no", "depth=5a"))
    shown = ["template: enable_thinking = False (bool)", "template: depth = '5a' (str)"]
    assert describe_template(form, tokenizer) == shown
    assert render(user("q"), form, tokenizer) == "[user]q[assistant]none5a", "Qwen3 asks so"
