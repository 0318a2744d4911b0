// Runs, one or several over each other: is it learning, and what bounds it?

import { change, linkTo } from "./address.js";
import { color } from "./charts.js";
import { choice, duration, el, field, notes, number, percent, short, shown, table, tile } from "./dom.js";
import { X_NAMES, isOfRows, runCharts } from "./run_charts.js";
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
    told.map((run) => summary(run, runs.length > 1)),
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

function summary(run, several) {
  const { name, index, about, told, fleet } = run;
  const { columns } = told;
  const last = (column) => columns[column]?.at(-1);
  const step = told.num_steps ? last("step") : 0;
  const results = newestResults(told.evaluations);
  const ofRows = isOfRows(told);
  return el(
    "section",
    { class: "summary" },
    el("h2", {}, several ? dot(index) : null, shown(name), " ", stateBadge(fleet), " ", el("span", { class: "dim why" }, shown(fleet.text))),
    notes([...about.notes, ...told.damage, ...fleet.damage], "damage"),
    el(
      "div",
      { class: "tiles" },
      tile("step", number(step), fleet.total_steps ? ` of ${short(fleet.total_steps)}` : ""),
      ofRows ? tile("loss", number(last("train/loss"))) : tile("reward", number(last("reward"))),
      columns.accuracy?.some((value) => value !== null) ? tile("accuracy", number(last("accuracy"))) : null,
      results.map((result) => tile(`${result.name}, step ${result.step}`, ...score(result))),
      ofRows ? null : tile("tokens/s generated", number(last("generated_tokens_per_s"))),
      tile("tokens/s trained", number(last("trained_tokens_per_s"))),
      told.num_steps && !ofRows ? tile(`bound by, last ${Math.min(NEWEST, told.num_steps)} steps`, ...bound(columns)) : null,
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
      const told = parts.slice(0, 3).map(([kind, seconds], place) => [place ? ", " : "", shown(kind), ` ${percent(seconds / sums.episode)}`]);
      box.replaceChildren(...(told.length ? told.flat(2) : ["not recorded"]));
      known.set(name, box.textContent);
    },
    () => box.replaceChildren("not recorded"),
  );
  return tile("an episode's time", el("a", { href: linkTo("time", { run: name }) }, box));
}

/** What most of the newest steps are bound by, and where their time went. */
function bound(columns) {
  const newest = (name) => (columns[name] || []).slice(-NEWEST);
  const counts = {};
  for (const word of newest("bound")) counts[word] = (counts[word] || 0) + 1;
  const [word] = Object.entries(counts).sort((a, b) => b[1] - a[1])[0] || ["–"];
  const sum = (name) => newest(name).reduce((total, value) => total + (value ?? 0), 0);
  const whole = sum("step_time_s");
  const parts = ["wait", "train", "sync"].map((part) => `${part} ${percent(whole ? sum(`${part}_s`) / whole : null)}`);
  return [el("b", {}, word), el("span", { class: "dim" }, ` ${parts.join(", ")}`)];
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
  const interval = result.accuracy_low === null ? "" : ` ${short(result.accuracy_low)} to ${short(result.accuracy_high)}`;
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

const PLAIN = new Set(["kind", "name", "time", "after_step"]);

function eventsTable(told, several) {
  const rows = told.flatMap((run) => run.told.events.map((event) => ({ run, event }))).sort((a, b) => b.event.time - a.event.time);
  if (!rows.length) return null;
  const words = (event) =>
    Object.entries(event)
      .filter(([name]) => !PLAIN.has(name))
      .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)
      .join(", ");
  return el(
    "section",
    {},
    el("h2", {}, "Events"),
    table(
      [...(several ? ["run"] : []), "after step", "what", "details", "at"],
      rows.slice(0, 50).map(({ run, event }) => [
        ...(several ? [[dot(run.index), shown(run.name)]] : []),
        number(event.after_step),
        shown(String(event.name).replaceAll("_", " ")),
        shown(words(event)),
        new Date(1000 * event.time).toLocaleString(),
      ]),
      { label: "events" },
    ),
    rows.length > 50 ? el("p", { class: "dim" }, `and ${rows.length - 50} earlier ones`) : null,
  );
}

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
  return el(
    "details",
    { "data-name": "settings" },
    el("summary", {}, `${names.length} settings`),
    table(["setting", "value"], names.map((name) => [name, shown(value(told[0], name))]), { label: "settings" }),
  );
}
