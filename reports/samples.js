// The stored completions: how a step is read and searched, the section, a completion with its tokens.

const MOST_TOKENS = 1500; // of a completion, before one asks for the rest
const PROBABILITIES = [0.9, 0.5, 0.2, 0.05, 0.01]; // below each of them a token's colour is stronger
const chosen = { run: "0", step: "", verdict: "", cut: "", text: "" };
const steps = new Map(); // "run-step" -> promise of it
let found = [], turn = 0;

const newDecoder = () => new TextDecoder("utf-8", { ignoreBOM: true });
const logprobOf = (code) => (code === 255 ? null : -20 * (code / 254) ** 2); // samples.py has made it; null: not sampled
const levelOf = (logprob) => PROBABILITIES.filter((limit) => Math.exp(logprob) < limit).length;

function load(name) {
  if (!steps.has(name)) steps.set(name, unpack(`samples-${name}`).then(addTexts));
  return steps.get(name);
}

/** The step; each of its rows with its text, its first token and its first byte. */
function addTexts(step) {
  let first = 0, start = 0;
  for (const row of step.rows) {
    Object.assign(row, { first, start, text: row.completion });
    if (!step.sizes) continue;
    for (const size of step.sizes.subarray(first, first += row.length)) start += size;
    row.text = newDecoder().decode(step.bytes.subarray(row.start, start));
  }
  return step;
}

/** The text of a completion in pieces of whole characters: {text, at, first, last}. Most are one token. */
function piecesOf(step, row) {
  const pieces = [], decoder = newDecoder(), end = row.first + row.length;
  let { first, start } = row, at = 0;
  for (let t = first; t < end; t++) {
    const text = decoder.decode(step.bytes.subarray(start, start += step.sizes[t]), { stream: t + 1 < end });
    if (!text && t + 1 < end) continue; // the character goes on in the next token
    pieces.push({ text, at, first, last: t });
    at += text.length;
    first = t + 1;
  }
  return pieces;
}

function passes(row) {
  if (chosen.verdict && (chosen.verdict === "correct") !== row.is_correct) return false;
  if (chosen.cut && (chosen.cut === "truncated") !== row.is_truncated) return false;
  return !chosen.text || row.text.toLowerCase().includes(chosen.text);
}

/** The groups with a completion that passes the filters: {number of the step, step, rows that pass, all rows}. */
async function findGroups() {
  const groups = new Map();
  for (const number of chosen.step === "all" ? RUNS[chosen.run].samples.steps : [chosen.step]) {
    const step = await load(`${chosen.run}-${number}`);
    for (const row of step.rows) {
      const key = `${number} ${row.group}`;
      if (!groups.has(key)) groups.set(key, { number, step, rows: [], all: [] });
      groups.get(key).all.push(row);
      if (passes(row)) groups.get(key).rows.push(row);
    }
  }
  return [...groups.values()].filter(({ rows }) => rows.length);
}

// The section ---------------------------------------------------------------------------------------------------------

function showSamples() {
  const stored = RUNS.flatMap(({ name, samples }, index) => (samples.steps.length ? [[String(index), name]] : []));
  if (!stored.length) {
    byId("samples").append(make("p", { className: "note" }, "No completions are stored (a run writes them to "
      + "rollouts/step_N.parquet). Its samples.jsonl has a few of each step."));
    return;
  }
  const [runs] = choice("Run", stored, (value) => { chosen.run = value; newRun(); });
  const [ofSteps, selectStep] = choice("Step", [], (value) => { chosen.step = value; search(); });
  const [verdicts] = choice("Verdict", [["", "any"], ["correct", "correct"], ["incorrect", "incorrect"]],
    (value) => { chosen.verdict = value; search(); });
  const [cuts] = choice("Length", [["", "any"], ["truncated", "truncated"], ["whole", "not truncated"]],
    (value) => { chosen.cut = value; search(); });
  const text = make("input", { type: "search", placeholder: "any text", spellcheck: false });
  text.addEventListener("input", () => { chosen.text = text.value.toLowerCase(); search(200); });
  const [groups, selectGroup] = choice("Group", [], showGroup);
  const buttons = [[-1, "Previous group", "‹"], [1, "Next group", "›"]].map(([by, title, sign]) => {
    const button = make("button", { type: "button", title, ariaLabel: title }, sign);
    button.addEventListener("click", () => {
      selectGroup.selectedIndex = Math.min(Math.max(selectGroup.selectedIndex + by, 0), found.length - 1);
      showGroup();
    });
    return button;
  });
  const note = make("p", { className: "muted" }), status = make("p", { className: "muted", role: "status" });
  const scale = ["p ≥ 0.9", ...PROBABILITIES.map((limit) => `< ${limit}`)].map((limit, level) =>
    make("span", {}, make("i", { className: `l${level}` }), limit));
  scale.push(make("span", {}, make("i", { className: "said" }), "said by an environment"));
  const shown = make("div");
  const filters = [runs, ofSteps, verdicts, cuts, make("label", {}, make("span", {}, "Text"), text)];
  byId("samples").append(note, make("div", { className: "bar" }, ...filters),
    make("div", { className: "bar" }, make("div", { className: "joined" }, groups, ...buttons), status),
    make("div", { className: "scale" }, "Probability of a token for the sampler: ", ...scale), shown);

  function newRun() {
    const { samples } = RUNS[chosen.run], all = samples.steps.length > 1 ? [["all", "all steps"]] : [];
    chosen.step = String(samples.steps.at(-1));
    fill(selectStep, [...samples.steps.map((step) => [step, step]), ...all], chosen.step);
    note.textContent = leftOut(samples);
    search();
  }

  /** Fills the list of groups again; keeps the group if it is still there. */
  async function search(delay = 0) {
    const own = ++turn, before = found[selectGroup.selectedIndex]?.all[0].group;
    await new Promise((resolve) => { setTimeout(resolve, delay); });
    const groups = own === turn ? await findGroups() : [];
    if (own !== turn) return; // the filters have changed meanwhile
    found = groups;
    const count = found.reduce((sum, { rows }) => sum + rows.length, 0);
    status.textContent = `${count.toLocaleString("en")} completions in ${found.length.toLocaleString("en")} groups`
      + `${chosen.verdict || chosen.cut || chosen.text ? " pass the filters" : ""}.`;
    fill(selectGroup, found.map(({ number, all }, i) => [i, `${chosen.step === "all" ? `step ${number}, ` : ""}`
      + `${all[0].group}: ${all.filter((row) => row.is_correct).length} of ${all.length} correct`]),
    Math.max(0, found.findIndex(({ all }) => all[0].group === before)));
    showGroup();
  }

  function showGroup() {
    if (!found.length) return void shown.replaceChildren();
    const { number, step, rows, all } = found[selectGroup.selectedIndex];
    const { group, row, prompt, answer } = { ...all[0], row: all[0].row ?? "–", prompt: all[0].prompt ?? "–" };
    const passing = rows.length < all.length ? ` ${rows.length} of ${all.length} completions pass the filters.` : "";
    const text = make("div", { className: "text" }, prompt);
    shown.replaceChildren(
      make("p", {}, `Step ${number}, group ${group}, `, make("bdi", {}, row), ". Answer: ", make("code", {}, answer ?? "–"),
        make("span", { className: "muted" }, passing)),
      make("details", { open: prompt.length < 600 }, make("summary", {}, "Prompt"), text),
      make("div", { className: "group" }, ...rows.map((each) => card(step, each))));
  }

  newRun();
}

function leftOut({ steps: shown, num_steps, groups, num_groups, has_tokens }) {
  const parts = [];
  if (shown.length < num_steps) parts.push(`${shown.length} of ${num_steps} steps`);
  if (groups < num_groups) parts.push(`${groups} of about ${num_groups} groups of a step`);
  const all = `All stored completions of ${num_steps === 1 ? "the step are" : `the ${num_steps} steps are`} here.`;
  const some = `To keep the page small, it has ${parts.join(" and ")}, evenly spaced; the others are in rollouts/.`;
  const plain = " This run has no rollouts/tokens.parquet, so its completions are shown as text, without tokens.";
  return (parts.length ? some : all) + (has_tokens ? "" : plain);
}

// A completion --------------------------------------------------------------------------------------------------------

/** A completion with what is known of it. */
function card(step, row) {
  const badge = (text, kind) => make("span", { className: `badge ${kind}` }, text);
  const verdicts = [["✓ correct", "good"], ["✗ incorrect", "bad"], ["no verdict", "warn"]];
  const verdict = badge(...verdicts[row.is_correct == null ? 2 : Number(!row.is_correct)]);
  const head = make("header", {}, verdict,
    make("b", {}, `reward ${short(row.reward) ?? "–"}`), make("span", {}, `${row.length.toLocaleString("en")} tokens`));
  if (row.is_truncated) head.append(badge("truncated", "warn"));
  if (row.is_trained === false) head.append(badge("not trained", "warn"));
  if ((row.reward_status ?? "ok") !== "ok") head.append(badge(row.reward_status, "warn"));
  const facts = Object.entries(row.reward_parts).map(([name, value]) => [name, short(value)]);
  if (row.read_as != null) facts.push(["read as", row.read_as]);
  const pairs = facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  const body = make("div", { className: "text tokens", tabIndex: 0, role: "group", ariaLabel: "completion" });
  if (step.sizes) fillTokens(body, step, row, MOST_TOKENS);
  else body.append(visible(row.text));
  return make("article", { className: "card completion" }, head, make("dl", {}, ...pairs), body);
}

/** Each piece as a span in its colour; pieces that the filter's text touches are marked. */
function fillTokens(body, step, row, most) {
  const pieces = piecesOf(step, row), shown = pieces.slice(0, most), whole = row.text.toLowerCase();
  const marked = new Uint8Array(whole.length); // 1: this character is part of what the filter looks for
  for (let at = chosen.text ? whole.indexOf(chosen.text) : -1; at >= 0; at = whole.indexOf(chosen.text, at + 1)) {
    marked.fill(1, at, at + chosen.text.length);
  }
  const spans = shown.map(({ text, at, last }) => {
    const logprob = logprobOf(step.logprob[last]), span = make("span", {}, text);
    span.className = logprob == null ? "said" : `l${levelOf(logprob)}`;
    if (marked.subarray(at, at + text.length).includes(1)) span.classList.add("found");
    if (text.includes("\n")) span.classList.add("newline");
    if (/^<[^\s<>]+>$/.test(text)) span.classList.add("special"); // <eos>, which stays on one line
    return span;
  });
  body.replaceChildren();
  for (const span of spans) body.append(span); // hundreds of thousands are too many arguments for one call
  if (pieces.length > most) {
    const rest = (pieces.length - most).toLocaleString("en");
    const more = make("button", { type: "button" }, `Show the other ${rest} tokens`);
    more.addEventListener("click", () => fillTokens(body, step, row, Infinity));
    body.append(more);
  }
  pointAtTokens(body, spans, (index) => describeToken(step, shown[index]));
}

/** Tells of the token under the pointer; the arrow keys go from token to token. */
function pointAtTokens(body, spans, describe) {
  let at = null;
  const leave = () => { spans[at]?.classList.remove("pointed"); at = null; hideTip(); };
  const point = (index) => {
    leave();
    at = index;
    spans[at].classList.add("pointed");
    const box = spans[at].getBoundingClientRect();
    showTip(describe(at), box.left - 14, box.bottom + 6);
  };
  body.onpointerover = body.onclick = ({ target }) => { if (spans.includes(target)) point(spans.indexOf(target)); };
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

function describeToken(step, { text, first, last }) {
  const logprobs = [...step.logprob.subarray(first, last + 1)].map(logprobOf).filter(isNumber);
  if (!logprobs.length) return [make("b", {}, JSON.stringify(text)), make("div", {}, "said by the environment: no loss")];
  return [make("b", {}, JSON.stringify(text)), ...logprobs.map((logprob) =>
    make("div", {}, `log-prob ${logprob.toFixed(3)}, probability ${short(Math.exp(logprob))}`))];
}
