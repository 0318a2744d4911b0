// What the model wrote: rows that are searched, filtered and sorted by the server.

import { change, goTo, linkTo } from "./address.js";
import { choice, el, field, marked, notes, number, percent, pictureBoxes, short, shown } from "./dom.js";
import { get, isFile, pictureAddress, query } from "./source.js";
import { span } from "./view_run.js";

export const rowsParts = ["recorded", "groups"];

const both = (name, most, least) => [
  [`-${name}`, most],
  [name, least],
];
// what rows are asked for by
const SORTS = [
  ...both("time", "newest first", "oldest first"),
  ...both("reward", "highest reward", "lowest reward"),
  ...both("num_tokens", "longest", "shortest"),
  ...both("staleness", "stalest", "freshest"),
  ...both("step", "newest step", "oldest step"),
  ...both("last_version", "newest version", "oldest version"),
  ["-num_interruptions", "most interruptions"],
];
const RANGES = ["reward", "num_tokens", "staleness", "version", "step", "group", "dataset", "index"];
const TITLES = { num_tokens: "tokens", index: "row of the data" };

/** The workflow's numbers of a row, without what did not happen to its agent. */
export function metricsOf({ metrics }) {
  return Object.entries(metrics).filter(([name, value]) => value !== 0 || !name.startsWith("agent/"));
}

/** Rows that a reader goes through by keyboard, as links, in the order in which the list showed them. */
export const listed = { run: "", links: [] };

export async function showRows({ run, words, again }) {
  const { run: _, ...asked } = words;
  const base = `/api/runs/${run.index}`;
  const first = await get(`${base}/recorded`, { ...asked, at: 0, limit: 50 });
  const list = el("div", { class: "rows" });
  const more = el("button", { type: "button", hidden: true }, "more");
  const fresh = el("button", { type: "button", hidden: true, on: { click: () => again() } }, "there are new rows: show them");
  const said = el("p", { class: "dim", role: "status" });
  const reading = el("p", { class: "dim", role: "status" });
  let isStopped = false;
  listed.run = run.name;
  listed.links = [];

  /** Shows what was found, and goes on until so many rows are shown, or there is nothing left. */
  async function load(found, wanted) {
    more.hidden = true;
    for (let missing = wanted; ; ) {
      const made = found.rows.map((row) => recordedCard(run, row, words));
      // rows that are new have moved others to places that come later
      const cards = made.filter((card) => !listed.links.includes(card.querySelector("a").hash));
      list.append(...cards);
      listed.links.push(...cards.map((card) => card.querySelector("a").hash));
      missing -= found.rows.length;
      const { next } = found;
      said.textContent = asked.text
        ? `${short(listed.links.length)} found in ${next === null ? "" : `the first ${short(next)} of `}${short(found.num_fitting)} rows; ${short(found.num_rows)} in all${next === null ? "" : missing > 0 ? "; the search goes on" : "; “more” searches the rest"}`
        : `${short(listed.links.length)} shown of ${short(found.num_fitting)} that fit; ${short(found.num_rows)} rows in all`;
      more.hidden = next === null;
      more.onclick = () => go(next, 50).catch((error) => said.replaceChildren(error.message));
      if (missing <= 0 || next === null || isStopped) return;
      if (!list.isConnected) {
        // the first hits are shown at once
        setTimeout(() => more.onclick());
        return;
      }
      found = await get(`${base}/recorded`, { ...asked, at: next, limit: missing });
    }
  }

  async function go(at, wanted) {
    await load(await get(`${base}/recorded`, { ...asked, at, limit: wanted }), wanted);
  }

  /** Lets the server read rows until all are there, and says how far it is. */
  async function read() {
    for (let isWhole = false; !isWhole && !isStopped; ) {
      const told = await get(`${base}/reading`);
      isWhole = told.is_whole;
      reading.textContent = isWhole ? "" : `rows are being read: ${percent(told.num_bytes ? told.num_read_bytes / told.num_bytes : 0)}`;
      if (isStopped || told.num_changes === first.num_changes || (!isWhole && listed.links.length)) continue;
      if (root.isQuiet()) again();
      else fresh.hidden = false;
    }
  }

  await load(first, 50);
  const root = el(
    "div",
    {},
    notes(first.damage, "damage"),
    isFile ? el("p", { class: "dim" }, "The newest rows of the run; the command `page` searches all of them.") : filters(run, words, first),
    !first.has_texts
      ? el("p", { class: "complaint" }, "The tokenizer of the run's model is not on this machine: of the texts only the rows of the data set are here. It was sought in ", shown(run.model_folders.join(", ")), ".")
      : null,
    reading,
    el("p", { class: "found" }, said, fresh),
    list,
    more,
  );
  root.onKey = keys(list);
  root.stop = () => {
    isStopped = true;
  };
  root.isQuiet = () => listed.links.length <= 50 && scrollY < 200 && !root.contains(document.activeElement);
  root.onChange = () => (fresh.hidden = false);
  read().catch((error) => reading.replaceChildren(error.message));
  return root;
}

function filters(run, words, found) {
  const apply = (event) => {
    event.preventDefault();
    const form = new FormData(event.target.closest("form"));
    change(Object.fromEntries([...form].map(([name, value]) => [name, String(value).trim()])));
  };
  const ranges = [...RANGES, ...found.metrics.map((name) => `metrics.${name}`)];
  const numSet = ranges.filter((name) => words[name]).length;
  const text = (name, attributes = {}) => el("input", { name, value: words[name] || "", placeholder: "0..1 or 3", size: 9, ...attributes });
  const sorts = [...SORTS, ...found.metrics.flatMap((name) => both(`metrics.${name}`, `highest ${name}`, `lowest ${name}`))];
  const counted = (counts) => [["", "any"], ...Object.entries(counts).map(([name, count]) => [name, `${name} (${short(count)})`])];
  const chosen = (name, options) => field(TITLES[name] || name, choice(name, options, words[name] || "", (value) => change({ [name]: value })));
  const ofWords = ["worker", "outcome", "cause", "evaluation"].filter((name) => words[name] || Object.keys(found[name]).length > 0);
  const { run: _, ...asked } = words;
  return el(
    "form",
    { class: "filters", role: "search", on: { submit: apply } },
    el(
      "div",
      { class: "controls" },
      field("search", text("text", { type: "search", size: 28, id: "search", placeholder: "in prompts and answers" })),
      chosen("sort", sorts),
      ofWords.map((name) => chosen(name, name === "evaluation" ? [["", "none"], ["*", "all, and training"], ...counted(found[name]).slice(1)] : counted(found[name]))),
      el("button", {}, "apply"),
      el("button", { type: "button", on: { click: () => goTo("rows", { run: words.run }) } }, "clear"),
    ),
    el(
      "details",
      { "data-name": "numbers", open: numSet > 0 },
      el("summary", {}, numSet ? `numbers: ${numSet} set` : "numbers"),
      el("div", { class: "controls" }, ranges.map((name) => field(TITLES[name] || name.replace("metrics.", ""), text(name)))),
    ),
    el(
      "p",
      { class: "ways" },
      el("a", { href: query(`/api/runs/${run.index}/recorded.jsonl`, asked), download: "" }, "download as JSONL"),
      el("span", { class: "dim" }, "keys: j, k, Enter"),
    ),
  );
}

/** Numbers of a row in one line. */
export function rowNumbers(row) {
  const pairs = [
    ["reward", number(row.reward)],
    ["tokens", number(row.num_tokens)],
    row.staleness === null ? null : ["staleness", number(row.staleness)],
    ["version", span(row.first_version, row.last_version)],
    ...metricsOf(row).map(([name, value]) => [shown(name), number(value)]),
  ].filter(Boolean);
  return el("span", { class: "numbers" }, pairs.map(([name, value]) => el("span", {}, el("span", { class: "dim" }, name), " ", value)));
}

/** A recorded row in a list. */
export function recordedCard(run, row, asked = {}) {
  const name = nameOf(row);
  const isRejected = row.episode < 0;
  const link = isRejected && row.evaluation ? linkTo("rows", { run: run.name, evaluation: row.evaluation, dataset: row.dataset, index: row.index }) : isRejected ? linkTo("group", { run: run.name, group: row.group }) : linkTo("row", { ...asked, run: run.name, name });
  const title = row.evaluation ? [...shown(row.evaluation), `, prompt ${short(row.index)}, answer ${row.attempt + 1}`] : [`group ${short(row.group)}`, isRejected ? `, attempt ${row.attempt + 1}` : `, answer ${row.episode + 1}${row.row ? `.${row.row + 1}` : ""}`];
  const outcome = row.outcome ? el("span", { class: `outcome ${row.outcome}` }, shown(row.cause ? `${row.outcome}: ${row.cause}` : row.outcome)) : "";
  const rest = [row.step ? ` step ${short(row.step)} ` : " ", outcome];
  return card(row, link, title, rest, asked.text, pictureBoxes(row.pictures, (digest) => pictureAddress(run, digest)));
}

/** The set of held-out prompts that an evaluation is of, as the server names it. */
export function setOf(evaluation) {
  if (!evaluation) return "training";
  const set = evaluation.split("/").slice(0, -1).join("/") || "held out";
  return /(^|\/)greedy$/.test(evaluation) ? `${set}, greedy` : set;
}

export function nameOf(row) {
  return `${row.group}.${row.attempt}.${row.episode}.${row.row}`;
}

function card(row, href, title, rest, wanted, pictures) {
  const { prompt_at: promptAt, answer_at: answerAt } = row;
  return el(
    "div",
    { class: "row" },
    el("span", { class: "head" }, el("a", { href }, title), rest, " ", row.episode < 0 ? "" : rowNumbers(row)),
    pictures,
    el("span", { class: "line prompt" }, promptAt > 0 ? "…" : "", marked(row.prompt, wanted)),
    el("span", { class: "line" }, answerAt > 0 ? "…" : "", marked(row.answer, wanted), row.answer_chars > answerAt + row.answer.length ? "…" : ""),
    row.right_answer ? el("span", { class: "line" }, el("span", { class: "dim" }, "right: "), shown(row.right_answer)) : null,
  );
}

function keys(list) {
  return (event) => {
    const cards = [...list.children];
    const at = cards.indexOf(document.activeElement.closest(".row"));
    const to = { j: at + 1, ArrowDown: at + 1, k: at - 1, ArrowUp: at - 1 }[event.key];
    if (to === undefined || !cards[to]) return;
    event.preventDefault();
    cards[to].querySelector("a").focus();
  };
}
