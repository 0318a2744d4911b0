// What is shown stands in the address: #/VIEW?NAME=VALUE&...

/** View and words of the present address. */
export function address() {
  const [view, query] = location.hash.slice(2).split("?");
  return { view: view || "run", words: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a view; words without a value are left out. */
export function linkTo(view, words = {}) {
  const told = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return told.length ? `#/${view}?${new URLSearchParams(told)}` : `#/${view}`;
}

export function goTo(view, words) {
  location.hash = linkTo(view, words);
}

/** Changes words of the present address. */
export function change(words) {
  const { view, words: present } = address();
  goTo(view, { ...present, ...words });
}
