// The flags, the code and the contents of files in which the runs differ.

function showDifferences() {
  const facts = RUNS.map(({ config: { out_dir, ...flags }, code }) => new Map([
    ...Object.entries(flags).map(([name, value]) => [`--${name}`, JSON.stringify(value)]),
    ...Object.entries(code).map(([name, value]) => [name, String(value ?? "not known")]),
  ]));
  const names = [...new Set(facts.flatMap((each) => [...each.keys()]))];
  const differing = names.filter((name) => new Set(facts.map((each) => each.get(name))).size > 1);
  const cells = (name) => facts.map((each) => (each.has(name) ? make("code", {}, each.get(name)) : null));
  const rows = (chosen) => table(chosen.map((name) => [make("code", {}, name), ...cells(name)]));
  if (!names.length) return byId("differences").append(make("p", { className: "note" }, "There is no config.json."));
  if (RUNS.length > 1) byId("differences").append(differing.length ? rows(differing) : "Flags, code, data and weights are the same.");
  byId("differences").append(make("details", {}, make("summary", {}, "All flags, code, data and weights"), rows(names)),
    make("p", { className: "muted" }, "Uncommitted changes are shown as a hash of their patch, changes_*.patch."));
}
