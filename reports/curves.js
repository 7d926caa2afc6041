// The curves of all runs, drawn by uPlot. First the metrics and their lines, then the charts, then the section.
"use strict";

/** [metrics, title, unit]: the panels that are looked for, in this order; any other metric is chosen by name. */
const PANELS = [
  [/^reward\/mean$/, "Reward", "mean over the completions"],
  [/^eval\/(.*)\/avg@\d+$/, "Held-out accuracy", "mean score"],
  [/^completion\/tokens_right_mean$/, "Length of correct completions", "tokens"],
  [/^completion\/tokens_wrong_mean$/, "Length of incorrect completions", "tokens"],
  [/^policy\/kl_ref$/, "KL to the reference", "nats per token"],
  [/^policy\/entropy$/, "Entropy", "nats per token"],
  [/^policy\/clip_frac_low$/, "Clipped tokens, ratio too small", "share"],
  [/^policy\/clip_frac_high$/, "Clipped tokens, ratio too large", "share"],
  [/^policy\/rollout_gap_mean$/, "Rollout gap", "difference of probabilities"],
  [/^critic\/explained$/, "Explained by the critic", "share of the variance of returns"],
  [/^optim\/grad_norm$/, "Gradient norm", "before clipping"],
  [/^time\/step_s$/, "Time of a step", "seconds"],
  [/^perf\/tokens_per_s$/, "Throughput", "completion tokens per second"],
  [/^perf\/update_mfu$/, "MFU of the update", "share of the peak"],
  [/^reward\/part\/(.*)/, "Part of the reward", "mean over the completions, without its weight"],
];
const HEIGHT = 210;
const view = { hidden: new Set(), together: true, smoothing: 1 };
const charts = []; // {metric, box, plot}

const metricNames = (pattern) =>
  [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].filter((name) => pattern.test(name)).sort();
const namesOf = (runs) => [...runs].map((index) => RUNS[index].name).join(", ");

/** The metric that is the standard error of this one. */
const errorOf = (name) => (/\/avg@\d+$/.test(name) ? name.replace(/avg@\d+$/, "stderr") : `${name}_stderr`);

/** The lines of a metric that are shown: {label, color, swatch, dash, points: step -> [value, low, high]}. */
function linesOf(name) {
  const shown = [...RUNS.keys()].filter((index) => !view.hidden.has(index) && known(RUNS[index], name).length);
  const groups = view.together ? GROUPS : [...RUNS.keys()].map((index) => [index]);
  const lines = groups.map((group) => group.filter((index) => shown.includes(index))).filter((group) => group.length);
  const own = lines.map((runs) => ({
    label: `${runs.length > 1 ? "mean of " : ""}${namesOf(runs)}`,
    color: colorOf(runs[0]), swatch: swatchOf(runs[0]), dash: dashOf(runs[0]),
    points: smoothed(together(runs.map((index) => pointsOf(RUNS[index], name)))),
  }));
  const published = new Map(shown.map((index) => RUNS[index].published[name]).filter(Boolean)
    .map(({ label, points }) => [label, new Map(points.map(([step, value]) => [step, [value, null, null]]))]));
  const muted = { color: "var(--muted)", swatch: "var(--muted)", dash: [6, 4] };
  return [...own, ...[...published].map(([label, points]) => ({ label, points, ...muted }))];
}

/** A run's values, with one standard error to each side where it is measured. */
function pointsOf(run, name) {
  const entries = run.metrics[name].map((value, i) => {
    const error = run.metrics[errorOf(name)]?.[i];
    return [run.steps[i], [value, ...(error == null ? [null, null] : [value - error, value + error])]];
  });
  return new Map(entries.filter(([, [value]]) => isNumber(value)));
}

/** The mean of several runs at the steps that all of them have, with the lowest and the highest of them. */
function together(runs) {
  if (runs.length === 1) return runs[0];
  const steps = [...runs[0].keys()].filter((step) => runs.every((run) => run.has(step)));
  return new Map(steps.map((step) => {
    const values = runs.map((run) => run.get(step)[0]);
    return [step, [mean(values), Math.min(...values), Math.max(...values)]];
  }));
}

/** The mean over `view.smoothing` neighbouring values. */
function smoothed(points) {
  const values = [...points.values()], reach = (view.smoothing - 1) / 2;
  return new Map([...points.keys()].map((step, i) => {
    const near = values.slice(Math.max(0, i - reach), i + reach + 1);
    return [step, values[i].map((value, part) => (isNumber(value) ? mean(near.map((each) => each[part])) : null))];
  }));
}

// Charts --------------------------------------------------------------------------------------------------------------

/** Draws the lines of the metric into the box, and returns the plot; null if there is nothing to draw. */
function draw(box, metric) {
  const lines = linesOf(metric);
  const steps = [...new Set(lines.flatMap((line) => [...line.points.keys()]))].sort((a, b) => a - b);
  if (!steps.length) {
    box.replaceChildren(make("p", { className: "muted" }, "No run that is shown has measured this."));
    return null;
  }
  const data = [steps], series = [{}], bands = [];
  for (const line of lines) {
    const color = style(line.color.slice(4, -1)); // a canvas knows no variables
    const add = (part, options) => {
      data.push(steps.map((step) => line.points.get(step)?.[part] ?? null));
      return series.push({ spanGaps: true, stroke: color, width: 1.75, ...options }) - 1;
    };
    if ([...line.points.values()].some(([, low]) => isNumber(low))) {
      const edge = { width: 0, points: { show: false } };
      bands.push({ series: [add(2, edge), add(1, edge)], fill: `${color}2e` });
    }
    line.index = add(0, { points: { show: line.points.size <= 40, size: 5, fill: color }, dash: line.dash });
  }
  const axis = { stroke: style("--muted"), font: `11px ${style("--font")}`,
    grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), size: 4 } };
  const dotSize = (_, index) => (lines.some((line) => line.index === index) ? 7 : 0); // none on the edges of a band
  box.ariaLabel = `${metric}: ${lines.map((line) => line.label).join("; ")}`;
  return new uPlot({
    width: Math.max(box.clientWidth, 120), height: HEIGHT, series, bands, legend: { show: false },
    scales: { x: { time: false, range: rangeOfSteps }, y: { range: rangeOfValues } }, padding: [8, 12, 0, 0],
    axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (tick % 1 ? "" : tick)) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
    cursor: { y: false, sync: { key: "steps" }, hover: { skip: [null, undefined] }, points: { size: dotSize } },
    hooks: { setCursor: [(shown) => showValues(shown, lines)] },
  }, data, box);
}

/** Of a single step, too, which uPlot shows on an axis to 100; so it does with a metric that is 0 everywhere. */
const rangeOfSteps = (_, low, high) => (low < high ? [low, high] : [low - 1, low + 1]);
const rangeOfValues = (_, low, high) =>
  (low == null ? [null, null] : low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true));

/** The values at the cursor, beside it; only of the chart that the pointer or the focus is on. */
function showValues(plot, lines) {
  const { left, idx, idxs } = plot.cursor;
  if (!plot.root.parentElement.matches(":hover, :focus")) return;
  if (idx == null || left < 0) return void hideTip();
  const rows = lines.filter((line) => idxs[line.index] != null).map((line) => {
    const step = plot.data[0][idxs[line.index]], [value, low, high] = line.points.get(step);
    const range = isNumber(low) ? ` (${short(low)} to ${short(high)})` : "";
    const other = step === plot.data[0][idx] ? "" : `, step ${step}`;
    return make("div", {}, swatch(line.swatch), ` ${line.label}: `, make("b", {}, short(value)), range + other);
  });
  const area = plot.over.getBoundingClientRect();
  showTip([make("div", { className: "muted" }, `step ${plot.data[0][idx]}`), ...rows], area.left + left, area.top + 8);
}

/** A place for the curves of a metric, under this heading. The arrow keys go from step to step. */
function addChart(grid, metric, ...heading) {
  const box = make("div", { className: "chart", tabIndex: 0, role: "img" });
  const chart = { metric, box, plot: null };
  box.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !chart.plot) return;
    event.preventDefault();
    const steps = chart.plot.data[0], at = chart.plot.cursor.idx;
    const next = at == null ? steps.length - 1 : Math.min(Math.max(at + move, 0), steps.length - 1);
    chart.plot.setCursor({ left: chart.plot.valToPos(steps[next], "x"), top: 20 });
  });
  for (const leaving of ["blur", "mouseleave"]) box.addEventListener(leaving, hideTip);
  grid.append(make("figure", { className: "card" }, make("h3", {}, ...heading), box));
  charts.push(chart);
  return chart;
}

function drawAll() {
  for (const chart of charts) {
    chart.plot?.destroy();
    chart.box.replaceChildren();
    chart.plot = draw(chart.box, chart.metric);
  }
}

function fitAll() {
  for (const { plot, box } of charts) {
    const width = box.clientWidth;
    if (plot && width && plot.width !== width) plot.setSize({ width, height: HEIGHT });
  }
}

// The section ---------------------------------------------------------------------------------------------------------

function showCurves() {
  const section = byId("curves"), grid = make("div", { className: "grid" });
  if (RUNS.every((run) => run.steps.length === 0)) {
    section.append(make("p", { className: "note" }, "No step is logged yet."));
    return;
  }
  const seeds = GROUPS.filter((group) => group.length > 1).map(namesOf);
  const together = "Runs that differ by their seed alone are one line, their mean where all have a value; the shade goes "
    + `from the lowest to the highest of them: ${seeds.join("; ")}. `;
  section.append(controlsOfCurves(seeds.length > 0), make("details", {}, make("summary", {}, "How to read the curves"),
    make("p", { className: "muted" }, seeds.length ? together : "",
      "The shade of a single run is ± one standard error, where it is measured. All curves go over steps. ",
      "Grey dashes: what was published of the set-up. Drag in a chart to zoom into steps, double-click to see all.")), grid);
  for (const [pattern, title, unit] of PANELS) {
    for (const metric of metricNames(pattern)) {
      const of = metric.match(pattern)[1];
      addChart(grid, metric, of ? `${title}: ${of}` : title, make("small", {}, make("code", {}, metric), `, ${unit}`));
    }
  }
  const others = metricNames(/^(?!.*stderr$)/).filter((name) => !PANELS.some(([pattern]) => pattern.test(name)));
  if (others.length) {
    const [label] = choice("Another metric", others.map((metric) => [metric, metric]), (metric) => {
      chart.metric = metric;
      drawAll();
    });
    const chart = addChart(grid, others[0], label);
  }
  drawAll();
  new ResizeObserver(fitAll).observe(grid);
}

/** Which runs are shown, and how. */
function controlsOfCurves(hasSeeds) {
  const keys = RUNS.map((_, index) => {
    const key = make("button", { type: "button", ariaPressed: "true", className: "key" }, runName(index));
    key.addEventListener("click", () => {
      view.hidden[view.hidden.has(index) ? "delete" : "add"](index);
      key.ariaPressed = String(!view.hidden.has(index));
      drawAll();
    });
    return key;
  });
  const [smoothing] = choice("Smoothing", [["1", "none"], ["5", "5 steps"], ["21", "21 steps"]], (value) => {
    view.smoothing = Number(value);
    drawAll();
  });
  const box = make("input", { type: "checkbox", checked: true });
  box.addEventListener("change", () => { view.together = box.checked; assignColors(); drawAll(); });
  const check = hasSeeds ? [make("label", { className: "check" }, box, "Seeds together")] : [];
  const runs = make("div", { className: "keys", role: "group", ariaLabel: "Runs that are shown" }, ...keys);
  return make("div", { className: "bar sticky" }, runs, smoothing, ...check);
}
