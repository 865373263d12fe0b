// The list of trajectories: newest first, older ones on demand.

import { call } from "./api.js";
import { byId, clock, h, number, reconcile, shortId } from "./dom.js";
import { shownIn } from "./fleet.js";

const PAGE = 12;
const WAITING = 4;

export class Trajectories {
  constructor(open) {
    this.open = open;
    this.paused = false;
    byId("trajectories-older").addEventListener("click", () => this.older());
    byId("trajectories-newest").addEventListener("click", () => {
      this.paused = false;
      byId("trajectories-newest").hidden = true;
      this.refresh(true).catch(() => {});
    });
  }

  /** The newest page, unless somebody is reading the list, or has gone to older ones. */
  async refresh(force = false) {
    const list = byId("trajectories");
    if (this.paused || (!force && list.matches(":hover, :focus-within"))) return;
    await shownIn("trajectories-problem", async () => {
      const { body } = await call(`v1/trajectories?limit=${PAGE}`);
      // What waits is counted above; the list is for reading.
      const waiting = body.trajectories.filter((one) => one.state !== "trained").slice(0, WAITING);
      this.show([...waiting, ...body.trajectories.filter((one) => one.state === "trained")], body.next);
    });
  }

  async older() {
    this.paused = true;
    byId("trajectories-newest").hidden = false;
    await shownIn("trajectories-problem", async () => {
      const { body } = await call(`v1/trajectories?limit=${PAGE}&before=${this.next}`);
      this.show([...this.shown, ...body.trajectories], body.next);
    }).catch(() => {});
  }

  show(trajectories, next) {
    this.shown = trajectories;
    this.next = next;
    const byKey = new Map(trajectories.map((one) => [one.id, one]));
    reconcile(
      byId("trajectories"),
      [...byKey.keys(), ...(trajectories.length ? [] : [""])],
      (id) => (id ? this.row(id) : h("li", { className: "muted" }, "None yet: the first appears when a rollout has finished.")),
      (row, id) => id && this.fill(row.firstChild, byKey.get(id)),
    );
    byId("trajectories-older").hidden = next === null;
  }

  row(id) {
    const button = h("button", { type: "button", className: "row" },
      h("span", { className: "strong mono" }, shortId(id)),
      h("span", { className: "pill small" }),
      h("span", { className: "value reward" }),
      h("span", { className: "grow muted" }),
      h("span", { className: "muted" }));
    button.addEventListener("click", () => this.open(id, button));
    return h("li", {}, button);
  }

  fill(button, one) {
    const [, pill, reward, facts, time] = button.children;
    pill.textContent = one.state;
    pill.dataset.state = one.state;
    reward.textContent = one.reward === null ? "" : number(one.reward, 3);
    const update = one.update === null ? "" : one.critic_only ? "critic only" : `update ${one.update}`;
    const under = one.trained_under ?? one.scored_under;
    facts.textContent = [
      update,
      under === null ? "" : `preference v${under}`,
      one.lag === null ? "" : `lag ${one.lag}`,
      one.tokens === null ? "" : `${one.tokens} tokens`,
      one.finish_reason ?? "",
    ].filter(Boolean).join(" · ");
    time.textContent = one.consumed_s === null ? "" : clock(one.consumed_s);
    const said = one.reward === null ? one.state : `${one.state}, reward ${number(one.reward, 3)}`;
    button.setAttribute("aria-label", `Inspect trajectory ${one.id.slice(-8)}, ${said}`);
  }
}
