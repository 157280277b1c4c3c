// The table of runs, with its plot of latencies.
const isNumber = (x) => typeof x === "number";
function short(x) {
  if (!isNumber(x)) return String(x ?? "–");
  const plainly = x === 0 || (Math.abs(x) >= 1e-3 && Math.abs(x) < 1e4);
  return plainly ? String(Number(x.toPrecision(3))) : x.toExponential(1);
}
const english = new Intl.NumberFormat("en");
const whole = (x) => (isNumber(x) ? english.format(x) : x);

function scaled(x) {
  const step = isNumber(x) && x >= 1e3 ? Math.min(4, Math.floor(Math.log10(x) / 3)) : 0;
  return isNumber(x)
    ? Number((x / 1000 ** step).toPrecision(3)) + ["", " k", " M", " G", " T"][step]
    : x;
}

/** What a row says of its one run, or of the prefill and of the decode step. */
const phases = (row) =>
  row.decode
    ? [
        ["prefill", row],
        ["decode", row.decode],
      ]
    : [["", row]];
const latencies = (row) =>
  phases(row)
    .map(([name, x]) => [name, x.latency_ms])
    .filter(([, x]) => isNumber(x?.median));
const inPhases = (show) => (row) =>
  phases(row)
    .map(([name, x]) => [name, show(x) ?? ""])
    .filter(([, told]) => told !== "")
    .map(([name, told]) => `${name} ${told}`.trim())
    .join("; ");
const number = (x) => (isNumber(x) ? short(x) : x);
const errors = (name) =>
  inPhases((x) => (x.error?.[name] === null ? "infinite" : number(x.error?.[name])));
const interval = (x) => x && `${short(x.median)} (${short(x.low)}–${short(x.high)})`;

/** A value in words; of an object, each of its parts. */
function plain(told, show = number) {
  if (told === undefined || told === null) return "";
  if (typeof told !== "object") return String(show(told));
  if (Array.isArray(told)) return told.map((x) => plain(x, show)).join(", ");
  return Object.entries(told)
    .map(([name, x]) => `${name.replaceAll("_", " ")} ${plain(x, show)}`.trim())
    .join(", ");
}

const COLUMNS = [
  ["median, ms", inPhases((x) => interval(x.latency_ms))],
  ["to the baseline", inPhases((x) => interval(x.ratio))],
  ["verdict", inPhases((x) => x.verdict)],
  [
    "fired / missed / refused",
    (row) =>
      row.sites &&
      ["fired", "missed", "refused"].map((status) => row.sites[status] ?? "–").join(" / "),
  ],
  ["nodes", (row) => whole(row.nodes)],
  ["in the session", (row) => whole(row.runtime_nodes)],
  ["relative RMS", errors("rel_rms")],
  ["largest error", errors("max_abs")],
  ["largest relative", errors("max_rel")],
  ["ULP", errors("ulp")],
  [
    "same argmax",
    inPhases((x) =>
      isNumber(x.error?.argmax_agreement)
        ? `${Number((100 * x.error.argmax_agreement).toFixed(2))} %`
        : x.error?.argmax_agreement,
    ),
  ],
  ["FLOPs", inPhases((x) => plain(x.flops, scaled))],
  ["bytes", inPhases((x) => plain(x.bytes, scaled))],
  ["parameters", (row) => scaled(row.parameters)],
  ["placement", (row) => plain(row.placement)],
  ["elsewhere", (row) => elsewhere(row.elsewhere)],
  ["compile, ms", (row) => number(row.compile_ms)],
  ["session, ms", (row) => number(row.session_ms)],
  ["", (row) => row.problem ?? (row.measured_as ? `measured as ${row.measured_as}` : "")],
];

function elsewhere(providers) {
  const texts = Object.entries(providers ?? {}).map(([name, x]) =>
    x.problem
      ? `${name}: ${x.problem}`
      : `${name}: ${x.nodes} nodes, ${x.cpu} on the CPU, ${x.copies} copies, ` +
        `error ${isNumber(x.error) ? number(x.error) : "infinite"}`,
  );
  return texts.join("; ");
}

/** What the plot spans: all medians, and around them as much as most intervals take. */
function rangeOf(measured) {
  const medians = measured.map((x) => x.median);
  const spans = measured.map((x) => (x.high ?? x.median) - (x.low ?? x.median));
  const usual = spans.sort((a, b) => a - b)[Math.floor(spans.length / 2)];
  return [Math.max(0, Math.min(...medians) - usual), Math.max(...medians) + usual];
}

function showFigures() {
  const rows = (Array.isArray(report.rows) ? report.rows : []).filter((row) => row);
  showVerdict(rows);
  if (!rows.length) return;
  byId("figures").hidden = false;
  const columns = COLUMNS.filter(([, show]) => rows.some((row) => show(row)));
  const measured = rows.flatMap(latencies).map(([, x]) => x);
  const ticks = measured.length ? roundTicks(...rangeOf(measured), 3) : [];
  const [low, high] = [ticks[0], ticks.at(-1)];
  const width = isSmall() ? 150 : 220,
    at = (x) => 8 + ((Math.min(high, Math.max(low, x)) - low) / (high - low || 1)) * (width - 16);
  const first = latencies(rows.find((row) => row.kind === "baseline") ?? rows[0]);
  const axis = () =>
    shape(
      "svg",
      { width, height: 14, class: "axis", "aria-hidden": "true" },
      ticks.map((x, i) =>
        shape(
          "text",
          { x: at(x), y: 11, "text-anchor": i ? (x === high ? "end" : "middle") : "start" },
          short(x),
        ),
      ),
    );
  const plot = (row) =>
    shape(
      "svg",
      {
        width,
        height: 10 + 12 * latencies(row).length,
        class: "plot",
        role: "img",
        "aria-label": COLUMNS[0][1](row),
      },
      first.map(([, x]) =>
        shape("line", { class: "base", x1: at(x.median), x2: at(x.median), y1: 0, y2: 99 }),
      ),
      latencies(row).map(([name, x], i) =>
        shape(
          "g",
          { transform: `translate(0 ${11 + 12 * i})` },
          shape(
            "title",
            {},
            `${name} ${short(x.median)} ms, between ${short(x.low)} and ${short(x.high)}` +
              (x.runs ? `, ${x.runs} runs` : ""),
          ),
          shape("line", { class: "range", x1: at(x.low ?? x.median), x2: at(x.high ?? x.median) }),
          x.low < low ? shape("path", { class: "range", d: "M8 -4l-5 4l5 4" }) : "",
          x.high > high ? shape("path", { class: "range", d: `M${width - 8} -4l5 4l-5 4` }) : "",
          shape("circle", { cx: at(x.median), r: 3.5 }),
        ),
      ),
    );
  const head = make(
    "tr",
    {},
    make("th", { scope: "col" }, "run"),
    measured.length ? make("th", { scope: "col", class: "plots" }, "latency, ms", axis()) : "",
    columns.map(([name]) => make("th", { scope: "col" }, name)),
  );
  const line = (row) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, graphLink(row)),
      measured.length ? make("td", {}, plot(row)) : "",
      columns.map(([name, show]) =>
        make(
          "td",
          name === "verdict" ? { class: `verdict ${plain(row.verdict)}` } : {},
          show(row) ?? "",
        ),
      ),
    );
  const groups = groupBy(rows, (row) => row.kind ?? "");
  byId("rows").append(
    make("thead", {}, head),
    ...[...groups].map(([kind, members]) =>
      make(
        "tbody",
        {},
        groups.size > 1 && members.length > 1
          ? make(
              "tr",
              { class: "kind" },
              make(
                "th",
                { scope: "rowgroup", colspan: columns.length + 2 },
                kind.replaceAll("_", " "),
              ),
            )
          : "",
        folded(rows, members, line, columns.length + 2),
      ),
    ),
  );
  if (report.complete === false) {
    byId("rows-note").textContent = "Interrupted: these are the rows until then.";
  }
}

/** The graph that a row of one more pass has measured. */
function stageOf(row) {
  const index = stages.findIndex((stage) => stage.name === row.name);
  return row.kind === "cumulative" && index > 0 ? index : undefined;
}
