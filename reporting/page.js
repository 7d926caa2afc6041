// The page of report.py: unpacks the embedded data and shows it. Sections in the order of the page.
// Text of models and users goes into the page by `make` and `textContent` only, never as HTML.
"use strict";

// Data ----------------------------------------------------------------------------------------------------------------

const ARRAYS = { u1: Uint8Array, i1: Int8Array, i2: Int16Array, i4: Int32Array };

/** The header and the arrays of a chunk that `embed` (samples.py) has packed. */
async function unpack(id) {
  const packed = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const raw = await new Response(stream).arrayBuffer();
  const size = new DataView(raw).getUint32(0, true);
  const { arrays, ...chunk } = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, size)));
  let start = 4 + size;
  for (const [name, type, length] of arrays) {
    chunk[name] = new ARRAYS[type](raw.slice(start, start + length));
    start += length;
  }
  return chunk;
}

// Elements and numbers ------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);

/** A new element. Children that are strings become text. */
function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** A table whose first row and first column are headings. `null` is an empty cell. */
function table(head, rows, className = "") {
  const cell = (tag, scope) => (content) => make(tag, scope ? { scope } : {}, ...[content ?? "–"].flat());
  return make("div", { className: "scroll", tabIndex: 0 },
    make("table", { className },
      make("thead", {}, make("tr", {}, ...head.map(cell("th", "col")))),
      make("tbody", {}, ...rows.map(([first, ...rest]) =>
        make("tr", {}, cell("th", "row")(first), ...rest.map(cell("td")))))));
}

/** A labelled select. `options`: [value, text] pairs. */
function choice(label, options, onchange) {
  const select = make("select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
  select.addEventListener("change", () => onchange(select.value));
  return [make("label", {}, make("span", {}, label), select), select];
}

/** A number in at most five characters or so: 0.732, 12.3, 9.1k, 1e-6. */
function short(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(+value.toPrecision(3));
}

function duration(seconds) {
  if (seconds < 120) return `${short(seconds)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isNumber = (value) => value != null;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const known = (run, name) => (run.metrics[name] ?? []).filter(isNumber);
const average = (run, name) => (known(run, name).length ? mean(known(run, name)) : null);
const swatch = (color) => make("span", { className: "swatch" }, Object.assign(make("i"), { style: `background:${color}` }));

let RUNS = [], GROUPS = []; // GROUPS: indices of the runs that differ by their seed alone

const colorOf = (index) => `var(--color${index})`;
const paint = (color) => style(color.slice(4, -1)); // a canvas knows no variables

/** Eight colours, for the runs or for the groups that are drawn as one line. */
function assignColors() {
  RUNS.forEach((_, index) => {
    const unit = view.together ? GROUPS.findIndex((group) => group.includes(index)) : index;
    document.documentElement.style.setProperty(`--color${index}`, `var(--run${unit % 8})`);
  });
}

// Overview ------------------------------------------------------------------------------------------------------------

const LAST_STEPS = 10;

function lastOf(run, name) {
  const values = run.metrics[name] ?? [];
  const at = values.findLastIndex(isNumber);
  if (at < 0) return null;
  const error = run.metrics[errorOf(name)]?.[at];
  return `${short(values[at])}${error == null ? "" : ` ± ${short(error)}`} at step ${run.steps[at]}`;
}

function averageOfLast(run, name) {
  const values = known(run, name).slice(-LAST_STEPS);
  return values.length ? short(mean(values)) : null;
}

function runName(index) {
  return make("span", { className: "run" }, swatch(colorOf(index)), RUNS[index].name);
}

function showOverview() {
  document.title = `Report: ${RUNS.map((run) => run.name).join(", ")}`;
  byId("title").textContent = RUNS.length === 1 ? `Run ${RUNS[0].name}` : `${RUNS.length} runs, side by side`;
  byId("subtitle").textContent = RUNS.map((run) => run.folder).join(" · ");
  const evaluated = metricNames(/^eval\/.*\/avg@\d+$/);
  const time = (run) => known(run, "time/step_s").reduce((sum, value) => sum + value, 0);
  const lines = [
    ["Steps", (run) => (run.steps.length ? String(run.steps.at(-1)) : "none yet")],
    [`Reward, mean of the last ${LAST_STEPS} steps`, (run) => averageOfLast(run, "reward/mean")],
    ...evaluated.map((name) => [`Held-out ${name.slice(5)}`, (run) => lastOf(run, name)]),
    [`Completion tokens, mean of the last ${LAST_STEPS} steps`, (run) => averageOfLast(run, "completion/tokens_mean")],
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

// Curves --------------------------------------------------------------------------------------------------------------

/** [title, unit, metrics]: the panels that are always looked for; others are chosen by name. */
const PANELS = [
  ["Reward", "mean over the step", ["reward/mean"]],
  ["EVAL"], // one panel for each held-out set
  ["Length of correct completions", "tokens", ["completion/tokens_right_mean"]],
  ["Length of incorrect completions", "tokens", ["completion/tokens_wrong_mean"]],
  ["KL to the reference", "nats per token", ["policy/kl_ref"]],
  ["Entropy", "nats per token", ["policy/entropy"]],
  ["Clipped tokens", "share; — too small, - - too large", ["policy/clip_frac_low", "policy/clip_frac_high"]],
  ["Rollout gap", "mean difference of probabilities", ["policy/rollout_gap_mean"]],
  ["Gradient norm", "before clipping", ["optim/grad_norm"]],
  ["Time of a step", "seconds", ["time/step_s"]],
  ["Throughput", "completion tokens per second", ["perf/tokens_per_s"]],
  ["MFU of the update", "share of the peak", ["perf/update_mfu"]],
  ["PARTS"], // one panel for each part of the reward
];
const DASHES = [[], [6, 4], [2, 3]];
const HEIGHT = 210;
const view = { hidden: new Set(), together: true, smoothing: 1, other: null };
const charts = []; // {plot, box, draw}

const metricNames = (pattern) =>
  [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))].filter((name) => pattern.test(name)).sort();

/** The metric that is the standard error of this one. */
const errorOf = (name) => (/\/avg@\d+$/.test(name) ? name.replace(/avg@\d+$/, "stderr") : `${name}_stderr`);

function allPanels() {
  const evaluated = metricNames(/^eval\/.*\/avg@\d+$/).map((name) => {
    const [, set, figure] = name.match(/^eval\/(.*)\/(.*)$/);
    return ["Held-out accuracy", `${set}, ${figure}`, [name]];
  });
  const parts = metricNames(/^reward\/part\//).map((name) => ["Part of the reward", name.slice(12), [name]]);
  return PANELS.flatMap((panel) => ({ EVAL: evaluated, PARTS: parts })[panel[0]] ?? [panel]);
}

/** The visible lines of a metric: {label, color, dash, points: step -> [value, low, high]}. */
function linesOf(name, dash) {
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
    const label = runs.length === 1 ? RUNS[runs[0]].name : `mean of ${runs.map((index) => RUNS[index].name).join(", ")}`;
    return [{ label, color: colorOf(runs[0]), dash, points: smoothed(points) }];
  });
}

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

/** Draws the lines of these metrics into the box, and returns the plot; null if there is nothing to draw. */
function draw(box, names) {
  const lines = names.flatMap((name, i) => linesOf(name, DASHES[i % DASHES.length])
    .map((line) => (names.length > 1 ? { ...line, label: `${line.label}, ${name.split("_").at(-1)}` } : line)));
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
    line.index = add(0, { dash: line.dash, points: { show: isSparse, size: 5, fill: color } });
  }
  const axis = { stroke: style("--muted"), font: `11px ${style("--font")}`,
    grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), size: 4 } };
  const plot = new uPlot({
    width: Math.max(box.clientWidth, 120), height: HEIGHT, series, bands, legend: { show: false },
    scales: { x: { time: false } }, padding: [8, 12, 0, 0],
    axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (tick % 1 ? "" : tick)) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(short) }],
    cursor: { y: false, sync: { key: "steps" }, hover: { skip: [null, undefined] }, points: { size: 7 } },
    hooks: { setCursor: [(shown) => showValues(shown, lines)] },
  }, data, box);
  box.ariaLabel = `${names.join(", ")}: ${lines.map((line) => {
    const [step, [value]] = [...line.points].at(-1);
    return `${line.label} ${short(value)} at step ${step}`;
  }).join("; ")}`;
  return plot;
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

function showTip(content, x, y) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const isRight = x + 14 + width < document.documentElement.clientWidth;
  tip.style.left = `${Math.max(4, isRight ? x + 14 : x - 14 - width)}px`;
  tip.style.top = `${Math.max(4, Math.min(y, innerHeight - height - 4))}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

function addChart(grid, title, unit, names, extra = []) {
  const box = make("div", { className: "chart", tabIndex: 0, role: "img" });
  const heading = title ? [make("h3", {}, title, " ", make("small", {}, unit))] : [];
  const chart = { box, names, plot: null };
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
  grid.append(make("figure", { className: "card" }, ...heading, ...extra, box));
  charts.push(chart);
  return chart;
}

function drawAll() {
  for (const chart of charts) {
    chart.plot?.destroy();
    chart.box.replaceChildren();
    chart.plot = draw(chart.box, chart.names);
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
  const shade = "± one standard error, where it is measured";
  const bands = GROUPS.filter((group) => group.length > 1)
    .map((group) => `${group.map((index) => RUNS[index].name).join(", ")} differ by their seed alone: one line, their mean `
      + "where all have a value; the shade goes from the lowest to the highest of them.");
  section.append(bar, make("p", { className: "muted" }, ...bands.map((text) => `${text} `),
    `The shade of a single run: ${shade}. Drag in a chart to zoom into steps, double-click to see all again.`));
  const grid = make("div", { className: "grid" });
  section.append(grid);
  const missing = [];
  for (const [title, unit, names] of allPanels()) {
    if (names.some((name) => metricNames(/./).includes(name))) addChart(grid, title, unit, names);
    else missing.push(title);
  }
  addOther(grid);
  if (missing.length) section.append(make("p", { className: "muted" }, `Not measured in any run: ${missing.join(", ")}.`));
  drawAll();
  new ResizeObserver(fitAll).observe(grid);
}

/** A chart of any metric. */
function addOther(grid) {
  const shown = new Set(allPanels().flatMap(([, , names]) => names));
  const names = metricNames(/./).filter((name) => !shown.has(name) && !/stderr$/.test(name));
  if (!names.length) return;
  const [label] = choice("Another metric", names.map((name) => [name, name]), (name) => {
    chart.names = [name];
    drawAll();
  });
  const chart = addChart(grid, "", "", names.slice(0, 1), [label]);
}

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
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.config)))];
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
  if (!started) return [make("p", { className: "note" }, "There is no starts.jsonl: the code of the runs is not known.")];
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
  const shown = [table(head, lines.map(([name, value]) => [name, ...RUNS.map((run) => (last(run) ? value(run) : null))]))];
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
  return `+${count(/^\+(?!\+\+ )/gm)} −${count(/^-(?!-- )/gm)} lines in ${filesIn(text).length} files`;
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
  const kinds = { "+": "added", "-": "removed", "@": "place", d: "file" };
  const lines = text.split("\n").map((line) => make("span", { className: kinds[line[0]] ?? "" }, `${line}\n`));
  return make("details", { open: open && lines.length < 200 },
    make("summary", {}, ...title, make("span", { className: "muted" }, `, ${changesIn(text)}`)),
    make("pre", { className: "patch", tabIndex: 0 }, ...lines));
}

// Samples -------------------------------------------------------------------------------------------------------------

const chosen = { run: 0, step: "", group: 0, coloring: "logprob", verdict: "", cut: "", text: "" };
const unpacked = new Map(); // chunk name -> promise of it
const MOST_TOKENS = 1500; // of a completion, before one asks for the rest
const LOGPROB = (code) => -20 * (code / 254) ** 2;
const GAP = (code) => Math.sign(code) * (code / 127) ** 2;

/** How tokens are coloured: what is known of a token, and [class, text] of the steps of the scale. */
const COLORINGS = {
  logprob: {
    title: "log-prob of the sampler", limits: [0.9, 0.5, 0.2, 0.05, 0.01],
    value: (step, t) => (step.logprob && step.logprob[t] !== 255 ? LOGPROB(step.logprob[t]) : null),
    kind(value) {
      const level = this.limits.filter((limit) => Math.exp(value) < limit).length;
      return level ? `warm l${level}` : "";
    },
    scale() {
      return [["", "p ≥ 0.9"], ...this.limits.map((limit, i) => [`warm l${i + 1}`, `< ${limit}`])];
    },
    text: (value) => `log-prob ${value.toFixed(3)}, probability ${short(Math.exp(value))}`,
  },
  gap: {
    title: "rollout gap", limits: [0.001, 0.003, 0.01, 0.03, 0.1],
    value: (step, t) => (step.gap && step.gap[t] !== -128 ? GAP(step.gap[t]) : null),
    kind(value) {
      const level = this.limits.filter((limit) => Math.abs(value) >= limit).length;
      return level ? `${value > 0 ? "cool" : "warm"} l${level}` : "";
    },
    scale() {
      const ends = [["warm l5", "trainer lower by 0.1"], ["warm l2", "0.003"], ["", "same"]];
      return [...ends, ["cool l2", "0.003"], ["cool l5", "trainer higher by 0.1"]];
    },
    text: (value) => `probability, trainer − sampler: ${value > 0 ? "+" : ""}${short(value)}`,
  },
  advantage: {
    title: "advantage",
    value: (step, t) => (step.advantage && step.advantage[t] !== -32768
      ? (step.advantage[t] / 32767) * step.advantage_scale : null),
    kind(value, step) {
      const level = Math.ceil((5 * Math.abs(value)) / step.advantage_scale - 1e-6);
      return level ? `${value > 0 ? "cool" : "warm"} l${level}` : "";
    },
    scale(step) {
      const most = short(step.advantage_scale);
      return [["warm l5", `−${most}`], ["warm l2", ""], ["", "0"], ["cool l2", ""], ["cool l5", `+${most}`]];
    },
    text: (value) => `advantage ${value > 0 ? "+" : ""}${short(value)}`,
  },
  version: {
    title: "weight version",
    value: (step, t) => (step.version && step.version[t] !== -1 ? step.version[t] : null),
    kind(value, step) {
      const level = Math.min(5, newestVersion(step) - value);
      return level ? `cool l${level}` : "";
    },
    scale(step) {
      const newest = newestVersion(step);
      return [["", `weights of step ${newest}`], ...[1, 2, 3, 4].map((age) => [`cool l${age}`, `${newest - age}`]),
        ["cool l5", "older"]];
    },
    text: (value) => `by the weights of step ${value}`,
  },
};

const newestVersion = (step) => (step.newest ??= step.version.reduce((most, value) => Math.max(most, value), 0));

function load(name) {
  if (!unpacked.has(name)) unpacked.set(name, unpack(name));
  return unpacked.get(name);
}

/** A step of the run, with its tokens' bytes. */
async function loadStep(run, number) {
  const step = await load(`samples-${run}-${number}`);
  if (step.starts) return step;
  step.number = number;
  step.starts = [0];
  for (const length of step.lengths) step.starts.push(step.starts.at(-1) + length);
  step.rowsOf = new Map(step.groups.map(({ group }) => [group, []]));
  step.rows.group.forEach((group, row) => step.rowsOf.get(group).push(row));
  if (RUNS[run].samples.has_tokens) {
    const tokens = await load(`samples-${run}-tokens`);
    if (!tokens.ends) {
      let end = 0;
      tokens.ends = tokens.lengths.map((length) => (end += length));
    }
    step.tokens = tokens;
  }
  return step;
}

function tokenAt(step, t) {
  let place = 0;
  for (let plane = 0; plane < step.num_planes; plane++) place += step[`place${plane}`][t] << (8 * plane);
  return place;
}

function bytesOf(step, t) {
  const place = tokenAt(step, t);
  return step.tokens.text.subarray(place ? step.tokens.ends[place - 1] : 0, step.tokens.ends[place]);
}

/** The text of a completion in pieces of whole characters: {text, at, first, last}. Most are one token. */
function piecesOf(step, row) {
  const pieces = [], decoder = new TextDecoder("utf-8", { ignoreBOM: true }), end = step.starts[row + 1];
  let first = step.starts[row], at = 0;
  for (let t = first; t < end; t++) {
    const text = decoder.decode(bytesOf(step, t), { stream: t + 1 < end });
    if (!text && t + 1 < end) continue; // the character goes on in the next token
    pieces.push({ text, at, first, last: t });
    at += text.length;
    first = t + 1;
  }
  return pieces;
}

function textOf(step, row) {
  step.texts ??= [];
  return (step.texts[row] ??= step.tokens ? piecesOf(step, row).map((piece) => piece.text).join("") : step.rows.text[row]);
}

/** Does the completion pass the filters? */
function passes(step, row) {
  const { rows } = step;
  if (chosen.verdict && (chosen.verdict === "correct") !== rows.is_correct[row]) return false;
  if (chosen.cut && (chosen.cut === "truncated") !== rows.is_truncated[row]) return false;
  return !chosen.text || textOf(step, row).toLowerCase().includes(chosen.text);
}

/** The groups with a completion that passes: [{step, group, rows that pass}]. */
async function findGroups() {
  const { steps } = RUNS[chosen.run].samples, found = [];
  for (const number of chosen.step === "all" ? steps : [Number(chosen.step)]) {
    const step = await loadStep(chosen.run, number);
    for (const group of step.groups) {
      const all = step.rowsOf.get(group.group), rows = all.filter((row) => passes(step, row));
      if (rows.length) found.push({ step, group, rows, all });
    }
  }
  return found;
}

function showSamples() {
  const section = byId("samples");
  const stored = RUNS.flatMap((run, index) => (run.samples.steps.length ? [index] : []));
  if (!stored.length) {
    section.append(make("p", { className: "note" },
      "No completions are stored: a run writes them to rollouts/step_N.parquet. Its samples.jsonl has a few of each step."));
    return;
  }
  const controls = {};
  const add = (key, label, options) => {
    const [node, select] = choice(label, options, (value) => { chosen[key] = value; changed(key); });
    controls[key] = select;
    return node;
  };
  const filterText = make("input", { type: "search", placeholder: "any text", spellcheck: false });
  let waiting;
  filterText.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { chosen.text = filterText.value.toLowerCase(); changed("text"); }, 200);
  });
  const move = (by, title, text) => {
    const button = make("button", { type: "button", title, ariaLabel: title }, text);
    button.addEventListener("click", () => {
      controls.group.selectedIndex = Math.min(Math.max(controls.group.selectedIndex + by, 0), found.length - 1);
      showGroup();
    });
    return button;
  };
  const filters = make("div", { className: "bar", role: "group", ariaLabel: "Which samples" },
    add("run", "Run", stored.map((index) => [index, RUNS[index].name])),
    add("step", "Step", []),
    add("verdict", "Verdict", [["", "any"], ["correct", "correct"], ["incorrect", "incorrect"]]),
    add("cut", "Length", [["", "any"], ["truncated", "truncated"], ["whole", "not truncated"]]),
    make("label", {}, make("span", {}, "Text"), filterText));
  const browse = make("div", { className: "bar" },
    make("div", { className: "joined" }, add("group", "Group", []), move(-1, "Previous group", "‹"), move(1, "Next group", "›")),
    add("coloring", "Colour tokens by", []));
  const note = make("p", { className: "muted" }), status = make("p", { className: "muted", role: "status" });
  const scale = make("div", { className: "scale", ariaLabel: "Colours" }), shown = make("div");
  section.append(note, filters, browse, status, scale, shown);
  let found = [], wanted = 0;

  function newRun() {
    const { samples } = RUNS[chosen.run];
    const last = samples.steps.at(-1), all = samples.steps.length > 1 ? [["all", "all steps"]] : [];
    fill(controls.step, [...samples.steps.map((step) => [step, step]), ...all], last);
    chosen.step = String(last);
    note.textContent = leftOut(samples) + (samples.has_tokens ? ""
      : " There is no tokenizer.json of this run, so its completions are shown as text, without tokens.");
  }

  /** Fills the list of groups again; keeps the group if it is still there. */
  async function changed(key) {
    if (key === "group" || key === "coloring") return showGroup();
    if (key === "run") newRun();
    const turn = ++wanted, before = found[controls.group.selectedIndex]?.group.group, results = await findGroups();
    if (turn !== wanted) return; // the filters have changed meanwhile
    found = results;
    const count = found.reduce((sum, each) => sum + each.rows.length, 0);
    status.textContent = `${count.toLocaleString("en")} completions in ${found.length.toLocaleString("en")} groups`
      + `${chosen.verdict || chosen.cut || chosen.text ? " pass the filters" : ""}.`;
    const at = Math.max(0, found.findIndex((each) => each.group.group === before));
    fill(controls.group, found.map(({ step, group, all }, i) => {
      const correct = all.filter((row) => step.rows.is_correct[row]).length;
      const where = chosen.step === "all" ? `step ${step.number}, ` : "";
      return [i, `${where}${group.group}: ${correct} of ${all.length} correct`];
    }), at);
    showGroup();
  }

  function showGroup() {
    const each = found[controls.group.selectedIndex];
    if (!each) return void (scale.replaceChildren(), shown.replaceChildren());
    const { step, group, rows, all } = each;
    const possible = Object.keys(COLORINGS).filter((key) => step.tokens && step[key]);
    if (!possible.includes(chosen.coloring)) chosen.coloring = possible[0] ?? "none";
    fill(controls.coloring, [...possible.map((key) => [key, COLORINGS[key].title]), ["none", "nothing"]], chosen.coloring);
    const coloring = COLORINGS[chosen.coloring];
    scale.replaceChildren(...(coloring?.scale(step) ?? []).map(([kind, text]) => make("span", {}, make("i", { className: kind }), text)));
    const prompt = make("details", { open: group.prompt.length < 600 }, make("summary", {}, "Prompt"),
      make("div", { className: "text" }, group.prompt));
    const facts = make("p", {}, `Step ${step.number}, group ${group.group}, ${group.row}. Answer: `, make("code", {}, group.answer));
    if (rows.length < all.length) facts.append(make("span", { className: "muted" }, ` ${rows.length} of ${all.length} completions pass the filters.`));
    shown.replaceChildren(facts, prompt, make("div", { className: "group" }, ...rows.map((row) => card(step, row, coloring))));
  }

  newRun();
  chosen.run = stored[0];
  changed("run");
}

function fill(select, options, value) {
  select.replaceChildren(...options.map(([key, text]) => make("option", { value: key }, text)));
  select.value = value;
}

function leftOut({ steps, num_steps, groups, num_groups }) {
  const parts = [];
  if (steps.length < num_steps) parts.push(`${steps.length} of ${num_steps} steps`);
  if (groups < num_groups) parts.push(`${groups} of about ${num_groups} groups of a step`);
  return parts.length ? `To keep the page small, it has ${parts.join(" and ")}, evenly spaced; the others are in rollouts/.`
    : `All stored completions of ${num_steps === 1 ? "the step are" : `the ${num_steps} steps are`} here.`;
}

/** A completion with what is known of it. */
function card(step, row, coloring) {
  const { rows } = step, correct = rows.is_correct[row], length = step.lengths[row];
  const badge = (text, kind) => make("span", { className: `badge ${kind}` }, text);
  const head = make("header", {}, badge(correct ? "✓ correct" : "✗ incorrect", correct ? "good" : "bad"),
    make("b", {}, `reward ${short(rows.reward[row])}`), make("span", {}, `${length.toLocaleString("en")} tokens`));
  if (rows.is_truncated[row]) head.append(badge("truncated", "warn"));
  if (!rows.is_trained[row]) head.append(badge("not trained", "warn"));
  if (rows.reward_status[row] !== "ok") head.append(badge(rows.reward_status[row], "warn"));
  const facts = Object.entries(rows.parts[row]).map(([name, value]) => [name, short(value)]);
  if (rows.read_as[row] != null) facts.push(["read as", rows.read_as[row]]);
  const values = make("dl", {}, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  const body = make("div", { className: "text tokens", tabIndex: 0, role: "group", ariaLabel: `completion ${row}` });
  if (step.tokens) fillTokens(body, step, row, coloring, MOST_TOKENS);
  else body.textContent = textOf(step, row);
  return make("article", { className: "card completion" }, head, values, body);
}

/** Each piece as a span in its colour; pieces that the filter's text touches are marked. */
function fillTokens(body, step, row, coloring, most) {
  const pieces = piecesOf(step, row), shown = pieces.slice(0, most), whole = textOf(step, row).toLowerCase();
  const found = new Uint8Array(whole.length + 1); // 1: this character is part of what the filter looks for
  for (let at = chosen.text ? whole.indexOf(chosen.text) : -1; at >= 0; at = whole.indexOf(chosen.text, at + 1)) {
    found.fill(1, at, at + chosen.text.length);
  }
  const spans = shown.map((piece) => {
    const value = coloring?.value(step, piece.last), span = make("span", {}, piece.text);
    if (value != null) span.className = coloring.kind(value, step);
    if (found.subarray(piece.at, piece.at + piece.text.length).includes(1)) span.classList.add("found");
    if (piece.text.includes("\n")) span.classList.add("newline");
    return span;
  });
  body.replaceChildren(...spans);
  if (pieces.length > most) {
    const more = make("button", { type: "button" }, `Show the other ${(pieces.length - most).toLocaleString("en")} tokens`);
    more.addEventListener("click", () => fillTokens(body, step, row, coloring, Infinity));
    body.append(more);
  }
  let at = null;
  const point = (index) => {
    spans[at]?.classList.remove("pointed");
    at = index;
    spans[at].classList.add("pointed");
    const box = spans[at].getBoundingClientRect();
    showTip(describeToken(step, shown[at]), box.left - 14, box.bottom + 6);
  };
  const leave = () => { spans[at]?.classList.remove("pointed"); at = null; hideTip(); };
  body.onpointerover = body.onclick = (event) => {
    const index = spans.indexOf(event.target);
    if (index >= 0) point(index);
  };
  body.onpointerleave = body.onblur = leave;
  body.onkeydown = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!move) return;
    event.preventDefault();
    point(at == null ? 0 : Math.min(Math.max(at + move, 0), spans.length - 1));
    spans[at].scrollIntoView({ block: "nearest" });
  };
}

function describeToken(step, piece) {
  const lines = [make("b", {}, JSON.stringify(piece.text))];
  for (let t = piece.first; t <= piece.last; t++) {
    const known = Object.values(COLORINGS).map((each) => [each, each.value(step, t)]).filter(([, value]) => value != null);
    lines.push(make("div", { className: "muted" }, `token ${step.tokens.ids[tokenAt(step, t)]}`),
      ...known.map(([each, value]) => make("div", {}, each.text(value))));
  }
  return lines;
}

// Start ---------------------------------------------------------------------------------------------------------------

async function start() {
  const data = await unpack("runs");
  RUNS = data.runs;
  GROUPS = data.seed_groups;
  assignColors();
  for (const show of [showOverview, showCurves, showTime, showDifferences, showSamples]) show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  const print = (isPrinting) => () => {
    document.documentElement.classList.toggle("print", isPrinting);
    drawAll();
  };
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
  addEventListener("scroll", hideTip, { passive: true });
}

start().catch((error) => {
  byId("problem").textContent = `This page cannot be shown: ${error.message}. It needs a browser from 2023 or later.`;
  byId("problem").hidden = false;
});
