// Drawing the two graphs as SVG, and the legend of their colors.
const KINDS = [
  ["attention", /Attention/],
  ["product", /MatMul|Gemm|Conv|Einsum/],
  ["norm", /Norm/],
  ["activation", /Softmax|Gelu|Relu|Sigmoid|Tanh|Erf|Silu|Swish|Softplus|Elu/i],
  ["layout", /Reshape|Transpose|Slice|Concat|Split|queeze|Expand|Tile|Flatten|Pad$|Identity/],
  ["lookup", /Gather|Cast|Shape|Range|Constant|Scatter|Where|OneHot|Trilu|Size|Embed/],
  ["control", /^(If|Loop|Scan)$/],
  ["arithmetic", /./],
];
const kindOf = (node) =>
  node.operator === "input" || node.operator === "output"
    ? "end"
    : KINDS.find(([, pattern]) => pattern.test(node.operator))[0];

const state = {
  index: 0,
  side: "both",
  scale: 1,
  selected: undefined,
  overlay: "",
  chosen: new Map(),
  opened: new Set(),
  marks: undefined,
  trees: {},
};
const panes = ["before", "after"].map((side) => {
  const figure = byId(side);
  return {
    side,
    figure,
    caption: figure.querySelector("figcaption"),
    items: new Map(),
    scroll: figure.querySelector(".scroll"),
    svg: figure.querySelector("svg"),
  };
});
const shownPanes = () => panes.filter((pane) => !pane.figure.hidden);
const isSmall = () => window.matchMedia("(max-width: 50rem)").matches;
const overlayNow = () => data.overlays.find((overlay) => overlay.name === state.overlay);
const isOpen = (block) =>
  !block.parent || (state.chosen.get(block.path) ?? state.opened.has(block.path));

/** Open what changed; of blocks that changed alike, the first. */
function openChanged(root) {
  let budget = 200;
  const open = (block) => {
    const seen = new Set();
    for (const part of block.parts.filter((p) => p.parts && p.changes.length)) {
      const change = `${part.size} ${part.changes.sort().join()}`;
      if (seen.has(change) || budget < part.parts.length) continue;
      seen.add(change);
      budget -= part.parts.length;
      state.opened.add(part.path);
      open(part);
    }
  };
  open(root);
  if (state.opened.size) return;
  for (let block = root; block && block.parts.filter((p) => p.parts || !isEnd(p)).length < 4;) {
    block = block.parts.filter((p) => p.parts).sort((a, b) => b.size - a.size)[0];
    if (block) state.opened.add(block.path);
  }
}

/** The overlay's figure for each node and block that has one. */
function heatOf(tree, index) {
  const overlay = overlayNow(),
    values = overlay?.values[index],
    heat = new Map();
  if (!overlay) return undefined;
  const join = overlay.combine === "max" ? (x, y) => Math.max(x, y) : (x, y) => x + y;
  const total = (part) => {
    const inner = part.parts?.map(total).filter(isNumber);
    const value = inner
      ? inner.length
        ? inner.reduce(join)
        : undefined
      : values?.[part.node.number];
    if (isNumber(value)) heat.set(part, value);
    return value;
  };
  total(tree.root);
  return heat;
}

function drawPart(pane, { part, x, y, width, height, inner }, dx, dy) {
  const left = x + dx,
    top = y + dy,
    node = part.node;
  const group = shape("g", {
    transform: `translate(${left.toFixed(1)} ${top.toFixed(1)})`,
    role: "button",
    tabindex: -1,
    "data-key": part.key,
    "aria-expanded": part.parts ? String(Boolean(inner)) : undefined,
    class: [
      "part",
      part.parts ? "block" : `node ${kindOf(node)}`,
      inner ? "open" : "",
      part.mark ?? "",
    ].join(" "),
  });
  const about = part.parts ? ` ${part.path}, ${part.size} nodes${countsOf(part)}` : ` ${node.name}`;
  group.setAttribute("aria-label", `${title(part)}${about}${part.mark ? `, ${part.mark}` : ""}`);
  group.append(
    shape("rect", {
      width: width.toFixed(1),
      height: height.toFixed(1),
      rx: part.parts ? 8 : kindOf(node) === "end" ? 18 : 5,
    }),
  );
  const heat = pane.heat?.get(part);
  if (heat !== undefined && !inner)
    group.style.setProperty("--heat", `${(100 * pane.warmth(heat)).toFixed(0)}%`);
  if (pane.heat && !inner) group.classList.add("heated");
  pane.svg.firstChild.append(group);
  pane.items.set(part.key, { part, element: group, x: left, y: top, width, height });
  if (inner) {
    drawLines(pane, inner, left, top);
    inner.parts.forEach((child) => drawPart(pane, child, left, top));
    const head = shape(
      "g",
      {
        class: "head",
        transform: `translate(${left.toFixed(1)} ${top.toFixed(1)})`,
        "data-key": part.key,
      },
      shape("rect", { width: width.toFixed(1), height: HEAD, rx: 8 }),
      shape("text", { x: 12, y: 17 }, `▾ ${title(part)}`),
      shape("text", { x: width - 12, y: 17, class: "more" }, countsOf(part)),
    );
    pane.svg.firstChild.append(head);
    return;
  }
  if (!part.parts && kindOf(node) !== "end")
    group.append(
      shape("path", {
        class: "stripe",
        d: `M5 0H4Q0 0 0 5V${height - 5}Q0 ${height} 4 ${height}H5Z`,
      }),
    );
  group.append(
    shape(
      "text",
      { x: 13, y: subtitle(part, pane) ? 15 : 22 },
      `${part.parts ? "▸ " : ""}${title(part)}`,
    ),
    shape("text", { x: 13, y: 28, class: "small" }, subtitle(part, pane)),
  );
  const mark = part.parts ? countsOf(part).replaceAll(",", "") : MARKS[part.mark];
  if (mark) {
    const wide = widthOf(mark, BIG) + 10;
    group.append(
      shape(
        "g",
        { class: "badge", transform: `translate(${(width - wide + 6).toFixed(1)} -8)` },
        shape("rect", { width: wide.toFixed(1), height: 16, rx: 8 }),
        shape("text", { x: wide / 2, y: 12 }, mark),
      ),
    );
  }
}

const countsOf = (block) =>
  Object.entries(MARKS)
    .filter(([mark]) => block.counts[mark])
    .map(([mark, sign]) => ` ${sign}${block.counts[mark]}`)
    .join(",");

function drawLines(pane, box, dx, dy) {
  const drawn = new Map();
  for (const { points, value, readers } of box.lines) {
    const d = curve(points.map(([x, y]) => [x + dx, y + dy]));
    if (!drawn.has(d)) {
      drawn.set(d, shape("path", { class: "line", d }));
      drawn.get(d).flows = [];
    }
    drawn.get(d).flows.push([Number(value.split(":")[0]), readers]);
  }
  pane.svg.firstChild.append(...drawn.values());
}

function render() {
  const { index } = state,
    shownSides = state.side === "both" ? ["before", "after"] : [state.side];
  for (const pane of panes) {
    pane.figure.hidden = index === 0 ? pane.side === "before" : !shownSides.includes(pane.side);
    pane.index = pane.side === "before" ? index - 1 : index;
    if (pane.figure.hidden) continue;
    pane.tree = state.trees[pane.side];
    pane.heat = heatOf(pane.tree, pane.index);
  }
  const visible = shownPanes();
  visible.forEach((pane) => {
    pane.box = layOut(pane.tree.root, pane);
  });
  warm(visible);
  for (const pane of visible) {
    pane.items.clear();
    pane.anchors = undefined;
    pane.svg.replaceChildren(shape("g", {}));
    drawLines(pane, pane.box, 0, 0);
    pane.box.parts.forEach((part) => drawPart(pane, part, 0, 0));
    const stage = stages[pane.index];
    const inner = [...stage.nodes.values()].filter((node) => !isEnd({ node })).length;
    pane.caption.replaceChildren(
      make("b", {}, isDiff || index === 0 ? "" : `${pane.side} `),
      stage.name,
      make("span", {}, ` ${whole(inner)} nodes${countsOf(pane.tree.root)}`),
    );
    pane.svg.setAttribute("aria-label", `graph ${pane.side} ${stage.name}`);
    const first = pane.items.values().next().value;
    first?.element.setAttribute("tabindex", 0);
  }
  zoom(state.scale);
  light();
}

/** The color scale spans what is drawn: linear, or logarithmic where figures are far apart. */
function warm(visible) {
  const legend = byId("legend"),
    overlay = overlayNow();
  const found = visible
    .flatMap((pane) =>
      [...(pane.heat ?? [])]
        .filter(([part]) => !(part.parts && isOpen(part)))
        .map(([, value]) => value),
    )
    .filter((x) => x > 0 && Number.isFinite(x));
  const high = Math.max(...found),
    low = Math.max(Math.min(...found), high / 1e4);
  const spread = high / low > 100;
  visible.forEach((pane) => {
    pane.warmth = (x) => {
      if (x <= 0 || !found.length || !Number.isFinite(x)) return x > 0 ? 1 : 0;
      return spread ? Math.max(0, Math.log(x / low) / Math.log(high / low)) : x / high;
    };
  });
  const marks = Object.entries(MARKS).map(([mark, sign]) =>
    make(
      "span",
      {},
      make("i", { class: `mark ${mark}` }, sign),
      isDiff
        ? { new: "only in the second", removed: "only in the first", edited: "differs" }[mark]
        : mark,
    ),
  );
  if (!overlay) {
    const kinds = new Set(
      visible.flatMap((pane) => [...stages[pane.index].nodes.values()].map(kindOf)),
    );
    legend.replaceChildren(
      ...KINDS.filter(([kind]) => kinds.has(kind)).map(([kind]) =>
        make("span", {}, make("i", { class: `swatch ${kind}` }), kind),
      ),
      ...(stages.length > 1 ? marks : []),
    );
    return;
  }
  legend.replaceChildren(
    make("span", {}, overlay.name),
    found.length
      ? make(
          "span",
          {},
          `${spread ? short(low) : 0}`,
          make("i", { class: "scale" }),
          `${short(high)} ${overlay.unit}${spread ? ", logarithmic" : ""}`,
        )
      : make("span", {}, "not measured in this graph"),
    ...(stages.length > 1 ? marks : []),
  );
}
