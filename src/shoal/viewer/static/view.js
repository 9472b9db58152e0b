// What the pages do beyond links: theme, keys, copying, the value under the pointer, and following a run that goes on.
const root = document.documentElement;
const isStatic = document.body.hasAttribute("data-static");
root.classList.add("js");

function remembered(key, value) {
  try {
    if (value === undefined) return localStorage.getItem(key);
    localStorage.setItem(key, value);
  } catch { /* a file opened from disk may have no storage */ }
  return null;
}

function toggleTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  remembered("shoal-theme", root.dataset.theme);
}
function toggleColour() {
  root.dataset.colour = root.dataset.colour === "advantage" ? "probability" : "advantage";
  remembered("shoal-colour", root.dataset.colour);
}
root.dataset.colour = new URLSearchParams(location.search).get("colour") || remembered("shoal-colour") || "probability";
const theme = new URLSearchParams(location.search).get("theme") || remembered("shoal-theme");
if (theme === "dark" || theme === "light") root.dataset.theme = theme;

function toast(text) {
  const said = document.createElement("div");
  said.className = "toast";
  said.textContent = text;
  document.body.append(said);
  setTimeout(() => said.remove(), 1400);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast("copied");
}

function toggleHelp() {
  const keys = document.getElementById("keys");
  if (keys.open) keys.close(); else keys.showModal();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.copy !== undefined) copy(button.dataset.copy);
  if (button.dataset.do === "theme") toggleTheme();
  if (button.dataset.do === "colour") toggleColour();
  if (button.dataset.do === "help") toggleHelp();
});

// --- keys
const shown = () => (isStatic ? document.querySelector(".page.shown") : document);

function move(step) {
  const lines = [...shown().querySelectorAll("tr:has(.row-link), article.turn")];
  if (!lines.length) return;
  const at = lines.findIndex((line) => line.classList.contains("at") || line.classList.contains("chosen"));
  lines.forEach((line) => line.classList.remove("at", "chosen"));
  const next = lines[Math.min(Math.max(at + step, 0), lines.length - 1)];
  next.classList.add(next.matches("article") ? "chosen" : "at");
  next.scrollIntoView({ block: "nearest" });
}

function go(way) {
  const link = isStatic ? shown().dataset[way] : document.querySelector(`link[rel=${way}]`)?.href;
  if (link) location.href = link;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  const home = document.querySelector(".bar a")?.href;
  const act = {
    j: () => move(1), k: () => move(-1), ArrowDown: null, n: () => go("next"), p: () => go("prev"), u: () => go("up"),
    h: () => { if (isStatic) location.hash = "#runs"; else if (home) location.href = home; },
    t: toggleTheme, a: toggleColour, "?": toggleHelp,
    c: () => { const text = shown().querySelector("[data-copy]")?.dataset.copy; if (text) copy(text); },
    Enter: () => shown().querySelector("tr.at .row-link")?.click(),
  }[event.key];
  if (act && !(event.key === "Enter" && event.target.closest("a, button, summary"))) {
    event.preventDefault();
    act();
  }
});

// --- the value under the pointer
document.addEventListener("pointermove", (event) => {
  document.querySelectorAll(".tip").forEach((tip) => tip.remove());
  document.querySelectorAll("circle.near").forEach((circle) => circle.classList.remove("near"));
  const chart = event.target.closest?.("svg.chart:not(.histogram)");
  if (!chart) return;
  let nearest = null;
  let least = 40;
  for (const circle of chart.querySelectorAll("circle")) {
    const box = circle.getBoundingClientRect();
    const x = box.left + box.width / 2 - event.clientX;
    const y = box.top + box.height / 2 - event.clientY;
    const distance = Math.hypot(x, y / 3);
    if (distance < least) [least, nearest] = [distance, circle];
  }
  if (!nearest) return;
  nearest.classList.add("near");
  const figure = chart.closest("figure");
  const frame = figure.getBoundingClientRect();
  const box = nearest.getBoundingClientRect();
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.textContent = nearest.querySelector("title").textContent;
  figure.append(tip);
  const half = tip.offsetWidth / 2;
  const left = Math.min(Math.max(box.left + box.width / 2 - frame.left, half), frame.width - half);
  tip.style.left = `${left}px`;
  tip.style.top = `${box.top - frame.top}px`;
});

// --- a static file: one section at a time
function showSection() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const pages = [...document.querySelectorAll(".page")];
  const page = pages.find((one) => one.id === wanted) || pages[0];
  pages.forEach((one) => one.classList.toggle("shown", one === page));
  document.title = `${page.dataset.title} · shoal`;
  scrollTo(0, 0);
}
if (isStatic) {
  addEventListener("hashchange", showSection);
  showSection();
}

// --- following a run
let pressed = false; // what is under a pressed pointer stays, or its click would be lost
addEventListener("pointerdown", () => { pressed = true; }, true);
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(() => { pressed = false; }), true);

async function follow() {
  const main = document.getElementById("main");
  if (document.visibilityState === "visible" && !document.querySelector("dialog[open]")) {
    try {
      const answer = await fetch(location.href, { headers: { "x-have": main.dataset.version } });
      const text = answer.status === 200 ? await answer.text() : "";
      if (text && !pressed && !main.querySelector("form.changed, form :focus")) {
        const page = new DOMParser().parseFromString(text, "text/html");
        const next = page.getElementById("main");
        const open = [...main.querySelectorAll("details")].map((one) => one.open);
        const at = [...main.querySelectorAll("tr")].findIndex((line) => line.classList.contains("at"));
        main.replaceChildren(...next.childNodes);
        main.dataset.version = next.dataset.version;
        const folds = [...main.querySelectorAll("details")];
        if (folds.length === open.length) folds.forEach((one, k) => { one.open = open[k]; });
        if (at >= 0) main.querySelectorAll("tr")[at]?.classList.add("at");
        main.dispatchEvent(new CustomEvent("followed", { bubbles: true }));
      }
    } catch { /* the server ended, or is busy: the page stays as it is */ }
  }
  setTimeout(follow, 1500);
}
if (!isStatic && document.getElementById("main").dataset.version) setTimeout(follow, 1500);
