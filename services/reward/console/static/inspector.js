// One trajectory, read token by token.

import { Problem, Unreachable, call } from "./api.js";
import { byId, clock, h, number, plural, say, short, shortId, whole } from "./dom.js";

const PAGE = 1024;

export class Inspector {
  constructor() {
    this.from = null;
    this.wanted = null;
    byId("inspect-close").addEventListener("click", () => this.close());
    byId("inspect").addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  async open(id, from) {
    this.from = from;
    this.wanted = id;
    byId("inspect").hidden = false;
    byId("inspect-title").textContent = `Trajectory ${shortId(id)}`;
    byId("inspect-body").replaceChildren();
    say(byId("inspect-message"), "reading …");
    byId("inspect-title").focus({ preventScroll: true });
    byId("inspect").scrollIntoView({ block: "start" });
    const view = await this.read(id, 0);
    if (view && this.wanted === id) this.show(view);
  }

  async read(id, first) {
    try {
      const { body } = await call(`v1/trajectories/${encodeURIComponent(id)}?first=${first}&count=${PAGE}`);
      say(byId("inspect-message"), body.note ? `Note: ${body.note}.` : "");
      return body;
    } catch (error) {
      if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
      say(byId("inspect-message"), error.words, "bad");
      return null;
    }
  }

  close() {
    this.wanted = null;
    byId("inspect").hidden = true;
    (this.from?.isConnected ? this.from : byId("trajectories-title").closest("section").querySelector("button"))?.focus();
  }

  show(view) {
    this.largest = view.largest_advantage || 1;
    this.shownTokens = 0;
    this.tokens = h("div", { className: "segments" });
    this.details = h("dl", { className: "token-facts", id: "token-facts", "aria-live": "polite" });
    this.more = h("button", { type: "button" }, "");
    this.more.addEventListener("click", () => this.append(view.summary.id));
    byId("inspect-body").replaceChildren(
      this.facts(view),
      h("div", { className: "token-area" },
        h("div", { className: "token-text" }, this.legend(view), this.tokens, this.more),
        h("aside", { className: "token-panel", "aria-label": "The chosen token" },
          h("h3", {}, "Token"),
          this.hint = h("p", { className: "muted" }, "Hover over a token, tap it, or go with Tab and the arrow keys."),
          this.details)),
    );
    this.add(view);
  }

  facts(view) {
    const { summary } = view;
    const update = summary.update === null ? "–" : `${whole(summary.update)}${summary.critic_only ? ", critic only" : ""}`;
    const pairs = [
      ["state", summary.state],
      ["reward", number(summary.reward, 4)],
      ["scored under", summary.scored_under === null ? "–" : `preference v${summary.scored_under}`],
      ["trained under", summary.trained_under === null ? "–" : `v${summary.trained_under}${view.preference ? ` ${view.preference}` : ""}`],
      ["update", update],
      ["lag", summary.lag === null ? "–" : plural(summary.lag, "update")],
      ["versions", view.versions.join(", ") || "–"],
      ["engine", view.engine_id || "–"],
      ["finished", summary.finish_reason ?? "–"],
      ["turns", `${summary.turns ?? "–"}, ${whole(view.token_count)} tokens`],
      ["prompt", view.prompt_id ? `${view.prompt_id}, ordinal ${summary.ordinal ?? "–"}` : "–"],
      ["taken", summary.consumed_s === null ? "–" : clock(summary.consumed_s)],
    ];
    const components = Object.entries(summary.components).sort(([a], [b]) => (a < b ? -1 : 1));
    return h("div", { className: "facts-area" },
      h("dl", { className: "facts" }, ...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      h("div", {},
        h("h3", {}, "Components"),
        components.length
          ? h("ul", { className: "bars" }, ...components.map(([name, value]) => bar(name, value)))
          : h("p", { className: "muted" }, "Not scored.")),
      h("details", {}, h("summary", {}, "What the task knows of it"), h("pre", {}, view.payload || "nothing"),
        h("p", { className: "muted mono" }, summary.id)));
  }

  legend(view) {
    const none = view.largest_advantage === null;
    return h("ul", { className: "token-legend", "aria-label": "Legend" },
      none ? null : h("li", {}, h("span", {}, `−${short(view.largest_advantage)}`), h("span", { className: "scale", role: "img", "aria-label": "from orange to blue" }),
        h("span", {}, `+${short(view.largest_advantage)} advantage`)),
      none ? null : h("li", {}, h("span", { className: "token masked" }, "masked"), h("span", {}, "carried no gradient")),
      none ? null : h("li", {}, h("span", { className: "token masked stale" }, "stale"), h("span", {}, "because it was too old")),
      h("li", {}, h("span", { className: "token given" }, "given"), h("span", {}, "not sampled")));
  }

  async append(id) {
    const view = await this.read(id, this.shownTokens);
    if (view && this.wanted === id) this.add(view);
  }

  add(view) {
    for (const segment of view.segments) {
      const words = { prompt: "Prompt", action: `Turn ${segment.turn}: action`, observation: `Turn ${segment.turn}: observation` }[segment.kind];
      const body = h("div", { className: `tokens ${segment.kind}`, role: "group", "aria-label": `${words}. Arrow keys move between tokens.` });
      // A tokenizer of words has no spaces in its tokens; one of bytes has.
      const spaced = segment.text.includes(" ") && !segment.tokens.some((token) => token.text.includes(" "));
      body.classList.toggle("spaced", spaced);
      segment.tokens.forEach((token, at) => body.append(this.token(token, segment.kind, at === 0)));
      body.addEventListener("keydown", (event) => move(event, body));
      this.tokens.append(h("section", { className: "segment" }, h("h3", {}, words), body));
    }
    this.shownTokens = view.first_token + view.segments.reduce((sum, one) => sum + one.tokens.length, 0);
    const left = view.token_count - this.shownTokens;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show ${whole(Math.min(left, PAGE))} more of ${whole(left)} tokens`;
  }

  token(token, kind, first) {
    const text = token.text.replaceAll("\n", "⏎\n") || "∅";
    const button = h("button", { type: "button", className: "token", tabIndex: first ? 0 : -1 }, text);
    if (kind !== "action") button.classList.add("given");
    if (token.masked) button.classList.add("masked");
    if (token.stale) button.classList.add("stale");
    if (token.advantage !== null) {
      const share = Math.min(1, Math.abs(token.advantage) / this.largest);
      button.classList.add(token.advantage >= 0 ? "up" : "down");
      button.style.setProperty("--share", `${Math.round(8 + 62 * share)}%`);
    }
    for (const event of ["pointerenter", "focus", "click"]) button.addEventListener(event, () => this.choose(token, button));
    return button;
  }

  choose(token, button) {
    this.chosen?.classList.remove("chosen");
    this.chosen = button;
    button.classList.add("chosen");
    this.hint.hidden = true;
    const why = token.stale ? "stale: too old for its update" : token.masked ? "masked: its ratio was out of bounds" : "";
    const pairs = [
      ["text", JSON.stringify(token.text)],
      ["token", `${token.position}, id ${token.token_id}`],
      ["log-prob", number(token.logprob, 4)],
      ["version", token.version ?? "not sampled"],
      ["lag", token.lag === null ? "–" : plural(token.lag, "update")],
      ["advantage", number(token.advantage, 4)],
      ["value", number(token.value, 4)],
      ["ratio", number(token.ratio, 4)],
      ["weight f(r)", [number(token.weight, 4), why].filter(Boolean).join(", ")],
    ];
    this.details.replaceChildren(...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }
}

function bar(name, value) {
  const fill = h("span", { className: "fill" });
  fill.style.setProperty("--part", `${100 * Math.min(1, Math.max(0, value))}%`);
  return h("li", {}, h("span", { className: "grow" }, name), h("span", { className: "track", "aria-hidden": "true" }, fill), h("span", { className: "value" }, number(value, 3)));
}

function move(event, body) {
  const tokens = [...body.children];
  const at = tokens.indexOf(event.target);
  const step = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1, ArrowUp: nearest(tokens, at, -1), ArrowDown: nearest(tokens, at, 1) }[event.key];
  const next = tokens[step];
  if (at < 0 || step === undefined) return;
  event.preventDefault();
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

/** The token of the line above or below whose middle is nearest. */
function nearest(tokens, at, direction) {
  const here = tokens[at]?.getBoundingClientRect();
  if (!here) return undefined;
  const middle = here.left + here.width / 2;
  let best = at;
  let line = null;
  for (let next = at + direction; tokens[next]; next += direction) {
    const box = tokens[next].getBoundingClientRect();
    if (Math.abs(box.top - here.top) < 4) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 4) break;
    const bestBox = tokens[best].getBoundingClientRect();
    if (best === at || Math.abs(box.left + box.width / 2 - middle) < Math.abs(bestBox.left + bestBox.width / 2 - middle)) best = next;
  }
  return best;
}
