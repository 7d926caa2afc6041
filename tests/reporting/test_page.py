"""The page that compares runs: its size and build time, what it embeds, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from fabricated_runs import GROUP_SIZE, HOSTILE, SMILE, make_rollouts, make_run, make_vocabulary
from helpers import ENVIRONMENT, ROOT
from report import read_metrics
from reporting import page
from reporting.page import seed_groups, write_page
from reporting.reference import load

FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
PATCH = """diff --git a/grpo.py b/grpo.py
--- a/grpo.py
+++ b/grpo.py
@@ -1 +1 @@
-    return -t.advantages
+    return -t.advantages  # <script>window.hacked=3</script>
"""


def write(file: Path, *runs: Path) -> Path:
    write_page(file, {run: read_metrics(run) for run in runs})
    return file


@pytest.fixture(scope="module")
def three_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of 500 steps. a and b differ by their seed, c by a flag and its code. a has 10,000 completions of 50 steps."""
    root = tmp_path_factory.mktemp("runs")
    runs = [make_run(root / "a", 1), make_run(root / "b", 2), make_run(root / "c", 3, patch=PATCH, clip_high=0.28)]
    vocabulary = make_vocabulary(151_000)
    make_rollouts(runs[0], list(range(10, 501, 10)), prompts=25, tokens=300, vocabulary=vocabulary)
    return runs


@pytest.fixture(scope="module")
def big_page(three_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """(the page of the three, seconds of CPU that it took: the fewest of at most three times)."""
    file, seconds = tmp_path_factory.mktemp("page") / "report.html", []
    while len(seconds) < 3 and min(seconds, default=2) >= 2:
        start = time.process_time()
        write(file, *three_runs)
        seconds.append(time.process_time() - start)
    return file, min(seconds)


def headers(file: Path) -> dict[str, dict]:
    """Name -> header of each chunk that is embedded."""
    found = {}
    for name, packed in re.findall(r'<script type="text/plain" id="(.*?)">(.*?)</script>', file.read_text()):
        raw = zlib.decompress(base64.b64decode(packed))
        found[name] = json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")])
    return found


def test_ten_thousand_completions_take_less_than_20_MB_and_2_seconds(big_page):
    file, seconds = big_page
    assert file.stat().st_size < 20e6
    assert seconds < 2, "of CPU, all threads together; the clock would also measure the tests that run meanwhile"
    found = headers(file)
    steps = found["stored"]["runs"][0]["steps"]
    assert steps == list(range(10, 501, 10)), "nothing is left out"
    assert sum(len(found[f"samples-0-{step}"]["lengths"]) for step in steps) == 10_000


def test_over_the_budget_whole_groups_of_evenly_spaced_steps_are_kept(three_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "BYTES_OF_DATA", 3_000_000)
    file = write(tmp_path / "report.html", three_runs[0])
    chunks = headers(file)
    found = chunks["stored"]["runs"][0]
    assert (found["num_steps"], found["num_groups"]) == (50, 25)
    steps = found["steps"]
    assert 10 <= len(steps) < 50 and (steps[0], steps[-1]) == (10, 500)
    assert max(np.diff(steps)) - min(np.diff(steps)) <= 10, "a step of the run"
    for step in steps:
        groups = chunks[f"samples-0-{step}"]["rows"]["group"]
        assert [groups.count(group) for group in dict.fromkeys(groups)] == [GROUP_SIZE] * found["groups"]
    packed = re.findall(r'id="samples-0-\d+">(.*?)</script>', file.read_text())
    assert 1_500_000 < sum(map(len, packed)) < 3_000_000


def test_steps_that_cost_more_than_the_first_and_the_last_one_are_left_out(tmp_path, monkeypatch):
    run, vocabulary = make_run(tmp_path / "run", steps=9), make_vocabulary(5000)
    make_rollouts(run, [1, 9], prompts=2, tokens=20, vocabulary=vocabulary)
    (run / "rollouts").rename(run / "short")
    make_rollouts(run, list(range(2, 9)), prompts=2, tokens=2000, vocabulary=vocabulary)
    for step in (1, 9):
        (run / "short" / f"step_{step}.parquet").rename(run / "rollouts" / f"step_{step}.parquet")
    monkeypatch.setattr(page, "BYTES_OF_DATA", 500_000)
    file = write(tmp_path / "page.html", run)
    packed = re.findall(r'id="samples-0-\w+">(.*?)</script>', file.read_text())
    assert 100_000 < sum(map(len, packed)) < 500_000


def test_files_that_are_damaged_or_just_removed_are_left_out_and_named(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", steps=5)
    make_rollouts(run, [1, 2, 3, 4, 5], prompts=2, tokens=30, vocabulary=make_vocabulary(400))
    folder = run / "rollouts"
    content = bytearray((folder / "step_2.parquet").read_bytes())
    content[len(content) // 3] ^= 255
    (folder / "step_2.parquet").write_bytes(content)
    (folder / "step_3.parquet").write_bytes((folder / "step_3.parquet").read_bytes()[:5000])
    (folder / "step_5.parquet").write_bytes(b"")
    (folder / "tokens.parquet").write_bytes(b"no table")
    listed, glob = {folder / f"step_{step}.parquet" for step in (1, 2, 3, 4, 5)}, Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, pattern: listed if "step" in pattern else glob(path, pattern))
    (folder / "step_1.parquet").unlink()  # after it was listed
    found = headers(write(tmp_path / "page.html", run))["stored"]["runs"][0]
    assert found["steps"] == [4] and not found["has_tokens"]
    said = capsys.readouterr().out.splitlines()
    assert sorted(re.match(r"warning: .*/(\S+) cannot be read and is left out: \S", line)[1] for line in said) == [
        "step_1.parquet", "step_2.parquet", "step_3.parquet", "step_5.parquet", "tokens.parquet",
    ]  # fmt: skip


def test_runs_that_differ_by_their_seed_alone_are_one_group():
    def run(seed: int, commit: str = "a", patch: str = "", **flags: object) -> dict:
        config = {"seed": seed, "out_dir": f"runs/{seed}", "model": f"runs/policy_seed{seed}", "kl_coef": 0.1} | flags
        return {"config": config, "starts": [{"commit": commit, "patch": patch}]}

    assert seed_groups([run(1), run(2), run(11)]) == [[0, 1, 2]]
    assert seed_groups([run(1), run(2, kl_coef=0.2)]) == [[0], [1]]
    assert seed_groups([run(1), run(2, commit="b")]) == [[0], [1]], "other code"
    assert seed_groups([run(1), run(2, patch="+1")]) == [[0], [1]], "other uncommitted changes"
    assert seed_groups([run(3, model="Qwen3-4B"), run(4, model="Qwen4-4B")]) == [[0], [1]], "3 and 4 are no seeds here"
    assert seed_groups([run(1, model="runs/policy_seed11"), run(2, model="runs/policy_seed21")]) == [[0], [1]]
    unknown = {"config": {}, "starts": []}
    assert seed_groups([unknown, unknown]) == [[0], [1]], "nothing is known of them"


def report(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "report.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_the_command_prints_where_the_page_is_and_refuses_what_is_no_run(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    said = report(run, "--output", tmp_path / "page.html")
    assert said.stdout == f"{tmp_path / 'page.html'}\n" and (tmp_path / "page.html").exists()
    (tmp_path / "nothing").mkdir()
    refused = report(run, tmp_path / "nothing")
    assert refused.returncode == 2 and refused.stdout == ""
    assert (
        refused.stderr == f"error: {tmp_path / 'nothing'} is no run: it holds neither metrics.jsonl nor config.json.\n"
    )


def test_what_is_damaged_is_told_in_a_sentence(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    for name, damage, said in [
        ("metrics.jsonl", '{"step": 1, "reward}', "metrics.jsonl, line 1, is damaged: Unterminated string"),
        ("starts.jsonl", '"}', "starts.jsonl, line 1, is damaged"), ("config.json", "[1]", "config.json is damaged"),
        ("metrics.jsonl", '{"reward/mean": 1.0}', "metrics.jsonl is damaged: a line of it has no step"),
        ("metrics.jsonl", '{"step": 9, "reward/mean": [1]}', "metrics.jsonl is damaged: reward/mean is no number"),
    ]:  # fmt: skip
        content = (run / name).read_text()
        (run / name).write_text(f"{damage}\n{content}" if name != "config.json" else damage)
        refused = report(run, "--output", tmp_path / "page.html")
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
        assert refused.stderr.startswith(f"error: {run / said}") and refused.stderr.count("\n") == 1
        (run / name).write_text(content)


def test_a_table_of_another_program_is_told_in_a_sentence(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    make_rollouts(run, [1], prompts=2, tokens=30, vocabulary=make_vocabulary(400))
    file = run / "rollouts" / "step_1.parquet"
    table = pq.read_table(file)
    place = table.column_names.index("reward_parts")
    pq.write_table(table.set_column(place, "reward_parts", [["[1]"] * table.num_rows]), file)
    refused = report(run, "--output", tmp_path / "page.html")
    assert refused.returncode == 2 and "holds what no run writes (AttributeError" in refused.stderr
    pq.write_table(table.drop_columns("reward_parts"), file)
    assert "step_1.parquet cannot be read and is left out" in report(run, "--output", tmp_path / "page.html").stdout


def test_odd_but_whole_files_make_a_page(tmp_path):
    """Line separators in texts, infinite flags, starts of which nothing is known."""
    run = make_run(tmp_path / "run", steps=3, system_prompt="a\u2028b\u0085c", max_grad_norm=float("inf"))
    (run / "starts.jsonl").write_text('{"note": "a\u2028b}"}\n')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/part/a\u2028b": 0.5}\n')
    done = report(run, "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    (found,) = headers(tmp_path / "page.html")["runs"]["runs"]
    assert found["config"]["max_grad_norm"] == "Infinity" and found["steps"][-1] == 4


def test_the_page_replaces_files_alone(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    refused = report(make_run(tmp_path / "run", steps=3), "--output", tmp_path / "fifo")
    assert refused.returncode == 2 and "is no file that could be replaced" in refused.stderr
    assert (tmp_path / "fifo").is_fifo()


def test_training_does_not_pay_for_the_page():
    names = "sys.modules.keys() & {'pyarrow', 'matplotlib', 'reporting.page'}"
    command = [sys.executable, "-c", f"import sys, report; sys.exit(str({names}) if {names} else 0)"]
    assert subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False).returncode == 0


# In a browser ---------------------------------------------------------------------------------------------------------


class Browser:
    """A page in Chromium, and what a user does with it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, file: Path, width: int = 1280, dark: bool = False) -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(file.as_uri())
        self.wait("return document.querySelector('#samples').childElementCount > 1")

    def run(self, script: str) -> object:
        return self.driver.execute_script(script)

    def wait(self, condition: str) -> None:
        WebDriverWait(self.driver, 20, 0.05).until(lambda _: self.run(condition), condition)

    def select(self, label: str) -> Select:
        return Select(self.driver.find_element(By.XPATH, f"//label[span='{label}']/select"))

    def choose(self, label: str, text: str) -> None:
        """Chooses an option that begins so."""
        select = self.select(label)
        select.select_by_visible_text(next(each.text for each in select.options if each.text.startswith(text)))

    def all(self, css: str) -> list[str]:
        """The text of all such elements."""
        return self.run(f"return [...document.querySelectorAll({css!r})].map((each) => each.textContent)")

    def count(self, css: str) -> int:
        return self.run(f"return document.querySelectorAll({css!r}).length")

    def is_as_wide_as_the_screen(self) -> bool:
        return self.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        reason = "there is no Chromium here (Debian: apt-get install chromium chromium-driver)"
        assert "NEEDS_BROWSER" not in os.environ, reason
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    yield Browser(driver)
    driver.quit()


@pytest.mark.parametrize("width", [1280, 360])
def test_samples_are_chosen_filtered_and_coloured(browser, big_page, width):
    browser.open(big_page[0], width)
    browser.wait("return document.querySelectorAll('.completion').length === 8")
    assert browser.select("Step").first_selected_option.text == "500"
    assert browser.is_as_wide_as_the_screen()

    browser.choose("Step", "30")
    browser.wait("return document.querySelector('#samples').textContent.includes('Step 30, group 0, train.jsonl:750')")
    assert browser.all("[role=status]") == ["200 completions in 25 groups."]

    browser.choose("Verdict", "incorrect")
    browser.wait("return document.querySelector('[role=status]').textContent.includes('pass the filters')")
    assert (
        browser.count(".completion .bad") == browser.count(".completion") < 8
        and browser.count(".completion .good") == 0
    )
    browser.choose("Verdict", "any")
    browser.choose("Length", "truncated")
    browser.wait("return document.querySelector('[role=status]').textContent.startsWith('50 completions')")
    assert browser.count(".completion") == browser.all(".completion .warn").count("truncated") == 2
    browser.choose("Length", "any")

    text = browser.driver.find_element(By.CSS_SELECTOR, "input[type=search]")
    text.send_keys("IS THE ANSWER")
    browser.choose("Step", "all steps")
    browser.wait("return document.querySelector('[role=status]').textContent.startsWith('50 completions in 50 groups')")
    assert "".join(browser.all(".tokens .found")) in (" is the answer", "is the answer")
    assert len(browser.select("Group").options) == 50
    browser.driver.find_element(By.CSS_SELECTOR, "button[title='Next group']").click()
    assert browser.all("#samples p")[2].startswith("Step 20, group 0")
    text.send_keys(Keys.CONTROL, "a")
    text.send_keys("no such text")
    browser.wait("return document.querySelector('[role=status]').textContent.startsWith('0 completions')")
    assert browser.count(".completion") == 0
    assert browser.is_as_wide_as_the_screen() and browser.errors() == []


def test_each_colour_mode_shows_the_stored_values(browser, big_page, three_runs):
    browser.open(big_page[0])
    browser.wait("return document.querySelectorAll('.completion').length === 8")
    row = pq.read_table(three_runs[0] / "rollouts" / "step_500.parquet").slice(2, 1).to_pylist()[0]
    sampler, trainer = np.exp(row["rollout_logprobs"]), np.exp(row["old_logprobs"])
    shown = {}
    for title in ("log-prob of the sampler", "rollout gap", "advantage", "weight version", "nothing"):
        browser.choose("Colour tokens by", title)
        shown[title] = browser.run(
            "const spans = document.querySelectorAll('.completion')[2].querySelectorAll('.tokens span');"
            "return [...spans].map((span) => span.className)"
        )
    assert len(shown["nothing"]) == len(row["token_ids"]) and set(shown["nothing"]) == {""}
    certain = [name for name, p in zip(shown["log-prob of the sampler"], sampler, strict=True) if p > 0.91]
    doubtful = [name for name, p in zip(shown["log-prob of the sampler"], sampler, strict=True) if 0.06 < p < 0.19]
    assert set(certain) == {""} and set(doubtful) == {"warm l3"}
    above = [name for name, gap in zip(shown["rollout gap"], trainer - sampler, strict=True) if 0.004 < gap < 0.009]
    below = [name for name, gap in zip(shown["rollout gap"], trainer - sampler, strict=True) if -0.009 < gap < -0.004]
    assert set(above) == {"cool l2"} and set(below) == {"warm l2"}
    assert set(shown["advantage"]) == {"warm l5" if row["advantages"][0] < 0 else "cool l5"}
    old = ["cool l1" if version < 499 else "" for version in row["versions"]]
    assert shown["weight version"] == old
    body = browser.driver.find_elements(By.CSS_SELECTOR, ".tokens")[2]
    body.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    said = browser.driver.find_element(By.ID, "tip").text
    assert f"token {row['token_ids'][1]}" in said and "by the weights of step 498" in said
    assert float(re.search(r"log-prob (\S+),", said)[1]) == pytest.approx(row["rollout_logprobs"][1], abs=0.02)
    gap = float(re.search(r"sampler: (\S+)", said)[1])
    assert gap == pytest.approx(trainer[1] - sampler[1], abs=2e-4 + 0.02 * abs(gap))
    assert browser.errors() == []


def test_what_a_model_has_written_is_shown_as_text_and_never_runs(browser, big_page):
    browser.open(big_page[0])
    browser.wait("return document.querySelectorAll('.completion').length === 8")
    hostile, smiling = browser.all(".tokens")[:2]
    assert hostile.startswith(HOSTILE)
    assert smiling.startswith(f"{SMILE} is the answer\nand a new line, {SMILE}"), "a character of four tokens is whole"
    for place in (".completion dt", ".completion dd", ".badge", "#samples code", "details .text", "td code", "option"):
        assert any("<img src=x onerror" in text for text in browser.all(place)), place
    browser.driver.find_elements(By.CSS_SELECTOR, ".tokens")[0].send_keys(Keys.ARROW_RIGHT)
    assert "window.hacked" in browser.driver.find_element(By.ID, "tip").text
    assert browser.count("img") == browser.count("main script") == 0
    assert PATCH.splitlines()[-1] in "".join(browser.all(".patch"))
    assert browser.run("return window.hacked") is None
    assert browser.errors() == []
    code = "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);"
    assert browser.run(f"{code} return window.hacked") is None, "the page's policy admits its own scripts alone"
    assert len(browser.errors()) == 1


@pytest.mark.parametrize("width", [1280, 360])
def test_curves_times_and_differences_are_shown(browser, big_page, width):
    browser.open(big_page[0], width, dark=width == 360)
    titles = " ".join(browser.all("figure h3"))
    for word in ("Reward", "eval/math500/avg@4", "correct", "incorrect", "KL", "Entropy", "clip_frac_low", "Gradient",
                 "Rollout gap", "tokens_per_s", "MFU", "reward/part/format", "Another metric"):  # fmt: skip
        assert word in titles
    assert browser.count(".chart canvas") == browser.count("figure")
    # a and b are one line with a band, c is another: with standard errors of reward and evaluation, without of the KL.
    lines = "return [0, 1, 4].map((i) => charts[i].plot.series.length - 1)"
    assert browser.run(lines) == [3 + 3, 3 + 3, 3 + 1]
    browser.driver.find_element(By.CSS_SELECTOR, "input[type=checkbox]").click()
    assert browser.run(lines) == [3 * 3, 3 * 3, 3]
    browser.driver.find_elements(By.CSS_SELECTOR, ".key")[2].click()
    assert browser.run(lines) == [2 * 3, 2 * 3, 2]
    browser.choose("Smoothing", "21")
    noise = "const y = charts[0].plot.data[1]; return Math.abs(y[300] - y[299])"
    assert browser.run(noise) < 0.02
    browser.choose("Another metric", "completion/frac_truncated")
    assert browser.run("return charts.at(-1).plot.data[1].slice(30)") == pytest.approx([0.05] * 470)

    chart = browser.driver.find_elements(By.CSS_SELECTOR, ".chart")[1]
    browser.run("document.querySelectorAll('.chart')[1].focus()")
    chart.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    browser.wait("return !document.querySelector('#tip').hidden")
    assert browser.driver.find_element(By.ID, "tip").text.startswith("step 475")

    phases = browser.all("#time tbody th")
    assert phases == ["sample", "update", "logprobs", "sync", "evaluate"]
    flags = browser.all("#differences .scroll:first-of-type tbody tr")
    assert flags[:3] == ['--model"policies/warm_seed1""policies/warm_seed2""policies/warm_seed3"', "--seed123",
                         "--clip_high0.20.20.28"]  # fmt: skip
    assert "Uncommitted changes of c, +1 −1 lines in 1 file" in browser.all("#differences summary")
    page_color = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert page_color == ("rgb(20, 23, 27)" if width == 360 else "rgb(246, 247, 249)")
    browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert browser.run("return document.documentElement.className") == "", "after printing it is dark again"
    assert browser.is_as_wide_as_the_screen() and browser.errors() == []


def test_what_was_published_of_the_set_up_is_drawn_dashed(browser, tmp_path):
    training = load("qwen3_4b_dapo_8gpu")["training"]
    for name, flags in (("dapo", training), ("other", training | {"group_size": 2})):
        run = make_run(tmp_path / name, steps=20, **flags)
        write_page(tmp_path / f"{name}.html", {run: read_metrics(run)})
        browser.open(tmp_path / f"{name}.html")
        dashed = browser.run("return charts[0].plot.series.filter((each) => each.dash?.length).length")
        assert dashed == (name == "dapo")
        assert ("torchtitan's picture" in browser.run("return charts[0].box.ariaLabel")) == (name == "dapo")


def test_what_is_missing_is_said(browser, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    browser.open(write(tmp_path / "empty.html", empty))
    notes = browser.all(".note")
    for words in ("No step is logged", "No times are logged", "no config.json", "no starts.jsonl", "No completions"):
        assert any(words in note for note in notes), words
    assert browser.run("return document.querySelector('#problem').hidden") and browser.errors() == []

    alone = make_run(tmp_path / "alone", steps=3)
    make_rollouts(alone, [1], prompts=2, tokens=30, vocabulary=make_vocabulary(400))
    (alone / "rollouts" / "tokens.parquet").unlink()
    browser.open(write(tmp_path / "alone.html", alone, empty))
    browser.wait("return document.querySelectorAll('.completion').length === 8")
    assert browser.all(".tokens")[0].startswith(HOSTILE), "without its tokens it is the stored text"
    assert any("no rollouts/tokens.parquet" in text for text in browser.all("#samples p"))
    assert any("Not measured in any run" in text for text in browser.all("#curves p")) is False
    assert browser.errors() == []
