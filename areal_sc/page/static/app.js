// The frame: which view of which run is shown, and that it follows the run.

import { address, change, linkTo } from "./address.js";
import { drawSeen, onScheme, release, resetZoom } from "./charts.js";
import { choice, el, field, shown, table } from "./dom.js";
import { get, isFile, listen, sharedAddress } from "./source.js";
import { promptParts, promptsParts, showPrompt, showPrompts } from "./view_prompts.js";
import { fleetParts, showFleet } from "./view_fleet.js";
import { groupParts, groupsParts, showGroup, showGroups } from "./view_groups.js";
import { rowParts, showRow } from "./view_row.js";
import { rowsParts, showRows } from "./view_rows.js";
import { runParts, showRuns } from "./view_run.js";
import { showTime, timeParts } from "./view_time.js";

// name in the address -> title, tab that it stands under, what makes it, parts of a run that it shows
const VIEWS = {
  run: { title: "Run", tab: "run", show: showRuns, parts: runParts, ofAll: true },
  time: { title: "Time line", tab: "time", show: showTime, parts: timeParts },
  rows: { title: "Rows", tab: "rows", show: showRows, parts: rowsParts },
  row: { title: "Row", tab: "rows", show: showRow, parts: rowParts },
  prompts: { title: "Prompts", tab: "prompts", show: showPrompts, parts: promptsParts },
  prompt: { title: "Prompt", tab: "prompts", show: showPrompt, parts: promptParts },
  groups: { title: "Lineage", tab: "groups", show: showGroups, parts: groupsParts },
  group: { title: "Group", tab: "groups", show: showGroup, parts: groupParts },
  fleet: { title: "Fleet", tab: "fleet", show: showFleet, parts: fleetParts },
};
const KEYS = [
  ["1 to 6", "the views, as they stand above"],
  ["/", "search, in Rows"],
  ["j, k or ↓, ↑", "the next and the previous row; in a row also →, ←"],
  ["Enter", "opens a row"],
  ["g, p, Esc", "from a row to its group, to its prompt, and back"],
  ["+, −, ←, →, Home", "zoom and move the time line; all of it"],
  ["?", "this list; Esc closes it"],
];
const SLOW_MS = 300; // after which a view that is not there says that it loads
const TABS = ["run", "time", "rows", "groups", "fleet", "prompts"];

const header = el("header", {});
const main = el("main", { id: "main" });
const live = el("span", { class: "live", role: "status" });
const busy = el("span", { class: "loading", role: "status" });
let turn = 0;
let body = null; // what the view has made
let waiting = false; // for a change that came while the view was being made
let runs = [];

function frame(view, run) {
  const copy = el("button", { type: "button", on: { click: () => copyAddress(copy) } }, "copy link");
  const parts = [
    el("h1", {}, "areal_sc"),
    el(
      "nav",
      { "aria-label": "views" },
      TABS.map((tab) =>
        el("a", { href: linkTo(tab, VIEWS[tab].ofAll ? {} : { run: run.name }), "aria-current": VIEWS[view].tab === tab ? "page" : null }, VIEWS[tab].title),
      ),
    ),
    runs.length > 1 && !VIEWS[view].ofAll
      ? field("run", choice("run", runs.map((it) => [it.name, it.name]), run.name, (name) => (location.hash = linkTo(VIEWS[view].tab, { run: name }))))
      : null,
    busy,
    live,
    isFile ? null : copy,
    el("button", { type: "button", "aria-label": "keys", title: "keys", on: { click: showKeys } }, "?"),
  ];
  header.replaceChildren(...parts.filter(Boolean));
  document.title = `${VIEWS[view].title}: ${VIEWS[view].ofAll ? runs.map((it) => it.name).join(", ") : run.name}`;
}

function showKeys() {
  const close = el("button", { type: "button", on: { click: () => list.close() } }, "close");
  const list = el("dialog", { class: "keys", "aria-label": "keys", on: { close: () => list.remove() } }, table(["key", "does"], KEYS, { label: "keys" }), close);
  document.body.append(list);
  list.showModal();
}

async function copyAddress(button) {
  try {
    await navigator.clipboard.writeText(sharedAddress());
    button.textContent = "copied";
  } catch {
    prompt("The address of what is shown:", sharedAddress());
  }
  setTimeout(() => (button.textContent = "copy link"), 1500);
}

/** Shows what the address says; `isSame`: it shows it already, and something has changed. */
async function show(isSame = false) {
  const mine = ++turn;
  const { view: asked, words } = address();
  const view = asked in VIEWS ? asked : "run";
  const run = words.run ? runs.find((it) => it.name === words.run) : runs[0];
  let made;
  if (!isSame) body?.stop?.();
  const slow = isSame ? 0 : setTimeout(() => mine === turn && sayLoading(true), SLOW_MS);
  if (run === undefined) {
    frame("run", runs[0]);
    made = failure(`There is no run of the name ${words.run} here.`);
  } else {
    if (!isSame) frame(view, run);
    try {
      made = await VIEWS[view].show({ runs, run, words, again: () => show(true) });
    } catch (error) {
      made = failure(error.message);
    }
  }
  clearTimeout(slow);
  if (mine !== turn) return;
  sayLoading(false);
  const { scrollX: left, scrollY: top } = window;
  const open = new Set([...main.querySelectorAll("details[open]")].map((it) => it.dataset.name));
  const focused = isSame && main.contains(document.activeElement) ? document.activeElement.name : "";
  if (isSame) body?.stop?.();
  else resetZoom();
  release(main);
  main.replaceChildren(made);
  body = made;
  for (const it of isSame ? main.querySelectorAll("details") : []) it.open = open.has(it.dataset.name);
  window.scrollTo(isSame ? left : 0, isSame ? top : 0);
  drawSeen(main);
  if (focused) main.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

/** Says whether a view is on its way; the one before stays until it is there. */
function sayLoading(isLoading) {
  busy.textContent = isLoading ? "loading …" : "";
  main.classList.toggle("stale", isLoading);
}

function failure(text) {
  return el("p", { class: "failure", role: "alert" }, shown(text));
}

function follow(changed) {
  const { view, words } = address();
  const { parts, ofAll } = VIEWS[view] || VIEWS.run;
  const isShown = ({ index, name }) => ofAll || name === (words.run || runs[0].name);
  const isTouched = runs.some((run) => isShown(run) && (changed[run.index] || []).some((part) => parts.includes(part)));
  if (!isTouched || waiting) return;
  if (document.hidden || document.activeElement?.matches("main select") || (body?.isQuiet && !body.isQuiet())) {
    body?.onChange?.();
    return;
  }
  waiting = true;
  show(true).finally(() => (waiting = false));
}

async function begin() {
  document.body.append(el("a", { class: "skip", href: "#main", on: { click: (event) => (event.preventDefault(), main.focus()) } }, "to the content"), header, main);
  main.tabIndex = -1;
  try {
    runs = (await get("/api/runs")).map((run, index) => ({ ...run, index }));
  } catch (error) {
    main.replaceChildren(failure(error.message));
    return;
  }
  addEventListener("hashchange", () => show());
  addEventListener("visibilitychange", () => document.hidden || show(true));
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/" && document.getElementById("search")) {
      event.preventDefault();
      document.getElementById("search").focus();
    } else if (event.key === "?") {
      event.preventDefault();
      if (!document.querySelector("dialog")) showKeys();
    } else if (/^[1-6]$/.test(event.key)) {
      location.hash = header.querySelectorAll("nav a")[event.key - 1].hash;
    } else {
      body?.onKey?.(event);
    }
  });
  onScheme(() => show(true));
  await show();
  live.textContent = isFile ? "a file, not live" : "";
  listen(follow, (isHeard) => {
    live.textContent = isHeard ? "connected" : "not connected: the server does not answer";
    live.classList.toggle("lost", !isHeard);
  });
}

begin();
