// What the sections share, and the start. One script with those of the sections, of which it is the end.
// Text of models and users goes into the page by `make` and `textContent` only, never as HTML.

const ARRAYS = { u1: Uint8Array, u2: Uint16Array };
let RUNS = [], GROUPS = []; // GROUPS: indices of the runs that differ by their seed alone

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
  node.append(...children.map((child) => (typeof child === "string" ? visible(child) : child)));
  return node;
}

/** The text with the controls that would turn what follows, such as U+202E, written out. */
function visible(text) {
  return text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (control) => `\\u${control.charCodeAt(0).toString(16)}`);
}

/** A table. Its first row, and the first cell of each other one, are headings; `null` is an empty cell. */
function table([head, ...rows], className = "") {
  const body = rows.map(([first, ...rest]) => make("tr", {}, make("th", { scope: "row" }, first),
    ...rest.map((content) => make("td", {}, content ?? "–"))));
  return make("div", { className: "scroll", tabIndex: 0 }, make("table", { className },
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...body)));
}

/** A table of facts, each [heading, a cell for each run]. Up to three runs stand side by side, more below each other. */
function tableOfRuns(facts, className) {
  const rows = [["", ...RUNS.map((_, index) => runName(index))], ...facts];
  return table(RUNS.length < 4 ? rows : rows[0].map((_, column) => rows.map((row) => row[column])), className);
}

/** A labelled select. `options`: [value, text] pairs. */
function choice(label, options, onchange) {
  const select = make("select");
  fill(select, options);
  select.addEventListener("change", () => onchange(select.value));
  return [make("label", {}, make("span", {}, label), select), select];
}

function fill(select, options, value = options[0]?.[0]) {
  select.replaceChildren(...options.map(([key, text]) => make("option", { value: key }, text)));
  select.value = value;
}

/** A number in at most five characters or so: 0.732, 12.3, 9.1k, 1e-6. */
function short(value) {
  if (value == null) return null;
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(+value.toPrecision(3));
}

const isNumber = (value) => value != null;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Runs and their colours ----------------------------------------------------------------------------------------------

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colorOf = (index) => `var(--color${index})`;
const swatchOf = (index) => `var(--swatch${index})`;
const swatch = (background) => make("i", { className: "swatch", style: `background: ${background}` });
const runName = (index) => make("span", { className: "run" }, swatch(swatchOf(index)), RUNS[index].name);

/** The number of the run's line: its own, or that of the group that is drawn as one. */
const lineOf = (index) => (view.together ? GROUPS.findIndex((group) => group.includes(index)) : index);

/** Eight colours; each further eight lines have the same ones in dashes: [length, gap] in pixels. */
const DASHES = [[], [11, 4], [5, 3], [2, 3]];
const dashOf = (index) => DASHES[Math.floor(lineOf(index) / 8) % DASHES.length];

function assignColors() {
  RUNS.forEach((_, index) => {
    const color = `var(--run${lineOf(index) % 8})`, [length, gap] = dashOf(index);
    const dashed = `repeating-linear-gradient(90deg, ${color} 0 ${length}px, transparent 0 ${length + gap}px)`;
    document.documentElement.style.setProperty(`--color${index}`, color);
    document.documentElement.style.setProperty(`--swatch${index}`, length ? dashed : color);
  });
}

// Tooltip -------------------------------------------------------------------------------------------------------------

function showTip(content, x, y) {
  const tip = byId("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const isRight = x + 14 + width < document.documentElement.clientWidth;
  tip.style.left = `${Math.max(4, isRight ? x + 14 : x - 14 - width)}px`;
  tip.style.top = `${Math.max(4, Math.min(y, innerHeight - height - 4))}px`;
}

const hideTip = () => { byId("tip").hidden = true; };

// Start ---------------------------------------------------------------------------------------------------------------

async function start() {
  ({ runs: RUNS, seed_groups: GROUPS } = await unpack("runs"));
  assignColors();
  for (const show of [showOverview, showCurves, showDifferences, showSamples]) show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  for (const scrolling of ["wheel", "touchmove"]) addEventListener(scrolling, hideTip, { passive: true });
}

addEventListener("unhandledrejection", ({ reason }) => {
  byId("problem").textContent = `A part of this page cannot be shown: ${reason.message}. It needs a browser from 2023.`;
  byId("problem").hidden = false;
});
start();
