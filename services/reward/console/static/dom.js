// Elements and words. Text always goes in as text: nothing here takes markup.

export const byId = (id) => document.getElementById(id);

/** An element with properties, attributes ("aria-label", "data-x") and children (elements or text). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Make the children of `parent` those of `keys`, in order; `make(key)` builds, `renew(element, key)` refreshes. Elements
    that stay are never moved out of the document, so that focus stays where it is. */
export function reconcile(parent, keys, make, renew = () => {}) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  keys.forEach((key, at) => {
    let element = known.get(key);
    known.delete(key);
    if (!element) {
      element = make(key);
      element.dataset.key = key;
    }
    renew(element, key);
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
  for (const element of known.values()) element.remove();
}

/** Say something in a message line, or hide it with an empty text; `kind`: "", "good" or "bad". */
export function say(element, text, kind = "") {
  element.textContent = text;
  element.hidden = !text;
  element.classList.toggle("good", kind === "good");
  element.classList.toggle("bad", kind === "bad");
}

export const number = (value, digits = 2) =>
  value === null || value === undefined || !Number.isFinite(value) ? "–" : value.toFixed(digits).replace("-", "−");

/** At most four digits after the point, without trailing zeros. */
export const short = (value) => (value === null || value === undefined ? "–" : String(+value.toFixed(4)).replace("-", "−"));

export const whole = (value) =>
  value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US").replaceAll(",", " ");

export const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

export function clock(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-CA")} ${time}`;
}

export function span(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

export const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

/** The last part of a UUIDv7, which is what tells two of them apart. */
export const shortId = (id) => `…${id.slice(-8)}`;
