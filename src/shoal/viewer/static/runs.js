// The list of runs: words and conditions that find some, columns of settings and metrics, sorted, grouped, chosen to
// compare. All of it stands in the address.
const isStatic = document.body.hasAttribute("data-static");
const asked = new URLSearchParams(location.search);
const several = (name) => new Set((asked.get(name) ?? "").split(",").filter(Boolean));
const listing = { find: asked.get("find") ?? "", order: asked.get("order") ?? "", group: asked.get("group") ?? "", columns: several("columns"), runs: several("runs") };

function made(name, properties, ...inside) {
  const { dataset, ...plain } = properties;
  const one = Object.assign(document.createElement(name), plain);
  Object.assign(one.dataset, dataset);
  one.append(...inside);
  return one;
}

// What a run has under a name: a column of the list, a metric, a setting by its whole name or the end of it.
function valueOf(line, name) {
  const cell = [...line.cells].find((one) => one.dataset.name === name);
  if (cell) return cell.dataset.value ?? "";
  const { shared } = line.closest("table").dataset;
  line.known ??= { ...JSON.parse(shared)[valueOf(line, "kind")], ...JSON.parse(line.dataset.known) };
  const key = name in line.known ? name : Object.keys(line.known).find((one) => one.endsWith(`.${name}`));
  return key === undefined ? "" : String(line.known[key]);
}

const order = (a, b) => (a === "" || b === "" || isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
const holds = { "=": (n) => n === 0, "!=": (n) => n !== 0, "<": (n) => n < 0, ">": (n) => n > 0, "<=": (n) => n <= 0, ">=": (n) => n >= 0 };
function matches(line, word) {
  const [, name, sign, wanted] = word.match(/^([^=<>!]+)(!=|<=|>=|=|<|>)(.+)$/) ?? [];
  if (!sign) return line.textContent.toLowerCase().includes(word);
  const value = valueOf(line, name).toLowerCase();
  return (value !== "" || sign === "!=") && holds[sign](order(value, wanted));
}

const short = (value) => (value === "" || isNaN(value) ? value : String(Number(Number(value).toPrecision(4))));
function addColumns(table) {
  table.querySelectorAll(".more").forEach((one) => one.remove());
  for (const name of listing.columns) {
    const at = [...table.tHead.rows[0].cells].findIndex((one) => one.textContent === "curve");
    const values = [...table.tBodies[0].rows].map((line) => valueOf(line, name));
    const side = values.some(isNaN) ? "more" : "more n"; // numbers stand on the right
    const [sort, drop] = [made("button", { dataset: { sort: name }, title: name }, name.split(".").at(-1)), made("button", { dataset: { drop: name }, ariaLabel: `without ${name}` }, "×")];
    table.tHead.rows[0].cells[at].before(made("th", { className: side }, sort, " ", drop));
    [...table.tBodies[0].rows].forEach((line, k) => {
      line.cells[at].before(made("td", { className: side, dataset: { name, value: values[k] } }, short(values[k]) || "–"));
    });
  }
}

function list() {
  for (const table of document.querySelectorAll("table.runs")) {
    table.querySelectorAll("tr.heading").forEach((one) => one.remove());
    addColumns(table);
    const words = listing.find.toLowerCase().split(/\s+/).filter(Boolean);
    const lines = [...table.tBodies[0].rows];
    const names = words.map((word) => word.match(/^([^=<>!]+)(=|!=|<|>)/)?.[1]).filter(Boolean);
    const unknown = names.filter((name) => lines.every((line) => valueOf(line, name) === ""));
    const said = document.getElementById("unknown");
    if (said) said.textContent = unknown.length ? `no run has ${unknown.join(", ")}` : "";
    for (const line of lines) {
      line.hidden = !words.every((word) => matches(line, word));
      const tick = line.querySelector("[data-run]");
      if (tick) tick.checked = listing.runs.has(tick.dataset.run);
    }
    const name = listing.order.replace(/^-/, "");
    const way = listing.order.startsWith("-") ? -1 : 1;
    const by = (key, up) => (a, b) => {
      const [one, other] = [valueOf(a, key), valueOf(b, key)];
      return (one === "") - (other === "") || up * order(one, other); // empty ones last
    };
    if (name) lines.sort(by(name, way));
    if (listing.group) lines.sort(by(listing.group, 1));
    if (name || listing.group) table.tBodies[0].append(...lines);
    let before;
    for (const line of listing.group ? lines.filter((one) => !one.hidden) : []) {
      const value = valueOf(line, listing.group);
      const count = lines.filter((one) => !one.hidden && valueOf(one, listing.group) === value).length;
      const title = made("th", { colSpan: line.cells.length, scope: "rowgroup" }, `${listing.group} ${short(value) || "–"}, ${count} run${count === 1 ? "" : "s"}`);
      if (value !== before) line.before(made("tr", { className: "heading" }, title));
      before = value;
    }
    for (const head of table.querySelectorAll("[data-sort]")) {
      head.closest("th").setAttribute("aria-sort", head.dataset.sort !== name ? "none" : way > 0 ? "ascending" : "descending");
    }
  }
  for (const [id, value] of [["find", listing.find], ["group", listing.group]]) {
    const field = document.getElementById(id);
    if (field && field.value !== value) field.value = value;
  }
  const compare = document.querySelector(".tools a[href*=compare]");
  if (!document.querySelector("table.runs") || isStatic) return;
  if (compare) compare.search = listing.runs.size ? `runs=${[...listing.runs].join(",")}` : "";
  const address = new URL(location.href);
  for (const [key, value] of Object.entries(listing)) {
    const text = typeof value === "string" ? value : [...value].join(",");
    if (text) address.searchParams.set(key, text); else address.searchParams.delete(key);
  }
  if (address.href !== location.href) history.replaceState(null, "", address);
}

document.addEventListener("input", ({ target }) => {
  if (target.id === "find" || target.id === "group") listing[target.id] = target.value;
  else if (target.dataset.run) listing.runs[target.checked ? "add" : "delete"](target.dataset.run);
  else return;
  list();
});
document.addEventListener("change", ({ target }) => {
  if (target.id !== "column" || !target.value) return;
  listing.columns.add(target.value);
  target.value = "";
  list();
});
document.addEventListener("click", (event) => {
  const { sort, drop } = event.target.closest("[data-sort], [data-drop]")?.dataset ?? {};
  if (sort !== undefined) listing.order = listing.order === sort ? `-${sort}` : sort;
  if (drop !== undefined) listing.columns.delete(drop);
  if (sort !== undefined || drop !== undefined) list();
});
document.addEventListener("followed", list);
list();
