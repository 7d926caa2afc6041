// The flags, the code and the contents of files in which the runs differ.

function showDifferences() {
  const facts = RUNS.map(({ config: { out_dir, ...flags }, code }) => new Map([
    ...Object.entries(flags).map(([name, value]) => [`--${name}`, JSON.stringify(value)]),
    ...Object.entries(code).map(([name, value]) => [name, String(value ?? "not known")]),
  ]));
  const names = [...new Set(facts.flatMap((each) => [...each.keys()]))];
  const isShared = (name) => facts.every((each) => each.get(name) === facts[0].get(name));
  const code = (text) => (text == null ? null : make("code", {}, text));
  const differing = names.filter((name) => !isShared(name)).map((name) => [code(name), ...facts.map((each) => code(each.get(name)))]);
  const shared = names.filter(isShared).map((name) => [code(name), code(facts[0].get(name))]);
  if (!names.length) return byId("differences").append(make("p", { className: "note" }, "There is no config.json."));
  if (RUNS.length > 1) byId("differences").append(differing.length ? tableOfRuns(differing) : "Flags, code, data and weights are the same.");
  byId("differences").append(
    make("details", {}, make("summary", {}, "Flags, code, data and weights that the runs share"), table([["", "all runs"], ...shared])),
    make("p", { className: "muted" }, "Uncommitted changes are shown as the name of their patch in the run's folder, which holds its hash."));
}
