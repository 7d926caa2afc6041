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

/** Seconds of a phase per step, and its share. */
function timeOf(run, name) {
  const total = (each) => known(run, each).reduce((sum, value) => sum + value, 0);
  const seconds = total(name) / known(run, "time/step_s").length;
  return name in run.metrics ? `${short(seconds)} s · ${percent(total(name) / total("time/step_s"))}` : null;
}

function showOverview() {
  document.title = `Report: ${namesOf(RUNS.keys())}`;
  byId("title").textContent = RUNS.length === 1 ? `Run ${RUNS[0].name}` : `${RUNS.length} runs, side by side`;
  byId("subtitle").textContent = RUNS.map((run) => run.folder).join(" · ");
  const average = (name, show = short, last = 0) => (run) => show(meanOf(known(run, name).slice(-last)));
  const phases = metricNames(/^time\/(?!step_s|rollout_tail_s).*_s$/);
  const lines = [
    ["Steps", (run) => run.steps.at(-1) ?? "none yet"],
    [`Reward, mean of the last ${LAST_STEPS} steps`, average("reward/mean", short, LAST_STEPS)],
    ...metricNames(/^eval\/.*\/avg@\d+$/).map((name) => [`Held-out ${name.slice(5)}`, (run) => lastOf(run, name)]),
    [`Completion tokens, mean of the last ${LAST_STEPS} steps`, average("completion/tokens_mean", short, LAST_STEPS)],
    ["Completion tokens per second", average("perf/tokens_per_s")],
    ["MFU of the update", average("perf/update_mfu", percent)],
    ["Seconds per step", average("time/step_s")],
    ...phases.map((name) => [`of these, ${name.slice(5, -2)}`, (run) => timeOf(run, name)]),
    ["Hardware", (run) => run.hardware], ["Replay of", (run) => run.config.replay],
  ];
  const rows = lines.map(([name, value]) => [name, ...RUNS.map((run) => value(run) ?? null)]);
  byId("overview").append(table(rows.filter(([, ...cells]) => cells.some(isNumber)), "numbers"));
}
