// One row: what the model read and wrote turn by turn, its numbers and tokens, and its group side by side.

import { linkTo } from "./address.js";
import { el, notes, number, short, shown, table, textBox, tile } from "./dom.js";
import { get, isFile, marks } from "./source.js";
import { recordedRows, tokenArea } from "./tokens.js";
import { listed, nameOf, rowNumbers, star } from "./view_rows.js";
import { span } from "./view_run.js";

export const rowParts = [];

export function showRow({ run, words }) {
  return words.name ? showRecorded(run, words) : showSample(run, words);
}

/** A recorded row: all of its turns and tokens, and its group. */
async function showRecorded(run, words) {
  const { name, run: _, ...asked } = words;
  const [group, attempt, episode, row] = name.split(".").map(encodeURIComponent);
  const base = `/api/runs/${run.index}`;
  const path = `${base}/tokens/${group}/${attempt}/${episode}/${row}`;
  const [recorded, stars, found] = await Promise.all([
    get(`${base}/recorded/${group}`),
    marks(run.index),
    get(path).then(
      (tokens) => ({ tokens }),
      (error) => ({ failure: error.message }),
    ),
  ]);
  const chosen = recorded.rows.find((one) => nameOf(one) === name);
  if (!chosen) throw new Error(`${recorded.damage.join("; ")} The row ${name} is not recorded (records.keep), or gone (records.max_bytes).`.trim());
  const to = (one) => linkTo("row", { ...asked, run: run.name, name: nameOf(one) });
  const ofGroup = recorded.rows.filter((one) => one.episode >= 0 && one.attempt === chosen.attempt);
  const place = ofGroup.indexOf(chosen);
  const ofAttempt = recorded.attempts.find((it) => it.attempt === chosen.attempt);
  const rejected = ofAttempt?.rejected || [];
  const numbers = ofAttempt?.rows.find((it) => it.episode === chosen.episode && it.row === chosen.row);
  const neighbours = neighboursOf(run, ofGroup[place - 1] && to(ofGroup[place - 1]), ofGroup[place + 1] && to(ofGroup[place + 1]));
  const ways = {
    ...neighbours,
    g: linkTo("group", { run: run.name, group: chosen.group }),
    p: isFile ? null : linkTo("rows", { run: run.name, dataset: chosen.dataset, index: chosen.index }),  // a file has no other rows
    Escape: linkTo("rows", { run: run.name, ...asked }),
  };
  const button = isFile ? null : star(run, name, stars);
  const root = el(
    "article",
    {},
    navOf(run, chosen, ways, isFile ? "← →, g, Esc" : "← →, b, g, p, Esc"),
    el("h2", {}, `Group ${short(chosen.group)}, answer ${chosen.episode + 1}${chosen.row ? `.${chosen.row + 1}` : ""} `, button),
    notes(recorded.damage, "damage"),
    tilesOf(chosen),
    ofAttempt ? [el("h2", {}, `Row ${short(chosen.index)} of the data`), textBox(ofAttempt.prompt, "row of the data")] : null,
    found.failure ? [el("p", { class: "failure", role: "alert" }, shown(found.failure)), textsOf(chosen)] : turnsOf(chosen, found.tokens.turns),
    found.failure ? null : branches(ofGroup, chosen, found.tokens.branches, to),
    found.failure || !numbers ? null : [el("h2", {}, "Tokens"), tokenArea({ ...chosen, run: run.name, versions: numbers.versions }, found.tokens, (first) => get(path, { first }))],
    ofGroup.length > 1 || rejected.length ? el("h2", {}, "The group side by side") : null,
    rejected.map((it) => el("p", { class: "complaint" }, `${short(it.num_episodes)} answers were rejected: `, shown(`${it.cause}: ${it.message}`))),
    ofGroup.length > 1
      ? el(
          "div",
          { class: "beside" },
          [...ofGroup].sort((a, b) => b.reward - a.reward).map((one) =>
            el(
              "section",
              { class: one === chosen ? "answer chosen" : "answer", "aria-label": `answer ${one.episode + 1}` },
              el("h3", {}, `answer ${one.episode + 1}${one.row ? `.${one.row + 1}` : ""} `, one === chosen ? el("span", { class: "dim" }, "this one") : el("a", { href: to(one) }, "open")),
              rowNumbers(one),
              textBox(one.answer, `answer ${one.episode + 1}`),
            ),
          ),
        )
      : null,
  );
  root.onKey = (event) => {
    if (event.key === "b") button?.click();
    if (!ways[event.key]) return;
    event.preventDefault();
    location.hash = ways[event.key];
  };
  return root;
}

/** Keys to the rows before and behind one: in the list that the reader comes from, else as told. */
function neighboursOf(run, before, after) {
  const place = listed.run === run.name ? listed.links.indexOf(location.hash) : -1;
  const previous = place >= 0 ? listed.links[place - 1] : before;
  const next = place >= 0 ? listed.links[place + 1] : after;
  return { ArrowLeft: previous, k: previous, ArrowRight: next, j: next };
}

/** Where a row leads to. */
function navOf(run, row, ways, keys) {
  return el(
    "nav",
    { class: "ways", "aria-label": "from this row" },
    way("← previous", ways.k),
    way("next →", ways.j),
    way("all rows", ways.Escape),
    way(`life of group ${short(row.group)}`, ways.g),
    ways.p ? way("this prompt over the run", ways.p) : null,
    row.step && !isFile ? way(`rows of step ${short(row.step)}`, linkTo("rows", { run: run.name, step: row.step })) : null,
    el("span", { class: "dim" }, `keys: ${keys}`),
  );
}

function tilesOf(row) {
  return el(
    "div",
    { class: "tiles" },
    tile("reward", number(row.reward), el("span", { class: "dim" }, `  mean of the group ${short(row.group_reward)}`)),
    row.advantage === null ? null : tile("advantage", number(row.advantage)),
    tile("tokens", number(row.num_tokens), el("span", { class: "dim" }, `  ${short(row.num_trained_tokens)} trained`)),
    tile("policy version", span(row.first_version, row.last_version), row.num_interruptions ? el("span", { class: "dim" }, `  ${row.num_interruptions} interruptions`) : ""),
    row.step === null ? null : tile("trained by step", number(row.step), el("span", { class: "dim" }, `  staleness ${short(row.staleness)}`)),
    row.outcome ? tile("outcome", el("span", { class: `outcome ${row.outcome}` }, shown(row.cause ? `${row.outcome}: ${row.cause}` : row.outcome))) : null,
    Object.entries(row.metrics).map(([name, value]) => tile(shown(name), number(value))),
    tile("prompt", `row ${row.index} of dataset ${row.dataset}`),
    tile("worker", shown(row.worker)),
    tile("ended", new Date(1000 * row.time).toLocaleString()),
  );
}

function textsOf(row) {
  return [el("h2", {}, "Prompt"), textBox(row.prompt, "prompt"), el("h2", {}, "Answer"), textBox(row.answer, "answer")];
}

/** What was given and what was sampled, in turns. */
function turnsOf(row, turns) {
  if (turns.some((it) => it.text === null)) return textsOf(row);
  const numTurns = turns.filter((it) => it.is_sampled).length;
  let turn = 0;
  return turns.map(({ is_sampled: isSampled, begin, end, text, first_version: first, last_version: last, mean_logprob: logprob }) => {
    if (isSampled) turn += 1;
    const name = isSampled ? (numTurns > 1 ? `Model, turn ${turn} of ${numTurns}` : "Answer") : begin === 0 ? "Prompt" : isOfTool(text) ? "Given by a tool" : "Given";
    const calls = isSampled ? toolCalls(text) : [];
    const about = `${short(end - begin)} tokens${isSampled ? `, version ${span(first, last)}, mean log-probability ${short(logprob)}` : ""}`;
    return el(
      "section",
      { class: isSampled ? "turn sampled" : "turn" },
      el("h2", {}, `${name} `, el("span", { class: "dim why" }, about), calls.map((call) => [" ", el("span", { class: "call" }, "calls ", shown(call))])),
      textBox(text, name),
    );
  });
}

function isOfTool(text) {
  return /tool_response|<\|im_start\|>tool|<\|start_header_id\|>(tool|ipython)|\[TOOL_RESULTS\]/.test(text);
}

/** Names of the tools that a text calls, in the forms of `areal_sc.workflows.tool_calls` and `<function=NAME>`. */
function toolCalls(text) {
  const ofObjects = [...text.matchAll(/"name"\s*:\s*"([^"]{1,100})"\s*,\s*"(?:arguments|parameters)"/g)];
  const ofTags = [...text.matchAll(/<function=([^>\s]{1,100})>/g)];
  return [...ofObjects, ...ofTags].sort((a, b) => a.index - b.index).map((it) => it[1]);
}

/** The other rows of the episode: where they part from this one. */
function branches(ofGroup, row, found, to) {
  if (!found.length) return null;
  return [
    el("h2", {}, "Branches of this episode"),
    table(
      ["row", "the same as this one up to token", "tokens", "reward", ""],
      found.map(({ row: other, num_shared: numShared }) => {
        const one = ofGroup.find((it) => it.episode === row.episode && it.row === other);
        return [`${row.episode + 1}.${other + 1}`, number(numShared), number(one?.num_tokens), number(one?.reward), one ? el("a", { href: to(one) }, "open") : ""];
      }),
      { label: "branches" },
    ),
  ];
}

async function showSample(run, words) {
  const { id, run: _, ...asked } = words;
  const { row, group, before, after } = await get(`/api/runs/${run.index}/rows/${encodeURIComponent(id || "")}`);
  const to = (offset) => (offset === undefined || offset === null ? null : linkTo("row", { ...asked, run: run.name, id: offset }));
  const ways = {
    ...neighboursOf(run, to(before), to(after)),
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
    navOf(run, row, ways, "← →, g, Esc"),
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

