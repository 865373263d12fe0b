// Requests to the service that served this page, with the run's token, and its problems in words.

import { byId } from "./dom.js";

const KEY = "sao.console.token";
const TIMEOUT_MS = 15000;
const ADVICE = {
  401: "Enter the run's token.",
  413: "Shorten it.",
  422: "Change what it names.",
  423: "“Let changes through” is in the history.",
};

/** An answer with an error status. */
export class Problem extends Error {
  constructor(status, detail, retryAfterS = null, body = {}) {
    super(detail);
    this.status = status;
    this.retryAfterS = retryAfterS;
    this.body = body;
  }

  get words() {
    const wait = this.retryAfterS === null ? "" : ` Try again in ${this.retryAfterS} s.`;
    const detail = this.message.trim().replace(/([^.!?])$/, "$1.");
    return [detail, ADVICE[this.status] ?? ""].filter(Boolean).join(" ") + wait;
  }

  /** The route does not exist on this server (an id that does not exist says so in its own words). */
  get missing() {
    return this.status === 404 || this.status === 405;
  }
}

/** No answer at all. */
export class Unreachable extends Error {
  get words() {
    return "The server did not answer; nothing is known to have changed. Look at the history before you repeat it.";
  }
}

/** The answer's JSON (`body`) and its headers. Throws Problem or Unreachable. */
export async function call(path, { method = "GET", json, headers = {} } = {}) {
  for (;;) {
    const token = sessionStorage.getItem(KEY);
    const response = await send(path, method, json, { ...headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) });
    if (response.status === 401) {
      if (sessionStorage.getItem(KEY) !== token || (await askForToken(token !== null))) continue;
      throw new Problem(401, "This run asks for its token");
    }
    if (response.ok) return { body: await parsed(response), headers: response.headers };
    const body = (await parsed(response)) ?? {};
    const wait = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
    const detail = body.detail ?? body.title ?? `${method} ${path} answered ${response.status}`;
    throw new Problem(response.status, detail, Number.isNaN(wait) ? null : wait, body);
  }
}

async function send(path, method, json, headers) {
  const content = json === undefined ? {} : { "Content-Type": "application/json" };
  const body = json === undefined ? undefined : JSON.stringify(json);
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  try {
    return await fetch(path, { method, body, headers: { ...headers, ...content }, signal, cache: "no-store" });
  } catch (error) {
    throw new Unreachable(String(error));
  }
}

async function parsed(response) {
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch {
    if (response.ok) throw new Unreachable("the answer ended too early");
    return null;
  }
}

let asking = null;
let declined = false;

/** Whether there is a token to try; asks once, however many requests need it. */
function askForToken(wasWrong) {
  if (declined) return Promise.resolve(false);
  asking ??= new Promise((resolve) => {
    const dialog = byId("token-dialog");
    if (wasWrong) byId("token-words").textContent = "That token was refused. It is auth.token of the run file.";
    byId("token").value = "";
    const done = (given) => {
      asking = null;
      declined = !given;
      byId("enter-token").hidden = given;
      dialog.close();
      resolve(given);
    };
    byId("token-form").onsubmit = (event) => {
      event.preventDefault();
      const given = byId("token").value;
      if (given) sessionStorage.setItem(KEY, given);
      done(Boolean(given));
    };
    byId("token-cancel").onclick = () => done(false);
    dialog.oncancel = (event) => {
      event.preventDefault();
      done(false);
    };
    dialog.showModal();
  });
  return asking;
}

/** Ask again although the question was declined. */
export function allowAsking() {
  declined = false;
}
