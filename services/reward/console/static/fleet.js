// Engines, weight versions and dead letters.

import { Problem, call } from "./api.js";
import { byId, clock, h, reconcile, say, shortId, span } from "./dom.js";

export class Fleet {
  constructor(open) {
    this.open = open;
    this.olderLetters = false;
    byId("letters-older").addEventListener("click", () => this.older());
  }

  async refresh() {
    const asked = await Promise.allSettled([this.engines(), this.letters()]);
    const failed = asked.find((one) => one.status === "rejected");
    if (failed) throw failed.reason;
  }

  async engines() {
    await shownIn("engines-problem", async () => {
      const [engines, versions] = await Promise.all([call("v1/engines"), call("v1/versions?limit=8")]);
      this.showEngines(engines.body.engines);
      this.showVersions(versions.body);
    });
  }

  showEngines(engines) {
    const byName = new Map(engines.map((one) => [one.engine_id, one]));
    reconcile(
      byId("engines"),
      [...byName.keys(), ...(engines.length ? [] : [""])],
      () => h("li", {}, h("span", { className: "pill small" }), h("span", { className: "grow" }), h("span", { className: "muted" })),
      (row, name) => {
        const one = byName.get(name);
        const [pill, middle, right] = row.children;
        pill.hidden = !one;
        pill.textContent = one?.state ?? "";
        pill.dataset.state = one?.state ?? "";
        middle.textContent = one ? trouble(one) : "No engine has been found yet.";
        right.textContent = one ? `${one.version || "no version"}, ${span(Date.now() / 1000 - one.since_s)}` : "";
      },
    );
  }

  showVersions({ versions, total }) {
    const byName = new Map(versions.map((one) => [one.name, one]));
    reconcile(
      byId("versions"),
      [...byName.keys(), ...(total ? [] : [""])],
      () => h("li", {}, h("span", { className: "strong" }), h("span", { className: "grow" }), h("span", { className: "muted" })),
      (row, name) => {
        const one = byName.get(name);
        const [left, middle, right] = row.children;
        left.textContent = one?.name ?? "";
        middle.textContent = one ? `update ${one.update}` : "No version has been announced yet.";
        right.textContent = one?.engines.join(", ") ?? "";
      },
    );
  }

  async letters() {
    if (this.olderLetters) return;
    await shownIn("letters-problem", async () => this.showLetters((await call("v1/dead-letters?limit=10")).body));
  }

  async older() {
    this.olderLetters = true;
    const before = byId("letters-older").dataset.before;
    await shownIn("letters-problem", async () => {
      const { body } = await call(`v1/dead-letters?limit=10&before=${before}`);
      this.showLetters({ ...body, dead_letters: [...this.shown, ...body.dead_letters] });
    }).catch(() => {});
  }

  showLetters({ dead_letters: letters, next }) {
    this.shown = letters;
    const byEntry = new Map(letters.map((one) => [one.entry_id, one]));
    reconcile(
      byId("letters"),
      [...byEntry.keys(), ...(letters.length ? [] : [""])],
      (entry) => {
        const one = byEntry.get(entry);
        if (!one) return h("li", { className: "muted" }, "None: every trajectory could be used.");
        const button = h("button", { type: "button", className: "row" },
          h("span", { className: "strong" }, shortId(one.trajectory_id)),
          h("span", { className: "grow wrap" }, one.reason),
          h("span", { className: "muted" }, `${one.stream}, delivery ${one.attempt}, ${clock(one.buried_ms / 1000)}`));
        button.addEventListener("click", () => this.open(one.trajectory_id, button));
        return h("li", {}, button);
      },
    );
    byId("letters-older").hidden = next === null;
    byId("letters-older").dataset.before = next ?? "";
  }
}

/** An engine and what is wrong with it; one that still loads its model answers nobody, and that is no fault. */
function trouble(one) {
  if (one.state === "starting" && one.error.includes("ConnectError")) return `${one.engine_id}: loads its model and does not answer yet`;
  return one.error.startsWith(one.engine_id) ? one.error : [one.engine_id, one.error].filter(Boolean).join(": ");
}

/** Do it, and say in the section itself what went wrong; the error goes on. */
export async function shownIn(id, work) {
  try {
    await work();
    say(byId(id), "");
  } catch (error) {
    if (error instanceof Problem) say(byId(id), error.words, "bad");
    throw error;
  }
}
