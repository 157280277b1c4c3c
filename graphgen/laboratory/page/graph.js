// The data, and what follows of it: stages, marks, trees of blocks.
// Data of a model is not trusted: it reaches the page as text nodes and attributes alone, never as HTML.
const byId = (id) => document.getElementById(id);
const SVG = document.querySelector("svg").namespaceURI;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== undefined && child !== ""));
  return element;
}
const make = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const shape = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

function groupBy(list, keyOf) {
  const groups = new Map();
  for (const item of list) {
    if (!groups.has(keyOf(item))) groups.set(keyOf(item), []);
    groups.get(keyOf(item)).push(item);
  }
  return groups;
}

const count = (list) =>
  Object.fromEntries([...groupBy(list, (x) => x)].map(([key, members]) => [key, members.length]));

const data = JSON.parse(byId("data").textContent);
const report = data.report;
const isDiff = data.view === "diff";

for (const overlay of data.overlays) {
  for (const values of overlay.values) {
    for (const number of Object.keys(values)) values[number] = Number(values[number]);
  }
}

const texts = data.texts;
const shown = data.nodes.map(
  ([number, name, operator, block, inputs, attributes, outputs, origin]) => ({
    number,
    name,
    operator: texts[operator],
    block: texts[block],
    inputs,
    attributes: texts[attributes],
    outputs: outputs.map(([n, type]) => [n, texts[type]]),
    origin: texts[origin],
  }),
);
const present = new Set();
const stages = data.stages.map((stage) => {
  stage.drop.forEach((row) => present.delete(row));
  stage.add.forEach((row) => present.add(row));
  return { ...stage, nodes: new Map([...present].map((row) => [shown[row].number, shown[row]])) };
});

const inOrder = new Intl.Collator("en", { numeric: true }).compare;
const MARKS = { new: "+", removed: "−", edited: "~" };

const changes = Array.isArray(report.changes) ? report.changes : [];
const changed = [0, 1].map((side) => new Set(data.changed.flatMap((nodes) => nodes[side])));

/** Whether a node that stayed says something else; to read what replaced its input is no change. */
function isEdited(old, now, before, after) {
  // Two graphs differ where the diff says so; a name or a size of one may be another's.
  if (isDiff) return changed[0].has(old.number) || changed[1].has(now.number);
  if (old === now) return false;
  const words = (node) => [
    node.operator,
    node.attributes,
    ...node.outputs.map((output) => output[1]),
    ...node.inputs.map((x) => (typeof x === "string" ? x.replace(/^.*?: /, "") : "")),
  ];
  const sources = (node) => new Set(node.inputs.filter(Array.isArray).map(String));
  const [had, has] = [sources(old), sources(now)];
  const isIn = (nodes) => (x) => nodes.has(Number(x.split(",")[0]));
  return (
    words(old).join("\n") !== words(now).join("\n") ||
    ([...had].filter((x) => !has.has(x)).some(isIn(after)) &&
      [...has].filter((x) => !had.has(x)).some(isIn(before)))
  );
}

/** What the step to a stage did to the nodes of the graph before it, and of its own. */
function marksOf(index) {
  const marks = { before: new Map(), after: new Map() };
  if (index === 0) return marks;
  const [before, after] = [stages[index - 1].nodes, stages[index].nodes];
  for (const [number, node] of before) {
    const now = after.get(number);
    if (!now) marks.before.set(number, "removed");
    else if (isEdited(node, now, before, after)) {
      marks.before.set(number, "edited");
      marks.after.set(number, "edited");
    }
  }
  for (const number of after.keys()) if (!before.has(number)) marks.after.set(number, "new");
  return marks;
}

/** Blocks in blocks, and for each what flows between its parts: an edge is listed at every border. */
function treeOf(stage, marks) {
  const blocks = new Map(),
    leaves = new Map();
  const blockAt = (path) => {
    if (!blocks.has(path)) {
      const parent = path ? blockAt(path.slice(0, Math.max(0, path.lastIndexOf("/")))) : undefined;
      const block = {
        key: `b${path}`,
        path,
        label: path.slice(path.lastIndexOf("/") + 1),
        parent,
        parts: [],
        edges: new Map(),
        size: 0,
        counts: {},
        changes: [],
      };
      blocks.set(path, block);
      parent?.parts.push(block);
    }
    return blocks.get(path);
  };
  blockAt("");
  for (const node of stage.nodes.values()) {
    const leaf = {
      key: `n${node.number}`,
      node,
      parent: blockAt(node.block),
      mark: marks.get(node.number),
    };
    leaves.set(node.number, leaf);
    leaf.parent.parts.push(leaf);
    for (let block = leaf.parent; block; block = block.parent) {
      block.size += 1;
      if (leaf.mark) {
        block.counts[leaf.mark] = (block.counts[leaf.mark] ?? 0) + 1;
        block.changes.push(leaf.mark + node.operator);
      }
    }
  }
  // A block of one node is that node, a block of one block is one with it.
  const settle = (block) => {
    block.parts = block.parts
      .map((part) => {
        if (!part.parts) return part;
        settle(part);
        const [only] = part.parts;
        if (part.parts.length > 1) return part;
        if (only.parts) only.label = `${part.label} / ${only.label}`;
        only.parent = block;
        return only;
      })
      .sort((a, b) => inOrder(a.path ?? "", b.path ?? ""));
  };
  settle(blocks.get(""));
  const join = (block, from, to, value, reader) => {
    const key = `${from}\n${to}\n${value}`;
    if (!block.edges.has(key)) block.edges.set(key, { from, to, value, readers: new Set() });
    block.edges.get(key).readers.add(reader);
  };
  for (const leaf of leaves.values()) {
    for (const input of leaf.node.inputs) {
      let source = Array.isArray(input) ? leaves.get(input[0]) : undefined;
      if (!source || source === leaf) continue;
      const value = input.join(":"),
        above = new Set(),
        reader = leaf.node.number;
      for (let block = leaf.parent; block; block = block.parent) above.add(block);
      for (; !above.has(source.parent); source = source.parent) {
        join(source.parent, source.key, `out ${value}`, value, reader);
      }
      let target = leaf;
      for (; target.parent !== source.parent; target = target.parent) {
        join(target.parent, `in ${value}`, target.key, value, reader);
      }
      join(source.parent, source.key, target.key, value, reader);
    }
  }
  return { root: blocks.get(""), leaves };
}
