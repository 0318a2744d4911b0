// What each process did when: a lane a line, interruptions as crosses, publications as lines.

import { address, goTo, linkTo } from "./address.js";
import { choice, duration, el, field, notes, number, short, shown, table } from "./dom.js";
import { get, isFile, steps } from "./source.js";
import { NUM_HUES } from "./tokens.js";

const GUTTER = 96; // pixels for the names of processes
const AXIS = 36; // pixels above: times, and below them the versions that were published
const LINE = 14; // pixels of the line for what concerns a whole process
const MOST_PIXELS = 12000; // of the canvas, in height
const SHORTEST_S = 1e-3;
const KINDS = { "start-up": 330, wait: 220, train: 30, sync: 150, update: 30, "updating weights": 150, "fetching weights": 175, "publishing weights": 150, "pulling rows": 220, generation: 205, "the sandbox": 60 };
const SETTLED_MS = 120;
const BAND = 96; // pixels of lanes that are drawn together
const NARROW = 16; // pixels of an episode, below which lanes are
const FEW_LANES = 8; // of a worker: they are never

export const timeParts = ["records", "steps"];

export async function showTime({ run, words }) {
  const asked = { first: words.first, last: words.last, width: Math.round(innerWidth * Math.min(devicePixelRatio, 2)) };
  const [first, { events }] = await Promise.all([get(`/api/runs/${run.index}/time`, asked), steps(run.index)]);
  let told = first;
  const deaths = deathsIn(events);
  if (told.begin === null) return el("p", { class: "dim" }, "Nothing is recorded of this run: it has not begun, or an earlier areal_sc made it.");
  const whole = { first: told.begin, last: told.end + SHORTEST_S };
  let view = { first: Number(words.first) || whole.first, last: Number(words.last) || whole.last };
  let by = words.color === "kind" ? "kind" : "version";
  const layOut = () => laidOut(told, canvas.parentElement?.clientWidth || innerWidth, view);
  let layout = null;
  let drag = null;
  let settling = 0;

  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "what each process did when; the table below has the sums" });
  const under = el("p", { class: "under above", role: "status" }, "point at something; drag to zoom, double-click for all; keys: + − ← → Home");
  const range = el("span", { class: "dim" });
  const totals = el("div", {});
  const legend = el("p", { class: "legend" });
  const pen = canvas.getContext("2d");
  layout = layOut();

  const timeAt = (pixel) => view.first + ((pixel - GUTTER) / (canvas.clientWidth - GUTTER)) * (view.last - view.first);

  const draw = () => {
    const width = canvas.parentElement?.clientWidth;
    if (!width) return;
    const ratio = devicePixelRatio;
    canvas.style.height = `${layout.height}px`;
    under.style.top = `${document.querySelector("header").offsetHeight}px`; // it stays in sight
    canvas.width = Math.floor(width * ratio);
    canvas.height = Math.floor(layout.height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const scale = (width - GUTTER) / (view.last - view.first);
    const x = (time) => GUTTER + (time - view.first) * scale;
    drawAll(pen, { told, deaths, layout, view, whole, by, width, x, drag });
    range.textContent = `${duration(view.last - view.first)}, from ${clock(view.first - whole.first, (view.last - view.first) / 10)} on after the begin`;
  };

  const settle = async () => {
    const { view: name, words: now } = address();
    if (name !== "time" || !canvas.isConnected) return;
    const isAll = view.first <= whole.first && view.last >= whole.last;
    const wanted = isAll ? { ...now, first: "", last: "" } : { ...now, first: view.first.toFixed(6), last: view.last.toFixed(6) };
    history.replaceState(null, "", linkTo("time", wanted));
    const length = view.last - view.first;
    // a little more than is seen, so that there is something to pan to
    told = await get(`/api/runs/${run.index}/time`, { first: view.first - length / 4, last: view.last + length / 4, width: Math.round(1.5 * canvas.width) });
    layout = layOut();
    showTotals();
    draw();
  };

  const look = (first, last) => {
    const length = Math.max(SHORTEST_S, Math.min(last - first, whole.last - whole.first));
    const begin = Math.max(whole.first, Math.min(first, whole.last - length));
    view = { first: begin, last: begin + length };
    draw();
    clearTimeout(settling);
    settling = setTimeout(() => settle().catch((error) => (under.textContent = error.message)), SETTLED_MS);
  };
  const zoom = (factor, around = (view.first + view.last) / 2) => look(around - (around - view.first) * factor, around + (view.last - around) * factor);
  const pan = (share) => look(view.first + share * (view.last - view.first), view.last + share * (view.last - view.first));
  const all = () => look(whole.first, whole.last);

  const showTotals = () => {
    totals.replaceChildren(totalsTable(told));
    legend.replaceChildren(...legendOf(told, by, layout));
  };

  canvas.addEventListener("pointerdown", (event) => {
    drag = { from: event.offsetX, to: event.offsetX };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      drag.to = event.offsetX;
      draw();
      return;
    }
    const found = spanAt(told, deaths, layout, timeAt(event.offsetX), event.offsetY, (view.last - view.first) / canvas.clientWidth);
    canvas.style.cursor = found?.group ? "pointer" : "default";
    if (found) under.replaceChildren(...found.words);
  });
  canvas.addEventListener("pointerup", (event) => {
    const { from, to } = drag || { from: 0, to: 0 };
    drag = null;
    if (Math.abs(to - from) > 5) {
      look(timeAt(Math.max(GUTTER, Math.min(from, to))), timeAt(Math.max(from, to)));
      return;
    }
    draw();
    const found = spanAt(told, deaths, layout, timeAt(event.offsetX), event.offsetY, (view.last - view.first) / canvas.clientWidth);
    if (found?.group) goTo("group", { run: run.name, group: found.group });
  });
  canvas.addEventListener("dblclick", all);
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      if (event.ctrlKey) zoom(Math.exp(event.deltaY / 200), timeAt(event.offsetX));
      else pan((event.deltaY || event.deltaX) / 1000);
    },
    { passive: false },
  );

  const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, on: { click: act } }, text);
  const root = el(
    "article",
    {},
    notes(told.damage, "damage"),
    el(
      "div",
      { class: "controls" },
      button("+", "zoom in", () => zoom(0.5)),
      button("−", "zoom out", () => zoom(2)),
      button("←", "earlier", () => pan(-0.4)),
      button("→", "later", () => pan(0.4)),
      button("all", "all of the run", all),
      field("colour", choice("colour", [["version", "version"], ["kind", "what is done"]], by, (value) => ((by = value), history.replaceState(null, "", linkTo("time", { ...address().words, color: value === "kind" ? value : "" })), showTotals(), draw()))),
      range,
      isFile ? null : el("a", { href: `/api/runs/${run.index}/trace`, download: `${run.name}.trace.json` }, "trace for Perfetto"),
    ),
    legend,
    under,
    el("div", { class: "timeline" }, canvas),
    el("h2", {}, "Sums of what is seen"),
    totals,
  );
  showTotals();
  const sized = new ResizeObserver(draw);
  sized.observe(root);
  root.stop = () => sized.disconnect();
  root.isQuiet = () => drag === null;
  root.onKey = (event) => {
    const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), Home: all }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  return root;
}

/** Where each process and each of its lanes is drawn, and which spans are in it; many lanes whose episodes are too narrow to be told apart are a band. */
function laidOut(told, width, view) {
  const { processes } = told;
  const isBand = ({ num_lanes: numLanes, totals }) => {
    const [count, seconds] = totals.episode || [0, 0];
    const pixels = ((seconds / Math.max(1, count)) * (width - GUTTER)) / (view.last - view.first);
    return numLanes > FEW_LANES && pixels < NARROW;
  };
  const count = processes.reduce((sum, it) => sum + (isBand(it) ? 0 : it.num_lanes), 0);
  const room = MOST_PIXELS - processes.length * (LINE + 6);
  const lane = Math.max(1, Math.min(9, Math.floor(room / Math.max(1, count)), Math.ceil(1600 / Math.max(1, count))));
  let top = AXIS;
  const places = processes.map((process) => {
    const lanes = new Map();
    process.lane.forEach((number, index) => {
      if (!lanes.has(number)) lanes.set(number, []);
      lanes.get(number).push(index);
    });
    const place = { process, top, lanes, isBand: isBand(process), end: top + LINE + (isBand(process) ? BAND : process.num_lanes * lane) };
    top = place.end + 6;
    return place;
  });
  return { places, lane, height: top };
}

/** Of each worker that died: when, until it was back, why, and how many groups ran again. */
function deathsIn(events) {
  return events
    .filter((event) => event.name === "workers_restarted")
    .flatMap(({ workers, time, duration_s: took, cause, num_groups: numGroups }) => (workers || []).map((worker) => ({ worker, at: time - (took || 0), back: time, cause: String(cause), numGroups })));
}

/** Whether a span is of an agent, which does an episode's work. */
export function isAgent(kind) {
  return /^(the|an) agent\b/.test(kind);
}

function drawAll(pen, { told, deaths, layout, view, whole, by, width, x, drag }) {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(name).trim();
  const [text, dim, grid, box, mark, back, bad] = ["--text", "--dim", "--grid", "--box", "--mark", "--back", "--bad"].map(named);
  pen.fillStyle = back;
  pen.fillRect(0, 0, width, layout.height);
  pen.font = "11px system-ui";
  pen.textBaseline = "middle";
  drawAxis(pen, { view, whole, layout, width, x, dim, grid });
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, AXIS, width - GUTTER, layout.height);
  pen.clip();
  for (const place of layout.places) {
    const { process } = place;
    pen.fillStyle = box;
    pen.fillRect(GUTTER, place.top, width, LINE);
    const crosses = [];
    // an episode, and its agent, lie under what they wait for
    for (const isUnder of [true, false]) {
      for (let index = 0; index < process.kind.length; index++) {
        const kind = told.kinds[process.kind[index]];
        if ((kind === "episode" || isAgent(kind)) !== isUnder) continue;
        const began = told.first + process.began[index];
        const ended = began + process.took[index];
        if (ended < view.first || began > view.last) continue;
        const lane = process.lane[index];
        if (lane >= 0 && place.isBand) continue;
        const top = lane < 0 ? place.top + 2 : place.top + LINE + lane * layout.lane;
        const height = lane < 0 ? LINE - 4 : Math.max(1, layout.lane - 1);
        if (isUnder) {
          pen.fillStyle = by === "kind" && isAgent(kind) ? colorOf(by, kind, -1) : grid;
          pen.fillRect(x(began), top, Math.max(1, x(ended) - x(began)), height);
        } else if (kind === "generation") {
          drawAnswer(pen, { process, index, began, ended, top, height, by, x, crosses });
        } else {
          pen.fillStyle = process.took[index] ? colorOf(by, kind, process.first_version[index]) : mark;
          pen.fillRect(x(began), top, Math.max(process.took[index] ? 1 : 2, x(ended) - x(began)), height);
        }
      }
    }
    if (place.isBand) drawBand(pen, { told, place, x, grid, dim });
    pen.fillStyle = bad;
    for (const { worker, at, back: until } of deaths) {
      if (worker === process.name) pen.fillRect(x(at), place.top, Math.max(3, x(until) - x(at)), LINE);
    }
    pen.strokeStyle = text;
    pen.lineWidth = 1;
    pen.beginPath();
    for (const [at, top, height] of crosses) {
      const half = Math.min(3, height / 2);
      pen.moveTo(at - half, top + height / 2 - half);
      pen.lineTo(at + half, top + height / 2 + half);
      pen.moveTo(at - half, top + height / 2 + half);
      pen.lineTo(at + half, top + height / 2 - half);
    }
    pen.stroke();
  }
  pen.restore();
  drawPublications(pen, { told, layout, view, x, mark });
  pen.fillStyle = dim;
  pen.textAlign = "left";
  for (const place of layout.places) {
    pen.fillText(place.process.name, 4, place.top + LINE / 2, GUTTER - 8);
    if (place.isBand && bandOf(place.process).parts) pen.fillText(`up to ${short(Math.ceil(bandOf(place.process).most))} lanes`, 4, place.top + LINE + 10, GUTTER - 8);
  }
  if (drag) {
    pen.fillStyle = mark;
    pen.globalAlpha = 0.2;
    pen.fillRect(Math.min(drag.from, drag.to), AXIS, Math.abs(drag.to - drag.from), layout.height);
    pen.globalAlpha = 1;
  }
}

/** What the lanes of a process do, over each other: as high as the number of lanes that do it. */
function drawBand(pen, { told, place, x, grid, dim }) {
  const { process, top, end } = place;
  const { kinds, parts, most } = bandOf(process);
  const length = (told.last - told.first) / parts;
  const scale = BAND / most;
  for (let part = 0; part < parts; part++) {
    const [from, to] = [x(told.first + part * length), x(told.first + (part + 1) * length)];
    let bottom = end;
    for (const [kind, values] of kinds) {
      const height = values[part] * scale;
      if (height <= 0) continue;
      pen.fillStyle = kind === OWN ? dim : colorOf("kind", kind, -1);
      pen.fillRect(from, bottom - height, to - from + 0.5, height);
      bottom -= height;
    }
  }
  pen.fillStyle = grid;
  pen.fillRect(GUTTER, top + LINE, x(told.last) - GUTTER, 1);
}

const OWN = "the workflow's own code";

/** What lanes do, by kind, with what is left of their episodes; what overlaps within an episode is made smaller, so that all of it has room. */
function bandOf({ density }) {
  const episodes = density.episode || [];
  const waits = Object.entries(density).filter(([kind]) => kind !== "episode" && !isAgent(kind)).sort(([a], [b]) => (a === "generation" ? -1 : b === "generation" ? 1 : a < b ? -1 : 1));
  const sums = episodes.map((_, part) => waits.reduce((sum, [, values]) => sum + values[part], 0));
  const kinds = waits.map(([kind, values]) => [kind, values.map((value, part) => (sums[part] > episodes[part] ? (value * episodes[part]) / sums[part] : value))]);
  kinds.push([OWN, episodes.map((value, part) => Math.max(0, value - sums[part]))]);
  return { kinds, parts: episodes.length, most: Math.max(1e-9, ...episodes) };
}

/** An answer by the versions that sampled it, with a cross where the next one came. */
function drawAnswer(pen, { process, index, began, ended, top, height, by, x, crosses }) {
  let version = process.first_version[index];
  let from = began;
  const part = (to) => {
    pen.fillStyle = colorOf(by, "generation", version);
    pen.fillRect(x(from), top, Math.max(1, x(to) - x(from)), height);
  };
  for (const [when, next] of process.updates) {
    if (next <= version || next > process.last_version[index] || when <= from || when >= ended) continue;
    part(when);
    crosses.push([x(when), top, height]);
    [from, version] = [when, next];
  }
  part(ended);
}

function drawPublications(pen, { told, layout, view, x, mark }) {
  const script = told.processes.find((it) => it.name === "script");
  if (!script) return;
  pen.strokeStyle = mark;
  pen.fillStyle = mark;
  pen.textAlign = "left";
  pen.setLineDash([3, 3]);
  pen.beginPath();
  let free = 0;
  script.kind.forEach((kind, index) => {
    if (told.kinds[kind] !== "sync") return;
    const when = told.first + script.began[index] + script.took[index];
    if (when < view.first || when > view.last || x(when) < free) return;
    pen.moveTo(x(when), AXIS - 16);
    pen.lineTo(x(when), layout.height);
    const label = `v${script.first_version[index]}`;
    pen.fillText(label, x(when) + 2, 25);
    free = x(when) + pen.measureText(label).width + 10;
  });
  pen.stroke();
  pen.setLineDash([]);
}

/** What each colour stands for, among what is seen. */
function legendOf({ processes }, by, layout) {
  const kinds = new Set(processes.flatMap(({ totals }) => Object.keys(totals).filter((kind) => kind !== "episode" && totals[kind][1] > 0)));
  const hasBand = layout.places.some((it) => it.isBand);
  const ofVersions = by === "version" ? el("span", { class: "dim" }, "answers and weights in the colour of their version, other work of an episode grey; × new weights came; red: the worker died; ") : null;
  const named = [...kinds].filter((kind) => by === "kind" || (hasBand && kind === "generation") || !isAgent(kind) && !/generation|weights|^(wait|train|sync|update|pulling rows|computing.*)$/.test(kind));
  return [
    hasBand ? el("span", { class: "dim" }, "lanes of a worker together: how many do what, grey its own code; zoom in for single lanes. ") : null,
    ofVersions,
    ...named.flatMap((kind) => {
      const swatch = el("span", { class: "dot" });
      swatch.style.background = colorOf("kind", kind, -1);
      return [swatch, ...shown(kind), "  "];
    }),
  ].filter(Boolean);
}

const colors = new Map(); // to make one takes longer than to draw with it

function colorOf(by, kind, version) {
  const name = `${by === "version" ? version : -1} ${kind}`;
  if (!colors.has(name)) colors.set(name, newColor(by, kind, version));
  return colors.get(name);
}

function newColor(by, kind, version) {
  if (by === "version" && version >= 0) return `hsl(${(version % NUM_HUES) * (360 / NUM_HUES)} 60% 58%)`;
  const ofName = 235 + [...kind].reduce((sum, it) => (31 * sum + it.charCodeAt(0)) % 97, 0); // several rewards differ
  const hue = KINDS[kind] ?? (kind.startsWith("the reward") ? ofName : kind.startsWith("computing") ? 250 : 0);
  return `hsl(${hue} ${kind === "wait" || kind === "pulling rows" ? 12 : 60}% 58%)`;
}

function drawAxis(pen, { view, whole, layout, width, x, dim, grid }) {
  const step = niceStep((view.last - view.first) / Math.max(2, (width - GUTTER) / 110));
  pen.textAlign = "center";
  pen.strokeStyle = grid;
  pen.fillStyle = dim;
  pen.beginPath();
  for (let tick = Math.ceil((view.first - whole.first) / step); ; tick++) {
    const when = whole.first + tick * step;
    if (when > view.last) break;
    pen.moveTo(x(when), AXIS);
    pen.lineTo(x(when), layout.height);
    pen.fillText(clock(tick * step, step), Math.min(Math.max(x(when), GUTTER + 24), width - 30), 10);
  }
  pen.stroke();
}

const STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400];

function niceStep(least) {
  if (least > 86400) return 86400 * Math.ceil(least / 86400);
  if (least >= 1) return STEPS.find((step) => step >= least);
  const unit = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((it) => it * unit).find((it) => it >= least);
}

/** Hours, minutes and seconds after the begin, with as many digits as a step needs. */
function clock(seconds, step) {
  const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  const rounded = Number(seconds.toFixed(digits));
  const [hours, minutes] = [Math.floor(rounded / 3600), Math.floor(rounded / 60) % 60];
  const rest = (rounded % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return `${hours ? `${hours}:${String(minutes).padStart(2, "0")}` : minutes}:${rest}`;
}

/** The shortest span at a place, with what is known of it; `room`: seconds that a pixel stands for. */
function spanAt(told, deaths, layout, time, y, room) {
  const place = layout.places.find((it) => y >= it.top && y < it.end);
  if (!place) return null;
  const { process } = place;
  if (place.isBand && y >= place.top + LINE) {
    const { kinds, parts } = bandOf(process);
    const part = Math.max(0, Math.min(parts - 1, Math.floor(((time - told.first) / (told.last - told.first)) * parts)));
    const busy = kinds.map(([kind, values]) => [kind, values[part]]).filter(([, value]) => value >= 0.05);
    return { words: [el("b", {}, process.name), `, of ${process.num_lanes} lanes: `, busy.length ? busy.map(([kind, value], nth) => [nth ? ", " : "", ...shown(kind), ` ${short(Number(value.toPrecision(2)))}`]) : "none works", "; zoom in for single lanes"].flat(3) };
  }
  const lane = y < place.top + LINE ? -1 : Math.floor((y - place.top - LINE) / layout.lane);
  const death = lane < 0 && deaths.find((it) => it.worker === process.name && it.at - 2 * room <= time && time <= it.back + 2 * room);
  if (death) return { words: [el("b", {}, `${death.worker} died`), ": ", ...shown(death.cause), `; back after ${duration(death.back - death.at)}, ${short(death.numGroups)} groups ran again`] };
  let best = -1;
  for (const index of place.lanes.get(lane) || []) {
    const began = told.first + process.began[index];
    const is = began - 2 * room <= time && time <= began + process.took[index] + 2 * room;
    if (is && (best < 0 || process.took[index] <= process.took[best])) best = index;
  }
  if (best < 0) return null;
  const about = told.abouts[process.about[best]];
  const [first, last] = [process.first_version[best], process.last_version[best]];
  const [group] = /^\d+(?=\.\d+\.\d+$)/.exec(about) || [];
  const words = [
    el("b", {}, shown(told.kinds[process.kind[best]])),
    ` on ${process.name}, ${duration(process.took[best])}`,
    first >= 0 ? `, version ${first}${last > first ? ` to ${last}` : ""}` : "",
    process.tokens[best] ? `, ${process.tokens[best].toLocaleString("en")} tokens` : "",
    group ? `, group ${group}` : about ? [", ", ...shown(about)] : "",
  ].flat();
  return { words, group };
}

function totalsTable({ processes, num_left_out: numLeftOut, last, first }) {
  const rows = processes.flatMap(({ name, totals }) =>
    Object.entries(totals)
      .sort(([, a], [, b]) => b[1] - a[1])
      .map(([kind, [count, seconds]]) => [name, shown(kind), number(count), number(seconds, duration(seconds)), number(seconds / (last - first))]),
  );
  return el(
    "div",
    {},
    table(["process", "what", "times", "together", "at one time, on average"], rows, { label: "sums" }),
    numLeftOut ? el("p", { class: "dim" }, `${numLeftOut.toLocaleString("en")} short spans stand behind longer ones; zoom to see them`) : null,
  );
}
