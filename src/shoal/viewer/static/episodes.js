// Episodes, groups and samples: folding and playing turns, the member that one came from, screenshots that enlarge.
const root = document.documentElement;
const page = () => document.querySelector(".page.shown") ?? document.getElementById("main");
const turnsOf = () => [...page().querySelectorAll("article.turn")];

function toggleFolds() {
  const folds = turnsOf().map((turn) => turn.querySelector("details"));
  const open = !folds.some((fold) => fold.open);
  for (const fold of folds) fold.open = open;
}

function showCompact(on) {
  root.toggleAttribute("data-compact", on);
  document.querySelectorAll("[data-do=compact]").forEach((button) => button.setAttribute("aria-pressed", String(on)));
}

// --- the player: the picture or text of one turn after another
let playing = null;
let shownTurn = 1;

function showTurn(number) {
  const player = page().querySelector(".player");
  const turns = turnsOf();
  const turn = turns[number - 1];
  if (!player || !turn) return;
  shownTurn = number;
  player.querySelector("input").value = number;
  const seen = turn.querySelector("img.shot, pre.saw").cloneNode(true);
  const did = turn.querySelector(".did").cloneNode(true);
  did.hidden = false;
  player.querySelector(".stage").replaceChildren(seen, did);
  player.querySelector("output").textContent = `turn ${number} of ${turns.length}`;
  turns.forEach((one) => one.classList.toggle("chosen", one === turn));
}

function stop() {
  clearInterval(playing);
  playing = null;
  document.querySelectorAll("[data-do=play]").forEach((button) => { button.textContent = "▶ play"; });
}

function play() {
  if (playing) return stop();
  const slider = page().querySelector(".player input");
  const last = Number(slider.max);
  showTurn(Number(slider.value) === last ? 1 : Number(slider.value));
  page().querySelector("[data-do=play]").textContent = "❚❚ stop";
  playing = setInterval(() => {
    const next = Number(page().querySelector(".player input")?.value ?? last) + 1;
    if (next > last) stop(); else showTurn(next);
  }, 600);
}

// --- what a page shows first
function prepare() {
  stop();
  markFound();
  showCompact(root.hasAttribute("data-compact"));
  if (page().querySelector(".player")) {
    const chosen = turnsOf().findIndex((turn) => turn.matches(".chosen, :target"));
    showTurn(Math.max(chosen, 0) + 1);
    if (chosen < 0) turnsOf()[0].classList.remove("chosen");
  }
  const head = page().querySelector("table.group th.chosen");
  if (head) {
    const box = head.closest(".sides");
    const still = [...box.querySelectorAll("thead th")].filter((one) => getComputedStyle(one).left !== "auto").at(-1);
    const edge = still.getBoundingClientRect().right; // of the columns that stay: the turns and the best
    if (head !== still) box.scrollLeft += head.getBoundingClientRect().left - edge - 8;
  }
  const hash = decodeURIComponent(location.hash.slice(1));
  if (hash) document.getElementById(hash)?.closest("tr")?.classList.add("at");
}

// --- what was searched for, marked in the turns
function markFound() {
  const text = new URLSearchParams(location.search).get("text")?.toLowerCase();
  if (!text || !window.Highlight || !turnsOf().length) return;
  const found = new Highlight();
  for (const turn of turnsOf()) {
    const walk = document.createTreeWalker(turn, NodeFilter.SHOW_TEXT);
    for (let node = walk.nextNode(); node; node = walk.nextNode()) {
      const said = node.data.toLowerCase();
      for (let at = said.indexOf(text); at >= 0; at = said.indexOf(text, at + text.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + text.length);
        found.add(range);
      }
    }
  }
  CSS.highlights.set("found", found);
}

// --- a screenshot over the whole window, and back
function enlarge(picture) {
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  const close = document.createElement("button");
  close.textContent = "close";
  const large = picture.cloneNode();
  large.removeAttribute("class");
  large.removeAttribute("tabindex");
  dialog.append(close, large);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { dialog.remove(); picture.focus(); });
  document.body.append(dialog);
  dialog.showModal();
}

const acts = { fold: toggleFolds, play, compact: () => showCompact(!root.hasAttribute("data-compact")) };

document.addEventListener("click", (event) => {
  const wanted = event.target.closest("[data-do]")?.dataset.do;
  if (acts[wanted]) acts[wanted]();
  if (wanted === "jump") page().querySelector(".border")?.scrollIntoView();
  const picture = event.target.closest("img.enlarges");
  if (picture) enlarge(picture);
});
document.addEventListener("input", (event) => {
  event.target.closest("form")?.classList.add("changed"); // a page that follows its run leaves it as it is
  if (!event.target.matches(".player input")) return;
  stop();
  showTurn(Number(event.target.value));
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  if (event.key === "f" && turnsOf().length) toggleFolds();
  if (event.key === "v") acts.compact();
  if (event.key === "Enter" && event.target.matches("img.enlarges")) enlarge(event.target);
});
document.addEventListener("click", (event) => { // a turn that a link leads to is open
  const link = event.target.closest("a[href^='#turn-']");
  if (link) document.querySelector(`${link.getAttribute("href")} > details`).open = true;
});
// A page that follows its run was written anew: it stays at its turn, and where it was scrolled to.
let scrolled = [0, 0];
document.addEventListener("scroll", ({ target }) => {
  if (target.classList?.contains("sides")) scrolled = [target.scrollLeft, target.scrollTop];
}, true);
document.addEventListener("followed", () => {
  showTurn(shownTurn);
  markFound();
  page().querySelector(".sides")?.scrollTo(...scrolled);
  showCompact(root.hasAttribute("data-compact"));
  if (playing) page().querySelector("[data-do=play]").textContent = "❚❚ stop";
});
addEventListener("hashchange", prepare);
addEventListener("load", prepare); // when the style is there, too: it decides where a column stands
