// One row: what the model read and wrote turn by turn, its numbers and tokens, and its group side by side.

import { linkTo } from "./address.js";
import { duration, el, notes, number, pictureBoxes, short, shown, table, textBox, tile } from "./dom.js";
import { get, isFile, pictureAddress } from "./source.js";
import { MAX_TOKENS, tokenArea } from "./tokens.js";
import { listed, metricsOf, nameOf, rowNumbers, setOf } from "./view_rows.js";
import { span } from "./view_run.js";

export const rowParts = [];
const OPEN_TURNS = 12; // of a longer row the last turn is open
const MAX_NAME_CHARS = 200; // of a model or a tool

/** A recorded row: all of its turns and tokens, and its group. */
export async function showRow({ run, words }) {
  const { name = "", token = "-1", run: _, ...asked } = words;
  const [group, attempt, episode, row] = name.split(".").map(encodeURIComponent);
  const base = `/api/runs/${run.index}`;
  const path = `${base}/tokens/${group}/${attempt}/${episode}/${row}`;
  const [recorded, found] = await Promise.all([
    get(`${base}/recorded/${group}`),
    get(path, { first: isFile || token < MAX_TOKENS ? 0 : token - 100 }).then(
      (tokens) => ({ tokens }),
      (error) => ({ failure: error.message }),
    ),
  ]);
  const chosen = recorded.rows.find((one) => nameOf(one) === name);
  if (!chosen) throw new Error(`${recorded.damage.join("; ")} The row ${name} is not recorded (records.keep), gone (records.max_bytes), or lost.`.trim());
  const to = (one, more) => linkTo("row", { ...asked, ...more, run: run.name, name: nameOf(one) });
  const ofGroup = recorded.rows.filter((one) => one.episode >= 0 && one.attempt === chosen.attempt);
  const place = ofGroup.indexOf(chosen);
  const ofAttempt = recorded.attempts.find((it) => it.attempt === chosen.attempt);
  const rejected = ofAttempt?.rejected || [];
  const numbers = ofAttempt?.rows.find((it) => it.episode === chosen.episode && it.row === chosen.row);
  const neighbours = neighboursOf(run, ofGroup[place - 1] && to(ofGroup[place - 1]), ofGroup[place + 1] && to(ofGroup[place + 1]));
  const ways = {
    ...neighbours,
    g: chosen.evaluation ? null : linkTo("group", { run: run.name, group: chosen.group }),
    p: isFile ? null : linkTo("prompt", { run: run.name, set: setOf(chosen.evaluation), dataset: chosen.dataset, index: chosen.index }),  // a file has no other rows
    Escape: linkTo("rows", { run: run.name, ...asked }),
  };
  const others = (found.tokens?.branches || []).flatMap(({ row: other, num_shared: numShared }) => {
    const one = ofGroup.find((it) => it.episode === chosen.episode && it.row === other);
    return one ? [{ ...one, name: `${one.episode + 1}.${other + 1}`, num_shared: numShared, href: to(one, { token: numShared }) }] : [];
  });
  const root = el(
    "article",
    {},
    navOf(run, chosen, ways, isFile ? "← →, g, Esc" : "← →, g, p, Esc"),
    el("h2", {}, titleOf(chosen)),
    notes(recorded.damage, "damage"),
    tilesOf(chosen),
    ofAttempt ? [el("h2", {}, `Row ${chosen.index} of the data`), pictureBoxes(chosen.pictures, (digest) => pictureAddress(run, digest)), textBox(ofAttempt.prompt, "row of the data")] : null,
    found.failure ? [el("p", { class: "failure", role: "alert" }, shown(found.failure)), textsOf(chosen)] : turnsOf(chosen, found.tokens.turns, others.filter((it) => it.num_shared < Math.min(it.num_tokens, chosen.num_tokens))),
    chosen.output ? [el("h2", {}, "Output of the episode"), textBox(chosen.output, "output")] : null,
    found.failure ? null : branches(others),
    found.failure || !numbers ? null : [el("h2", {}, "Tokens"), tokenArea({ ...chosen, run: run.name, versions: numbers.versions }, found.tokens, (first) => get(path, { first }), Number(token))],
    ofGroup.length > 1 || rejected.length ? el("h2", {}, "The group side by side") : null,
    rejected.map((it) => el("p", { class: "complaint" }, `Rejected answers: ${short(it.num_episodes)}, `, shown(`${it.cause}: ${it.message}`))),
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
    if (!ways[event.key]) return;
    event.preventDefault();
    location.hash = ways[event.key];
  };
  return root;
}

function titleOf({ evaluation, step, index, attempt, group, episode, row }) {
  if (evaluation) return [...shown(evaluation), `, step ${short(step)}: prompt ${short(index)}, answer ${attempt + 1} `];
  return `Group ${short(group)}, answer ${episode + 1}${row ? `.${row + 1}` : ""} `;
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
    ways.g ? way(`life of group ${short(row.group)}`, ways.g) : null,
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
    tile("tokens", number(row.num_tokens), el("span", { class: "dim" }, `  ${short(row.num_trained_tokens)} trained`)),
    tile("policy version", span(row.first_version, row.last_version), row.num_interruptions ? el("span", { class: "dim" }, `  interruptions: ${row.num_interruptions}`) : ""),
    row.step === null ? null : row.evaluation ? tile("evaluated after step", number(row.step)) : tile("trained by step", number(row.step), el("span", { class: "dim" }, `  staleness ${short(row.staleness)}`)),
    row.outcome ? tile("outcome", el("span", { class: `outcome ${row.outcome}` }, shown(row.cause ? `${row.outcome}: ${row.cause}` : row.outcome))) : null,
    metricsOf(row).map(([name, value]) => tile(shown(name), number(value))),
    tile("prompt", `row ${row.index} of dataset ${row.dataset}`),
    tile("worker", shown(row.worker)),
    tile("ended", new Date(1000 * row.time).toLocaleString()),
  );
}

function textsOf(row) {
  return [el("h2", {}, "Prompt"), textBox(row.prompt, "prompt"), el("h2", {}, "Answer"), textBox(row.answer, "answer")];
}

/** What was given and what was sampled, in turns; where another row of the episode parts from it. */
function turnsOf(row, turns, parting) {
  if (turns.some((it) => it.text === null) && !turns.some((it) => it.call)) return textsOf(row);
  const numTurns = turns.filter((it) => it.is_sampled).length;
  const asked = new Set(turns.flatMap(({ call }) => (call?.answer.tool_calls || []).map((it) => it.id)));
  const results = new Map(turns.flatMap(({ call }) => (call?.given || []).filter((it) => asked.has(it.answers)).map((it) => [it.answers, { ...it, came: call.began }])));
  let turn = 0;
  let before = null; // the call before
  let given = null; // tokens before a recorded call
  return turns.map((part, place) => {
    const { is_sampled: isSampled, begin, end, text, call, first_version: first, last_version: last, mean_logprob: logprob } = part;
    if (!call && turns[place + 1]?.call) {
      given = part;
      return null;
    }
    if (isSampled) turn += 1;
    const model = call?.model || "Model";
    const name = isSampled ? (numTurns > 1 || call ? `${model}, turn ${turn} of ${numTurns}` : "Answer") : begin === 0 ? "Prompt" : isOfTool(text) ? "Given by a tool" : "Given";
    const tools = call ? (call.answer.tool_calls || []).map((it) => it.name) : isSampled ? toolCalls(text) : [];
    const about = [
      given ? `${short(given.end - given.begin)} tokens given, ${short(end - begin)} sampled` : `${short(end - begin)} tokens`,
      isSampled && part.is_trained ? `version ${span(first, last)}, mean log-probability ${short(logprob)}` : null,
      isSampled && !part.is_trained ? "trained in another row, or not at all" : null,
      call ? duration(call.took_s) : null,
      call && before ? `${duration(Math.max(0, call.began - before.began - before.took_s))} after the turn before` : null,
    ];
    const from = given ? given.begin : begin;
    const here = parting.filter((it) => it.num_shared >= from && (it.num_shared < end || place === turns.length - 1));
    const block = el(
      "details",
      { class: isSampled ? "turn sampled" : "turn", "data-name": `tokens from ${begin}`, open: numTurns <= OPEN_TURNS || here.length > 0 || turn === numTurns },
      el("summary", {}, el("h2", {}, shown(name, MAX_NAME_CHARS), " ", el("span", { class: "dim why" }, about.filter(Boolean).join(", ")), tools.map((it) => [" ", el("span", { class: "call" }, "calls ", shown(it, MAX_NAME_CHARS))]))),
      here.map((it) => el("p", { class: "parting" }, `Row ${it.name} parts from this one at token ${short(it.num_shared)}: `, el("a", { href: it.href }, "open"))),
      call ? messagesOf(call, results, text === null ? [] : [given?.text, text]) : el("div", { class: isSampled ? "said" : null }, textBox(text, name)),
    );
    given = null;
    before = call;
    return block;
  });
}

/** What a call gave the model and what that answered; the result of a tool stands with its call. */
function messagesOf(call, results, texts) {
  const message = (role, text, said = "said") => (text ? [el("h3", {}, shown(role)), el("div", { class: said }, textBox(text, role))] : null);
  const { reasoning, text, tool_calls: tools = [] } = call.answer;
  return [
    call.new_row ? el("p", { class: "dim" }, "The row begins here, though the conversation is older: ", shown(call.new_row)) : null,
    call.given.filter((it) => results.get(it.answers)?.text !== it.text).map((it) => [message(it.role, it.text, null), ...(it.tool_calls || []).map((one) => toolOf(one))]),
    message("thought", reasoning),
    message("answer", text),
    tools.map((it) => toolOf(it, results.get(it.id), call)),
    texts.length ? el("details", { class: "raw", "data-name": `text of call ${call.number}` }, el("summary", {}, "all of it as its tokens have it"), texts.filter(Boolean).map((it) => textBox(it, "text of the tokens"))) : null,
  ];
}

function toolOf({ name, arguments: told }, result, call) {
  return [
    el("h3", {}, "calls ", el("span", { class: "call" }, shown(name, MAX_NAME_CHARS))),
    el("div", { class: "said" }, textBox(told, `arguments of ${name}`)),
    result ? [el("h3", {}, "result ", el("span", { class: "dim" }, `within ${duration(Math.max(0, result.came - call.began - call.took_s))}`)), textBox(result.text, `result of ${name}`)] : null,
  ];
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
function branches(others) {
  if (!others.length) return null;
  return [
    el("h2", {}, "Branches of this episode"),
    table(
      ["row", "the same as this one up to token", "tokens", "reward", ""],
      others.map((it) => [it.name, number(it.num_shared), number(it.num_tokens), number(it.reward), el("a", { href: it.href }, "open")]),
      { label: "branches" },
    ),
  ];
}

function way(text, href) {
  return href ? el("a", { href }, text) : el("span", { class: "dim" }, text);
}

