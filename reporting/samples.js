// The browser of stored completions: how tokens are coloured, how chunks are read, the section, a completion.

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
    step.places = joinPlanes(step);
  }
  return step;
}

/** The places of the step's tokens in the list of all, from their bytes. */
function joinPlanes(step) {
  const places = new Uint32Array(step.place0);
  for (let plane = 1; plane < step.num_planes; plane++) {
    step[`place${plane}`].forEach((byte, t) => { places[t] += byte << (8 * plane); });
  }
  return places;
}

/** The bytes of tokens `first` to `last` together. */
function bytesOf({ places, tokens }, first, last) {
  let size = 0;
  for (let t = first; t <= last; t++) size += tokens.lengths[places[t]];
  const bytes = new Uint8Array(size);
  for (let t = first, at = 0; t <= last; t++) {
    const end = tokens.ends[places[t]];
    for (let i = end - tokens.lengths[places[t]]; i < end; i++) bytes[at++] = tokens.text[i];
  }
  return bytes;
}

const newDecoder = () => new TextDecoder("utf-8", { ignoreBOM: true });

/** The text of a completion in pieces of whole characters: {text, at, first, last}. Most are one token. */
function piecesOf(step, row) {
  const pieces = [], decoder = newDecoder(), end = step.starts[row + 1];
  let first = step.starts[row], at = 0;
  for (let t = first; t < end; t++) {
    const text = decoder.decode(bytesOf(step, t, t), { stream: t + 1 < end });
    if (!text && t + 1 < end) continue; // the character goes on in the next token
    pieces.push({ text, at, first, last: t });
    at += text.length;
    first = t + 1;
  }
  return pieces;
}

function textOf(step, row) {
  step.texts ??= [];
  const decoded = () => newDecoder().decode(bytesOf(step, step.starts[row], step.starts[row + 1] - 1));
  return (step.texts[row] ??= step.tokens ? decoded() : step.rows.text[row]);
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
    section.append(make("p", { className: "note" }, "No completions are stored (a run writes them to "
      + "rollouts/step_N.parquet). Its samples.jsonl has a few of each step."));
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
    make("div", { className: "joined" },
      add("group", "Group", []), move(-1, "Previous group", "‹"), move(1, "Next group", "›")),
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
      : " This run has no rollouts/tokens.parquet, so its completions are shown as text, without tokens.");
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
    const choices = [...possible.map((key) => [key, COLORINGS[key].title]), ["none", "nothing"]];
    const current = [...possible, "none"].includes(chosen.coloring) ? chosen.coloring : choices[0][0];
    fill(controls.coloring, choices, current);
    const coloring = COLORINGS[current];
    const colors = coloring?.scale(step) ?? [];
    scale.replaceChildren(...colors.map(([kind, text]) => make("span", {}, make("i", { className: kind }), text)));
    const prompt = make("details", { open: group.prompt.length < 600 }, make("summary", {}, "Prompt"),
      make("div", { className: "text" }, group.prompt));
    const where = [`Step ${step.number}, group ${group.group}, `, make("bdi", {}, group.row), ". Answer: "];
    const facts = make("p", {}, ...where, make("code", {}, group.answer));
    const passing = ` ${rows.length} of ${all.length} completions pass the filters.`;
    if (rows.length < all.length) facts.append(make("span", { className: "muted" }, passing));
    const cards = rows.map((row) => card(step, row, coloring));
    shown.replaceChildren(facts, prompt, make("div", { className: "group" }, ...cards));
  }

  newRun();
  chosen.run = stored[0];
  changed("run");
}

function leftOut({ steps, num_steps, groups, num_groups }) {
  const parts = [];
  if (steps.length < num_steps) parts.push(`${steps.length} of ${num_steps} steps`);
  if (groups < num_groups) parts.push(`${groups} of about ${num_groups} groups of a step`);
  return parts.length
    ? `To keep the page small, it has ${parts.join(" and ")}, evenly spaced; the others are in rollouts/.`
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
  const pair = ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
  const values = make("dl", {}, ...facts.map(pair));
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
    const rest = (pieces.length - most).toLocaleString("en");
    const more = make("button", { type: "button" }, `Show the other ${rest} tokens`);
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
    const values = Object.values(COLORINGS).map((each) => [each, each.value(step, t)]);
    lines.push(make("div", { className: "muted" }, `token ${step.tokens.ids[step.places[t]]}`),
      ...values.filter(([, value]) => value != null).map(([each, value]) => make("div", {}, each.text(value))));
  }
  return lines;
}
