// Where everything is: one block at a time, by dagre.
const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();
function widthOf(text, font) {
  const key = font + text;
  if (!widths.has(key)) {
    pen.font = font;
    widths.set(key, pen.measureText(text).width);
  }
  return widths.get(key);
}
const FONT = "system-ui, sans-serif",
  BIG = `600 12px ${FONT}`,
  SMALL = `10px ${FONT}`;
const HEAD = 26,
  PAD = 14;
const clip = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
const isEnd = (leaf) => leaf.node.operator === "input" || leaf.node.operator === "output";
const title = (part) =>
  clip(
    part.parts
      ? part.label || "graph"
      : isEnd(part)
        ? part.node.name
        : part.node.operator.replace(/^.*::/, ""),
    36,
  );
const placed = new Map(); // equal blocks, such as the layers of a transformer, are laid out once

function subtitle(part, pane) {
  const value = pane.heat?.get(part);
  if (pane.heat) return value === undefined ? "" : `${short(value)} ${overlayNow().unit}`;
  if (part.parts) return `${whole(part.size)} nodes`;
  return clip(part.node.outputs[0]?.[1] ?? "", 34);
}

/** Places and lines of a block's parts. What enters or leaves has a port on the border. */
function layOut(block, pane) {
  const keys = new Map(),
    nodes = [],
    inner = new Map();
  const add = (key, width, height) => {
    keys.set(key, String(nodes.length));
    nodes.push({ v: String(nodes.length), width, height });
  };
  for (const part of block.parts) {
    if (part.parts && isOpen(part)) {
      const box = layOut(part, pane);
      inner.set(part.key, box);
      add(part.key, box.width, box.height);
    } else {
      const width = Math.max(widthOf(title(part), BIG), widthOf(subtitle(part, pane), SMALL));
      add(part.key, Math.ceil(Math.max(64, width + 30 + (part.parts ? 12 : 0))), 36);
    }
  }
  const ports = new Set(
    [...block.edges.values()].flatMap(({ from, to }) => [from, to]).filter((key) => !keys.has(key)),
  );
  ports.forEach((key) => add(key, 1, 1));
  const pairs = new Set(
    [...block.edges.values()].map(({ from, to }) => `${keys.get(from)} ${keys.get(to)}`),
  );
  const edges = [...pairs].map((pair) => ({ v: pair.split(" ")[0], w: pair.split(" ")[1] }));
  // A heavy edge holds all entries in the first row, and all exits in the last.
  for (const key of ports) {
    const entry = key.startsWith("in ");
    const rim = entry ? "first" : "last";
    if (!keys.has(rim)) add(rim, 1, 1);
    const [v, w] = entry ? [keys.get(rim), keys.get(key)] : [keys.get(key), keys.get(rim)];
    edges.push({ v, w, weight: 100 });
  }
  const same = JSON.stringify([nodes, edges]);
  if (!placed.has(same)) {
    dagre.layout(nodes, edges, { nodesep: 18, edgesep: 12, ranksep: 26 }, {});
    placed.set(same, {
      nodes,
      lines: new Map(edges.map((edge) => [`${edge.v} ${edge.w}`, edge.points])),
    });
  }
  const plan = placed.get(same);
  const spot = (key) => plan.nodes[keys.get(key)];
  const parts = block.parts.map((part) => ({ part, ...spot(part.key) }));
  const flat = [...plan.lines.values()].flat();
  const rightOf = Math.max(0, ...parts.map((p) => p.x + p.width / 2), ...flat.map((p) => p.x));
  const leftOf = Math.min(rightOf, ...parts.map((p) => p.x - p.width / 2), ...flat.map((p) => p.x));
  const topOf = Math.min(...parts.map((p) => p.y - p.height / 2));
  const bottomOf = Math.max(...parts.map((p) => p.y + p.height / 2));
  const label = block.parent ? widthOf(title(block), BIG) + 80 : 0;
  const width = Math.max(rightOf - leftOf + 2 * PAD, label);
  const dx = (width - (rightOf - leftOf)) / 2 - leftOf;
  const dy = (block.parent ? HEAD + PAD / 2 : PAD) - topOf;
  const height = bottomOf + dy + PAD;
  const portX = (key) => (ports.has(key) ? spot(key).x + dx : undefined);
  const border = (key, value, isSource) => {
    if (ports.has(key)) return [portX(key), isSource ? 0 : height];
    const { x, y, width: w, height: h } = spot(key),
      box = inner.get(key);
    const port = box?.portX(`${isSource ? "out" : "in"} ${value}`);
    return [
      port === undefined ? x + dx : x + dx - w / 2 + port,
      y + dy + (isSource ? h / 2 : -h / 2),
    ];
  };
  const lines = [...block.edges.values()].map((edge) => {
    const points = plan.lines.get(`${keys.get(edge.from)} ${keys.get(edge.to)}`) ?? [];
    const bends = points.slice(1, -1).map((p) => [p.x + dx, p.y + dy]);
    return {
      ...edge,
      points: [border(edge.from, edge.value, true), ...bends, border(edge.to, edge.value, false)],
    };
  });
  return {
    width,
    height,
    lines,
    portX,
    parts: parts.map((p) => ({
      ...p,
      x: p.x + dx - p.width / 2,
      y: p.y + dy - p.height / 2,
      inner: inner.get(p.part.key),
    })),
  };
}

const curve = (points) =>
  points
    .map(([x, y], i) => {
      if (i === 0) return `M${x.toFixed(1)} ${y.toFixed(1)}`;
      const [px, py] = points[i - 1],
        middle = ((py + y) / 2).toFixed(1);
      return `C${px.toFixed(1)} ${middle} ${x.toFixed(1)} ${middle} ${x.toFixed(1)} ${y.toFixed(1)}`;
    })
    .join("");
