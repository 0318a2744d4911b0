// What the model wrote: rows that are searched, filtered and sorted by the server.

import { change, goTo, linkTo } from "./address.js";
import { choice, el, field, notes, number, short, shown } from "./dom.js";
import { get, isFile } from "./source.js";
import { span } from "./view_run.js";

export const rowsParts = ["rows"];

const SORTS = [
  ["-step", "newest first"],
  ["step", "oldest first"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-num_tokens", "longest"],
  ["num_tokens", "shortest"],
  ["-staleness", "stalest"],
  ["-last_version", "newest version"],
  ["first_version", "oldest version"],
];
const RANGES = ["reward", "num_tokens", "staleness", "version", "step", "group"];
const PLACES = [["", "any place"], ["best", "best of its group"], ["worst", "worst of its group"], ["equal", "all answers alike"]];

/** Rows that a reader goes through by keyboard, in the order in which the list showed them. */
export const listed = { run: "", offsets: [] };

export async function showRows({ run, words }) {
  const path = `/api/runs/${run.index}/rows`;
  const list = el("div", { class: "rows" });
  const more = el("button", { type: "button", hidden: true }, "more");
  const said = el("p", { class: "dim", role: "status" });
  const { run: _, ...asked } = words;
  let first = null;
  let isStopped = false;
  listed.run = run.name;
  listed.offsets = [];

  async function load(at, wanted) {
    more.hidden = true;
    let missing = wanted;
    while (missing > 0 && at !== null && !isStopped) {
      const found = await get(path, { ...asked, at, limit: missing });
      first ??= found;
      list.append(...found.rows.map((row) => rowCard(run, row, asked)));
      listed.offsets.push(...found.rows.map((row) => row.offset));
      missing -= found.rows.length;
      at = found.next;
      const searched = asked.text && at !== null ? `, ${short(at)} searched` : "";
      said.textContent = `${listed.offsets.length} shown of ${short(found.num_fitting)} that fit${searched}; ${short(found.num_rows)} rows in all`;
      if (asked.text && at !== null && missing > 0 && !list.isConnected && listed.offsets.length > 0) break; // the first hits are shown at once
    }
    more.hidden = at === null;
    more.onclick = () => load(at, 50).catch((error) => said.replaceChildren(error.message));
  }

  await load(0, 50);
  const root = el(
    "div",
    { on: { keydown: keys(list) } },
    notes(first.damage, "damage"),
    isFile ? el("p", { class: "dim" }, "The newest rows of the run; the command `page` searches all of them.") : filters(words, first.metrics),
    said,
    list,
    more,
  );
  root.stop = () => {
    isStopped = true;
  };
  root.isQuiet = () => listed.offsets.length <= 50 && scrollY < 200 && !root.contains(document.activeElement);
  return root;
}

function filters(words, metrics) {
  const apply = (event) => {
    event.preventDefault();
    const form = new FormData(event.target.closest("form"));
    change(Object.fromEntries([...form].map(([name, value]) => [name, String(value).trim()])));
  };
  const text = (name, placeholder, attributes = {}) => el("input", { name, value: words[name] || "", placeholder, size: 9, ...attributes });
  const sorts = [...SORTS, ...metrics.flatMap((name) => [[`-metrics.${name}`, `highest ${name}`], [`metrics.${name}`, `lowest ${name}`]])];
  return el(
    "form",
    { class: "controls", on: { submit: apply } },
    field("search", text("text", "in prompts and answers", { type: "search", size: 28, id: "search" })),
    field("order", choice("sort", sorts, words.sort || "-step", (sort) => change({ sort }))),
    field("place", choice("place", PLACES, words.place || "", (place) => change({ place }))),
    [...RANGES, ...metrics.map((name) => `metrics.${name}`)].map((name) => field(name.replace("metrics.", ""), text(name, "0..1 or 3"))),
    el("button", {}, "apply"),
    el("button", { type: "button", on: { click: () => goTo("rows", { run: words.run }) } }, "clear"),
  );
}

/** Numbers of a row in one line. */
export function rowNumbers(row) {
  const pairs = [
    ["reward", number(row.reward)],
    ["tokens", number(row.num_tokens)],
    ["staleness", number(row.staleness)],
    ["version", span(row.first_version, row.last_version)],
    ...Object.entries(row.metrics).map(([name, value]) => [shown(name), number(value)]),
  ];
  return el("span", { class: "numbers" }, pairs.map(([name, value]) => el("span", {}, el("span", { class: "dim" }, name), " ", value)));
}

export function rowCard(run, row, asked = {}) {
  return el(
    "a",
    { class: `row ${row.place}`, href: linkTo("row", { run: run.name, id: row.offset, ...asked }) },
    el("span", { class: "head" }, el("b", {}, `step ${short(row.step)}`), ` group ${short(row.group)} `, el("span", { class: `place ${row.place}` }, row.place), " ", rowNumbers(row)),
    el("span", { class: "line prompt" }, row.prompt_chars > row.prompt.length ? "…" : "", shown(row.prompt)),
    el("span", { class: "line" }, shown(row.answer), row.answer_chars > row.answer.length ? "…" : ""),
  );
}

function keys(list) {
  return (event) => {
    if (event.target.matches("input, select")) return;
    const cards = [...list.children];
    const at = cards.indexOf(document.activeElement.closest(".row"));
    const to = { j: at + 1, ArrowDown: at + 1, k: at - 1, ArrowUp: at - 1 }[event.key];
    if (to === undefined || !cards[to]) return;
    event.preventDefault();
    cards[to].focus();
  };
}
