// What people do: step, walk, open, select, search.

function go(index) {
  state.index = Math.min(stages.length - 1, Math.max(0, index));
  state.marks = marksOf(state.index);
  state.opened = new Set();
  state.trees = { after: treeOf(stages[state.index], state.marks.after) };
  if (state.index > 0) state.trees.before = treeOf(stages[state.index - 1], state.marks.before);
  for (const tree of Object.values(state.trees)) openChanged(tree.root);
  const stage = stages[state.index];
  byId("slider").value = state.index;
  byId("back").disabled = state.index === 0;
  byId("forth").disabled = state.index === stages.length - 1;
  const { before, after } = state.marks;
  const counts =
    state.index === 0
      ? ""
      : before.size || after.size
        ? countsOf({ counts: count([...new Map([...before, ...after]).values()]) })
        : "nothing changed";
  byId("pass").replaceChildren(
    make("b", {}, stage.name),
    ` ${state.index} of ${stages.length - 1} `,
    make("span", {}, counts),
  );
  byId("slider").setAttribute("aria-valuetext", `${stage.name}, ${counts}`);
  render();
  showSites(stage);
  showTimes();
  showNode();
  showChange();
}

/** Open or close a block, which stays where it is on the screen. */
function toggle(pane, key) {
  const { part, x, y } = pane.items.get(key);
  state.chosen.set(part.path, !isOpen(part));
  render();
  const now = pane.items.get(key);
  pane.scroll.scrollLeft += (now.x - x) * state.scale;
  pane.scroll.scrollTop += (now.y - y) * state.scale;
  follow(pane);
  focusOn(pane, key);
}

function focusOn(pane, key) {
  pane.svg.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
  const { element } = pane.items.get(key);
  element.setAttribute("tabindex", 0);
  element.focus({ preventScroll: true });
}

function act(pane, key) {
  const item = pane.items.get(key);
  if (item.part.parts) toggle(pane, key);
  else select(item.part.node.number);
}

function select(number) {
  state.selected = number;
  light();
  showNode();
}

/** Make a node visible: its blocks open, in the middle, selected. */
function reveal(number) {
  const inAfter = stages[state.index].nodes.has(number);
  const pane = panes[inAfter ? 1 : 0];
  if (pane.figure.hidden) {
    state.side = pane.side;
    showSides();
    render();
  }
  const leaf = pane.tree.leaves.get(number);
  if (!leaf) return;
  for (let block = leaf.parent; block; block = block.parent) state.chosen.set(block.path, true);
  render();
  if (state.scale < 0.6) zoom(0.8);
  select(number);
  center(pane, leaf.key);
  if (isSmall()) pane.figure.scrollIntoView();
}

function light() {
  for (const pane of shownPanes()) {
    for (const { part, element } of pane.items.values()) {
      element.classList.toggle(
        "selected",
        part.node !== undefined && part.node.number === state.selected,
      );
    }
    for (const line of pane.svg.querySelectorAll(".line")) {
      line.classList.toggle(
        "lit",
        line.flows.some(
          ([maker, readers]) => maker === state.selected || readers.has(state.selected),
        ),
      );
    }
  }
}

const lookUp = (number) =>
  stages[state.index].nodes.get(number) ?? stages[state.index - 1]?.nodes.get(number);
const link = (number, text) =>
  make("button", { type: "button", class: "link", onclick: () => reveal(number) }, text);
const remarksOf = (number) =>
  stages
    .slice(0, stages.length)
    .flatMap((stage) =>
      stage.remarks
        .filter((remark) => remark[4].includes(number))
        .map((remark) => [stage.name, ...remark]),
    );

function showNode() {
  const panel = byId("node"),
    node = lookUp(state.selected);
  panel.hidden = !node;
  if (!node) return;
  const mark = state.marks.after.get(node.number) ?? state.marks.before.get(node.number);
  const told = [];
  const tell = (name, ...values) => {
    if (values.flat().length)
      told.push(make("dt", {}, name), ...values.flat().map((v) => make("dd", {}, v)));
  };
  const readers = [...stages[state.index].nodes.values()].filter((other) =>
    other.inputs.some((x) => Array.isArray(x) && x[0] === node.number),
  );
  const [from, to] = [
    stages.findIndex((s) => s.nodes.has(node.number)),
    stages.findLastIndex((s) => s.nodes.has(node.number)),
  ];
  tell("name", node.name || []);
  tell("block", node.block ? node.block.replaceAll("/", " / ") : []);
  tell("attributes", node.attributes ? node.attributes.split(/, (?=\w+=)/) : []);
  tell(
    "reads",
    node.inputs
      .filter((x) => x !== "")
      .map((x) => {
        const source = Array.isArray(x) ? lookUp(x[0]) : undefined;
        return source
          ? [link(source.number, source.operator), ` ${source.outputs[x[1]]?.[1] ?? ""}`]
          : String(x);
      })
      .map((parts) => make("span", {}, parts)),
  );
  tell(
    "gives",
    node.outputs.map(([name, type]) => `${name}: ${type}`),
  );
  tell(
    "read by",
    readers.slice(0, 20).map((other) => link(other.number, other.operator)),
    readers.length > 20 ? [`and ${readers.length - 20} more`] : [],
  );
  tell("from", node.origin || []);
  if (!isDiff && from > 0) tell("made by", stages[from].name);
  if (!isDiff && to < stages.length - 1) tell("taken by", stages[to + 1].name);
  if (isDiff) tell("only in", from === to ? stages[from].name : []);
  for (const overlay of data.overlays) {
    const value =
      overlay.values[state.index]?.[node.number] ?? overlay.values[state.index - 1]?.[node.number];
    tell(overlay.name, isNumber(value) ? `${short(value)} ${overlay.unit}` : []);
  }
  tell(
    "remarks",
    remarksOf(node.number).map(([pass, status, , reason]) =>
      make("span", {}, make("span", { class: `status ${status}` }, status), ` ${pass}: ${reason}`),
    ),
  );
  panel.replaceChildren(
    make(
      "button",
      { type: "button", class: "shut", "aria-label": "close", onclick: () => select() },
      "×",
    ),
    make(
      "h3",
      { class: `node ${kindOf(node)}` },
      isEnd({ node }) ? `${node.operator} ${node.name}` : node.operator,
      mark ? make("i", { class: `mark ${mark}` }, MARKS[mark]) : "",
    ),
    make("dl", {}, told),
  );
}

function showSites(stage) {
  const box = byId("sites"),
    remarks = stage.remarks;
  box.hidden = !remarks.length;
  const counts = count(remarks.map(([status]) => status));
  box.querySelector("summary").textContent = `Remarks of ${stage.name}: ${Object.entries(counts)
    .map(([status, n]) => `${whole(n)} ${status}`)
    .join(", ")}`;
  const groups = groupBy(remarks, ([status, , reason]) => `${status} ${reason}`);
  box.querySelector("div").replaceChildren(
    ...[...groups.values()].map((alike) =>
      make(
        "p",
        {},
        make("span", { class: `status ${alike[0][0]}` }, alike[0][0]),
        ` ${alike[0][2]}`,
        make("br"),
        alike.slice(0, 30).map(([, where, , , numbers]) => {
          const number = numbers.find((n) => lookUp(n));
          return make(
            "span",
            { class: "where" },
            number === undefined ? where : link(number, where),
          );
        }),
        alike.length > 30 ? `and ${alike.length - 30} more` : "",
      ),
    ),
  );
}

/** Nodes that have every word in their operator, names or block; a slash is as good as a dot. */
function showFound() {
  const plain = (text) => text.toLowerCase().replaceAll("/", ".");
  const words = plain(byId("search").value)
    .split(/\s+/)
    .filter((word) => word);
  const all = new Map([...(stages[state.index - 1]?.nodes ?? []), ...stages[state.index].nodes]);
  const found = [...all.values()].filter((node) => {
    const names = node.outputs.map(([name]) => name);
    const text = plain([node.operator, node.name, node.block, ...names].join(" "));
    return words.length > 0 && words.every((word) => text.includes(word));
  });
  const list = byId("found");
  list.hidden = !words.length;
  list.replaceChildren(
    make("p", {}, `${whole(found.length)} found`),
    ...found.slice(0, 50).map((node) =>
      make(
        "button",
        {
          type: "button",
          onclick: () => {
            list.hidden = true;
            reveal(node.number);
          },
        },
        make("b", {}, node.operator),
        ` ${node.name}`,
        make("small", {}, node.block),
      ),
    ),
  );
}

function showSides() {
  const names = isDiff
    ? { both: "Both", before: stages[0].name, after: stages[1].name }
    : { both: "Both", before: "Before", after: "After" };
  byId("sides").replaceChildren(
    ...Object.entries(names).map(([side, name]) =>
      make(
        "button",
        {
          type: "button",
          "aria-pressed": String(state.side === side),
          "data-side": side,
          onclick: () => {
            state.side = side;
            showSides();
            render();
            fit();
          },
        },
        name,
      ),
    ),
  );
}

/** What no stage tells: the differences of two graphs, or remarks without graphs. */
function showTold() {
  const remarks = stages.some((stage) => stage.remarks.length) ? [] : (report.remarks ?? []);
  const told = [...changes, ...(Array.isArray(remarks) ? remarks : [])];
  byId("told").hidden = !told.length;
  if (changes.length) byId("told-title").textContent = `${whole(changes.length)} differences`;
  byId("told")
    .querySelector("ul")
    .append(
      ...told.slice(0, 1000).map((one, i) => {
        const words = ["pass", "status", "kind", "where", "text", "reason"].map(
          (key) => one?.[key],
        );
        const text =
          typeof one === "object" ? words.filter((word) => word).join(" · ") : String(one);
        const [at] = data.changed[i]?.flat() ?? []; // of two graphs that are compared
        return make("li", {}, at === undefined ? text : link(at, text));
      }),
    );
}

const ASIDE = [
  "conclusion",
  "rows",
  "remarks",
  "changes",
  "model",
  "title",
  "inputs",
  "optimizers",
  "complete",
];

function start() {
  const [a, b] = [report.a?.name, report.b?.name];
  const name = String(report.title ?? report.model ?? (a ? `${a}, ${b}` : "graphgen"));
  byId("title").textContent = document.title = name;
  byId("facts").textContent = Object.entries(report)
    .filter(([key, x]) => !ASIDE.includes(key) && plain(x) !== "")
    .map(([key, x]) => `${key.replaceAll("_", " ")}: ${plain(x)}`)
    .join(" · ");
  showFigures();
  showTold();
  if (!stages.length) return;
  byId("graphs").hidden = false;
  byId("passes").hidden = isDiff || stages.length < 2;
  if (isDiff) byId("graphs-title").textContent = "The two graphs";
  byId("slider").max = stages.length - 1;
  state.side = stages.length > 1 && window.innerWidth >= 1000 ? "both" : "after";
  byId("sides").hidden = stages.length < 2;
  showSides();
  byId("colors").hidden = !data.overlays.length;
  byId("overlay").append(
    ...[["", "operators"], ...data.overlays.map((x) => [x.name, x.name])].map(([value, text]) =>
      make("option", { value }, text),
    ),
  );
  byId("overlay").addEventListener("change", (event) => {
    state.overlay = event.target.value;
    render();
  });
  byId("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  byId("back").addEventListener("click", () => go(state.index - 1));
  byId("forth").addEventListener("click", () => go(state.index + 1));
  byId("in").addEventListener("click", () => zoom(state.scale * 1.25));
  byId("out").addEventListener("click", () => zoom(state.scale / 1.25));
  byId("fit").addEventListener("click", fit);
  byId("close").addEventListener("click", () => {
    state.opened.clear();
    state.chosen.clear();
    render();
    fit();
  });
  byId("search").addEventListener("input", showFound);
  byId("search").addEventListener("focus", showFound);
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") byId("found").querySelector("button")?.click();
    if (event.key === "ArrowDown") byId("found").querySelector("button")?.focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest(".find")) byId("found").hidden = true;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      byId("found").hidden = true;
      select();
    }
    if (event.target.matches("input[type=search]") || event.ctrlKey || event.metaKey) return;
    if (event.key === "[") go(state.index - 1);
    if (event.key === "]") go(state.index + 1);
    if (event.key === "/") {
      event.preventDefault();
      byId("search").focus();
    }
  });
  panes.forEach(listen);
  unfoldTimes();
  go(isDiff ? 1 : 0);
  fit();
  fitWhenShown(shownPanes()[0].scroll);
}

/** A frame of a notebook may have no width yet. */
function fitWhenShown(scroll) {
  if (scroll.clientWidth) return;
  const seen = new ResizeObserver(() => {
    if (!scroll.clientWidth) return;
    fit();
    seen.disconnect();
  });
  seen.observe(scroll);
}

start();
