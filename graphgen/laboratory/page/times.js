// Where the time goes: what the runtime measured of each node, added up by operator and by block.

const timed = data.overlays.find((overlay) => overlay.name === "time");
const unfolded = new Set();

/** The time of each operator, and of each block with all that is in it, whose leaves are operators. */
function timesOf(index) {
  const operators = new Map(),
    blocks = new Map();
  const add = (all, key, ms, node, more) => {
    if (!all.has(key))
      all.set(key, { key, ms: 0, count: 0, first: node.number, longest: 0, ...more });
    const row = all.get(key);
    row.ms += ms;
    row.count += 1;
    row.first = Math.min(row.first, node.number);
    if (ms >= row.longest) Object.assign(row, { longest: ms, node: node.number });
  };
  for (const node of stages[index].nodes.values()) {
    const ms = timed?.values[index]?.[node.number];
    if (!isNumber(ms)) continue;
    add(operators, node.operator, ms, node, { name: node.operator });
    const steps = node.block.split("/").filter((step) => step);
    steps.forEach((name, depth) => {
      const [key, parent] = [depth + 1, depth].map((n) => steps.slice(0, n).join("/"));
      add(blocks, key, ms, node, { name, parent, isBlock: true });
    });
    const key = `${node.block}\n${node.operator}`; // no block is called so
    add(blocks, key, ms, node, { name: node.operator, parent: node.block });
  }
  const total = [...operators.values()].reduce((sum, { ms }) => sum + ms, 0);
  return { operators, blocks, total, children: groupBy(blocks.values(), (row) => row.parent) };
}

/** Show the times of this graph, and next to them those of the first. */
function showTimes() {
  const [now, first] = [timesOf(state.index), timesOf(0)];
  byId("times").hidden = !first.total;
  if (!first.total) return;
  const [name, given] = [stages[state.index].name, stages[0].name];
  const compared = state.index > 0;
  const all = `${short(now.total)}${compared ? `, ${given} ${short(first.total)}` : ""}`;
  byId("times-title").textContent = `Time by operator and block: ${name}`;
  byId("times-note").textContent = now.total
    ? [`${all} ${timed.unit}`, timed.note].filter((words) => words).join("; ")
    : "not measured in this graph";
  const old = (row, kind) => first[kind].get(row.key)?.ms ?? 0;
  const both = (mine, before) => {
    const known = new Set(mine.map((row) => row.key));
    return [
      ...mine,
      ...before.filter((row) => !known.has(row.key)).map((row) => ({ ...row, ms: 0, count: 0 })),
    ];
  };
  const bar = (ms, kind) => make("i", { class: kind, "data-ms": ms });
  const line = (row, head, was) =>
    make(
      "tr",
      { class: row.count ? "" : "gone" },
      make("th", { scope: "row" }, head),
      make("td", {}, row.count ? whole(row.count) : "–"),
      compared ? make("td", { class: "was" }, was ? short(was) : "–") : "",
      make("td", {}, row.count ? short(row.ms) : "–"),
      make("td", { class: "bars" }, compared ? bar(was, "then") : "", bar(row.ms, "now")),
      make("td", {}, row.count ? `${Math.round((100 * row.ms) / now.total)} %` : ""),
    );
  const leaf = (row) =>
    row.count
      ? make(
          "button",
          {
            type: "button",
            class: "link",
            title: "show the longest",
            onclick: () => reveal(row.node),
          },
          row.name,
        )
      : row.name;
  const operators = () => {
    const rows = both([...now.operators.values()], [...first.operators.values()]);
    const isLong = (row) => row.ms >= now.total / 100 || old(row, "operators") >= first.total / 100;
    const weight = (row) => row.ms + old(row, "operators") / 1e6; // those that are gone come last
    const rest = rows.filter((row) => !isLong(row));
    const sum = (f) => rest.reduce((total, row) => total + f(row), 0);
    const others = { ms: sum((row) => row.ms), count: sum((row) => row.count) };
    return [
      ...rows
        .filter(isLong)
        .sort((a, b) => weight(b) - weight(a))
        .map((row) => line(row, leaf(row), old(row, "operators"))),
      rest.length
        ? line(
            others,
            `${rest.length} others`,
            sum((row) => old(row, "operators")),
          )
        : "",
    ];
  };
  const blocks = (parent, depth) =>
    both(now.children.get(parent) ?? [], first.children.get(parent) ?? [])
      .sort((a, b) => a.first - b.first)
      .flatMap((row) => {
        const isUnfolded = unfolded.has(row.key);
        const press = () => {
          if (!unfolded.delete(row.key)) unfolded.add(row.key);
          showTimes();
          byId("times")
            .querySelector(`[data-path="${CSS.escape(row.key)}"]`)
            .focus();
        };
        const about = { type: "button", class: "link fold", "data-path": row.key };
        const head = row.isBlock
          ? make(
              "button",
              { ...about, "aria-expanded": String(isUnfolded), onclick: press },
              row.name,
            )
          : leaf(row);
        const shift = make("span", { class: row.isBlock ? "" : "leaf" }, head);
        shift.style.marginLeft = `${depth}rem`;
        return [
          line(row, shift, old(row, "blocks")),
          ...(isUnfolded ? blocks(row.key, depth + 1) : []),
        ];
      });
  const table = (kind, lines) => {
    const bars = lines.flatMap((row) => [...(row.querySelectorAll?.("i") ?? [])]);
    const longest = Math.max(...bars.map((drawn) => Number(drawn.dataset.ms)));
    for (const drawn of bars)
      drawn.style.width = `${((100 * drawn.dataset.ms) / longest).toFixed(1)}%`;
    return make(
      "table",
      {},
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          [`by ${kind}`, "nodes", compared ? given : "", timed.unit, " ", "share"]
            .filter((text) => text)
            .map((text) => make("th", { scope: "col" }, text)),
        ),
      ),
      make("tbody", {}, lines),
    );
  };
  byId("times-tables").replaceChildren(
    ...(now.total ? [table("operator", operators()), table("block", blocks("", 0))] : []),
  );
}

/** Unfold the blocks that take nearly all of the time of what they are in. */
function unfoldTimes() {
  const { children, total } = timesOf(0);
  for (
    let path = "", row;
    (row = (children.get(path) ?? []).find((x) => x.isBlock && x.ms > 0.8 * total));
    path = row.key
  )
    unfolded.add(row.key);
}
