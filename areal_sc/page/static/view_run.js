// Runs, one or several over each other: is it learning, and what bounds it?

import { change, linkTo } from "./address.js";
import { color } from "./charts.js";
import { choice, duration, el, field, notes, number, percent, short, shown, table, tile } from "./dom.js";
import { X_NAMES, isOfRows, leadChart, runCharts } from "./run_charts.js";
import { get, steps } from "./source.js";
import { isAgent } from "./view_time.js";

const NEWEST = 20; // steps that tell what bounds a run now
const known = new Map(); // run -> what its episodes spent their time on, when it was asked last

export const runParts = ["steps", "fleet"];

export async function showRuns({ runs, words }) {
  const hidden = new Set((words.hidden || "").split("|"));
  const chosen = runs.filter((run) => !hidden.has(run.name));
  const told = await Promise.all(
    chosen.map(async (run) => ({ name: run.name, index: run.index, about: run, told: await steps(run.index), fleet: await get(`/api/runs/${run.index}/fleet`) })),
  );
  const x = X_NAMES.includes(words.x) ? words.x : "step";
  const isSmooth = words.smooth !== "no";
  const complaints = el("div", {});
  for (const run of told) {
    get(`/api/runs/${run.index}/health`).then(
      ({ complaints: found }) => complaints.append(...complaintBoxes(run, found, runs.length)),
      () => {},
    );
  }
  return el(
    "div",
    {},
    told.map((run, nth) => summary(run, runs.length > 1, nth ? null : leadChart(told, { x, isSmooth }))),
    complaints,
    el(
      "form",
      { class: "controls", on: { submit: (event) => event.preventDefault() } },
      field("along", choice("x", X_NAMES.map((name) => [name, name]), x, (value) => change({ x: value === "step" ? "" : value }))),
      el(
        "label",
        { class: "check" },
        el("input", { type: "checkbox", name: "smooth", checked: isSmooth, on: { change: (event) => change({ smooth: event.target.checked ? "" : "no" }) } }),
        "smoothed",
      ),
      runs.length > 1 ? runs.map((run) => runSwitch(run, hidden)) : null,
      el("span", { class: "dim" }, "drag over a chart to zoom, double-click to go back"),
    ),
    runCharts(told, { x, isSmooth }),
    told.some((run) => run.told.evaluations.length) ? evaluationsTable(told, runs.length > 1) : null,
    eventsTable(told, runs.length > 1),
    settingsTable(told),
  );
}

function runSwitch(run, hidden) {
  const flip = (event) => {
    const now = new Set(hidden);
    if (event.target.checked) now.delete(run.name);
    else now.add(run.name);
    change({ hidden: [...now].filter(Boolean).join("|") });
  };
  return el(
    "label",
    { class: "check" },
    el("input", { type: "checkbox", name: `show ${run.name}`, checked: !hidden.has(run.name), on: { change: flip } }),
    dot(run.index),
    shown(run.name),
  );
}

export function dot(index) {
  const mark = el("span", { class: "dot" });
  mark.style.background = color(index);
  return mark;
}

export function stateBadge(fleet) {
  return el("span", { class: `state ${fleet.state}` }, fleet.state);
}

function summary(run, several, lead) {
  const { name, index, about, told, fleet } = run;
  const { columns } = told;
  const last = (column) => columns[column]?.at(-1);
  const step = told.num_steps ? last("step") : 0;
  const results = newestResults(told.evaluations);
  const ofRows = isOfRows(told);
  const newestSteps = `last ${Math.min(NEWEST, told.num_steps)} steps`;
  return el(
    "section",
    { class: "summary" },
    el("h2", {}, several ? dot(index) : null, shown(name), " ", stateBadge(fleet), " ", el("span", { class: "dim why" }, shown(fleet.text))),
    notes([...about.notes, ...told.damage, ...fleet.damage], "damage"),
    lead,
    el(
      "div",
      { class: "tiles" },
      tile("step", number(step), fleet.total_steps ? ` of ${short(fleet.total_steps)}` : ""),
      ofRows ? tile("loss", number(last("train/loss"))) : tile("reward", number(last("reward"))),
      columns.accuracy?.some((value) => value !== null) ? tile("accuracy", number(last("accuracy"))) : null,
      results.map((result) => tile(`${result.name}, step ${result.step}`, ...score(result))),
      ofRows ? null : tile(`tokens/s generated, ${newestSteps}`, number(meanOf(columns.generated_tokens_per_s))),
      tile(`tokens/s trained, ${newestSteps}`, number(meanOf(columns.trained_tokens_per_s))),
      told.num_steps && !ofRows ? tile(`bound by, ${newestSteps}`, ...bound(columns)) : null,
      told.num_steps && !ofRows ? episodeTile(run) : null,
      told.num_steps ? tile("newest step", duration(fleet.now - last("time")), " ago") : tile("steps", "none yet"),
    ),
    fleet.warnings.length
      ? el("details", { "data-name": `warnings ${name}` }, el("summary", {}, `warnings in the script's log: ${fleet.warnings.length}`), notes(fleet.warnings, "warnings"))
      : null,
  );
}

/** What the episodes of the newest steps spent their time on; it comes later, as all spans are read for it. */
function episodeTile({ name, index, told }) {
  const box = el("span", {}, known.get(name) || "…");
  const first = told.columns.time.at(-NEWEST - 1);
  get(`/api/runs/${index}/time`, { first, width: 1 }).then(
    ({ processes }) => {
      const sums = {};
      for (const [kind, [, seconds]] of processes.flatMap(({ totals }) => Object.entries(totals))) sums[kind] = (sums[kind] || 0) + seconds;
      const parts = Object.entries(sums).filter(([kind]) => kind === "generation" || (kind.startsWith("the ") && !isAgent(kind))).sort((a, b) => b[1] - a[1]);
      const isBeside = parts.reduce((sum, [, seconds]) => sum + seconds, 0) > 1.01 * sums.episode; // ends are rounded
      const told = parts.slice(0, 3).map(([kind, seconds], place) => [place ? ", " : "", shown(kind), ` ${percent(seconds / sums.episode)}`]);
      if (isBeside) told.push([", beside each other: together more than all of it"]);
      box.replaceChildren(...(told.length ? told.flat(2) : ["not recorded"]));
      known.set(name, box.textContent);
    },
    () => box.replaceChildren("not recorded"),
  );
  return tile("an episode's time", el("a", { href: linkTo("time", { run: name }) }, box));
}

function meanOf(column = []) {
  const told = column.slice(-NEWEST).filter((value) => value !== null);
  return told.length ? Number((told.reduce((sum, value) => sum + value, 0) / told.length).toPrecision(3)) : null;
}

const DOES = { rollout: ["wait", "waits"], training: ["train", "trains"], synchronisation: ["sync", "publishes"] };

/** What most of the newest steps are bound by, and what the trainer did in their time, with that first. */
function bound(columns) {
  const newest = (name) => (columns[name] || []).slice(-NEWEST);
  const counts = {};
  for (const word of newest("bound")) counts[word] = (counts[word] || 0) + 1;
  const [word, count] = Object.entries(counts).sort((a, b) => b[1] - a[1])[0] || ["–", 0];
  const of = newest("bound").length;
  const sum = (name) => newest(name).reduce((total, value) => total + (value ?? 0), 0);
  const whole = sum("step_time_s");
  const names = Object.keys(DOES).sort((a, b) => (b === word) - (a === word));
  const parts = names.map((name) => `${DOES[name][1]} ${percent(whole ? sum(`${DOES[name][0]}_s`) / whole : null)}`);
  const why = word === "rollout" && sum("train_s") > sum("wait_s") ? "; trained faster, it would wait longer" : "";
  return [el("b", {}, word), el("span", { class: "dim" }, `${count < of ? ` in ${count} of them` : ""}: the trainer ${parts.join(", ")}${why}`)];
}

/** The newest result of each set. */
function newestResults(evaluations) {
  const found = new Map();
  for (const result of evaluations) {
    const set = result.name.includes("/") ? result.name.slice(0, result.name.lastIndexOf("/")) : "";
    found.set(`${set} ${result.temperature === 0}`, result);
  }
  return [...found.values()];
}

function score(result) {
  if (result.accuracy === null || result.accuracy === undefined) return [number(result.reward ?? result.workflow.loss)];
  const interval = result.accuracy_low === null ? "" : ` (95 %: ${[result.accuracy_low, result.accuracy_high].map((it) => Number(it.toPrecision(2))).join(" to ")})`;
  return [number(result.accuracy), el("span", { class: "dim", title: "95 % confidence" }, interval)];
}

function complaintBoxes(run, found, numRuns) {
  return Object.entries(found).map(([rule, text]) =>
    el("div", { class: "complaint", role: "status" }, el("b", {}, numRuns > 1 ? [shown(run.name), ": "] : null, rule), " ", shown(text)),
  );
}

function evaluationsTable(told, several) {
  const rows = told.flatMap((run) => run.told.evaluations.map((result) => ({ run, result }))).reverse();
  const own = [...new Set(rows.flatMap(({ result }) => Object.keys(result.workflow)))].filter((name) => name !== "accuracy");
  const passes = [...new Set(rows.flatMap(({ result }) => Object.keys(result.pass_at)))].sort((a, b) => a - b);
  const columns = [
    ["run", ({ run }) => (several ? [dot(run.index), shown(run.name)] : null)],
    ["step", ({ result }) => number(result.step)],
    ["name", ({ result }) => shown(result.name)],
    ["accuracy", ({ result }) => result.accuracy],
    ["95 %", ({ result }) => (result.accuracy_low === null ? null : `${short(result.accuracy_low)} to ${short(result.accuracy_high)}`)],
    ["reward", ({ result }) => result.reward],
    ...passes.map((k) => [`pass@${k}`, ({ result }) => result.pass_at[k]]),
    ...own.map((name) => [name, ({ result }) => result.workflow[name]]),
    ["prompts", ({ result }) => result.num_prompts],
    ...["num_samples", "num_rejected", "temperature"].map((name) => [{ num_samples: "answers", num_rejected: "rejected" }[name] || name, ({ run, result }) => (isOfRows(run.told) ? null : result[name])]),
    ["versions", ({ result }) => span(result.version_min, result.version_max)],
  ].filter(([, of]) => rows.some((row) => (of(row) ?? null) !== null));
  const cell = (value) => (typeof value === "number" || value == null ? number(value) : value);
  return el(
    "section",
    {},
    el("h2", {}, "Evaluations"),
    table(
      columns.map(([name]) => name),
      rows.slice(0, 200).map((row) => columns.map(([, of]) => cell(of(row)))),
      { label: "evaluations" },
    ),
  );
}

export function span(first, last) {
  return first === last ? short(first) : `${short(first)} to ${short(last)}`;
}

const PLAIN = new Set(["kind", "name", "time", "after_step", "since"]);

/** Events that come one after another and are equal but for their numbers, together; `of` tells from where to where a number goes. */
export function folded(events) {
  const found = [];
  for (const event of events) {
    const key = JSON.stringify([event.name, ...Object.entries(event).filter(([name, value]) => !PLAIN.has(name) && typeof value !== "number")]);
    if (found.at(-1)?.key === key) found.at(-1).events.push(event);
    else found.push({ key, first: event, events: [event] });
  }
  for (const it of found) {
    it.of = (name, told) => {
      const values = it.events.map((event) => event[name] ?? null).filter((value) => value !== null);
      if (!values.length) return "–";
      const [low, high] = [told(Math.min(...values)), told(Math.max(...values))];
      return low === high ? low : `${low} to ${high}`;
    };
  }
  return found;
}

/** From when to when; the newest event comes first. */
export function timesOf(events) {
  const [from, to] = [events.at(-1), events[0]].map((event) => new Date(1000 * event.time));
  const isOneDay = from.toDateString() === to.toDateString();
  return events.length > 1 ? `${from.toLocaleString()} to ${isOneDay ? to.toLocaleTimeString() : to.toLocaleString()}` : to.toLocaleString();
}

function eventsTable(told, several) {
  const rows = told
    .flatMap((run) => folded([...run.told.events].reverse()).map((it) => ({ run, ...it })))
    .sort((a, b) => b.first.time - a.first.time);
  if (!rows.length) return null;
  const words = ({ first, of }) =>
    Object.entries(first)
      .filter(([name]) => !PLAIN.has(name))
      .map(([name, value]) => {
        if (typeof value === "number") return name.endsWith("_s") ? `${name.slice(0, -2)} ${of(name, duration)}` : `${name.replace("num_", "")} ${of(name, threeDigits)}`;
        return `${name} ${Array.isArray(value) ? value.join(", ") : typeof value === "object" ? JSON.stringify(value) : value}`;
      })
      .join(", ");
  return el(
    "section",
    {},
    el("h2", {}, "Events"),
    table(
      [...(several ? ["run"] : []), "after step", "what", "times", "details", "at"],
      rows.slice(0, 50).map((row) => [
        ...(several ? [[dot(row.run.index), shown(row.run.name)]] : []),
        row.of("after_step", short),
        shown(String(row.first.name).replaceAll("_", " ")),
        number(row.events.length),
        shown(words(row)),
        timesOf(row.events),
      ]),
      { label: "events" },
    ),
    rows.length > 50 ? el("p", { class: "dim" }, `and ${rows.length - 50} earlier ones`) : null,
  );
}

function threeDigits(value) {
  return Number.isInteger(value) ? short(value) : short(Number(value.toPrecision(3)));
}

let wantedSetting = ""; // kept when the view is made anew

/** Of several runs the settings that differ; of one all, folded. */
function settingsTable(told) {
  const names = [...new Set(told.flatMap((run) => Object.keys(run.about.settings)))];
  const value = (run, name) => run.about.settings[name] ?? "(not set)";
  if (told.length > 1) {
    const different = names.filter((name) => name !== "run_dir" && new Set(told.map((run) => value(run, name))).size > 1);
    return el(
      "section",
      {},
      el("h2", {}, "Settings that differ"),
      different.length
        ? table(["setting", ...told.map((run) => [dot(run.index), shown(run.name)])], different.map((name) => [name, ...told.map((run) => shown(value(run, name)))]), { label: "settings" })
        : el("p", { class: "dim" }, "none"),
    );
  }
  if (!names.length) return null;
  const all = table(["setting", "value"], names.map((name) => [name, shown(value(told[0], name))]), { label: "settings" });
  const filter = (text) => {
    wantedSetting = text;
    for (const row of all.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(text.toLowerCase());
  };
  filter(wantedSetting);
  return el(
    "details",
    { "data-name": "settings" },
    el("summary", {}, `${names.length} settings`),
    field("only those with", el("input", { type: "search", name: "settings", value: wantedSetting, on: { input: (event) => filter(event.target.value) } })),
    all,
  );
}
