// What is known of the runs beside their curves: overview, time per phase, differences of flags and of code.

// Overview ------------------------------------------------------------------------------------------------------------

const LAST_STEPS = 10;

function lastOf(run, name) {
  const values = run.metrics[name] ?? [];
  const at = values.findLastIndex(isNumber);
  if (at < 0) return null;
  const error = run.metrics[errorOf(name)]?.[at];
  const where = run.steps[at] === run.steps.at(-1) ? "" : ` at step ${run.steps[at]}`;
  return `${short(values[at])}${error == null ? "" : ` ± ${short(error)}`}${where}`;
}

function averageOfLast(run, name) {
  const values = known(run, name).slice(-LAST_STEPS);
  return values.length ? short(mean(values)) : null;
}

function showOverview() {
  document.title = `Report: ${RUNS.map((run) => run.name).join(", ")}`;
  byId("title").textContent = RUNS.length === 1 ? `Run ${RUNS[0].name}` : `${RUNS.length} runs, side by side`;
  byId("subtitle").textContent = RUNS.map((run) => run.folder).join(" · ");
  const evaluated = metricNames(/^eval\/.*\/avg@\d+$/);
  const time = (run) => known(run, "time/step_s").reduce((sum, value) => sum + value, 0);
  const lines = [
    ["Steps", (run) => (run.steps.length ? String(run.steps.at(-1)) : "none yet")],
    ...(RUNS.some((run) => run.config.replay) ? [["Replay of", (run) => run.config.replay]] : []),
    [`Reward, mean of the last steps, ${LAST_STEPS} at most`, (run) => averageOfLast(run, "reward/mean")],
    ...evaluated.map((name) => [`Held-out ${name.slice(5)}`, (run) => lastOf(run, name)]),
    [`Completion tokens, mean of the last steps, ${LAST_STEPS} at most`,
      (run) => averageOfLast(run, "completion/tokens_mean")],
    ["Seconds per step", (run) => short(average(run, "time/step_s"))],
    ["Tokens per second", (run) => short(average(run, "perf/tokens_per_s"))],
    ["MFU of the update", (run) => percent(average(run, "perf/update_mfu"))],
    ["Time of all steps", (run) => (time(run) ? duration(time(run)) : null)],
    ["Hardware", (run) => run.starts.length ? `${run.starts.at(-1).world_size} × ${run.starts.at(-1).device}` : null],
    ["Seed", (run) => run.config.seed ?? null],
  ];
  byId("overview").append(table(["", ...RUNS.map((_, i) => runName(i))],
    lines.map(([name, value]) => [name, ...RUNS.map((run) => value(run) ?? null)]), "numbers"));
}

const percent = (share) => (share == null ? null : `${(100 * share).toFixed(0)}%`);

// Time per phase ------------------------------------------------------------------------------------------------------

function phasesOf(run) {
  const names = Object.keys(run.metrics).filter((name) => /^time\/.*_s$/.test(name));
  const phases = names.map((name) => name.slice(5, -2)).filter((phase) => !["step", "rollout_tail"].includes(phase));
  const count = known(run, "time/step_s").length || 1;
  return new Map(phases.map((phase) => [phase, known(run, `time/${phase}_s`).reduce((a, b) => a + b, 0) / count]));
}

function showTime() {
  const section = byId("time"), ofRuns = RUNS.map(phasesOf);
  const sum = (phase) => ofRuns.reduce((total, each) => total + (each.get(phase) ?? 0), 0);
  const phases = [...new Set(ofRuns.flatMap((each) => [...each.keys()]))].sort((a, b) => sum(b) - sum(a));
  if (!phases.length) {
    section.append(make("p", { className: "note" }, "No times are logged yet."));
    return;
  }
  const totals = ofRuns.map((each) => [...each.values()].reduce((a, b) => a + b, 0));
  const bars = RUNS.map((run, index) => make("div", { className: "stack" },
    make("div", { className: "stack-name" }, runName(index), ` ${short(totals[index])} s`),
    make("div", { className: "stack-bar" }, ...phases.map((phase, i) => {
      const seconds = ofRuns[index].get(phase) ?? 0, part = make("i", { title: `${phase}: ${short(seconds)} s` });
      part.style.width = `${(100 * seconds) / Math.max(...totals)}%`;
      part.style.background = `var(--phase${Math.min(i, 7)})`;
      return part;
    }))));
  const rows = phases.map((phase, i) => [
    make("span", { className: "run" }, swatch(`var(--phase${Math.min(i, 7)})`), phase),
    ...ofRuns.map((each, index) => (each.has(phase)
      ? `${each.get(phase).toFixed(2)} s · ${((100 * each.get(phase)) / totals[index]).toFixed(0)}%` : null)),
  ]);
  section.append(make("p", { className: "muted" }, "Seconds per step, averaged over all steps, evaluations included."),
    ...bars, table(["", ...RUNS.map((_, i) => runName(i))], rows, "numbers"));
}

// Differences ---------------------------------------------------------------------------------------------------------

function showDifferences() {
  const section = byId("differences");
  section.append(make("h3", {}, "Flags"), ...flagDifferences(), make("h3", {}, "Code"), ...codeDifferences());
}

function flagDifferences() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))].filter((name) => name !== "out_dir");
  const texts = (name) => RUNS.map((run) => (name in run.config ? JSON.stringify(run.config[name]) : null));
  const different = names.filter((name) => new Set(texts(name)).size > 1);
  const head = ["", ...RUNS.map((_, i) => runName(i))];
  const rows = (chosen) => chosen.map((name) => [make("code", {}, `--${name}`), ...texts(name).map((text) =>
    (text == null ? null : make("code", {}, text)))]);
  const all = make("details", {}, make("summary", {}, `All ${names.length} flags`), table(head, rows(names)));
  if (!names.length) return [make("p", { className: "note" }, "There is no config.json.")];
  if (RUNS.length === 1) return [all];
  const what = different.length ? [table(head, rows(different))] : [make("p", {}, "All flags are the same.")];
  return [...what, all];
}

function codeDifferences() {
  const started = RUNS.some((run) => run.starts.length);
  const unknown = "There is no starts.jsonl: the code of the runs is not known.";
  if (!started) return [make("p", { className: "note" }, unknown)];
  const last = (run) => run.starts.at(-1);
  const distinct = (run) => new Set(run.starts.map((start) => `${start.commit} ${start.patch}`)).size;
  const packages = [...new Set(RUNS.flatMap((run) => Object.keys(last(run)?.packages ?? {})))]
    .filter((name) => new Set(RUNS.map((run) => last(run)?.packages?.[name])).size > 1);
  const lines = [
    ["Last start", (run) => last(run).time.replace(/(....)(..)(..)T(..)(..)(..)/, "$1-$2-$3 $4:$5")],
    ["Starts", (run) => `${run.starts.length}${distinct(run) > 1 ? ", the code changed between them" : ""}`],
    ["Commit", (run) => (last(run).commit ? make("code", {}, last(run).commit.slice(0, 10)) : null)],
    ["Uncommitted changes", (run) => (last(run).patch ? changesIn(last(run).patch)
      : last(run).has_uncommitted_changes ? "yes, but their patch is missing" : "none")],
    ...packages.map((name) => [name, (run) => last(run).packages[name] ?? "not installed"]),
  ];
  const head = ["", ...RUNS.map((_, i) => runName(i))];
  const cells = (value) => RUNS.map((run) => (last(run) ? value(run) : null));
  const shown = [table(head, lines.map(([name, value]) => [name, ...cells(value)]))];
  RUNS.forEach((run, index) => {
    if (run.code_difference) shown.push(patch(["From the commit of ", runName(0), " to that of ", runName(index)],
      run.code_difference));
    else if (last(run) && last(RUNS[0]) && last(run).commit !== last(RUNS[0]).commit) {
      shown.push(make("p", { className: "muted" }, runName(index), ` has another commit than ${RUNS[0].name}; `
        + "this repository does not know both."));
    }
  });
  return [...shown, ...patches()];
}

const changesIn = (text) => {
  const count = (pattern) => (text.match(pattern) ?? []).length;
  const files = filesIn(text).length;
  return `+${count(/^\+(?!\+\+ )/gm)} −${count(/^-(?!-- )/gm)} lines in ${files} ${files === 1 ? "file" : "files"}`;
};
const filesIn = (text) => text.split(/^(?=diff --git )/m).filter(Boolean);

/** The uncommitted changes of each run, without those that all runs have. */
function patches() {
  const files = RUNS.map((run) => filesIn(run.starts.at(-1)?.patch ?? ""));
  const inAll = new Set(files[0].filter((text) => RUNS.length > 1 && files.every((each) => each.includes(text))));
  const own = RUNS.flatMap((_, index) => {
    const text = files[index].filter((each) => !inAll.has(each)).join("");
    return text ? [patch(["Uncommitted changes of ", runName(index)], text)] : [];
  });
  return inAll.size ? [...own, patch(["Uncommitted changes that all runs have"], [...inAll].join(""), false)] : own;
}

function patch(title, text, open = true) {
  const kinds = [[/^diff /, "file"], [/^(---|\+\+\+|@@) /, "place"], [/^\+/, "added"], [/^-/, "removed"]];
  const kindOf = (line) => kinds.find(([pattern]) => pattern.test(line))?.[1] ?? "";
  const lines = text.trimEnd().split("\n").map((line) => make("span", { className: kindOf(line) }, `${line}\n`));
  return make("details", { open: open && lines.length < 200 },
    make("summary", {}, ...title, make("span", { className: "muted" }, `, ${changesIn(text)}`)),
    make("pre", { className: "patch", tabIndex: 0 }, ...lines));
}
