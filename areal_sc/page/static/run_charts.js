// Which curves the view of runs shows, made of the columns of steps.

import { chart, color, smoothed } from "./charts.js";
import { el } from "./dom.js";

const X_AXES = {
  step: { label: "step", of: (columns) => columns.step },
  minutes: { label: "minutes", of: (columns) => columns.time.map((time) => (time - columns.time[0]) / 60) },
  tokens: {
    label: "trained tokens",
    of: (columns) => {
      let sum = 0;
      return columns.num_trained_tokens.map((count) => (sum += count ?? 0));
    },
  },
};
export const X_NAMES = Object.keys(X_AXES);

const SECTIONS = [
  [
    "Is it learning?",
    [
      { title: "reward", names: ["reward"], evaluated: "reward" },
      { title: "accuracy", names: ["accuracy"], evaluated: "accuracy", min: 0, max: 1 },
      { title: "groups with signal", note: "share whose answers differ in reward", names: ["signal_share"], min: 0, max: 1 },
      { title: "entropy", note: "nats", names: ["train/entropy"], min: 0 },
      { title: "KL of the step", note: "proximal, nats a token", names: ["train/proximal_kl"] },
      { title: "KL to the sampler", note: "behaviour, nats a token", names: ["train/behavior_kl"] },
      { title: "clipped tokens", note: "share", names: ["train/clip_fraction"], min: 0 },
      { title: "trainer and sampler apart", note: "mismatch, nats", names: ["train/mismatch"], min: 0 },
      { title: "gradient norm", names: ["train/grad_norm"], min: 0 },
      { title: "loss", names: ["train/loss"], evaluated: "loss" },
      { title: "learning rate", names: ["train/lr"], min: 0 },
    ],
  ],
  [
    "What are the answers like?",
    [
      { title: "tokens an answer", names: ["answer_tokens", "longest_tokens_mean", "longest_tokens_max"], min: 0 },
      { title: "answers that end by themselves", note: "share", names: ["workflow/stopped"], min: 0, max: 1 },
      { title: "rejected episodes", note: "by cause", prefix: "rejected_episodes/", min: 0 },
    ],
  ],
  [
    "Is it fresh?",
    [
      { title: "staleness of tokens", note: "versions", names: ["token_staleness_mean", "token_staleness_max"], min: 0 },
      { title: "staleness of groups", note: "versions", names: ["group_staleness_mean", "group_staleness_max"], min: 0 },
      { title: "lost tokens", note: "share masked, and thrown away", names: ["masked_share", "wasted_share"], min: 0 },
    ],
  ],
  [
    "What bounds it?",
    [
      { title: "time of a step", note: "s", names: ["step_time_s", "wait_s", "train_s", "sync_s"], min: 0 },
      { title: "tokens a second", names: ["generated_tokens_per_s", "trained_tokens_per_s"], min: 0 },
      { title: "time of a group", note: "s", names: ["group_time_s"], min: 0 },
      { title: "lead and slack", note: "steps", names: ["lead", "slack"] },
      { title: "workers", names: ["num_train_workers", "num_rollout_workers"], min: 0 },
    ],
  ],
];
const TOLD_OTHERWISE = new Set(["accuracy"]);

const MARKED = {
  resumed: () => "resumed",
  reattached: () => "taken over",
  went_back: (event) => `back to ${event.step}`,
  workers_restarted: (event) => `${(event.workers || []).length} restarted`,
  scaled: (event) => `${event.num_workers} workers`,
  paused: () => "paused",
  pause_ended: () => "goes on",
};

/** Whether a run trains on rows of a data set: it generates nothing, and has no rewards. */
export function isOfRows({ columns, num_steps: numSteps }) {
  const isEmpty = (name) => (columns[name] || []).every((value) => !value);
  return numSteps > 0 && ["reward", "num_generated_tokens", "num_rollout_workers"].every(isEmpty);
}

/** The charts of runs, in sections. `runs`: {name, index, told}, those that are shown. */
export function runCharts(runs, { x, isSmooth }) {
  const shownNames = new Set(SECTIONS.flatMap(([, specs]) => specs.flatMap((spec) => spec.names || [])));
  const own = ownNames(runs, shownNames).map((name) => ({ title: name.replace(/^[a-z]+\//, ""), names: [name], evaluated: name }));
  const sections = [SECTIONS[0], ["The workflow's own metrics", own], ...SECTIONS.slice(1), ["What else the trainer says", restNames(runs, shownNames)]];
  return sections.map(([title, specs]) => {
    const charts = specs.map((spec) => oneChart(spec, runs, x, isSmooth)).filter(Boolean);
    return charts.length ? el("section", { class: title === SECTIONS[0][0] ? "learning" : null }, el("h2", {}, title), el("div", { class: "charts" }, charts)) : null;
  });
}

/** What runs learn: the first chart of all, which a narrow screen has above the numbers. */
export function leadChart(runs, { x, isSmooth }) {
  const [, [spec]] = SECTIONS[0];
  const figure = oneChart(spec, runs, x, isSmooth);
  return figure && el("div", { class: "lead" }, figure);
}

function namesOf(runs, prefix) {
  return [...new Set(runs.flatMap(({ told }) => Object.keys(told.columns).filter((name) => name.startsWith(prefix))))];
}

function ownNames(runs, shownNames) {
  const ofEvaluations = runs.flatMap(({ told }) => told.evaluations.flatMap((it) => Object.keys(it.workflow).flatMap((name) => (name === "loss" ? [] : `workflow/${name}`))));
  const names = new Set([...namesOf(runs, "workflow/"), ...ofEvaluations]);
  const happened = (name) => !name.startsWith("workflow/agent/") || runs.some(({ told }) => (told.columns[name] || []).some((value) => value)); // what agents do wrong
  return [...names].filter((name) => happened(name) && !shownNames.has(name) && !TOLD_OTHERWISE.has(name.slice("workflow/".length)));
}

function restNames(runs, shownNames) {
  return namesOf(runs, "train/").filter((name) => !shownNames.has(name)).map((name) => ({ title: name.slice("train/".length), names: [name] }));
}

function oneChart(spec, runs, xName, isSmooth) {
  const axis = X_AXES[xName];
  const several = runs.length > 1;
  const curves = [];
  const silences = [];
  for (const [place, { name, index, told }] of runs.entries()) {
    const { columns } = told;
    const xs = columns.step ? axis.of(columns) : [];
    const names = spec.prefix ? Object.keys(columns).filter((it) => it.startsWith(spec.prefix)) : spec.names;
    const ofRows = isOfRows(told);
    for (const [nth, column] of names.entries()) {
      if (!columns[column]?.some((value) => (ofRows ? value : value !== null))) continue; // of rows 0 is what it does not do
      if (several && nth > 0 && !spec.prefix) continue; // one curve a run
      const label = several ? name : column.replace(/^[a-z_]+\//, "");
      const own = color(several ? index : nth);
      const values = columns[column];
      const size = Math.max(1, Math.round(values.length / 15));
      if (isSmooth && size > 2) {
        curves.push({ label: `${label}, smoothed`, x: xs, y: smoothed(values, size), color: own, isDerived: true });
      }
      const faint = isSmooth && size > 2;
      curves.push({ label, x: xs, y: values, color: own, faint, dash: several && spec.prefix && nth ? [6, 3] : undefined });
    }
    const since = spec.prefix ? 0 : silentSince(columns, names);
    if (since) silences.push(`${several ? `${name}: ` : ""}nothing since step ${since}${columns.signal_share?.at(-1) === 0 ? ": no tokens with signal" : ""}`);
    if (spec.evaluated) curves.push(...evaluationCurves(spec.evaluated, told, xs, several, several ? index : place).map((curve) => ({ ...curve, run: name })));
  }
  if (!curves.length) return null;
  for (const curve of several ? curves : []) {
    curve.begins = curve === curves.find((it) => !it.isDerived && it.color === curve.color);
    if (curve.begins && curve.run) curve.label = `${curve.run}: ${curve.label}`; // else the curve before it names the run
  }
  const { title, note, min, max } = spec;
  return chart({ title, note: [note, ...silences].filter(Boolean).join("; "), curves, marks: several ? [] : marksOf(runs[0].told, axis), xLabel: axis.label, min, max });
}

/** The step from which on none of some columns has a value; 0: none, or they never had any. */
function silentSince(columns, names) {
  const last = Math.max(...names.map((name) => (columns[name] || []).findLastIndex((value) => value !== null)));
  return last < 0 ? 0 : (columns.step[last + 1] ?? 0);
}

/** Results by the name of the set, greedy ones apart, each at the step after which it was made. */
function evaluationCurves(metric, told, xs, several, index) {
  const column = metric.replace("workflow/", "");
  const sets = new Map();
  for (const result of told.evaluations) {
    const value = column in result ? result[column] : result.workflow[column];
    if (value === null || value === undefined || typeof value !== "number") continue;
    const set = result.name.includes("/") ? result.name.slice(0, result.name.lastIndexOf("/")) : "";
    const kind = [set, result.temperature === 0 ? "held out, greedy" : "held out"].filter(Boolean).join(": ");
    if (!sets.has(kind)) sets.set(kind, new Map());
    sets.get(kind).set(result.step, { value, result });
  }
  return [...sets].map(([kind, results], nth) => {
    const ordered = [...results].sort(([a], [b]) => a - b);
    const hasInterval = column === "accuracy";
    return {
      label: kind,
      x: ordered.map(([step]) => xOfStep(step, told.columns.step || [], xs)),
      y: ordered.map(([, { value }]) => value),
      low: hasInterval ? ordered.map(([, { result }]) => result.accuracy_low) : undefined,
      high: hasInterval ? ordered.map(([, { result }]) => result.accuracy_high) : undefined,
      color: color(several ? index : nth + 1),
      isPoints: true,
      isFilled: !kind.endsWith("held out, greedy"),
    };
  });
}

/** Where a step stands on the axis; one before the first stands where that begins. */
function xOfStep(step, all, xs) {
  if (xs === all || !all.length) return step;
  let low = 0;
  let high = all.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (all[middle] < step) low = middle + 1;
    else high = middle;
  }
  return step < all[0] ? 0 : xs[Math.min(low, xs.length - 1)];
}

function marksOf(told, axis) {
  const xs = told.columns.step ? axis.of(told.columns) : [];
  const marks = new Map(); // one for each kind and step
  for (const event of told.events.filter((it) => it.name in MARKED)) {
    const key = `${event.name} ${event.after_step}`;
    const workers = [...(marks.get(key)?.event.workers || []), ...(event.workers || [])];
    marks.set(key, { event: { ...event, workers }, x: xOfStep(event.after_step, told.columns.step || [], xs) });
  }
  return [...marks.values()].map(({ event, x }) => ({ x, label: MARKED[event.name](event), brief: event.workers.length ? String(event.workers.length) : undefined }));
}
