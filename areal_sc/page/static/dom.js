// Elements and texts. Whatever comes from a run is text: nothing here parses markup.

/** An element: attributes, `on` with listeners, and children (elements, texts, lists; null is left out). */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value != null) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// C0 and C1 controls but tab and newline, marks of direction, and others that nobody sees
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

/** The parts of a text, in which characters that nobody sees, or that steer its direction, are shown by number; of a longer one than `most` the beginning. */
export function shown(text, most = Infinity) {
  if (text.length > most) return [...shown(text.slice(0, most)), el("span", { class: "dim" }, ` … ${text.length.toLocaleString("en")} characters`)];
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(UNSEEN)) {
    parts.push(text.slice(at, found.index));
    const code = found[0].codePointAt(0).toString(16).padStart(4, "0");
    parts.push(el("span", { class: "unseen" }, `\\u${code}`));
    at = found.index + 1;
  }
  parts.push(text.slice(at));
  return parts;
}

/** The parts of a text, in which each place where something stands, in small letters or capitals, is marked. */
export function marked(text, wanted) {
  if (!wanted) return shown(text);
  const [low, small] = [text.toLowerCase(), wanted.toLowerCase()];
  if (low.length !== text.length) return shown(text); // its places are others
  const parts = [];
  let at = 0;
  for (let found = low.indexOf(small); found >= 0; found = low.indexOf(small, at)) {
    parts.push(...shown(text.slice(at, found)), el("mark", {}, shown(text.slice(found, found + small.length))));
    at = found + small.length;
  }
  return [...parts, ...shown(text.slice(at))];
}

const FIRST_CHARS = 20000;

/** Recorded pictures of a prompt, each with what it is; `addressOf` gives where its content is, by its digest, or null. */
export function pictureBoxes(pictures, addressOf) {
  if (!pictures?.length) return null;
  return el("div", { class: "pictures" }, pictures.map((it, place) => {
    const name = `picture ${place + 1}`;
    const box = el("figure", {});
    const missing = () => el("span", { class: "dim" }, "not here, or gone (records.max_bytes)");
    const address = addressOf(it.digest);
    const drawn = address && el("img", { src: address, alt: name, loading: "lazy", width: it.width, height: it.height, on: { error: () => drawn.replaceWith(missing()) } });
    box.append(drawn || missing(), el("figcaption", { class: "dim" }, shown(`${name}: ${it.kind}, ${it.width} x ${it.height}, ${bytes(it.num_bytes)}`)));
    return box;
  }));
}

/** A long text in its own box; the rest of one that is very long comes when it is asked for. */
export function textBox(text, label) {
  const box = el("pre", { class: "text", tabindex: "0", dir: "ltr", "aria-label": label }, shown(text.slice(0, FIRST_CHARS), Infinity));
  if (text.length <= FIRST_CHARS) return box;
  const more = el(
    "button",
    {
      type: "button",
      on: {
        click: () => {
          box.replaceChildren(...shown(text, Infinity));
          more.remove();
        },
      },
    },
    `show all ${text.length.toLocaleString("en")} characters`,
  );
  return [box, more];
}

/** A number in few characters. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(2);
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** A number beside an axis. */
export function tick(value) {
  return Math.abs(value) >= 1e4 ? COMPACT.format(value) : short(value);
}

/** A number that tells all of itself under the pointer. */
export function number(value, text = short(value)) {
  return el("span", { class: "number", title: value === null || value === undefined ? null : String(value) }, text);
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${Number((100 * share).toPrecision(3))}%`;
}

/** A number of bytes in few characters. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return `${Number((value / 1024 ** power).toPrecision(3))} ${["bytes", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds && seconds < 0.1) return `${Number((1000 * seconds).toPrecision(2))} ms`;
  if (seconds < 100) return `${Number(seconds.toPrecision(3))} s`;
  const parts = (unit, of, name, small) => `${Math.floor(Math.round(seconds / unit) / of)} ${name} ${Math.round(seconds / unit) % of} ${small}`;
  if (seconds < 6000) return parts(1, 60, "min", "s");
  if (seconds < 360000) return parts(60, 60, "h", "min");
  return parts(3600, 24, "d", "h");
}

/** What went wrong, or is particular, one line each. */
export function notes(texts, kind) {
  return texts.length ? el("ul", { class: `notes ${kind}` }, texts.map((text) => el("li", {}, shown(text)))) : null;
}

/** A table: heads, then rows of cells. */
export function table(heads, rows, attributes = {}) {
  return el(
    "div",
    { class: "scrolled", tabindex: "0", role: "region", "aria-label": attributes.label || heads.join(", ") },
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell))))),
    ),
  );
}

/** A value under its name. */
export function tile(name, ...value) {
  return el("div", { class: "tile" }, el("div", { class: "name" }, name), el("div", { class: "value" }, ...value));
}

/** A field of a form. */
export function field(label, input) {
  return el("label", { class: "field" }, el("span", {}, label), input);
}

export function choice(name, options, chosen, onChange) {
  return el(
    "select",
    { name, on: { change: (event) => onChange(event.target.value) } },
    options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
  );
}
