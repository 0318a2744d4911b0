// Where answers come from: the server of the page, or the file that the page was exported to.

const stored = document.getElementById("answers");
const answers = stored && JSON.parse(stored.textContent);

/** Whether the page is a file: it shows what was the case when it was written. */
export const isFile = answers !== null;

/** An answer of the server. Throws an Error that says in a sentence why there is none. */
export async function get(path, words = {}) {
  if (isFile) {
    const isLaterPart = path.includes("/tokens/") && words.first;
    if (Object.hasOwn(answers, path) && !isLaterPart) return answers[path];
    throw new Error("This is not in the exported file; `python -m areal_sc page` on the run folder shows it.");
  }
  return told(query(path, words));
}

/** A path with words; those without a value are left out. */
export function query(path, words) {
  const asked = new URLSearchParams(Object.entries(words).filter(([, value]) => value !== "" && value != null));
  return asked.size ? `${path}?${asked}` : path;
}

async function told(path, how) {
  let response;
  try {
    response = await fetch(path, how);
  } catch {
    throw new Error("The server of this page does not answer; it may have been ended.");
  }
  const found = await response.json().catch(() => ({ error: `The server answered with status ${response.status}.` }));
  if (!response.ok) throw new Error(found.error);
  return found;
}

/** Where the content of a recorded picture is; null: the exported file does not have it. */
export function pictureAddress(run, digest) {
  const path = `/api/runs/${run.index}/pictures/${encodeURIComponent(digest)}`;
  return isFile ? (answers[path] ?? null) : path;
}

/** Calls `onChange` with the parts of runs that have changed, and `onState` with whether it can hear of them. */
export function listen(onChange, onState) {
  if (isFile) return;
  let events = null;
  const connect = () => {
    events?.close();
    events = document.hidden ? null : new EventSource("/api/changes");  // a host has few connections, which other tabs need
    if (events === null) return;
    events.onopen = () => onState(true);
    events.onerror = ({ target }) => {
      onState(false);
      if (target.readyState === EventSource.CLOSED && target === events) setTimeout(connect, 3000);
    };
    events.onmessage = (event) => onChange(JSON.parse(event.data));
  };
  document.addEventListener("visibilitychange", connect);
  connect();
}

// the key leaves the address bar, and stays for links that are copied
const key = new URLSearchParams(location.search).get("key");
if (key !== null) {
  sessionStorage.setItem("key", key);
  history.replaceState(null, "", location.pathname + location.hash);
}

/** The address of what is shown, for somebody else. */
export function sharedAddress() {
  const known = isFile ? null : sessionStorage.getItem("key");
  return known === null ? location.href : `${location.origin}/?key=${encodeURIComponent(known)}${location.hash}`;
}

/** Has a run paused, resumed, scaled or stopped; tells what came of it. */
export function control(run, what, numWorkers = null) {
  return told(`/api/runs/${run}/control`, { method: "POST", body: JSON.stringify({ what, num_workers: numWorkers }) });
}

const known = new Map();

/** Steps, evaluations and events of a run; only what is new is asked for. */
export async function steps(run) {
  const before = known.get(run);
  const told = await get(`/api/runs/${run}/steps`, before && { epoch: before.epoch, first: before.num_steps });
  if (before && told.epoch === before.epoch && told.first > 0) {
    const none = (count) => new Array(count).fill(null);
    const names = new Set([...Object.keys(before.columns), ...Object.keys(told.columns)]);
    const all = [...names].map((name) => [
      name,
      (before.columns[name] || none(told.first)).concat(told.columns[name] || none(told.num_steps - told.first)),
    ]);
    told.columns = Object.fromEntries(all);
  }
  known.set(run, told);
  return told;
}
