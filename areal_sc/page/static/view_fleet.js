// Who works for a run, in which state, what is waited for, and the ends of the logs.

import { change, linkTo } from "./address.js";
import { bytes, choice, duration, el, field, notes, number, short, shown, table, tile } from "./dom.js";
import { control, get, isFile, steps } from "./source.js";
import { folded, stateBadge, timesOf } from "./view_run.js";

export const fleetParts = ["fleet", "steps"];

export async function showFleet({ run, words, again }) {
  const base = `/api/runs/${run.index}`;
  const [fleet, told, held] = await Promise.all([get(`${base}/fleet`), steps(run.index), get(`${base}/held`)]);
  const names = fleet.logs.map((log) => log.name);
  const name = names.includes(words.log) ? words.log : names.find((it) => it.startsWith("controller")) || names[0];
  const log = name ? await get(`${base}/logs/${encodeURIComponent(name)}`) : null;
  const roles = Object.entries(fleet.status?.roles || {});
  const ago = (at) => duration(Math.max(0, fleet.now - at));
  const box = log && el("pre", { class: "text log", tabindex: "0", "aria-label": `log ${name}` }, log.text ? shown(log.text, Infinity) : "(empty)");
  if (box) requestAnimationFrame(() => (box.scrollTop = box.scrollHeight));
  const root = el(
    "div",
    {},
    el("h2", {}, stateBadge(fleet), " ", el("span", { class: "why" }, shown(fleet.text))),
    notes(fleet.damage, "damage"),
    el(
      "div",
      { class: "tiles" },
      fleet.status
        ? [
            tile("script", shown(`process ${fleet.status.pid} on ${fleet.status.host}`)),
            tile("started", ago(fleet.status.began), " ago"),
            tile("wrote", ago(fleet.status.written), " ago"),
            fleet.status.phases.map((phase) => tile("phase", shown(phase.name), phase.total ? `, ${phase.done} of ${phase.total} ${phase.unit}` : "")),
          ]
        : null,
      (fleet.status?.tenants || []).map((it) => tile(`tenant ${shown(it.name)}`, `${short(it.num_models)} models`, `, ${short(it.num_resting)} rest; ${short(it.num_waiting)} requests wait, ${short(it.num_answered)} answered; ${duration(it.busy_s)} of the ranks`)),
      fleet.snapshots.length ? tile("newest snapshot", shown(fleet.snapshots.at(-1))) : null,
      roles.map(([name, role]) => tile(`policy version of ${name}`, number(role.version), role.lineage ? el("span", { class: "dim" }, `  lineage ${role.lineage}`) : "")),
      roles.filter(([, role]) => role.num_open !== null).map(([, role]) => tile("groups", `${short(role.num_open - (role.num_running || 0))} queued, ${short(role.num_running)} running, ${short(role.num_finished)} ended since the script began`)),
    ),
    run.can_control && !isFile ? controls(run, fleet, roles, again) : null,
    waits(roles, ago),
    workers(run, roles, fleet, held, ago),
    nodes(roles, ago),
    restarts(told.events),
    name
      ? [
          el("h2", {}, "Logs"),
          el(
            "form",
            { class: "controls" },
            field("log", choice("log", fleet.logs.map((it) => [it.name, `${it.name}, ${short(it.num_bytes)} bytes`]), name, (log) => change({ log }))),
          ),
          box,
        ]
      : el("p", { class: "dim" }, "no logs"),
  );
  root.isQuiet = () => !root.contains(document.activeElement);
  return root;
}

const answers = new Map(); // name of a run -> the element of what it last answered, which outlives a view

/** Buttons that ask the run's script, where the page was started with `--control`. */
function controls(run, { status }, roles, again) {
  if (!answers.has(run.name)) answers.set(run.name, el("span", { class: "dim", role: "status" }));
  const said = answers.get(run.name);
  const ask = async (what, numWorkers) => {
    said.textContent = `${what} …`;
    try {
      said.replaceChildren(...shown((await control(run.index, what, numWorkers)).text));
    } catch (error) {
      said.replaceChildren(...shown(error.message));
    }
    if (said.isConnected) again(); // "pause" becomes "resume"
  };
  const button = (what, go = () => ask(what)) => el("button", { type: "button", on: { click: go } }, what);
  const number = el("input", { name: "workers", type: "number", min: 1, value: (roles.find(([name]) => name === "rollout")?.[1].workers || []).length || 1 });
  return el(
    "form",
    { class: "controls", "aria-label": "control", on: { submit: (event) => (event.preventDefault(), ask("scale", number.valueAsNumber)) } },
    button(status?.wishes?.pause ? "resume" : "pause"),
    field("rollout workers", number),
    el("button", {}, "scale"),
    button("stop", () => confirm(`End the run ${run.name}?`) && ask("stop")),
    said,
  );
}

function waits(roles, ago) {
  const all = roles.flatMap(([, role]) => role.waits);
  return all.length
    ? [el("h2", {}, "Waits"), table(["who", "for what", "since"], all.map((wait) => [shown(wait.who), shown(wait.what), ago(wait.since)]), { label: "waits" })]
    : null;
}

function workers(run, roles, { have_workers_ended: haveEnded, logs }, held, ago) {
  const all = roles.flatMap(([, role]) => role.workers);
  const logOf = (worker) => logs.find((it) => it.name === `${worker.name.replace("/", "-")}.log`);
  if (!all.length) return el("p", { class: "dim" }, "no workers: the script has ended, or has not started any");
  return [
    el("h2", {}, "Workers"),
    table(
      ["worker", "state", "version", "restarts", "heard", "tensor store", "process", "host", "log"],
      all.map((worker) => [
        shown(worker.name),
        el("span", { class: `state ${haveEnded ? "ended" : worker.state.replaceAll(" ", "-")}` }, haveEnded ? "ended" : shown(worker.state)),
        number(held[worker.name]),
        number(worker.restarts),
        `${ago(worker.heard)} ago`,
        `${bytes(worker.held_bytes)}${worker.store_bytes ? ` of ${bytes(worker.store_bytes)}` : ""}`,
        String(worker.pid),
        shown(worker.host),
        logOf(worker)
          ? [el("a", { href: linkTo("fleet", { run: run.name, log: logOf(worker).name }), "aria-label": `log of ${worker.name}` }, "log"), " ", el("code", { class: "dim last" }, shown(logOf(worker).last))]
          : "–",
      ]),
      { label: "workers" },
    ),
  ];
}

function nodes(roles, ago) {
  const all = new Map(roles.flatMap(([, role]) => role.agents).map((agent) => [agent.host, agent]));
  const workersOn = (host) => roles.flatMap(([, role]) => role.workers).filter((worker) => worker.host === host);
  return all.size
    ? [
        el("h2", {}, "Nodes"),
        table(
          ["node", "heard", "memory of its stores", "workers"],
          [...all.values()].map((agent) => {
            const its = workersOn(agent.host);
            const held = its.reduce((sum, worker) => sum + (worker.held_bytes || 0), 0);
            const room = Math.max(0, ...its.map((worker) => worker.node_bytes || 0));
            return [shown(agent.host), `${ago(agent.heard)} ago`, `${bytes(held)}${room ? ` of ${bytes(room)}` : ""}`, shown(its.map((it) => it.name).join(", ") || "–")];
          }),
          { label: "nodes" },
        ),
      ]
    : null;
}

function restarts(events) {
  const found = folded(events.filter((event) => event.name === "workers_restarted").reverse());
  return found.length
    ? [
        el("h2", {}, "Restarts"),
        table(
          ["workers", "times", "after step", "back after", "groups that ran again", "cause", "at"],
          found.slice(0, 50).map(({ events: its, first, of }) => [
            shown((first.workers || []).join(", ")),
            number(its.length),
            of("after_step", short),
            of("duration_s", duration),
            of("num_groups", short),
            shown(String(first.cause)),
            timesOf(its),
          ]),
          { label: "restarts" },
        ),
      ]
    : null;
}
