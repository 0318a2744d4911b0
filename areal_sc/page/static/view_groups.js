// What became of each prompt: from its admission to the step that trained it, or why it was not.

import { change, linkTo } from "./address.js";
import { choice, el, field, notes, number, pictureBoxes, short, shown, table, textBox, tile } from "./dom.js";
import { get, isFile, pictureAddress } from "./source.js";
import { recordedRows } from "./tokens.js";
import { recordedCard } from "./view_rows.js";
import { span } from "./view_run.js";

export const groupsParts = ["groups"];
export const groupParts = ["groups"];

export async function showGroups({ run, words }) {
  const { run: _, ...asked } = words;
  const path = `/api/runs/${run.index}/groups`;
  const found = await get(path, asked);
  const body = el("tbody", {}, found.groups.map((account) => groupLine(run, account)));
  const more = el("button", { type: "button", hidden: found.next === null }, "more");
  let at = found.next;
  more.onclick = async () => {
    const next = await get(path, { ...asked, at });
    body.append(...next.groups.map((account) => groupLine(run, account)));
    at = next.next;
    more.hidden = at === null;
  };
  const root = el(
    "div",
    {},
    notes(found.damage, "damage"),
    found.account ? totals(found.account) : null,
    isFile ? null : filters(words, found),
    el("p", { class: "dim" }, `${short(found.num_fitting)} groups, the newest first`),
    el(
      "div",
      { class: "scrolled", tabindex: "0", role: "region", "aria-label": "groups" },
      el(
        "table",
        {},
        el("thead", {}, el("tr", {}, ["group", "outcome", "reward", "step", "admitted at", "sampled by", "rows", "attempts", "worker", "row of the data", "its content"].map((head) => el("th", { scope: "col" }, head)))),
        body,
      ),
    ),
    more,
  );
  root.isQuiet = () => body.children.length <= 100 && scrollY < 200 && !root.contains(document.activeElement);
  return root;
}

function totals({ totals: all, rows_lost: lost, version, lineages, num_undone: undone }) {
  const rejected = Object.entries(all.rejected);
  const count = rejected.reduce((sum, [, value]) => sum + value, 0);
  return el(
    "div",
    { class: "tiles" },
    tile("policy version", number(version)),
    tile("groups admitted", number(all.admitted)),
    tile("consumed", number(all.consumed)),
    tile("rejected", number(count), el("span", { class: "dim" }, rejected.length ? `  ${rejected.map(([cause, value]) => `${cause} ${short(value)}`).join(", ")}` : "")),
    tile("in flight", number(all.queued + all.running + all.finished), el("span", { class: "dim" }, `: ${all.queued} queued, ${all.running} running, ${all.finished} finished`)),
    tile("rows trained", number(all.rows_trained), el("span", { class: "dim" }, `  of ${short(all.rows_consumed)} consumed`)),
    tile("rows trained twice", number(all.rows_trained_twice)),
    tile("rows lost", number(lost)),
    undone ? tile("groups undone", number(undone)) : null,
    lineages.length > 1
      ? tile("lineages", lineages.map((one) => el("div", {}, `${one.lineage}: versions ${short(one.begun_at)} to ${short(one.version)}`, one.counts_to < one.version ? `, undone after ${short(one.counts_to)}` : "")))
      : null,
  );
}

function filters(words, found) {
  const counted = (any, counts) => [["", any], ...Object.entries(counts).map(([name, count]) => [name, `${name} (${short(count)})`])];
  const apply = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    change({ step: form.get("step").trim(), group: form.get("group").trim() });
  };
  return el(
    "form",
    { class: "controls", on: { submit: apply } },
    field("outcome", choice("outcome", counted("any", found.outcomes), words.outcome || "", (outcome) => change({ outcome }))),
    field("cause", choice("cause", counted("any", found.causes), words.cause || "", (cause) => change({ cause }))),
    field("worker", choice("worker", counted("any", found.workers), words.worker || "", (worker) => change({ worker }))),
    field("step", el("input", { name: "step", value: words.step || "", size: 7, inputmode: "numeric" })),
    field("group", el("input", { name: "group", value: words.group || "", size: 7, inputmode: "numeric" })),
    el("button", {}, "apply"),
  );
}

function outcomeOf(account) {
  if (account.is_undone) return `${account.outcome}, then undone`;
  return account.outcome === "rejected" ? `rejected: ${account.cause}` : account.outcome;
}

/** Mean reward of a group's rows, and from which to which they go. */
function rewardsOf({ rewards }) {
  if (!rewards) return "–";
  const [mean, low, high] = rewards;
  return [number(mean), low === high ? null : el("span", { class: "dim" }, `  ${short(low)} to ${short(high)}`)];
}

function groupLine(run, account) {
  const cells = [
    el("a", { href: linkTo("group", { run: run.name, group: account.group }) }, short(account.group)),
    el("span", { class: `outcome ${account.outcome}` }, shown(outcomeOf(account))),
    rewardsOf(account),
    number(account.step),
    number(account.admitted_version),
    account.versions ? span(...account.versions) : "–",
    number(account.num_rows),
    number(account.attempt + 1),
    shown(account.worker || "–"),
    isFile ? String(account.index) : el("a", { href: linkTo("rows", { run: run.name, dataset: account.dataset, index: account.index }) }, String(account.index)),
    el("span", { class: "line prompt" }, shown(account.data_row || "–", 400)),
  ];
  return el("tr", {}, cells.map((cell) => el("td", {}, cell)));
}

const SAID = {
  admitted: (it) => `Admitted at policy version ${it.version}: row ${it.index} of dataset ${it.dataset}, seed ${it.seed}.`,
  started: (it) => `Attempt ${it.attempt + 1} sent to ${it.worker}.`,
  finished: (it) => `Attempt ${it.attempt + 1} gave ${it.rows.length} rows.`,
  requeued: (it) => `Queued again for attempt ${it.attempt + 1}: ${it.cause}.`,
  rejected: (it) => `Rejected: ${it.cause}.${it.returns_prompt ? " Its prompt is admitted again, as another group." : ""}`,
  consumed: (it) => `Taken into the batch of step ${it.step}.`,
  "taken back": () => "That step was taken back; the group waits again.",
  trained: () => "Its rows were trained.",
  published: (it) => `The step made policy version ${it.version}.`,
  "went back": (it) => `The run went back to version ${it.version} (lineage ${it.lineage}): this does not count any more.`,
};

export async function showGroup({ run, words }) {
  const recorded = recordedRows(run, encodeURIComponent(words.group || "")).catch((error) => el("p", { class: "dim" }, shown(error.message)));
  const group = encodeURIComponent(words.group || "");
  const [{ account, events }, kept] = await Promise.all([get(`/api/runs/${run.index}/groups/${group}`), get(`/api/runs/${run.index}/recorded/${group}`)]);
  const finished = events.filter((event) => event.what === "finished").at(-1);
  return el(
    "article",
    {},
    el(
      "nav",
      { class: "ways", "aria-label": "from this group" },
      el("a", { href: linkTo("groups", { run: run.name }) }, "all groups"),
      account.step !== null && !isFile ? el("a", { href: linkTo("groups", { run: run.name, step: account.step }) }, "groups of the same step") : null,
    ),
    el("h2", {}, `Group ${short(account.group)}: `, shown(outcomeOf(account))),
    el("ol", { class: "life" }, events.map((event) => el("li", {}, shown((SAID[event.what] || JSON.stringify)(event))))),
    el("h2", {}, `Row ${account.index} of the data`),
    account.data_row === null
      ? el("p", { class: "dim" }, "Its content is recorded nowhere: none of its attempts has come to its end, or an earlier areal_sc made this run.")
      : [pictureBoxes(kept.rows.at(-1)?.pictures, (digest) => pictureAddress(run, digest)), textBox(account.data_row, "row of the data")],
    finished
      ? [
          el("h2", {}, "Rows"),
          table(
            ["answer", "reward", "tokens", "trained", "sampled by version (tokens)"],
            finished.rows.map((row) => [
              number(row.episode + 1),
              number(row.reward),
              number(row.num_tokens),
              number(row.versions.reduce((sum, [, count]) => sum + count, 0)),
              row.versions.map(([version, count]) => `${short(version)} (${short(count)})`).join(", "),
            ]),
            { label: "rows" },
          ),
        ]
      : null,
    el("h2", {}, "Texts"),
    kept.rows.length
      ? el("div", { class: "rows" }, kept.rows.map((row) => recordedCard(run, row)))
      : el("p", { class: "dim" }, finished ? "none: not recorded (records.keep), or gone (records.max_bytes)" : "none: no attempt has come to its end, when its rows are recorded"),
    finished || kept.attempts.some((it) => it.rows.length || it.rejected.length) ? await recorded : null,
  );
}
