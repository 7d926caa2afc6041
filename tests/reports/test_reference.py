"""The references: each is whole, belongs to its launch script, and judges a run as its figures and protocol say."""

import functools
import json
import math
import re
from pathlib import Path

import pytest

from command_line import parse_flags
from helpers.made_up import write_completions, write_lines, write_run
from helpers.runs import ROOT
from reports.reference import SAMPLING, belongs_to, judge, judgement, load, names, published_curves, report
from runtime.history import History, read_run
from test_setups import launched

GSM8K, DAPO = "qwen2.5_3b_gsm8k_lora_1gpu", "qwen3_4b_dapo_8gpu"
ZOO, TULU = "qwen7b_simplerl_2x8xh100", "tulu8b_rlvr_7plus1"
UNKNOWN = "cannot be judged"
EVAL = "eval/gsm8k_test/avg@1"
BEFORE, AFTER = "GSM8K, 3B, before training", "GSM8K, 3B, after 116 steps"


@functools.cache
def config_of(name: str) -> dict:
    """The flags as the script gives them, as config.json has them."""
    *_, arguments = launched(name, NGPU=1, NUM_GPUS=0)
    return json.loads(json.dumps(vars(parse_flags(arguments))))


@pytest.mark.parametrize("name", names())
def test_every_reference_has_its_form_and_documented_figures(name):
    reference = load(name)
    pages = (ROOT / "docs" / "setups.md").read_text() + (ROOT / "benchmarks" / "README.md").read_text()
    assert reference.keys() - {"cannot_be_judged"} == {"set_up", "source", "training", "figures", "curves"}
    assert reference["set_up"] == name and reference["training"] and reference["source"]
    assert bool(reference["figures"]) != ("cannot_be_judged" in reference), "figures, or the reason why there are none"
    for figure in reference["figures"]:
        is_judged, what, share = "cannot_be_judged" not in figure, figure["what"], figure["value"]
        needed = {"what", "metric", "value", "source"} | ({"is", "tolerance", "why"} if is_judged else set())
        assert needed <= figure.keys() <= needed | {"model", "steps", "evaluated_by", "protocol", "cannot_be_judged"}
        assert ("steps" in figure) != ("evaluated_by" in figure), what
        assert (ROOT / figure.get("evaluated_by", "scripts")).exists(), what
        assert not is_judged or (figure["is"] in ("equal", "at least") and figure["tolerance"] > 0), what
        if is_judged and figure["metric"].startswith("eval/"):
            assert figure["protocol"].keys() == {*SAMPLING, "problems"}, what
        if name in (GSM8K, TULU) or "MATH500" in what:  # an accuracy
            assert f"{100 * share:.1f}" in pages, what
        if figure.get("protocol", {}).get("samples") == 1 and "/avg@1" in figure["metric"]:
            margin = 1.96 * math.sqrt(2 * share * (1 - share) / figure["protocol"]["problems"])
            assert figure["tolerance"] > margin - 0.0006, what
    for curve in reference["curves"]:
        assert curve.keys() - {"model"} == {"metric", "label", "source", "points"}
        steps = [step for step, _ in curve["points"]]
        assert steps == sorted(set(steps)) and all(math.isfinite(value) for _, value in curve["points"])


def test_every_documented_set_up_has_a_reference_for_its_runs():
    files = (ROOT / "scripts").glob("*.sh")
    scripts = {path.stem for path in files if re.search("^source .*launch.sh", path.read_text(), re.MULTILINE)}
    documented = set(re.findall(r"^\| `(\w[\w.]*)\.sh` \|", (ROOT / "docs" / "setups.md").read_text(), re.MULTILINE))
    assert scripts - {"tiny_turns_cpu"} == documented | {"tiny_cpu", "smollm2_cpu"} == set(names())
    for name in names():
        config = config_of(name)
        assert belongs_to(config | {"seed": 7, "out_dir": "elsewhere", "micro_batch_tokens": 1024}) == name
        for other in ({"group_size": 2}, {"max_completion_tokens": 8}):  # the second as in a smoke run
            assert belongs_to(config | other) is None
    assert belongs_to({}) is None


def gsm8k_run(folder: Path, before: float = 0.563, after: float = 0.861, last: int = 116, **flags: object) -> Path:
    """A run of the set-up on 3B with its two evaluations."""
    records = [{"step": step, "reward/mean": 0.5} for step in range(last + 1)]
    for step, accuracy in ((0, before), (last, after)):
        records[step][EVAL] = accuracy
        write_completions(folder, step, "gsm8k_test", [1.0] * flags.pop("problems", 1319))
    return write_run(folder, config_of(GSM8K) | flags, records)


def judged(run: Path, name: str) -> dict[str, tuple[str, str]]:
    """Figure -> (verdict, why it cannot be judged)."""
    return {each.figure["what"]: (each.verdict, each.reason) for each in judge(load(name), read_run(run))}


@pytest.mark.parametrize(("changes", "before", "after", "overall"), [
    ({}, ("reached", ""), ("reached", ""), "reached"),
    ({"after": 0.834}, ("reached", ""), ("not reached", ""), "not reached"),
    ({"before": 0.7}, ("not reached", ""), ("reached", ""), "not reached"),  # other prompts?
    ({"last": 60}, ("reached", ""), (UNKNOWN, "the run is at step 60 of 116"), UNKNOWN),
    ({"problems": 1000}, (UNKNOWN, "another evaluation: problems 1000, not 1319"), ("reached", ""), "reached"),
    ({"eval_temperature": [1.0]}, *[(UNKNOWN, "another evaluation: temperature 1.0, not 0.0")] * 2, UNKNOWN),
    ({"group_size": 16}, *[(UNKNOWN, "another training")] * 2, None),
])  # fmt: skip
def test_a_run_is_judged_by_what_was_published(tmp_path, changes, before, after, overall):
    run = gsm8k_run(tmp_path, **changes)
    assert judged(run, GSM8K) == {BEFORE: before, AFTER: after}
    said = judgement(read_run(run))
    if overall is None:
        assert said == "", "nothing is said at the end of a run of one's own"
    else:
        assert said.startswith(f"{run} against {GSM8K}: {overall}\n") and "\nsource: the logs" in said
        row = rf"^{AFTER} +0\.861 +\S+ +at least 0\.835 +{after[0]}"
        assert re.search(row, said, re.MULTILINE) and after[1] in said


def test_of_several_sets_the_one_that_was_evaluated_alike_is_judged(tmp_path):
    run = gsm8k_run(tmp_path, eval_data=["x/aime.jsonl", *config_of(GSM8K)["eval_data"]])
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace('"eval/', '"eval/aime/avg@1": 0.1, "eval/'))
    write_completions(run, 116, "aime", [0.0] * 30)
    assert judged(run, GSM8K)[AFTER] == ("reached", "")


def test_unpublished_or_unmeasured_figures_cannot_be_judged(tmp_path):
    run = gsm8k_run(tmp_path / "model", model="Qwen/Qwen2.5-14B-Instruct")
    assert f"{UNKNOWN}: nothing is published for --model Qwen/Qwen2.5-14B-Instruct" in judgement(read_run(run))
    run = write_run(tmp_path / "qwq", config_of("qwq32b_8xh100"), [{"step": 1}])
    assert f"{UNKNOWN}: the source gives no figure" in judgement(read_run(run))
    run = write_run(tmp_path / "lost", config_of(GSM8K), [{"step": 0}, {"step": 116, EVAL: 0.9}])
    assert "problems not known, not 1319" in judged(run, GSM8K)[AFTER][1]
    assert judged(run, GSM8K)[BEFORE] == (UNKNOWN, "metrics.jsonl has no eval/*/avg@1 at step 0")
    other = write_run(tmp_path / "other", config_of(GSM8K) | {"group_size": 16}, [{"step": 0}])
    assert "\nanother training: --group_size 16, not 5\n" in report(GSM8K, read_run(other))
    replay = History(tmp_path, {"replay": "runs/x"}, [{"step": 1}])
    pytest.raises(ValueError, report, GSM8K, replay).match("is a replay: .*judge that")


def test_a_figure_over_steps_takes_their_mean_and_bears_a_null(tmp_path):
    records = [{"step": step, "reward/mean": 0.3 if step % 2 else 0.4} for step in range(1, 151)]
    records[130]["reward/mean"] = None
    run = read_run(write_run(tmp_path, config_of(DAPO), records))
    (found,) = [each for each in judge(load(DAPO), run) if each.figure["what"] == "reward, steps 120 to 150"]
    assert found.verdict == "reached" and found.value == pytest.approx((16 * 0.4 + 14 * 0.3) / 30), "0.315 or more"


def results(folder: Path, set_name: str, accuracy: float, top_p: float = 0.95) -> None:
    protocol = {"problems": 500, "samples": 1, "temperature": 1.0, "top_p": top_p, "max_completion_tokens": 16000}
    found = {"sets": {set_name: protocol | {"avg@1": {"mean": accuracy, "stderr": 0.02}}}}
    write_lines(folder / "results.json", [found])


def test_figures_of_evaluations_come_from_the_best_checkpoint(tmp_path):
    run, what = write_run(tmp_path, config_of(ZOO), [{"step": 100, "reward/mean": 0.5}]), "MATH500, after training"
    advice = f"no results; make them: MODEL={run}/best bash scripts/eval_qwen7b_simplerl.sh"
    assert judged(run, ZOO)[what] == (UNKNOWN, advice)
    results(run / "eval" / "step_100_old" / "2026-01-02", "math500", 0.78)  # somebody's copy
    results(run / "eval" / "step_100" / "2026-01-02", "math500", 0.70)
    assert judged(run, ZOO)[what][0] == "not reached"
    results(run / "eval" / "step_90" / "2026-01-01", "math500", 0.78)
    (run / "best").symlink_to("step_90")
    assert judged(run, ZOO)[what] == ("reached", "")
    results(run / "eval" / "step_90" / "2026-01-03", "math500", 0.78, top_p=1.0)
    assert judged(run, ZOO)[what] == (UNKNOWN, "another evaluation: top_p 1.0, not 0.95")


def test_figures_of_another_evaluation_are_shown_and_not_judged(tmp_path):
    write_run(tmp_path, config_of(TULU), [{"step": 223}])
    results(tmp_path / "eval" / "step_223" / "x", "gsm8k_test", 0.9)
    said = judgement(read_run(tmp_path))
    assert f"against {TULU}: {UNKNOWN}\n" in said and "the source shows 8 worked examples" in said
    assert re.search(r"^GSM8K, after training +0\.876 +0\.9 +- +cannot be judged: the", said, re.MULTILINE)


def test_published_curves_are_those_of_the_set_up_and_its_model():
    records = [{"step": 1, "reward/mean": 0.5, EVAL: 0.5}]
    own, *others = (
        published_curves(History(Path("run"), config_of(GSM8K) | changes, records))
        for changes in ({}, {"group_size": 2}, {"model": "Qwen/Qwen2.5-7B-Instruct"})
    )
    assert own[EVAL]["points"][0] == [0, 0.563] and own["reward/mean"]["label"] == "verl's log"
    assert others == [{}, {}], "the curves are of 3B"
