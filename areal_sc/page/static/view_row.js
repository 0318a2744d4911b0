// One row: what the model read and wrote, its numbers, and its group side by side.

import { linkTo } from "./address.js";
import { el, number, short, shown, textBox, tile } from "./dom.js";
import { get } from "./source.js";
import { recordedRows } from "./tokens.js";
import { span } from "./view_run.js";
import { listed } from "./view_rows.js";

export const rowParts = [];

export async function showRow({ run, words }) {
  const { id, run: _, ...asked } = words;
  const { row, group, before, after } = await get(`/api/runs/${run.index}/rows/${encodeURIComponent(id || "")}`);
  // the order of the list that the reader comes from, else that of the file
  const place = listed.run === run.name ? listed.offsets.indexOf(row.offset) : -1;
  const previous = place >= 0 ? listed.offsets[place - 1] : before;
  const next = place >= 0 ? listed.offsets[place + 1] : after;
  const to = (offset) => (offset === undefined || offset === null ? null : linkTo("row", { run: run.name, ...asked, id: offset }));
  const ways = {
    ArrowLeft: to(previous),
    k: to(previous),
    ArrowRight: to(next),
    j: to(next),
    g: linkTo("group", { run: run.name, group: row.group }),
    Escape: linkTo("rows", { run: run.name, ...asked }),
  };
  const prompts = new Set(group.map((one) => one.prompt));
  const tokens = el("div", {});
  recordedRows(run, row.group, row).then(
    (found) => tokens.append(found),
    (error) => tokens.append(el("p", { class: "dim" }, shown(error.message))),
  );
  const root = el(
    "article",
    {},
    el(
      "nav",
      { class: "ways" },
      way("← previous", ways.k),
      way("next →", ways.j),
      way("all rows", ways.Escape),
      way(`life of group ${short(row.group)}`, ways.g),
      way(`rows of step ${short(row.step)}`, linkTo("rows", { run: run.name, step: row.step })),
      el("span", { class: "dim" }, "keys: ← →, g, Esc"),
    ),
    el(
      "div",
      { class: "tiles" },
      tile("step", number(row.step)),
      tile("reward", number(row.reward), el("span", { class: "dim" }, `  mean of the group ${short(row.group_reward)}`)),
      tile("tokens, with the prompt", number(row.num_tokens)),
      tile("policy version", span(row.first_version, row.last_version)),
      tile("staleness", number(row.staleness)),
      Object.entries(row.metrics).map(([name, value]) => tile(shown(name), number(value))),
      tile("trained", new Date(1000 * row.time).toLocaleString()),
    ),
    prompts.size === 1 ? [el("h2", {}, "Prompt"), textBox(row.prompt, "prompt")] : null,
    el("h2", {}, group.length > 1 ? `Answers of the group that were kept` : "Answer"),
    el(
      "div",
      { class: "beside" },
      group.map((one) =>
        el(
          "section",
          { class: one.offset === row.offset ? "answer chosen" : "answer" },
          el(
            "h3",
            {},
            el("span", { class: `place ${one.place}` }, one.place),
            ` reward ${short(one.reward)}, ${short(one.num_tokens)} tokens `,
            one.offset === row.offset ? null : el("a", { href: to(one.offset) }, "open"),
          ),
          prompts.size > 1 ? [el("h4", {}, "prompt"), textBox(one.prompt, "prompt"), el("h4", {}, "answer")] : null,
          textBox(one.answer, "answer"),
        ),
      ),
    ),
    tokens,
  );
  root.onKey = (event) => {
    if (!ways[event.key]) return;
    event.preventDefault();
    location.hash = ways[event.key];
  };
  return root;
}

function way(text, href) {
  return href ? el("a", { href }, text) : el("span", { class: "dim" }, text);
}

