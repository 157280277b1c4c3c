// Where people look: zoom, scroll and drag; the graphs before and after move together.

function zoom(scale, pane, x, y) {
  const next = Math.min(3, Math.max(0.05, scale)),
    ratio = next / state.scale;
  state.scale = next;
  for (const { box, svg, figure } of panes) {
    if (figure.hidden || !box) continue;
    svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    svg.setAttribute("width", box.width * next);
    svg.setAttribute("height", box.height * next);
  }
  if (pane) {
    pane.scroll.scrollLeft = (pane.scroll.scrollLeft + x) * ratio - x;
    pane.scroll.scrollTop = (pane.scroll.scrollTop + y) * ratio - y;
  }
  const [first] = shownPanes();
  if (pane ?? first) follow(pane ?? first);
}

function fit() {
  const scales = shownPanes().map(({ box, scroll }) => (scroll.clientWidth - 4) / box.width);
  zoom(Math.min(1, ...scales));
}

/** Show a part in the middle, and in the other graph what is there. */
function center(pane, key) {
  const item = pane.items.get(key);
  if (!item) return;
  const high = isSmall() ? 0.25 : 0.5; // above the sheet on a phone
  lookAt(pane, [item.x + item.width / 2, item.y + Math.min(item.height, 80) / 2], high);
  follow(pane);
}

/** The place in the graph that a pane shows in its middle. */
function middleOf({ scroll, box }) {
  const gap = Math.max(0, (scroll.clientWidth - box.width * state.scale) / 2);
  return [
    (scroll.scrollLeft + scroll.clientWidth / 2 - gap) / state.scale,
    (scroll.scrollTop + scroll.clientHeight / 2) / state.scale,
  ];
}

function lookAt({ scroll, box }, [x, y], high = 0.5) {
  const gap = Math.max(0, (scroll.clientWidth - box.width * state.scale) / 2);
  scroll.scrollLeft = gap + x * state.scale - scroll.clientWidth / 2;
  scroll.scrollTop = y * state.scale - high * scroll.clientHeight;
}

/**
 * Places of one graph and those of another: the ends of both, and of the parts that both show the
 * most that come in the same order, so that a part which moved far does not take the others with it.
 */
function anchorsOf(pane, other) {
  const middle = (item) => item.x + item.width / 2;
  const parts = [...pane.items]
    .filter(([key]) => other.items.has(key))
    .map(([key, one]) => [one, other.items.get(key)])
    .map(([one, two]) => ({ at: [one.y, two.y, middle(two) - middle(one)], length: 1 }))
    .sort((a, b) => a.at[0] - b.at[0] || a.at[1] - b.at[1]);
  parts.forEach((part, i) => {
    for (const above of parts.slice(0, i)) {
      if (above.at[1] > part.at[1] || above.length < part.length) continue;
      part.length = above.length + 1;
      part.above = above;
    }
  });
  const chain = [];
  let part = parts.reduce((best, x) => (x.length > (best?.length ?? 0) ? x : best), undefined);
  for (; part; part = part.above) chain.unshift(part.at);
  const aside = (other.box.width - pane.box.width) / 2;
  return [[0, 0, aside], ...chain, [pane.box.height, other.box.height, aside]];
}

/** Where the other graph is at this place: between the parts above and below that both have. */
function placeIn(anchors, [x, y]) {
  const last = anchors.findIndex(([at]) => at >= y);
  const below = anchors.at(last),
    above = anchors[Math.max(0, last - 1)];
  const share = below[0] > above[0] ? Math.min(1, (y - above[0]) / (below[0] - above[0])) : 0;
  const mix = (i) => above[i] + share * (below[i] - above[i]);
  return [x + mix(2), mix(1)];
}

const scrolled = ({ scroll }) => `${scroll.scrollLeft} ${scroll.scrollTop}`;

/** Move the other graph to where this one is. */
function follow(pane) {
  for (const other of shownPanes()) {
    if (other !== pane)
      lookAt(other, placeIn((pane.anchors ??= anchorsOf(pane, other)), middleOf(pane)));
    other.at = scrolled(other);
  }
}

const inView = ({ scroll, items }) => {
  const frame = scroll.getBoundingClientRect();
  return [...items.values()].filter(({ part, element }) => {
    if (!part.mark) return false;
    const { top, bottom, left, right } = element.getBoundingClientRect();
    return top < frame.bottom && bottom > frame.top && left < frame.right && right > frame.left;
  });
};

/** Show a change: the first that both graphs show at once, or else the first. */
function showChange() {
  const visible = shownPanes();
  const changes = [...visible].reverse().flatMap((pane) =>
    [...pane.items.values()]
      .filter(({ part }) => part.mark)
      .sort((a, b) => a.y - b.y)
      .slice(0, 20) // each is laid out
      .map((item) => [pane, item.part.key]),
  );
  const marked = visible.filter((pane) => changes.some(([other]) => other === pane));
  const both = changes.find(([pane, key]) => {
    center(pane, key);
    return marked.every((each) => inView(each).length);
  });
  if (changes.length) center(...(both ?? changes[0]));
  else for (const pane of visible) lookAt(pane, [pane.box.width / 2, 0]);
}

function listen(pane) {
  const { scroll, svg } = pane;
  let grip, pinch;
  scroll.addEventListener("scroll", () => {
    if (pane.at !== scrolled(pane)) follow(pane); // or else it is what has followed
  });
  svg.addEventListener("click", (event) => {
    const key = event.target.closest("[data-key]")?.dataset.key;
    if (grip?.moved) return;
    const part = key && pane.items.get(key).part;
    // The inside of an open block is no button: its head is.
    if (!part || (part.parts && isOpen(part) && !event.target.closest(".head"))) select();
    else act(pane, key);
  });
  scroll.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse") grip = { x: event.clientX, y: event.clientY, moved: false };
  });
  scroll.addEventListener("pointermove", (event) => {
    if (!grip || event.buttons !== 1) return;
    grip.moved ||= Math.hypot(event.clientX - grip.x, event.clientY - grip.y) > 4;
    if (!grip.moved) return;
    scroll.scrollLeft -= event.movementX;
    scroll.scrollTop -= event.movementY;
  });
  scroll.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = scroll.getBoundingClientRect();
      zoom(
        state.scale * Math.exp(-event.deltaY / 300),
        pane,
        event.clientX - box.left,
        event.clientY - box.top,
      );
    },
    { passive: false },
  );
  scroll.addEventListener(
    "touchmove",
    (event) => {
      if (event.touches.length !== 2) {
        pinch = undefined;
        return;
      }
      event.preventDefault();
      const [a, b] = event.touches,
        box = scroll.getBoundingClientRect();
      const apart = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      if (pinch)
        zoom(
          (state.scale * apart) / pinch,
          pane,
          (a.clientX + b.clientX) / 2 - box.left,
          (a.clientY + b.clientY) / 2 - box.top,
        );
      pinch = apart;
    },
    { passive: false },
  );
  svg.addEventListener("keydown", (event) => {
    const here = pane.items.get(document.activeElement?.dataset.key);
    const [dx, dy] =
      { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key] ??
      [];
    if (!here || (dx === undefined && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    if (dx === undefined) {
      act(pane, here.part.key);
      return;
    }
    // The nearest in that direction; what lies aside counts as further away.
    const middle = (item) => [item.x + item.width / 2, item.y + Math.min(item.height, HEAD) / 2];
    const [x, y] = middle(here);
    const ranked = [...pane.items.values()]
      .map((item) => {
        const [u, v] = middle(item),
          along = (u - x) * dx + (v - y) * dy;
        return [along > 1 ? along + 2 * Math.abs((u - x) * dy + (v - y) * dx) : Infinity, item];
      })
      .sort((a, b) => a[0] - b[0]);
    if (!ranked.length || ranked[0][0] === Infinity) return;
    focusOn(pane, ranked[0][1].part.key);
    center(pane, ranked[0][1].part.key);
  });
}
