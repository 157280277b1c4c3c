// What to read first: the verdict, the passes that matter most, and rows that say nothing new.

/** What a row compares with: the row before it in the pipeline, or the whole of the pipeline. */
function before(rows, row) {
  if (row.kind === "cumulative") return rows[rows.indexOf(row) - 1];
  return row.kind === "leave_one_out"
    ? rows.findLast((other) => other.kind === "cumulative")
    : undefined;
}

/** Whether a pass left the graph as it was, or changed nothing by being left out. */
function isUnchanged(rows, row) {
  const stage = stageOf(row);
  if (stage !== undefined) return !stages[stage].add.length && !stages[stage].drop.length;
  const other = before(rows, row);
  const same = other && row.measured_as && row.measured_as === other.measured_as;
  const fired = row.kind === "cumulative" && row.sites?.fired;
  return Boolean(same && row.nodes === other.nodes && !fired);
}

/** The passes that changed the most time, or where none was measured the most nodes. */
function passesThatMatter(rows) {
  const steps = rows
    .filter((row) => row.kind === "cumulative" && before(rows, row))
    .map((row) => {
      const other = before(rows, row);
      const [now, then] = [row, other].map((x) => latencies(x).at(-1)?.[1]);
      const saved = now && then ? then.median - now.median : undefined;
      const [a, b] = [row.ratio, other.ratio]; // of the same rounds, so without the machine's drift
      const tie = a && b && a.low <= b.high && b.low <= a.high;
      const nodes = isNumber(row.nodes) && isNumber(other.nodes) ? other.nodes - row.nodes : 0;
      return { row, other, saved, then, tie, nodes };
    });
  const timed = steps.some(({ saved }) => isNumber(saved));
  const weight = ({ saved, nodes }) => Math.abs(timed ? (saved ?? 0) : nodes);
  return steps
    .filter((step) => weight(step) > 0 && !isUnchanged(rows, step.row))
    .sort((a, b) => weight(b) - weight(a))
    .slice(0, 3);
}

function showVerdict(rows) {
  const steps = passesThatMatter(rows);
  byId("verdict").hidden = !report.conclusion;
  const said = String(report.conclusion ?? ""),
    head = `${byId("title").textContent}: `; // which stands above it
  byId("verdict").textContent = said.startsWith(head) ? said.slice(head.length) : said;
  byId("matter").hidden = !steps.length;
  byId("matter").replaceChildren(
    ...steps.map(({ row, other, saved, then, tie }) => {
      const size = Math.abs(saved);
      const share = `${short(size)} ms, ${Math.round((100 * size) / then?.median)} %`;
      const time = isNumber(saved)
        ? make(
            "strong",
            { class: tie ? "tie" : saved < 0 ? "slower" : "faster" },
            `${saved < 0 ? "costs" : "saves"} ${share}`,
          )
        : "";
      const facts = [
        isNumber(row.nodes) ? `${whole(other.nodes)} → ${whole(row.nodes)} nodes` : "",
        row.sites?.fired ? `${whole(row.sites.fired)} site${row.sites.fired === 1 ? "" : "s"}` : "",
        tie ? "within the noise" : "",
      ].filter((fact) => fact);
      return make("li", {}, graphLink(row), time, make("span", {}, facts.join(", ")));
    }),
  );
}

/** The name of a row, which leads to its graph if there is one. */
function graphLink(row) {
  const stage = stageOf(row);
  if (stage === undefined) return row.name ?? "";
  const show = () => {
    go(stage);
    byId("graphs").scrollIntoView();
  };
  return make(
    "button",
    { type: "button", class: "link", title: "show this graph", onclick: show },
    row.name ?? "",
  );
}

/** The rows of one kind: those whose graph is as before are one line, until it is opened. */
function folded(rows, members, line, columns) {
  const same = members.filter((row) => isUnchanged(rows, row));
  if (same.length < 2) return members.map(line);
  const lines = new Map(members.map((row) => [row, line(row)]));
  for (const row of same) lines.get(row).hidden = true;
  const names = same.map((row) => row.name).join(", ");
  const toggle = () => {
    const open = button.getAttribute("aria-expanded") === "false";
    button.setAttribute("aria-expanded", String(open));
    for (const row of same) lines.get(row).hidden = !open;
  };
  const button = make(
    "button",
    { type: "button", class: "link fold", "aria-expanded": "false", title: names, onclick: toggle },
    `${same.length} that changed no graph`,
  );
  const head = make("th", { scope: "row", colspan: columns }, button);
  return [...lines.values(), make("tr", { class: "folded" }, head)];
}

/** Round numbers for an axis: about as many as asked for, the first and last around all values. */
function roundTicks(low, high, wanted) {
  const rough = (high - low || high || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((x) => x * power >= rough * 0.999);
  const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  const tick = (_, i) => Number(((first + i) * step).toPrecision(12));
  return Array.from({ length: last - first + 1 }, tick);
}
