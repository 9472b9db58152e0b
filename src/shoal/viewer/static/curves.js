// Curves, drawn from the numbers in the page. The panels of a section share the range of x, the hover line, the settings.
const TOP = 10;
const bottomOf = (figure) => (figure.matches(".large") ? 420 : 158);
const LEFT = 46; // at least: a section whose labels are longer has more room for them
const views = new Map(); // the settings of each section, kept in the address and while the page follows its run
const isStatic = document.body.hasAttribute("data-static");

function viewOf(section) {
  const key = `${section.closest(".page")?.id} ${section.id}`;
  if (!views.has(key)) views.set(key, keptOf(section));
  const view = views.get(key);
  if (view.section !== section) {
    Object.assign(view, { section, tables: JSON.parse(section.dataset.tables) });
    if (!(view.axis in view.tables[0].axes)) view.axis = Object.keys(view.tables[0].axes)[0];
  }
  return view;
}

// The settings of a section as its address has them, and back: what is as it was at first is left out.
function keptOf(section) {
  const kept = new URLSearchParams(new URLSearchParams(location.search).get(section.id) ?? "");
  const zoom = (kept.get("zoom") ?? "").split(",").map(Number);
  return {
    axis: kept.get("axis"), smooth: Math.min(Math.max(Number(kept.get("smooth")) || 0, 0), 0.95), log: kept.has("log"),
    zoom: zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null, hidden: new Set(kept.getAll("hidden")), large: new Set(kept.getAll("large")),
  };
}
function keep(section, { axis, smooth, log, zoom, hidden, large, tables }) {
  const first = axis === Object.keys(tables[0].axes)[0];
  const told = Object.entries({ axis: !first && axis, smooth: smooth || false, log, zoom }).filter(([, value]) => value);
  const named = Object.entries({ hidden, large }).flatMap(([key, names]) => [...names].map((name) => [key, name]));
  const text = new URLSearchParams([...told, ...named]).toString();
  const address = new URL(location.href);
  if (isStatic || (address.searchParams.get(section.id) ?? "") === text) return;
  if (text) address.searchParams.set(section.id, text); else address.searchParams.delete(section.id);
  history.replaceState(null, "", address);
}

function shape(name, attributes, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}
const words = (text, x, y, anchor = "middle") => shape("text", { x, y, "text-anchor": anchor }, text);

const round = (value) => Math.round(value * 10) / 10;
function short(value) {
  if (Math.abs(value) >= 1e9) return value.toExponential(3);
  return Number.isInteger(value) || Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity); // of so many that no call takes them all
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// Round numbers from low to high, each with its label, which is exact.
function ticks(low, high, steps) {
  const raw = (high - low) / 4;
  if (!(raw > 1e-300)) return [{ at: low, label: exact(low) }];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = steps.map((s) => s * power).sort((a, b) => Math.abs(a - raw) - Math.abs(b - raw))[0];
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
    const at = Number((k * step).toPrecision(12));
    found.push({ at, label: exact(at) });
  }
  return found;
}
function exact(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e9)) return value.toExponential().replace("e+", "e");
  return value.toLocaleString("en", { maximumFractionDigits: 12 });
}

// Powers of ten from low to high, which are logarithms; below two decades 2 and 5 times these too.
function powers(low, high) {
  const every = Math.max(1, Math.ceil((high - low) / 7));
  const plain = low >= -2 && high <= 3; // 0.02, 1 and 500 are read as they are, 2e-5 is not
  const found = [];
  for (let n = Math.floor(low); n <= Math.ceil(high); n++) {
    if (n % every) continue;
    for (const first of high - low < 2 ? [1, 2, 5] : [1]) {
      const label = `${first}e${n}`;
      found.push({ at: n + Math.log10(first), label: plain ? exact(Number(label)) : label });
    }
  }
  const inside = found.filter(({ at }) => at >= low - 1e-9 && at <= high + 1e-9);
  if (inside.length > 1) return inside;
  return [found.findLast(({ at }) => at <= low), found.find(({ at }) => at >= high)]; // the two around
}

// The points of a line; `smooth` is their exponential moving average, without bias at its beginning. What lies rows ago
// counts as little in a sparse curve as in a dense one.
function pointsOf(view, { table, name }) {
  const { axes, rows, curves, links } = view.tables[table];
  const curve = curves[name] ?? { i: [] };
  const kept = links?.[name.startsWith("heldout") ? "heldout" : "train"] ?? {};
  let [sum, weight, before] = [0, 0, rows[curve.i[0]] - 1];
  return curve.i.map((row, k) => {
    const y = curve.y[k];
    const left = view.smooth ** (rows[row] - before);
    [sum, weight, before] = [left * sum + (1 - left) * y, left * weight + (1 - left), rows[row]];
    return { x: axes[view.axis]?.[row] ?? NaN, y, smooth: sum / weight, low: curve.low?.[k] ?? y, high: curve.high?.[k] ?? y, link: kept[row] };
  }).filter((p) => Number.isFinite(p.x) && (!view.zoom || (p.x >= view.zoom[0] && p.x <= view.zoom[1])));
}

function rangeOf(view) {
  const all = view.tables.flatMap((table) => table.axes[view.axis] ?? []).filter(Number.isFinite);
  return view.zoom ?? [least(all), most(all)];
}

const scaled = (view, value) => (view.log ? Math.log10(value) : value);
const can = (view, value) => !view.log || value > 0; // a logarithm has only what is above 0

// What a panel shows: its lines with their points, the range of y and its ticks.
function panelOf(view, figure) {
  const lines = JSON.parse(figure.dataset.lines).filter((line) => !view.hidden.has(line.label));
  for (const line of lines) line.points = pointsOf(view, line);
  const shown = (p) => (view.smooth ? [p.low, p.y, p.high, p.smooth] : [p.low, p.y, p.high]);
  const all = lines.flatMap((line) => line.points.flatMap(shown)).filter((y) => can(view, y)).map((y) => scaled(view, y));
  const fixed = "share" in figure.dataset && !view.log;
  let [low, high] = fixed || !all.length ? [0, 1] : [least(all), most(all)];
  const margin = fixed ? 0 : low === high ? Math.abs(low) * 0.1 || 0.5 : (high - low) * 0.05;
  [low, high] = [low - margin, high + margin];
  const marks = view.log ? powers(low, high) : ticks(low, high, [1, 2, 2.5, 5, 10]);
  return { lines, marks, low: Math.min(low, marks[0].at), high: Math.max(high, marks.at(-1).at) };
}

const pen = document.createElement("canvas").getContext("2d");
function widthOf(text) {
  pen.font = "11px system-ui, sans-serif"; // that of the style sheet
  return pen.measureText(text).width;
}

function draw(figure, view, { lines, marks, low, high }) {
  const [left, bottom] = [view.left, bottomOf(figure)];
  const width = Math.max(160, Math.round(figure.clientWidth - 20)); // drawn at its size, so that its text is not scaled
  const right = width - 8;
  const [x0, x1] = rangeOf(view);
  const toX = (value) => round(left + ((value - x0) / (x1 - x0 || 1)) * (right - left));
  const place = (value) => round(bottom - ((value - low) / (high - low || 1)) * (bottom - TOP));
  const along = ticks(x0, x1, [1, 2, 5, 10]);
  const axes = shape("g", { class: "axes" },
    ...marks.flatMap(({ at, label }) => [
      shape("line", { x1: left, x2: right, y1: place(at), y2: place(at), class: "grid" }),
      words(label, left - 6, place(at) + 3.5, "end")]),
    ...along.map(({ at, label }) => words(label, Math.min(toX(at), width - widthOf(label) / 2), bottom + 16)),
    words(view.axis, (left + right) / 2, bottom + 29));
  const series = lines.map((line) => {
    const inside = line.points.filter((p) => can(view, p.y));
    const path = (key) => inside.map((p) => `${toX(p.x)},${place(scaled(view, can(view, p[key]) ? p[key] : p.y))}`);
    const marks = inside.filter((p) => p.link || inside.length < 120).map((p) => {
      const mark = shape("circle", { cx: toX(p.x), cy: place(scaled(view, p.y)), r: p.link ? 3.5 : 2 });
      const said = `${line.label} ${short(p.y)} at ${short(p.x)}: its episodes`;
      return p.link ? shape("a", { href: p.link, class: "kept", tabindex: -1, "aria-label": said }, mark) : mark;
    });
    const banded = line.points.some((p) => p.low !== p.high);
    return shape("g", { class: `series s${line.colour % 8} d${(line.table % 2) + (Math.floor(line.table / 8) % 2) * 2}` },
      ...(banded ? [shape("polygon", { class: "band", points: [...path("high"), ...path("low").reverse()].join(" ") })] : []),
      shape("polyline", { class: view.smooth ? "line faint" : "line", points: path("y").join(" ") }),
      ...(view.smooth ? [shape("polyline", { class: "line", points: path("smooth").join(" ") })] : []), ...marks);
  });
  const said = `${figure.dataset.title}: arrow keys go along, Enter opens the episodes of a point`;
  const svg = shape("svg", { class: "chart", viewBox: `0 0 ${width} ${bottom + 32}`, role: "group", tabindex: 0, "aria-label": said },
    axes, ...series, shape("rect", { class: "zoom", y: TOP, height: bottom - TOP, width: 0 }),
    shape("g", { class: "hover" }, shape("line", { y1: TOP, y2: bottom }), shape("rect", { rx: 4 }), shape("text", { y: TOP + 12 })));
  const before = figure.querySelector("svg.chart");
  const focused = before === document.activeElement;
  before?.remove();
  figure.append(svg);
  if (focused) svg.focus();
  const xs = [...new Set(lines.flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
  figure.plot = { view, lines, xs, toX, width, fromX: (x) => x0 + ((x - left) / (right - left)) * (x1 - x0) };
  for (const button of figure.querySelectorAll("[data-curve]")) button.setAttribute("aria-pressed", !view.hidden.has(button.dataset.curve));
}

const figures = (section) => [...section.querySelectorAll("figure[data-lines]")].filter((figure) => figure.checkVisibility());
function drawAll() {
  for (const section of document.querySelectorAll(".curves")) {
    if (!section.checkVisibility()) continue;
    const view = viewOf(section);
    for (const control of section.querySelectorAll("[data-set]")) {
      control[control.type === "checkbox" ? "checked" : "value"] = view[control.dataset.set];
    }
    section.querySelector("[data-do=unzoom]").hidden = !view.zoom;
    for (const figure of figures(section)) figure.classList.toggle("large", view.large.has(figure.dataset.title));
    const panels = figures(section).map((figure) => [figure, panelOf(view, figure)]);
    const widest = most(panels.flatMap(([, { marks }]) => marks.map(({ label }) => widthOf(label))));
    view.left = Math.max(LEFT, Math.ceil(widest) + 8);
    for (const [figure, panel] of panels) draw(figure, view, panel);
    keep(section, view);
  }
}

// The hover line: in every panel at the same x, with the values of the nearest points there.
const closest = (xs, x) => xs.reduce((best, one) => (Math.abs(best - x) <= Math.abs(one - x) ? best : one), xs[0]);
function hover(section, x) {
  for (const { plot, ...figure } of figures(section).map((one) => ({ plot: one.plot, group: one.querySelector(".hover") }))) {
    figure.group.classList.toggle("on", x !== undefined);
    if (x === undefined) continue;
    const at = plot.toX(x);
    const side = at > plot.width * 0.55 ? -12 : 12;
    const values = plot.lines.flatMap((line) => {
      const near = closest(line.points.map((p) => p.x), x);
      const point = line.points.find((p) => p.x === near && Math.abs(plot.toX(near) - at) < 12);
      if (!point) return [];
      const smoothed = plot.view.smooth ? ` (smoothed ${short(point.smooth)})` : "";
      const swatch = shape("tspan", { class: `s${line.colour % 8}` }, "■ ");
      return [shape("tspan", { x: side, dy: 15 }, swatch, `${line.label} ${short(point.y)}${smoothed}`)];
    });
    const text = figure.group.querySelector("text");
    figure.group.setAttribute("transform", `translate(${at})`);
    text.setAttribute("x", side);
    text.setAttribute("text-anchor", side < 0 ? "end" : "start");
    text.replaceChildren(`${plot.view.axis} ${short(x)}`, ...values);
    const box = text.getBBox();
    const card = { x: box.x - 6, y: box.y - 4, width: box.width + 12, height: box.height + 8 };
    for (const [key, value] of Object.entries(card)) figure.group.querySelector("rect").setAttribute(key, value);
  }
}
const figureOf = (event) => event.target.closest?.(".curves svg.chart")?.closest("figure");
function xAt(figure, event) {
  const box = figure.querySelector("svg.chart").getBoundingClientRect();
  return closest(figure.plot.xs, figure.plot.fromX(((event.clientX - box.left) / box.width) * figure.plot.width));
}

let drag = null; // where a zoom began
document.addEventListener("pointerdown", (event) => {
  const figure = figureOf(event);
  if (figure && event.button === 0) drag = { figure, from: xAt(figure, event), begin: event.clientX };
});
document.addEventListener("pointermove", (event) => {
  const figure = drag?.figure ?? figureOf(event);
  if (!figure) return document.querySelectorAll(".curves").forEach((section) => hover(section));
  const x = xAt(figure, event);
  hover(figure.closest(".curves"), x);
  if (!drag) return;
  const [a, b] = [drag.from, x].map(figure.plot.toX).sort((p, q) => p - q);
  for (const [key, value] of [["x", a], ["width", b - a]]) figure.querySelector(".zoom").setAttribute(key, value);
});
document.addEventListener("pointerup", (event) => {
  if (!drag) return;
  const { figure, from, begin } = drag;
  const to = xAt(figure, event);
  drag = null;
  if (Math.abs(event.clientX - begin) < 8 || to === from) return;
  figure.plot.view.zoom = [from, to].sort((a, b) => a - b);
  drawAll();
});
document.addEventListener("dragstart", (event) => { if (figureOf(event)) event.preventDefault(); });
document.addEventListener("dblclick", (event) => {
  if (figureOf(event)) figureOf(event).plot.view.zoom = null;
  drawAll();
});
document.addEventListener("keydown", (event) => {
  const figure = figureOf(event);
  const way = { ArrowRight: 1, ArrowLeft: -1, Enter: 0 }[event.key];
  if (!figure || way === undefined) return;
  const { plot } = figure;
  if (way) plot.at = Math.min(Math.max((plot.at ?? -1) + way, 0), plot.xs.length - 1);
  hover(figure.closest(".curves"), plot.xs[plot.at]);
  const link = plot.lines.flatMap((line) => line.points).find((p) => p.link && p.x === plot.xs[plot.at])?.link;
  if (!way && link) location.href = link;
  event.preventDefault();
  event.stopImmediatePropagation();
}, true);

// --- settings and downloads
document.addEventListener("input", ({ target }) => {
  const { set } = target.dataset;
  if (!set) return;
  const value = { axis: target.value, smooth: Number(target.value), log: target.checked }[set];
  Object.assign(viewOf(target.closest(".curves")), { [set]: value }, set === "axis" && { zoom: null });
  drawAll();
});
document.addEventListener("click", (event) => {
  const button = event.target.closest(".curves button");
  if (!button) return;
  const view = viewOf(button.closest(".curves"));
  const name = button.dataset.curve;
  if (name !== undefined && !view.hidden.delete(name)) view.hidden.add(name);
  if (button.dataset.do === "large") {
    const { title } = button.closest("figure").dataset;
    if (!view.large.delete(title)) view.large.add(title);
  }
  if (button.dataset.do === "unzoom") view.zoom = null;
  if (button.dataset.do === "csv") save("curves.csv", new Blob([csv(view.tables)], { type: "text/csv" }));
  if (button.dataset.do === "png") picture(button.closest("figure"));
  drawAll();
});

function csv(tables) {
  const names = [...new Set(tables.flatMap(({ axes, curves }) => [...Object.keys(axes), ...Object.keys(curves)]))];
  const cell = (value) => (/[",\n]/.test(value ?? "") ? `"${String(value).replaceAll('"', '""')}"` : (value ?? ""));
  const lines = tables.flatMap(({ name, axes, curves }) => {
    const columns = { ...axes };
    for (const [metric, { i, y }] of Object.entries(curves)) if (!axes[metric]) columns[metric] = Object.fromEntries(i.map((row, k) => [row, y[k]]));
    return Object.values(axes)[0].map((_, row) => [name, ...names.map((one) => columns[one]?.[row])]);
  });
  return [["run", ...names], ...lines].map((line) => line.map(cell).join(",")).join("\n") + "\n";
}

function save(name, blob) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const STYLED = ["fill", "stroke", "stroke-width", "opacity", "font-family", "font-size"]; // a picture has no style sheet
async function picture(figure) {
  const svg = figure.querySelector("svg.chart").cloneNode(true);
  const [made, shown] = [svg, figure.querySelector("svg.chart")].map((one) => [...one.querySelectorAll("*")]);
  made.forEach((one, k) => STYLED.forEach((key) => one.setAttribute(key, getComputedStyle(shown[k])[key])));
  const ink = getComputedStyle(figure);
  const names = figure.plot.lines.map((line, k) => shape("tspan", { fill: svg.querySelectorAll(".series>polyline:last-of-type")[k].getAttribute("stroke") }, `   ${line.label}`));
  svg.append(shape("text", { x: 6, y: -6, "font-family": "sans-serif", "font-size": 12, fill: ink.color }, figure.dataset.title, ...names));
  const high = bottomOf(figure) + 52;
  const size = { width: 3 * figure.plot.width, height: 3 * high };
  for (const [key, value] of Object.entries({ ...size, viewBox: `0 -20 ${figure.plot.width} ${high}`, xmlns: svg.namespaceURI })) svg.setAttribute(key, value);
  svg.querySelector(".hover").remove();
  const image = Object.assign(new Image(), { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}` });
  await image.decode();
  const canvas = Object.assign(document.createElement("canvas"), size);
  const pen = canvas.getContext("2d");
  pen.fillStyle = ink.backgroundColor;
  pen.fillRect(0, 0, size.width, size.height);
  pen.drawImage(image, 0, 0);
  canvas.toBlob((blob) => save(`${figure.dataset.title}.png`, blob));
}

for (const moment of ["followed", "toggle"]) document.addEventListener(moment, drawAll, true);
for (const moment of ["hashchange", "resize"]) addEventListener(moment, drawAll);
drawAll();
