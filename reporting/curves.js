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

/** The metric that is the standard error of this one. */
const errorOf = (name) => (/\/avg@\d+$/.test(name) ? name.replace(/avg@\d+$/, "stderr") : `${name}_stderr`);

/** The visible lines of a metric: {label, color, points: step -> [value, low, high]}. */
function linesOf(name) {
  const units = view.together ? GROUPS : RUNS.map((_, index) => [index]);
  return units.flatMap((unit) => {
    const runs = unit.filter((index) => !view.hidden.has(index) && known(RUNS[index], name).length);
    if (!runs.length) return [];
    const own = runs.map((index) => pointsOf(RUNS[index], name));
    const points = runs.length === 1 ? own[0] : new Map([...own[0].keys()]
      .filter((step) => own.every((each) => each.has(step)))
      .map((step) => {
        const values = own.map((each) => each.get(step)[0]);
        return [step, [mean(values), Math.min(...values), Math.max(...values)]];
      }));
    const label = `${runs.length > 1 ? "mean of " : ""}${namesOf(runs)}`;
    return [{ label, color: colorOf(runs[0]), points: smoothed(points) }];
  }).concat(publishedLines(name));
}

/** What was published of the metric of the visible runs, dashed. */
function publishedLines(name) {
  const shown = RUNS.filter((_, index) => !view.hidden.has(index));
  const byLabel = new Map(shown.flatMap(({ published }) => (published[name] ? [published[name]] : []))
    .map((curve) => [curve.label, curve.points]));
  return [...byLabel].map(([label, points]) => {
    const entries = points.map(([step, value]) => [step, [value, null, null]]);
    return { label, color: "var(--muted)", dash: [6, 4], points: new Map(entries) };
  });
}

const namesOf = (runs) => runs.map((index) => RUNS[index].name).join(", ");

function pointsOf(run, name) {
  const errors = run.metrics[errorOf(name)] ?? [];
  const entries = run.metrics[name].map((value, i) => {
    const error = errors[i];
    return [run.steps[i], [value, ...(error == null ? [null, null] : [value - error, value + error])]];
  });
  return new Map(entries.filter(([, [value]]) => isNumber(value)));
}

/** The mean over `view.smoothing` neighbouring values. */
function smoothed(points) {
  if (view.smoothing === 1) return points;
  const steps = [...points.keys()], values = [...points.values()], reach = (view.smoothing - 1) / 2;
  return new Map(steps.map((step, i) => {
    const near = values.slice(Math.max(0, i - reach), i + reach + 1);
    return [step, [0, 1, 2].map((part) => (isNumber(values[i][part]) ? mean(near.map((each) => each[part])) : null))];
  }));
}

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
    const color = paint(line.color), isSparse = line.points.size <= 40;
    const add = (part, options) => {
      data.push(steps.map((step) => line.points.get(step)?.[part] ?? null));
      return series.push({ spanGaps: true, stroke: color, width: 1.75, ...options }) - 1;
    };
    if ([...line.points.values()].some(([, low]) => isNumber(low))) {
      const edge = { width: 0, points: { show: false } };
      bands.push({ series: [add(2, edge), add(1, edge)], fill: `${color}2e` });
    }
    line.index = add(0, { points: { show: isSparse, size: 5, fill: color }, dash: line.dash });
  }
  const axis = { stroke: style("--muted"), font: `11px ${style("--font")}`,
    grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), size: 4 } };
  const dotSize = (_, index) => (lines.some((line) => line.index === index) ? 7 : 0); // none on the edges of a band
  const plot = new uPlot({
    width: Math.max(box.clientWidth, 120), height: HEIGHT, series, bands, legend: { show: false },
    scales: { x: { time: false, range: rangeOfSteps }, y: { range: rangeOfValues } }, padding: [8, 12, 0, 0],
    axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (tick % 1 ? "" : tick)) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
    cursor: { y: false, sync: { key: "steps" }, hover: { skip: [null, undefined] }, points: { size: dotSize } },
    hooks: { setCursor: [(shown) => showValues(shown, lines)] },
  }, data, box);
  box.ariaLabel = `${metric}: ${lines.map((line) => {
    const [step, [value]] = [...line.points].at(-1);
    return `${line.label} ${short(value)} at step ${step}`;
  }).join("; ")}`;
  return plot;
}

/** Of a single step, too, which uPlot shows on an axis to 100; so it does with a metric that is 0 everywhere. */
const rangeOfSteps = (_, low, high) => (low < high ? [low, high] : [low - 1, low + 1]);

function rangeOfValues(_, low, high) {
  if (low == null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

/** The values at the cursor, beside it; only of the chart that the pointer or the focus is on. */
function showValues(plot, lines) {
  const { left, idx, idxs } = plot.cursor;
  const box = plot.root.parentElement;
  if (idx == null || left < 0) return void (box.matches(":hover, :focus") && hideTip());
  if (!box.matches(":hover, :focus")) return;
  const rows = lines.filter((line) => idxs[line.index] != null).map((line) => {
    const step = plot.data[0][idxs[line.index]], [value, low, high] = line.points.get(step);
    const range = isNumber(low) ? ` (${short(low)} to ${short(high)})` : "";
    const other = step === plot.data[0][idx] ? "" : `, step ${step}`;
    return make("div", {}, swatch(line.color), `${line.label}: `, make("b", {}, short(value)), range + other);
  });
  const area = plot.over.getBoundingClientRect();
  showTip([make("div", { className: "muted" }, `step ${plot.data[0][idx]}`), ...rows], area.left + left, area.top + 8);
}

/** A place for the curves of a metric, under this heading. */
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
  box.addEventListener("blur", hideTip);
  box.addEventListener("mouseleave", hideTip);
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

function legend() {
  const buttons = RUNS.map((_, index) => {
    const button = make("button", { type: "button", ariaPressed: "true", className: "key" }, runName(index));
    button.addEventListener("click", () => {
      view.hidden[view.hidden.has(index) ? "delete" : "add"](index);
      button.ariaPressed = String(!view.hidden.has(index));
      drawAll();
    });
    return button;
  });
  return make("div", { className: "keys", role: "group", ariaLabel: "Runs that are shown" }, ...buttons);
}

function showCurves() {
  const section = byId("curves"), hasSeeds = GROUPS.some((group) => group.length > 1);
  if (RUNS.every((run) => run.steps.length === 0)) {
    section.append(make("p", { className: "note" }, "No step is logged yet."));
    return;
  }
  const [smoothing] = choice("Smoothing", [["1", "none"], ["5", "5 steps"], ["21", "21 steps"]], (value) => {
    view.smoothing = Number(value);
    drawAll();
  });
  const together = make("input", { type: "checkbox", checked: true });
  together.addEventListener("change", () => { view.together = together.checked; assignColors(); drawAll(); });
  const bar = make("div", { className: "bar sticky" }, legend(), smoothing);
  if (hasSeeds) bar.append(make("label", { className: "check" }, together, "Seeds together"));
  const seeds = GROUPS.filter((group) => group.length > 1).map((group) => `${namesOf(group)} differ by their seed `
    + "alone: one line, their mean where all have a value; the shade goes from the lowest to the highest of them. ");
  section.append(bar, make("p", { className: "muted" }, ...seeds,
    "The shade of a single run is ± one standard error, where it is measured. All curves go over steps. ",
    "Dashed: what was published of the set-up. Drag in a chart to zoom into steps, double-click to see all again."));
  const grid = make("div", { className: "grid" });
  section.append(grid);
  const missing = [];
  for (const [pattern, title, unit] of PANELS) {
    const metrics = metricNames(pattern);
    for (const metric of metrics) {
      const of = metric.match(pattern)[1];
      addChart(grid, metric, of ? `${title}: ${of}` : title, make("small", {}, make("code", {}, metric), `, ${unit}`));
    }
    if (!metrics.length) missing.push(title);
  }
  addOther(grid);
  const absent = `Not measured in any run: ${missing.join(", ")}.`;
  if (missing.length) section.append(make("p", { className: "muted" }, absent));
  drawAll();
  new ResizeObserver(fitAll).observe(grid);
}

/** A chart of any other metric. */
function addOther(grid) {
  const isShown = (name) => PANELS.some(([pattern]) => pattern.test(name)) || /stderr$/.test(name);
  const isInAll = (name) => RUNS.every((run) => name in run.metrics);
  const others = metricNames(/./).filter((name) => !isShown(name)); // first what is new in one of the runs
  const metrics = [...others.filter((name) => !isInAll(name)), ...others.filter(isInAll)];
  if (!metrics.length) return;
  const [label] = choice("Another metric", metrics.map((metric) => [metric, metric]), (metric) => {
    chart.metric = metric;
    drawAll();
  });
  const chart = addChart(grid, metrics[0], label);
}
