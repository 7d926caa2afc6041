"""The page that compares runs: its size and build time, what it embeds, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
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

from helpers.made_up import GROUP_SIZE, HOSTILE, SMILE, make_rollouts, make_run, make_vocabulary
from helpers.runs import GUARD_SECONDS, said
from reports.page import seed_groups, write_page
from reports.reference import published_curves
from reports.samples import pack_samples
from runtime.history import read_run


def write(file: Path, *runs: Path) -> Path:
    histories = list(map(read_run, runs))
    write_page(file, histories, list(map(published_curves, histories)))
    return file


@pytest.fixture(scope="module")
def big_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of runs of 500 steps: a and b differ by their seed, c by a flag and its code; a has 10,000 completions."""
    root = tmp_path_factory.mktemp("runs")
    runs = [make_run(root / "a", 1), make_run(root / "b", 2), make_run(root / "c", 3, patch=HOSTILE, clip_high=0.28)]
    make_rollouts(runs[0], list(range(10, 501, 10)), prompts=25, tokens=300, vocabulary=make_vocabulary(151_000))
    return write(root / "report.html", *runs)


def small_run(folder: Path, steps: list[int]) -> Path:
    run = make_run(folder, steps=5)
    make_rollouts(run, steps, prompts=2, tokens=30, vocabulary=make_vocabulary(400))
    return run


def header_of(packed: str) -> dict:
    raw = zlib.decompress(base64.b64decode(packed))
    return json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")])


def headers(file: Path) -> dict[str, dict]:
    """Name -> header of each chunk that is embedded."""
    chunks = re.findall(r'<script type="text/plain" id="(.*?)">(.*?)</script>', file.read_text())
    return {name: header_of(packed) for name, packed in chunks}


def test_ten_thousand_completions_take_less_than_20_MB(big_page):
    assert big_page.stat().st_size < 20e6
    found = headers(big_page)
    steps = found["runs"]["runs"][0]["samples"]["steps"]
    assert steps == list(range(10, 501, 10)), "nothing is left out"
    assert sum(len(found[f"samples-0-{step}"]["rows"]) for step in steps) == 10_000


@pytest.mark.parametrize(("budget", "fewest", "kept"), [(9_000_000, 20, 25), (1_000_000, 15, 3)])
def test_over_the_budget_whole_groups_of_all_the_run_are_kept(big_page, budget, fewest, kept):
    found, chunks = pack_samples(big_page.with_name("a"), budget)
    assert (found["num_steps"], found["num_groups"], found["groups"]) == (50, 25, kept)
    steps = found["steps"]
    assert fewest <= len(steps) < 50 and steps[-1] == 500 and steps[0] <= 50
    assert max(np.diff(steps)) <= 40, "they are spread over the run"
    for step in steps:
        groups = [row["group"] for row in header_of(chunks[step])["rows"]]
        assert [groups.count(group) for group in dict.fromkeys(groups)] == [GROUP_SIZE] * kept
    assert budget / 2 < sum(map(len, chunks.values())) <= budget


def test_files_that_cannot_be_read_are_left_out_and_named(tmp_path, capsys):
    run = small_run(tmp_path / "run", [1, 2, 3, 4])
    files = {step: run / "rollouts" / f"step_{step}.parquet" for step in range(1, 5)}
    content = bytearray(files[2].read_bytes())
    content[len(content) // 3] ^= 255
    files[2].write_bytes(content)
    files[3].write_bytes(files[3].read_bytes()[:5000])
    pq.write_table(pq.read_table(files[4]).drop_columns("is_sampled"), files[4])  # a file of another program
    (run / "rollouts" / "tokens.parquet").write_bytes(b"no table")
    shutil.copy(files[1], run / "rollouts" / "step_1_copy.parquet")
    found = headers(write(tmp_path / "page.html", run))["runs"]["runs"][0]["samples"]
    assert found["steps"] == [1] and not found["has_tokens"]
    names = re.findall(r"warning: .*/(\S+)\.parquet cannot be read and is left out: \S", capsys.readouterr().out)
    assert sorted(names) == ["step_2", "step_3", "step_4", "tokens"]


def test_runs_that_differ_by_their_seed_alone_are_one_group():
    def run(seed: int, commit: str = "a", **flags: object) -> dict:
        config = {"seed": seed, "out_dir": f"runs/{seed}", "model": f"runs/policy_seed{seed}", "kl_coef": 0.1} | flags
        return {"config": config, "code": {"commit": commit}}

    assert seed_groups([run(1), run(2), run(11)]) == [[0, 1, 2]]
    others = [run(2, kl_coef=0.2), run(2, commit="b"), {"config": {}, "code": {}}]
    others += [run(2, model="runs/policy_seed21"), run(2, model="Qwen2-4B")]  # there the 2 is no seed
    assert [seed_groups([run(1), other]) for other in others] == [[[0], [1]]] * 5


def test_training_does_not_pay_for_the_page():
    program = "import sys, run; print(sys.modules.keys() & {'pyarrow', 'matplotlib', 'reports.page'})"
    assert said([sys.executable, "-c", program]) == "set()\n"


# In a browser ---------------------------------------------------------------------------------------------------------


class Browser:
    """A page in Chromium, and what a user does with it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver, self.run = driver, driver.execute_script

    def open(self, file: Path, width: int = 1280, dark: bool = False) -> None:
        self.is_dark = dark
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(file.as_uri())
        self.wait("document.querySelectorAll('.completion').length === 8 || document.querySelector('#samples .note')")

    def wait(self, condition: str) -> None:
        WebDriverWait(self.driver, GUARD_SECONDS, 0.05).until(lambda _: self.run(f"return {condition}"), condition)

    def wait_for(self, status: str) -> None:
        self.wait(f"document.querySelector('[role=status]').textContent.includes({status!r})")

    def choose(self, label: str, text: str) -> None:
        select = Select(self.driver.find_element(By.XPATH, f"//label[span='{label}']/select"))
        select.select_by_visible_text(next(each.text for each in select.options if each.text.startswith(text)))

    def find(self, css: str, index: int = 0) -> webdriver.remote.webelement.WebElement:
        return self.driver.find_elements(By.CSS_SELECTOR, css)[index]

    def all(self, css: str) -> list[str]:
        """The text of all such elements."""
        return self.run(f"return [...document.querySelectorAll({css!r})].map((each) => each.textContent)")

    def check(self) -> None:
        """No script has failed, and nothing is wider than the screen."""
        assert [entry["message"] for entry in self.driver.get_log("browser")] == []
        assert self.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not chromedriver:
        reason = "there is no Chromium here (Debian: apt-get install chromium chromium-driver)"
        assert "NEEDS_BROWSER" not in os.environ, reason
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    flags = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-sync disable-background-networking"
    for flag in [*flags.split(), "disable-component-update", f"user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="module", params=[1280, 360])
def page(request, browser, big_page) -> Browser:
    """The page of three runs on a wide, light screen and on a narrow, dark one."""
    browser.open(big_page, request.param, dark=request.param == 360)
    return browser


def test_tokens_are_coloured_by_the_stored_log_probs(page, big_page):
    row = pq.read_table(big_page.with_name("a") / "rollouts" / "step_500.parquet").slice(2, 1).to_pylist()[0]
    spans = "document.querySelectorAll('.tokens')[2].querySelectorAll('span')"
    classes = page.run(f"return [...{spans}].map((span) => span.classList[0])")
    for level, low, high in (("l0", 0.91, 1), ("l1", 0.51, 0.89), ("l3", 0.06, 0.19), ("l4", 0.011, 0.049)):
        shown = [name for name, x in zip(classes, row["rollout_logprobs"], strict=True) if low < np.exp(x) < high]
        assert set(shown) <= {level}, level
    assert {"l0", "l1", "l2", "l3"} <= set(classes)
    page.find(".tokens", 2).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert float(re.search(r"log-prob (\S+),", page.find("#tip").text)[1]) == pytest.approx(
        row["rollout_logprobs"][1], abs=0.02
    )
    page.check()


def test_a_models_text_is_shown_and_never_runs_as_code(page):
    hostile, smiling = page.all(".tokens")[:2]
    assert hostile.startswith(HOSTILE)
    assert smiling.startswith(f"{SMILE} is the answer\nand a new line, {SMILE}"), "a character of four tokens is whole"
    for place in (".completion dt", ".completion dd", ".badge", "#samples code", "details .text", "td code", "option"):
        assert any("<img src=x onerror" in text for text in page.all(place)), place
    assert page.all("img, main script") == [] and page.run("return window.hacked") is None
    assert page.run(r"return make('b', {}, 'a\u202eb\u2066').textContent") == r"a\u202eb\u2066", "turns no text"
    page.check()
    code = "const s = document.createElement('script'); s.textContent = 'window.hacked = 1'; document.body.append(s);"
    assert page.run(f"{code} return window.hacked") is None, "the page's policy admits its own scripts alone"
    assert len(page.driver.get_log("browser")) == 1


def test_overview_curves_and_differences_are_shown(page):
    for word in ("Reward", "eval/math500/avg@4", "KL", "Entropy", "MFU", "reward/part/format", "Another metric"):
        assert word in " ".join(page.all("figure h3"))
    assert len(page.all(".chart canvas")) == len(page.all("figure"))
    # a and b are one line with a band, c is another: with standard errors of reward and evaluation, without of the KL.
    lines = "return [0, 1, 4].map((i) => charts[i].plot.series.length - 1)"
    assert page.run(lines) == [3 + 3, 3 + 3, 3 + 1]
    page.find("input[type=checkbox]").click()
    assert page.run(lines) == [3 * 3, 3 * 3, 3]
    page.find(".key", 2).click()
    assert page.run(lines) == [2 * 3, 2 * 3, 2]
    page.choose("Smoothing", "21")
    assert page.run("const y = charts[0].plot.data[1]; return Math.abs(y[300] - y[299])") < 0.02, "no noise"
    page.choose("Another metric", "completion/frac_truncated")
    assert page.run("const select = document.querySelector('figure select');"
                    "return select.clientWidth / select.closest('figure').clientWidth") > 0.8  # fmt: skip
    assert page.run("return charts.at(-1).plot.data[1].slice(30)") == pytest.approx([0.05] * 470)
    page.run("document.querySelectorAll('.chart')[1].focus()")
    page.find(".chart", 1).send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    page.wait("document.querySelector('#tip').textContent.startsWith('step 475')")
    assert page.all("section h2") == ["Curves", "Overview", "Differences", "Samples"]
    assert not page.run("return document.querySelector('#overview details').open"), "phases are folded"
    phases = page.all("#overview details tbody tr")
    assert re.match(r"sample(20|19.9|20.1) s · 5[23]%", phases[0])
    shares = [int(re.search(r"· (\d+)%", row)[1]) for row in phases]
    assert shares == sorted(shares, reverse=True)
    flags = page.all("#differences .scroll:first-of-type tbody tr")
    assert flags[1:3] == ["--seed123", "--clip_high0.20.20.28"]
    assert flags[3] == f"uncommitted changesnonenone{HOSTILE}"
    color = page.run("return getComputedStyle(document.body).backgroundColor")
    assert color == ("rgb(20, 23, 27)" if page.is_dark else "rgb(246, 247, 249)")
    page.check()


def test_samples_are_chosen_filtered_and_searched(page):  # the last one: it changes what is shown
    assert page.all("#samples p")[2].startswith("Step 500, group 0")
    page.choose("Step", "30")
    page.wait_for("200 completions in 25 groups.")
    page.choose("Verdict", "incorrect")
    page.wait_for("pass the filters")
    shown = len(page.all(".completion"))
    assert len(page.all(".completion .bad")) == shown < 8 and page.all(".completion .good") == []
    page.choose("Verdict", "any")
    page.choose("Length", "truncated")
    page.wait_for("50 completions")
    assert len(page.all(".completion")) == page.all(".completion .warn").count("truncated") == 2
    page.choose("Length", "any")
    page.find("input[type=search]").send_keys("IS THE ANSWER")
    page.choose("Step", "all steps")
    page.wait_for("50 completions in 50 groups")
    assert "".join(page.all(".tokens .found")) in (" is the answer", "is the answer")
    page.find("button[title='Next group']").click()
    assert page.all("#samples p")[2].startswith("Step 20, group 0")
    page.find("input[type=search]").send_keys("no such text")
    page.wait_for("0 completions in 0 groups")
    assert page.all(".completion") == []
    page.check()


def test_a_special_token_stays_on_one_line(page):
    """In a text without spaces, which is broken anywhere."""
    made = """const n = 800, text = "abc<eos>".repeat(n / 2), body = make("div", {className: "text tokens"});
        const sizes = new Uint16Array(n).map((_, t) => (t % 2 ? 5 : 3));
        byId("problem").after(body);
        const step = {bytes: new TextEncoder().encode(text), sizes, logprob: new Uint8Array(n)};
        fillTokens(body, step, {first: 0, start: 0, length: n, text}, Infinity);
        const mostLines = () => Math.max(...[...body.children].map((span) => span.getClientRects().length));
        const found = [mostLines()];
        body.querySelectorAll(".special").forEach((span) => span.classList.remove("special"));
        found.push(mostLines());
        body.remove();
        return found"""
    assert page.run(made) == [1, 2], "as it is, and as it would be for another token"


@pytest.mark.parametrize("width", [1280, 360])
def test_twenty_runs_fit_the_page(width, browser, tmp_path):
    """The first chart is on the first screen, a run has a row and its own line, and the seeds are told once."""
    runs = [
        make_run(tmp_path / f"clip{i}_seed{seed}", seed, 30, clip_high=i / 10) for i in range(10) for seed in (1, 2)
    ]
    browser.open(write(tmp_path / "page.html", *runs), width)
    top = browser.run("return document.querySelector('.chart').getBoundingClientRect().top")
    assert top < 600, "of a screen of 900"
    for section in ("overview", "differences"):
        rows = browser.all(f"#{section} > .scroll tbody th")
        assert rows == [run.name for run in runs]
    room = browser.run("const {scrollWidth, clientWidth} = document.querySelector('#overview .scroll');"
                       "return [scrollWidth, clientWidth]")  # fmt: skip
    assert width < 1280 or room[0] == room[1]
    for click, count in ((False, 10), (True, 20)):  # with the seeds together, and apart
        if click:
            browser.find("input[type=checkbox]").click()
        drawn = browser.run("return charts[0].plot.series.filter((one) => one.width > 0)"
                            ".map(({stroke, dash}) => [stroke(), String(dash)])")  # fmt: skip
        shown = browser.run("return [...document.querySelectorAll('.key .swatch')]"
                            ".map((mark) => getComputedStyle(mark).background)")  # fmt: skip
        assert len(drawn) == len(set(map(tuple, drawn))) == len(set(shown)) == count
    assert " ".join(browser.all("#curves")).count("by their seed alone") == 1
    browser.check()


def test_a_completion_of_300000_tokens_is_shown_whole(page):
    made = """const n = 300000, body = document.createElement("div");
        const step = {bytes: new Uint8Array(n).fill(97), sizes: new Uint16Array(n).fill(1), logprob: new Uint8Array(n)};
        fillTokens(body, step, {first: 0, start: 0, length: n, text: "a".repeat(n)}, Infinity);
        return body.querySelectorAll("span").length"""
    assert page.run(made) == 300_000


def test_what_is_missing_is_said(browser, tmp_path):
    (tmp_path / "empty").mkdir()
    alone = small_run(tmp_path / "alone", [1])
    (alone / "rollouts" / "tokens.parquet").unlink()
    for runs, missing in (
        ([tmp_path / "empty"], ("No step is logged", "no config.json", "No completions")),
        ([alone, tmp_path / "empty"], ["no rollouts/tokens.parquet"]),
    ):
        browser.open(write(tmp_path / f"{len(runs)}.html", *runs))
        notes = " ".join(browser.all(".note, #samples p"))
        assert all(words in notes for words in missing)
        browser.check()
    assert browser.all(".tokens")[0].startswith(HOSTILE), "without its tokens it is the stored text"
