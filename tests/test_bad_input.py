"""Mistakes of the user end the program before any model is loaded, and say what was given and what to do."""

import io
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import show_data
from command_line import parse_flags
from gate.checks import check_flags, free_on_resume
from gate.choices import check_choices
from gate.digests import digests_of_inputs
from gate.inputs import Inputs
from helpers.made_up import write_lines
from helpers.runs import ROOT, run_command, run_ranks, training_flags
from run import open_run_folder
from train_grpo import open_run

IMAGE_ROW = b'{"problem": "<image>1+1", "answer": "2"}\n'


def check(policy: Path, out_dir: Path, **changes: object) -> None:
    """What the program does before it loads a model."""
    args = parse_flags(training_flags(policy, out_dir, **changes))
    check_flags(args)
    check_choices(args)
    Inputs.load(args).grader.close()


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": "./nowhere"}, ["--model './nowhere'", " is n"]),
    ({"train_data": "absent.jsonl"}, ["absent.jsonl", "does not exist"]),
    ({"max_prompt_tokens": 4}, ["all 64 prompts", "--max_prompt_tokens 4", "5 tokens"]),
    ({"max_completion_tokens": 121, "micro_batch_tokens": 999}, ["8", "121", "beyond the context", "128", "by 1"]),
    ({"prompts_per_step": 128, "prompts_per_update": 128}, ["64 usable rows", "--prompts_per_step 128"]),
    ({"eval_temperature": 0, "eval_samples": 4}, ["--eval_samples 4", "--eval_temperature 0", "--eval_samples 1"]),
    ({"image_column": "image"}, ["--image_column 'image'", "of the type 'qwen2'", "qwen2_5_vl"]),
    ({"stop_tokens": ""}, ["--stop_tokens '': no token of the tokenizer"]),
    ({"stop_tokens": "<|im_end|>"}, ["--stop_tokens '<|im_end|>'", "no token of the tokenizer", "special ones are"]),
    ({"reward": "absent.py:score"}, ["--reward", "FOLDER/absent.py", "does not exist"]),
    ({"policy_loss": "absent.py:f"}, ["--policy_loss", "FOLDER/absent.py"]),
    ({"reward": "exact,pairs.py:score"}, ["--eval_samples 1: --reward", "with itself", "--eval_samples 2 or more"]),
    ({"reward": "pairs.py:score", "group_size": 1, "advantage": "none"}, ["--group_size 1: --reward"]),
    ({"model": "."}, ["--model ", " is neither a folder with a model nor"]),
    ({"train_data": "rows.jsonl", "max_prompt_tokens": 12}, ["no row can", "line 1: 1 <image>", "--image_column"]),
])  # fmt: skip
def test_a_mistake_is_named_with_a_way_out(changes, words, policy, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_bytes(IMAGE_ROW)
    (tmp_path / "pairs.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        check(policy, tmp_path / "run", **changes)
    assert [word for word in words if word.replace("FOLDER", str(tmp_path)) not in str(error.value)] == []
    assert not (tmp_path / "run").exists(), "a refused start leaves nothing behind"


ENVIRONMENTS = """
class Raises:
    def __init__(self, row): raise KeyError("secret")
    def reply(self, completion): return None
class FortyTwo:
    def __init__(self, row): pass
    def reply(self, completion): return 42
class Ends(FortyTwo):
    def reply(self, completion): raise SystemExit(3)
class NoReply: pass
def helper(): pass
"""


@pytest.mark.parametrize(("given", "words"), [
    (["--environment", "env.py"], "'env.py' in --environment or --tools: needed is FILE.py:NAME."),
    (["--environment", "env.py:Missing"],
     "env.py has no function or class 'Missing'; it has Raises, FortyTwo, Ends, NoReply, helper."),
    (["--environment", "env.py:NoReply"], "NoReply has no method reply(self, completion); see docs/turns.md"),
    (["--environment", "env.py:Raises"], "which training leaves out: KeyError: 'secret' (env.py, line 3)"),
    (["--environment", "env.py:FortyTwo"], "which training leaves out: WrongReturn: FortyTwo.reply returned 42, not a"),
    (["--environment", "env.py:Ends"], "which training leaves out: SystemExit: 3 (env.py, line 9)"),
    (["--tools", "env.py:Missing"], "env.py has no function or class 'Missing'; it has Raises"),
])  # fmt: skip
def test_an_environment_on_the_terminal_fails_as_in_training(given, words, tmp_path, monkeypatch):
    (tmp_path / "env.py").write_text(ENVIRONMENTS)
    (tmp_path / "rows.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    monkeypatch.chdir(tmp_path)
    known = ["--data", "rows.jsonl", "--model", str(ROOT / "scripts" / "tiny_policy")]
    monkeypatch.setattr("sys.argv", ["show_data.py", *known, *given])
    monkeypatch.setattr("sys.stdin", io.StringIO("2\n"))
    with pytest.raises(SystemExit) as ending:
        show_data.main()
    assert ending.value.code.startswith("error: ") and words in ending.value.code, ending.value.code


def test_a_start_without_docstrings_or_of_a_damaged_replay_says_a_sentence(tmp_path):
    done = run_command([sys.executable, "-OO", "train_grpo.py", "--help"], dict(os.environ))
    assert done.returncode == 1 and done.stderr == (
        "error: python -OO takes away the docstrings that transformers reads; leave -OO and PYTHONOPTIMIZE out.\n"
    )
    (tmp_path / "config.json").write_text('{"seed": 1')
    given = f"train_grpo.py --model m --train_data d --total_steps 1 --out_dir {tmp_path}/o --replay {tmp_path}"
    done = run_command([sys.executable, *given.split()])
    assert done.returncode and done.stderr.startswith(f"error: {tmp_path}/config.json is damaged: ")
    assert done.stderr.count("\n") == 1


CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ END }}{% endfor %}"


@pytest.mark.parametrize(("template", "words"), [
    ("{{ 1 / 0 }}", "the chat template refuses it"),
    ("{{ messages[7]['content'] }}", "the chat template refuses it"),
    ("{{ '%d' % 'a' }}", "the chat template refuses it"),
    ("{{ eos_token }}", "shows no text of a user"),
    ("{# nothing #}", "shows no text of a user"),
    (CHAT.replace("{{ END }}", "<eos>"), r"no generation prompt: it writes '\[assistant\]' .* end of '\[user\]1<eos>'"),
    ("{% for m in messages %}{{ '[I]%s[/I]' % m.content if m.role == 'user' else m.content }}{% endfor %}", None),
    (CHAT + "{% if add_generation_prompt %}[assistant]{% endif %}", None),
])  # fmt: skip
def test_a_chat_template_that_makes_no_prompt_is_named(template, words, policy, tmp_path):
    shutil.copytree(policy, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        check(tmp_path / "model", tmp_path / "run", max_prompt_tokens=60)


@pytest.mark.parametrize(("template", "changes", "who"), [  # the end of the chat template; flags; who has the token
    ("{# <new> #}", {}, "the chat template"),
    ("", {"stop_tokens": "<new>"}, "--stop_tokens"),
    ("", {"train_data": "problem.jsonl"}, "problem.jsonl, line 9"),
    ("", {"eval_data": "problem.jsonl"}, "problem.jsonl, line 9"),
    ("", {"train_data": "hint.jsonl", "hint_column": "hint", "max_prompt_tokens": 116}, "hint.jsonl, line 9"),
    ("", {"train_data": "answer.jsonl"}, ""),
    ("", {}, ""),
])  # fmt: skip
def test_a_token_without_an_embedding_row_is_reported_early(template, changes, who, policy, tmp_path, monkeypatch):
    model = shutil.copytree(policy, tmp_path / "model")  # its embedding has 64 rows
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template += template
    tokenizer.save_pretrained(model)
    for column in ("problem", "answer", "hint"):
        rows = [{"problem": "1+1", "answer": "2", "hint": "1"}] * 8
        write_lines(tmp_path / f"{column}.jsonl", [*rows, rows[0] | {column: "<new>"}])
    monkeypatch.chdir(tmp_path)
    said = rf"--model {model}: its embedding has 64 rows, none for token 64 \('<new>'\), which {who} has; resize it"
    with pytest.raises(ValueError, match=said) if who else nullcontext():
        check(model, tmp_path / "run", **changes)


@pytest.mark.parametrize("given", [
    "--train_data=", "--model=", "--out_dir=", "--eval_data=", "--image_column=", "--reward=", "--replay= ",
    "--out_dir=~/runs/x", "--out_dir=~", "--model=~someone/m", "--reward=math,~/r.py:f", "--tools=~/t.py:f",
])  # fmt: skip
def test_an_empty_value_or_an_unexpanded_home_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o", given])
    name, _, value = given.partition("=")
    why = "the shell leaves a ~ after = and in quotes" if "~" in value else "give a value; is a variable not set?"
    assert f"error: {name} {value!r}: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "ours"), [
    ("--num_generations=8", "--group_size"), ("--num-generations", "--group_size"), ("--beta", "--kl_coef"),
    ("--lr", "--learning_rate"), ("actor_rollout_ref.actor.optim.lr=1e-6", "--learning_rate"),
    ("--epsilon", "--clip_low"), ("--top_p", "--eval_samples"), ("--max_completion_length", "--max_completion_tokens"),
    ("--goup-size", ""),  # of no library
    *((given, None) for given in ("--foo", "--bar=1", "--temp", "--x")),  # like none of ours
])  # fmt: skip
def test_a_name_of_another_library_or_a_mistyped_one_is_answered_with_ours(given, ours, capsys):
    with pytest.raises(SystemExit):
        parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o", given])
    answer = f"; another library's name for {ours}: docs/from_other_libraries.md" if ours else "; did you mean --group_"
    said = capsys.readouterr().err
    assert said == f"error: unrecognized arguments: {given}\n" if ours is None else answer in said


def test_texts_that_are_no_paths_may_be_empty_or_have_a_tilde():
    given = ["--prompt_suffix=", "--system_prompt=", "--stop_tokens=~", "--train_data=a~b/c.jsonl", "--replay=~1"]
    args = parse_flags(["--model", "m", "--train_data", "d", "--out_dir", "o", *given])
    assert (args.prompt_suffix, args.system_prompt, args.stop_tokens) == ("", "", ["~"])


def start(policy: Path, folder: Path, **changes: object) -> Inputs:
    """What a start reads, and keeps in its folder, in which a step was trained."""
    args = parse_flags(training_flags(policy, folder, max_prompt_tokens=16, **changes))
    inputs = Inputs.load(args)
    inputs.grader.close()
    open_run_folder(folder, vars(args), free_on_resume(args), digests_of_inputs(args, inputs)).close()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return inputs


def test_a_run_continues_under_other_paths_but_no_other_config(policy, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    for name in ("my_reward.py", "there/my_reward.py"):
        (tmp_path / name).write_text("import helping\ndef score(completion):\n    return helping.VALUE\n")
        (tmp_path / name).with_name("helping.py").write_text("VALUE = 0.5\n")
    (tmp_path / "link").symlink_to(policy)
    shutil.copytree(policy, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    assert start(policy, run, reward="exact,my_reward.py:score", reward_timeout=4).train_data[0].is_shuffled
    assert not start(policy, tmp_path / "new", shuffle="off").train_data[0].is_shuffled
    start(Path("link"), run, reward="exact,there/my_reward.py:score", reward_timeout=5)
    start(Path("copy"), run, train_data=policy / "train.jsonl", reward=f"exact,{tmp_path}/my_reward.py:score")
    for file, old, new, said in (
        ("there/helping.py", "0.5", "0.6", "helping.py: not the same"),
        ("copy/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05', "config of --model: not the same"),
        ("copy/chat_template.jinja", "<assistant>", "!<assistant>", "--train_data .* there, .* now"),
    ):
        before = Path(file).read_text()
        Path(file).write_text(before.replace(old, new))
        assert Path(file).read_text() != before
        with pytest.raises(ValueError, match=said):
            start(Path("copy"), run, reward="exact,there/my_reward.py:score")
        Path(file).write_text(before)
    start(Path("copy"), run, reward="exact,there/my_reward.py:score")


def test_flags_that_may_change_on_a_resume_may_name_changed_files(policy, tmp_path):
    """A hook and held-out problems are mended, replaced or left out, with what the hook imports."""
    hook, other, helper = (tmp_path / f"{name}.py" for name in ("hook", "other", "helping"))
    helper.write_text("VALUE = 1\n")
    hook.write_text("import helping\ndef f(step, metrics):\n    return None\n")
    held_out = Path(shutil.copy(policy / "heldout.jsonl", tmp_path))
    run, given = tmp_path / "run", {"after_step": f"{hook}:f", "eval_data": held_out}
    start(policy, run, **given)
    for file, text in ((hook, hook.read_text() + "# mended\n"), (helper, "VALUE = 2\n"), (other, hook.read_text())):
        file.write_text(text)
        start(policy, run, **given)
    held_out.write_text("\n".join(held_out.read_text().splitlines()[2:]) + "\n")
    start(policy, run, **given | {"after_step": f"{other}:f"})
    hook.unlink()
    start(policy, run, eval_data=policy / "heldout.jsonl")
    start(policy, run, eval_data=None, eval_every=None, eval_before_training=None)
    other.write_text("def f(step, metrics):\n    return None\n\ndef score(completion):\n    return 1.0\n")
    both = {"after_step": f"{other}:f", "reward": f"{other}:score"}
    start(policy, tmp_path / "both", **both)
    other.write_text(other.read_text().replace("1.0", "2.0"))
    with pytest.raises(ValueError, match="other.py: not the same as when this run began"):  # it rewards, too
        start(policy, tmp_path / "both", **both)


@pytest.mark.parametrize(("line", "said"), [
    ('{"reward/mean": 1.0}', "is damaged: there is no step in the line {'reward/mean': 1.0}; delete that line"),
    ('{"step": "2"}', "is damaged: step is no number in the line {'step': '2'}; delete that line"),
    ('{"step": 2, "reward/mean: 1.0}', ", line 2, is damaged: Unterminated string"),
])  # fmt: skip
def test_a_log_that_is_damaged_ends_a_resume_in_a_sentence(line, said, policy, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    inputs = start(policy, run)
    with (run / "metrics.jsonl").open("a") as log:
        log.write(f"{line}\n")
    monkeypatch.setattr("train_grpo.Inputs.load", lambda _: inputs)
    with pytest.raises(SystemExit):
        open_run(parse_flags(training_flags(policy, run, max_prompt_tokens=16)))
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and f"{run}/metrics.jsonl{' ' * (said[0] == 'i')}{said}" in shown


def test_a_mistake_is_told_once_and_last_without_a_traceback(policy, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text((policy / "train.jsonl").read_text() + '{"problem": "1')
    # In a collective the other rank would wait for longer than this waits for both.
    done = run_ranks(2, "train_grpo.py", training_flags(policy, tmp_path / "run", train_data=broken))
    assert done.returncode != 0
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "broken.jsonl, line 65: not valid JSON" in done.stderr
    assert not (tmp_path / "run").exists()
