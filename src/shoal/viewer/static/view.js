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

const CONTROLS = "a, button, input, select, summary, svg[tabindex], .wide";
let wait = 1500; // longer while nobody answers, so that failed requests do not pile up

function lost(text) {
  const said = document.getElementById("lost");
  said.hidden = !text;
  said.textContent = text;
  wait = text ? Math.min(wait * 2, 30000) : 1500;
}

// What a fold is called: its title without the numbers in it, and where it stands.
function called(fold) {
  const title = fold.querySelector("summary").textContent.replace(/[\d.,]+|s\b/g, "");
  return [fold.closest("figure")?.dataset.title, fold.closest("article")?.id, title].join(" ");
}

async function follow() {
  const main = document.getElementById("main");
  if (document.visibilityState === "visible" && !document.querySelector("dialog[open]")) {
    try {
      const answer = await fetch(location.href, { headers: { "x-have": main.dataset.version }, signal: AbortSignal.timeout(20000) });
      const text = answer.status === 200 ? await answer.text() : "";
      lost(answer.status === 403 ? "This address is not valid any more: use the one that shoal view printed." : "");
      if (text && !pressed && !main.querySelector("form.changed, form :focus")) {
        const page = new DOMParser().parseFromString(text, "text/html");
        const next = page.getElementById("main");
        const open = new Map();
        for (const one of main.querySelectorAll("details")) open.set(called(one), [...(open.get(called(one)) ?? []), one.open]);
        const at = [...main.querySelectorAll("tr")].findIndex((line) => line.classList.contains("at"));
        const focus = [...main.querySelectorAll(CONTROLS)].indexOf(document.activeElement);
        main.replaceChildren(...next.childNodes);
        main.dataset.version = next.dataset.version;
        for (const one of main.querySelectorAll("details")) one.open = open.get(called(one))?.shift() ?? one.open;
        if (at >= 0) main.querySelectorAll("tr")[at]?.classList.add("at");
        main.dispatchEvent(new CustomEvent("followed", { bubbles: true }));
        if (focus >= 0) main.querySelectorAll(CONTROLS)[focus]?.focus({ preventScroll: true });
      }
    } catch {
      lost("Connection lost: the server has ended or is busy. This page goes on when it answers again.");
    }
  }
  setTimeout(follow, wait);
}
if (!isStatic && document.getElementById("main").dataset.version) setTimeout(follow, wait);
