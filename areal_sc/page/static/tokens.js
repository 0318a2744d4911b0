// The tokens of recorded rows: coloured by what is known of them, with every number of the one under the pointer.

import { linkTo } from "./address.js";
import { choice, el, field, notes, number, short, shown } from "./dom.js";
import { get } from "./source.js";

export const NUM_HUES = 12;
export const MAX_TOKENS = 10000; // of one answer
const TRACED_EVERY = 16; // groups of whose tokens train ranks record numbers
// numbers that give a token its colour: where one ends and the next one begins; p: from good to bad, d: from low to high
const SCALES = {
  "log-probability": { of: ({ logprobs }) => logprobs, ends: [-8, -4, -2, -1, -0.5, -0.1, -0.01], name: (place) => `p${7 - place}` },
  "gap of trainer and sampler": { of: ({ trained }) => trained?.gaps, ends: [-0.5, -0.1, -0.02, -0.005, 0.005, 0.02, 0.1, 0.5], name: (place) => `d${place}` },
  advantage: { of: ({ trained }) => trained?.advantages, ends: [-2, -1, -0.3, -0.001, 0.001, 0.3, 1, 2], name: (place) => `d${place}` },
  entropy: { of: ({ trained }) => trained?.entropies, ends: [0.01, 0.1, 0.3, 0.7, 1.5, 3, 5], name: (place) => `p${place}` },
};
let color = "version"; // kept from row to row
let lookedAt = ""; // the address whose token has been brought into view

/** The recorded rows of a group, and the tokens of the one that is chosen. */
export async function recordedRows(run, group) {
  const { attempts, damage } = await get(`/api/runs/${run.index}/recorded/${group}`);
  const rows = attempts.flatMap((attempt) => attempt.rows.map((row) => ({ ...row, run: run.name, group: Number(group), attempt: attempt.attempt, name: `${attempt.attempt}.${row.episode}.${row.row}` })));
  const first = rows[0];
  const area = el("div", {});
  const show = async (name) => {
    const row = rows.find((one) => one.name === name);
    try {
      const path = `/api/runs/${run.index}/tokens/${group}/${row.attempt}/${row.episode}/${row.row}`;
      area.replaceChildren(tokenArea(row, await get(path), (first) => get(path, { first })));
    } catch (error) {
      area.replaceChildren(el("p", { class: "dim" }, shown(error.message)));
    }
  };
  if (first) await show(first.name);
  const options = rows.map((row) => [row.name, `${row.attempt ? `attempt ${row.attempt + 1}, ` : ""}answer ${row.episode + 1}${row.row ? `.${row.row + 1}` : ""}: reward ${short(row.reward)}, ${short(row.num_tokens)} tokens`]);
  return el(
    "section",
    {},
    el("h2", {}, "Tokens"),
    notes(damage, "damage"),
    attempts.flatMap((attempt) =>
      attempt.rejected.map((it) => el("p", { class: "complaint" }, `Rejected episodes of attempt ${attempt.attempt + 1}: ${short(it.num_episodes)}, `, shown(`${it.cause}: ${it.message}`))),
    ),
    rows.length ? field("row", choice("recorded row", options, first.name, show)) : el("p", { class: "dim" }, "not recorded (records.keep), or gone (records.max_bytes)"),
    area,
  );
}

/** The tokens of a row, a part of them at once. `load` gives those from another one on; at `at` the reader looks. */
export function tokenArea(row, tokens, load, at = -1) {
  const area = el("div", {});
  const show = (told) => {
    const { first, ids, num_tokens: numTokens } = told;
    const last = first + ids.length;
    const part = (text, begin) => el("button", { type: "button", on: { click: () => load(begin).then(show, (error) => area.append(el("p", { class: "failure", role: "alert" }, shown(error.message)))) } }, text);
    const parts =
      ids.length < numTokens
        ? el(
            "p",
            { class: "found" },
            el("span", { class: "dim" }, `tokens ${short(first)} to ${short(last - 1)} of ${short(numTokens)}`),
            first > 0 ? part("earlier tokens", Math.max(0, first - tokens.ids.length)) : null,
            last < numTokens ? part("later tokens", last) : null,
          )
        : null;
    area.replaceChildren(...[parts, tokenBox(row, told, at - first)].filter(Boolean));
  };
  show(tokens);
  return area;
}

function tokenBox(row, told, start) {
  const { ids, mask, logprobs, versions, texts, first, num_tokens: numTokens, trained } = told;
  const colors = ["version", ...Object.keys(SCALES).filter((it) => SCALES[it].of(told)), "mask"];
  const under = el("p", { class: "under", role: "status" }, "point at a token, or go along them with ← and →");
  const box = el("div", { class: "tokens text", tabindex: "0", dir: "ltr", role: "group", "aria-label": "tokens" });
  const marks = ids.map((id, index) => {
    const mark = document.createElement("span");
    mark.append(...textOf(texts ? texts[index] : `${id} `));
    mark.index = index;
    return mark;
  });
  const legend = el("p", { class: "legend" });
  const paint = (by) => {
    marks.forEach((mark, index) => (mark.className = mask[index] ? classOf(by, told, index) : "given"));
    legend.replaceChildren(...legendOf(by, row));
  };
  let at = -1;
  const point = (index) => {
    marks[at]?.removeAttribute("aria-current");
    at = index;
    marks[at].setAttribute("aria-current", "true");
    under.replaceChildren(...numbersOf(at));
  };
  const numbersOf = (index) => [
    `token ${short(first + index)} of ${short(numTokens)}, id ${ids[index]}`,
    texts ? [" ", el("code", {}, shown(JSON.stringify(texts[index])))] : "",
    mask[index] ? `, sampled by version ${short(versions[index])}, log-probability ` : ", given: not trained",
    ...(mask[index] ? [number(logprobs[index]), `, probability ${short(Math.exp(logprobs[index]))}`] : []),
    mask[index] && row.step ? `, staleness ${short(row.step - 1 - versions[index])}` : "",
    mask[index] && trained ? trainedNumbers(trained, index) : "",
  ].flat();
  box.addEventListener("pointerover", (event) => event.target !== box && point(event.target.closest(".tokens > span").index));
  box.addEventListener("keydown", (event) => {
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: ids.length - 1 }[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation(); // in a row these keys go to the next one
    if (next < 0 || next >= ids.length) return;
    point(next);
    marks[next].scrollIntoView({ block: "nearest" });
  });
  box.append(...marks);
  if (marks[start]) {
    point(start);
    if (lookedAt !== location.hash) setTimeout(() => marks[start].scrollIntoView({ block: "center" })); // once it is on the page
    lookedAt = location.hash;
  }
  const chosen = colors.includes(color) ? color : "version";
  paint(chosen);
  return el(
    "div",
    {},
    el("div", { class: "controls" }, field("colour", choice("colour", colors.map((it) => [it, it]), chosen, (by) => paint((color = by)))), legend),
    trained || row.evaluation ? null : untraced(row),
    texts ? null : el("p", { class: "dim" }, "ids, as the tokenizer of the run's model is not on this machine"),
    under,
    box,
  );
}

/** A newline is seen as what it is; of a character that several tokens make, the last one has the text. */
function textOf(text) {
  return text === "" ? ["▫"] : shown(text.replaceAll("\n", "⏎\n"));
}

/** What the trainer says of a token. */
function trainedNumbers({ step, minibatch, gaps, entropies, advantages }, index) {
  if (gaps[index] === null) return `, advantage ${short(advantages[index])}; step ${short(step)} sent it through no forward`;
  return [", trainer less sampler ", number(gaps[index]), " nats, entropy ", number(entropies[index]), ", advantage ", number(advantages[index]), `, trained by step ${short(step)}, minibatch ${minibatch + 1}`].flat();
}

function untraced({ run, group }) {
  const nearest = group - (group % TRACED_EVERY);
  const of = nearest === group ? "none are recorded of this row" : ["the nearest before is ", el("a", { href: linkTo("group", { run, group: nearest }) }, `group ${short(nearest)}`)];
  return el("p", { class: "dim" }, `The trainer's numbers of each token are recorded of every ${TRACED_EVERY}th group, once it is trained; `, of, ".");
}

function classOf(by, told, index) {
  if (by === "mask") return "trained";
  if (by === "version") return `hue${told.versions[index] % NUM_HUES}`;
  const { of, ends, name } = SCALES[by];
  const value = of(told)[index];
  return value === null ? "given" : name(ends.filter((end) => value >= end).length);
}

function legendOf(by, row) {
  const given = el("span", { class: "given" }, "given");
  if (by === "mask") return [el("span", { class: "trained" }, "trained"), " ", given];
  if (by === "version") {
    const versions = [...new Set(row.versions.map(([version]) => version))].slice(-NUM_HUES);
    return [...versions.flatMap((version) => [el("span", { class: `hue${version % NUM_HUES}` }, `version ${version}`), " "]), given];
  }
  const { ends, name } = SCALES[by];
  const names = [`< ${ends[0]}`, ...ends.map((end) => `≥ ${end}`)];
  return [...names.flatMap((text, place) => [el("span", { class: name(place) }, text), " "]), given];
}
