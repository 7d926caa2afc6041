// The overview: what the runs have reached, how fast they are, and where their time goes.

const LAST_STEPS = 10;

const known = (run, name) => (run.metrics[name] ?? []).filter(isNumber);
const meanOf = (values) => (values.length ? mean(values) : null);
const percent = (share) => (share == null ? null : `${(100 * share).toFixed(0)}%`);

/** The last value of a metric, with its standard error. */
function lastOf(run, name) {
  const values = run.metrics[name] ?? [], at = values.findLastIndex(isNumber);
  if (at < 0) return null;
  const error = run.metrics[errorOf(name)]?.[at];
  const where = run.steps[at] === run.steps.at(-1) ? "" : ` at step ${run.steps[at]}`;
  return `${short(values[at])}${error == null ? "" : ` ± ${short(error)}`}${where}`;
}

const secondsOf = (run, name) => known(run, name).reduce((sum, value) => sum + value, 0);

/** Seconds of a phase per step, and its share. */
function timeOf(run, name) {
  const seconds = secondsOf(run, name), share = percent(seconds / secondsOf(run, "time/step_s"));
  return name in run.metrics ? `${short(seconds / known(run, "time/step_s").length)} s · ${share}` : null;
}

function showOverview() {
  document.title = `Report: ${namesOf(RUNS.keys())}`;
  byId("title").textContent = RUNS.length === 1 ? `Run ${RUNS[0].name}` : `${RUNS.length} runs, side by side`;
  const parents = new Set(RUNS.map((run) => run.folder.replace(/[^/]*$/, "")).filter(Boolean));
  byId("subtitle").textContent = parents.size ? `in ${[...parents].join(", ")}` : "";
  const average = (name, show = short, last = 0) => (run) => show(meanOf(known(run, name).slice(-last)));
  const longest = (name) => Math.max(...RUNS.map((run) => secondsOf(run, name) / secondsOf(run, "time/step_s") || 0));
  const phases = metricNames(/^time\/(?!step_s|rollout_tail_s).*_s$/).sort((a, b) => longest(b) - longest(a));
  const lines = [
    ["Steps", (run) => run.steps.at(-1) ?? "none yet"],
    [`Reward, mean of the last ${LAST_STEPS} steps`, average("reward/mean", short, LAST_STEPS)],
    ...metricNames(/^eval\/.*\/avg@\d+$/).map((name) => [`Held-out ${name.slice(5)}`, (run) => lastOf(run, name)]),
    [`Completion tokens, mean of the last ${LAST_STEPS} steps`, average("completion/tokens_mean", short, LAST_STEPS)],
    ["Completion tokens per second", average("perf/tokens_per_s")],
    ["MFU of the update", average("perf/update_mfu", percent)],
    ["Seconds per step", average("time/step_s")],
    ["Hardware", (run) => run.hardware], ["Replay of", (run) => run.config.replay],
  ];
  const inRows = (chosen) => chosen.map(([name, value]) => [name, ...RUNS.map((run) => value(run) ?? null)])
    .filter(([, ...cells]) => cells.some(isNumber));
  byId("overview").append(tableOfRuns(inRows(lines), "numbers"));
  if (phases.length) byId("overview").append(make("details", {}, make("summary", {}, "Seconds of each phase"),
    tableOfRuns(inRows(phases.map((name) => [name.slice(5, -2), (run) => timeOf(run, name)])), "numbers")));
}
