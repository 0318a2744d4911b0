// Which prompt fails, since when, and what the model writes for it.

import { change, linkTo } from "./address.js";
import { chart, color } from "./charts.js";
import { choice, el, field, notes, number, percent, pictureBoxes, short, shown, textBox, tile } from "./dom.js";
import { get, isFile, pictureAddress } from "./source.js";
import { nameOf } from "./view_rows.js";
import { span } from "./view_run.js";

export const promptsParts = ["recorded"];
export const promptParts = ["recorded"];

const SORTS = [
  ["worst", "lowest reward first"],
  ["falling", "falling"],
  ["unsolved", "never solved"],
  ["rising", "rising"],
  ["tries", "most tries first"],
  ["cut", "most cut first"],
];
const MOST_PARTS = 1500; // of a text that is compared

export async function showPrompts({ run, words, again }) {
  const { run: _, ...asked } = words;
  const path = `/api/runs/${run.index}/prompts`;
  const found = await get(path, asked);
  const list = el("div", { class: "rows" }, found.prompts.map((it) => promptCard(run, it, found.versions)));
  const more = el("button", { type: "button", hidden: found.next === null }, "more");
  const reading = el("p", { class: "dim", role: "status" });
  let at = found.next;
  let isStopped = false;
  more.onclick = async () => {
    const next = await get(path, { ...asked, at }).catch((error) => void (reading.textContent = error.message));
    if (!next) return;
    list.append(...next.prompts.map((it) => promptCard(run, it, next.versions)));
    at = next.next;
    more.hidden = at === null;
  };
  const read = async () => {
    for (let isWhole = false; !isWhole && !isStopped; ) {
      const told = await get(`/api/runs/${run.index}/reading`);
      isWhole = told.is_whole;
      reading.textContent = isWhole ? "" : `rows are being read: ${percent(told.num_bytes ? told.num_read_bytes / told.num_bytes : 0)}`;
      if (!isStopped && isWhole && told.num_changes !== found.num_changes && root.isQuiet()) again();
    }
  };
  const sets = Object.entries(found.sets);
  const root = el(
    "div",
    {},
    notes(found.damage, "damage"),
    isFile
      ? el("p", { class: "dim" }, "The prompts of lowest mean reward; the command `page` shows and sorts all of them.")
      : el(
          "div",
          { class: "controls" },
          field("sort", choice("sort", SORTS, words.sort || "worst", (sort) => change({ sort: sort === "worst" ? "" : sort }))),
          field("answered in", choice("set", [["", "all"], ...sets.map(([name, count]) => [name, `${name} (${short(count)})`])], words.set || "", (set) => change({ set }))),
        ),
    reading,
    el("p", { class: "dim" }, `${short(found.num_fitting)} prompts; bars: mean reward along policy versions ${span(...found.versions)}`),
    list,
    more,
  );
  root.stop = () => {
    isStopped = true;
  };
  root.isQuiet = () => list.children.length <= 50 && scrollY < 200 && !root.contains(document.activeElement);
  if (!isFile) read().catch((error) => reading.replaceChildren(error.message));
  return root;
}

function promptCard(run, prompt) {
  const title = `${prompt.set}, row ${prompt.index}`;
  const words = { run: run.name, set: prompt.set, dataset: prompt.dataset, index: prompt.index };
  return el(
    "div",
    { class: "row prompt-row" },
    bars(prompt.parts),
    el(
      "div",
      { class: "told" },
      el("span", { class: "head" }, isFile ? el("b", {}, shown(title)) : el("a", { href: linkTo("prompt", words) }, shown(title)), " ", numbersOf(prompt)),
      el("span", { class: "line prompt" }, shown(prompt.text, 400)),
      prompt.answer ? el("span", { class: "line" }, el("span", { class: "dim" }, `newest, ${short(prompt.answer.reward)}: `), shown(prompt.answer.text)) : null,
    ),
  );
}

function numbersOf(prompt) {
  const pairs = [
    ["reward", number(prompt.mean)],
    ["first", number(prompt.first)],
    ["newest", number(prompt.newest)],
    ["tries", number(prompt.tries)],
    ["solved", number(prompt.solved)],
    prompt.cut === null ? null : ["cut", percent(prompt.cut)],
  ].filter(Boolean);
  return [el("span", { class: "numbers" }, pairs.map(([name, value]) => el("span", {}, el("span", { class: "dim" }, name), " ", value))), " ", trendOf(prompt)];
}

/** Since when the rewards are others, where that is no chance. */
function trendOf({ is_clear: isClear, change, since }) {
  if (!isClear) return null;
  const text = `${change < 0 ? "falls" : "rises"} by ${short(Number(Math.abs(change).toPrecision(2)))} since version ${short(since)}`;
  return el("span", { class: change < 0 ? "outcome rejected" : "outcome trained" }, text);
}

/** A bar for each part of the run's versions, as high as the mean reward there is among those of the line. */
function bars(parts) {
  const told = parts.filter((it) => it !== null);
  const low = Math.min(0, ...told);
  const high = Math.max(low + 1e-9, 1, ...told);
  return el(
    "div",
    { class: "bars", role: "img", "aria-label": `mean reward along the run: ${told.map(short).join(", ")}` },
    parts.map((value) => {
      const bar = el("span", { class: value === null ? "none" : "bar" });
      if (value !== null) bar.style.height = `${Math.max(4, (100 * (value - low)) / (high - low))}%`;
      return bar;
    }),
  );
}

export async function showPrompt({ run, words }) {
  const { dataset = "0", index = "0", set = "" } = words;
  const path = `/api/runs/${run.index}/prompts/${encodeURIComponent(dataset)}/${encodeURIComponent(index)}`;
  const { prompt, tries, num_left_out: numLeftOut } = await get(path, { set });
  const [older, newer] = chosenTries(tries, words);
  const [first, second] = await Promise.all([answerOf(run, older), answerOf(run, newer)]);
  const [before, after] = compared(first?.answer ?? "", second?.answer ?? "");
  const options = tries.map((it) => [it.name, `version ${short(it.version)}${it.evaluation && prompt.set !== it.evaluation ? ` (${it.evaluation})` : ""}: reward ${short(it.reward)}${it.cut ? ", cut" : ""}`]).reverse();
  const side = (name, one, row, text) =>
    el(
      "section",
      { class: "answer", "aria-label": name },
      field(name, choice(name, options, one.name, (value) => change({ [name]: value }))),
      row
        ? [el("p", {}, "reward ", number(one.reward), `, ${short(one.num_tokens)} tokens${one.cut ? ", cut" : ""} `, el("a", { href: linkTo("row", { run: run.name, name: one.name }) }, "its tokens")), el("pre", { class: "text", tabindex: "0", dir: "ltr", "aria-label": `answer, ${name}` }, text)]
        : el("p", { class: "dim" }, "not recorded any more"),
    );
  return el(
    "article",
    {},
    el(
      "nav",
      { class: "ways", "aria-label": "from this prompt" },
      el("a", { href: linkTo("prompts", { run: run.name }) }, "all prompts"),
      el("a", { href: linkTo("rows", { run: run.name, dataset, index, evaluation: "*" }) }, "all of its rows"),
    ),
    el("h2", {}, shown(`${prompt.set}, row ${prompt.index} of the data `), trendOf(prompt)),
    el(
      "div",
      { class: "tiles" },
      tile("tries", number(prompt.tries)),
      tile("mean reward", number(prompt.mean)),
      tile("at first, newest", number(prompt.first), " → ", number(prompt.newest)),
      tile("solved", number(prompt.solved)),
      prompt.cut === null ? null : tile("cut", percent(prompt.cut)),
    ),
    pictureBoxes((second || first)?.pictures, (digest) => pictureAddress(run, digest)),
    textBox(prompt.text, "row of the data"),
    numLeftOut ? el("p", { class: "dim" }, `${short(numLeftOut)} older tries are left out`) : null,
    curveOf(tries),
    el("h2", {}, "Two answers side by side ", el("span", { class: "dim why" }, "what only one of them has is marked")),
    el("div", { class: "beside" }, side("earlier", older, first, before), side("later", newer, second, after)),
  );
}

/** The two tries that are compared: as the address says, else the newest one and the first of another reward, if there is any. */
function chosenTries(tries, words) {
  const named = (name) => tries.find((it) => it.name === name);
  const newer = named(words.later) || tries.at(-1);
  const others = tries.filter((it) => it !== newer);
  const older = named(words.earlier) || others.find((it) => it.reward !== newer.reward) || others[0] || newer;
  return [older, newer];
}

async function answerOf(run, one) {
  const { rows } = await get(`/api/runs/${run.index}/recorded/${one.name.split(".")[0]}`);
  return rows.find((row) => nameOf(row) === one.name);
}

/** Reward of each try, and the mean of each version. */
function curveOf(tries) {
  const means = new Map();
  for (const { version, reward } of tries) {
    const [sum, count] = means.get(version) || [0, 0];
    means.set(version, [sum + reward, count + 1]);
  }
  const versions = [...means.keys()];
  const per = (pick) => versions.map((version) => pick(tries.filter((it) => it.version === version).map((it) => it.reward)));
  const curves = [
    { label: "mean", x: versions, y: versions.map((it) => means.get(it)[0] / means.get(it)[1]), color: color(0) },
    ...(tries.length === versions.length ? [] : [{ label: "highest", x: versions, y: per((its) => Math.max(...its)), color: color(2), isPoints: true },
    { label: "lowest", x: versions, y: per((its) => Math.min(...its)), color: color(1), isPoints: true }]),
  ];
  return el("div", { class: "charts one" }, chart({ title: "reward", note: "of its answers, by the version that wrote them", curves, xLabel: "policy version" }));
}

const SPLITS = [
  (text) => [...text],
  (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) || [],
  (text) => text.match(/[^\n]*\n|[^\n]+/g) || [],
];

/** The parts of two texts, with what only one of them has marked: by signs, words or lines. */
export function compared(first, second) {
  let [a, b, begin, end, left, right] = [];
  for (const split of SPLITS) {
    [a, b] = [split(first), split(second)];
    [begin, end] = [0, 0];
    while (begin < a.length && begin < b.length && a[begin] === b[begin]) begin++;
    while (end < a.length - begin && end < b.length - begin && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
    [left, right] = [a.slice(begin, a.length - end), b.slice(begin, b.length - end)];
    if (left.length <= MOST_PARTS && right.length <= MOST_PARTS) break;
  }
  const [keptLeft, keptRight] = left.length > MOST_PARTS || right.length > MOST_PARTS ? [new Set(), new Set()] : common(left, right);
  const told = (all, middle, kept) => {
    const parts = [...shown(all.slice(0, begin).join(""))];
    for (let at = 0; at < middle.length; ) {
      let stop = at;
      while (stop < middle.length && kept.has(stop) === kept.has(at)) stop++;
      const text = shown(middle.slice(at, stop).join(""));
      parts.push(...(kept.has(at) ? text : [el("mark", {}, text)]));
      at = stop;
    }
    return [...parts, ...shown(all.slice(all.length - end).join(""))];
  };
  return [told(a, left, keptLeft), told(b, right, keptRight)];
}

/** Places in both lists of a longest common subsequence. */
function common(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i * width + j] = a[i] === b[j] ? lengths[(i + 1) * width + j + 1] + 1 : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  const [left, right] = [new Set(), new Set()];
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      left.add(i++);
      right.add(j++);
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
    else j++;
  }
  return [left, right];
}
