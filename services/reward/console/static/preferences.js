// What is rewarded: sliders, the dry run before a change, history with undo, the hold.

import { Problem, Unreachable, call } from "./api.js";
import { byId, clock, h, number, plural, reconcile, say, short } from "./dom.js";
import { dryRunResult } from "./dry_run.js";

const URL = "v1/preferences";
const PAGE = 12;
const LAST = 200;
const ORIGINS = { initial: "the run began with it", schedule: "was scheduled" };

export class Preferences {
  /** `named`: told of every version that is known, newest first. */
  constructor(named) {
    this.named = named;
    this.current = null;
    this.components = null;
    this.tried = null;
    this.dropped = null;
    this.offers = { history: true, hold: true, schedule: true, adaptation: true };
    this.adaptations = new Map();
    this.versions = [];
    byId("preference").addEventListener("submit", (event) => {
      event.preventDefault();
      this.tryIt();
    });
    byId("preference").addEventListener("input", () => this.edited());
    byId("reset").addEventListener("click", () => this.load(this.current));
    byId("restore").addEventListener("click", () => this.restore());
    byId("undo").addEventListener("click", () => this.bringBack(this.versions[1]));
    byId("history-older").addEventListener("click", () => this.older());
  }

  async refresh() {
    if (this.components === null) await this.readComponents();
    const { body } = await call(URL);
    if (body.version !== this.current?.version) await this.follow(body);
    else if (!this.versions.length) await this.readHistory();
    await Promise.all([this.readHold(), this.readSchedule()]);
  }

  /** A version that was not known: loaded at once, unless somebody is moving sliders. */
  async follow(preference) {
    const known = this.current;
    const untouched = known === null || !this.dirty;
    if (!untouched && this.notedVersion === preference.version) return;
    await this.readHistory(preference);
    if (untouched) {
      this.newest = null;
      this.load(preference);
      if (known !== null && this.expected !== preference.version) say(byId("preference-message"), `${this.whose(preference)} is in force now.`, "good");
    } else {
      this.notedVersion = preference.version;
      say(byId("preference-message"), `${this.whose(preference)} was stored meanwhile. Reset loads it; applying yours will be refused until then.`, "bad");
      this.newest = preference;
    }
  }

  async readComponents() {
    try {
      const { body } = await call("v1/components");
      const listed = Array.isArray(body) ? body : body.components;
      this.components = listed.map((one) => (typeof one === "string" ? { name: one } : one));
    } catch (error) {
      if (!(error instanceof Problem && error.missing)) throw error;
      const { body } = await call("./");
      this.components = (body.components ?? []).map((name) => ({ name }));
      say(byId("components-note"), "This server does not tell more of its components than their names.");
    }
  }

  load(preference) {
    this.current = this.newest ?? preference;
    this.newest = null;
    const { document: wanted, version } = this.current;
    byId("preference-now").replaceChildren("Now: ", h("strong", {}, wanted.name), ` (version ${version})`);
    byId("formula").textContent = formula(wanted);
    byId("preference-name").value = wanted.name;
    const names = [...new Set([...this.components.map((one) => one.name), ...Object.keys(wanted.weights)])].sort();
    reconcile(byId("sliders"), ["legend", ...names], (name) => this.slider(name), (row, name) => this.set(row, wanted.weights[name] ?? 0));
    this.edited();
    say(byId("preference-message"), "");
  }

  slider(name) {
    if (name === "legend") return h("legend", { className: "hidden" }, "Weight of each component");
    const about = this.components.find((one) => one.name === name);
    const id = `weight-${name}`;
    const range = h("input", { type: "range", id, step: "0.05", name });
    const box = h("input", { type: "number", step: "any", "aria-label": `${name}, exact weight`, inputMode: "decimal" });
    range.addEventListener("input", () => (box.value = range.value));
    box.addEventListener("input", () => {
      widen(range, Number(box.value));
      range.value = box.value;
    });
    return h("div", { className: "slider" }, h("label", { htmlFor: id }, name), range, box,
      about?.kind && about.kind !== "task" ? h("p", { className: "muted source" }, `${about.kind} ${about.scorer}: ${about.description}`) : null);
  }

  set(row, weight) {
    const [, range, box] = row.children;
    if (!range) return;
    range.min = -1;
    range.max = 1;
    widen(range, weight);
    range.value = weight;
    box.value = +weight.toFixed(6);
  }

  /** The document that the sliders say; a weight of 0 is left out where the current one has none. */
  get draft() {
    const weights = {};
    for (const row of byId("sliders").querySelectorAll(".slider")) {
      const [, range, box] = row.children;
      const weight = box.value.trim() === "" ? Number.NaN : Number(box.value);
      if (weight !== 0 || range.name in this.current.document.weights) weights[range.name] = weight;
    }
    return { ...this.current.document, name: byId("preference-name").value.trim(), weights };
  }

  get dirty() {
    return this.current !== null && JSON.stringify(sorted(this.draft)) !== JSON.stringify(sorted(this.current.document));
  }

  edited() {
    byId("reset").disabled = !this.dirty && this.newest === null;
    if (this.tried !== null && this.tried !== JSON.stringify(sorted(this.draft))) {
      this.tried = null;
      byId("dry-run").hidden = true;
    }
  }

  /** A word about what keeps the draft from being tried, or nothing. */
  get objection() {
    const draft = this.draft;
    if (!draft.name) return "Give it a name.";
    const odd = Object.entries(draft.weights).find(([, weight]) => !Number.isFinite(weight));
    if (odd) return `The weight of ${odd[0]} is no number.`;
    return Object.keys(draft.weights).length ? "" : "Give at least one component a weight.";
  }

  async tryIt() {
    if (this.current === null) return;
    const message = byId("preference-message");
    if (this.objection) {
      say(message, this.objection, "bad");
      return;
    }
    const draft = this.draft;
    await this.working(byId("try"), message, async () => {
      let result = null;
      try {
        result = (await call(`${URL}:dry-run?last=${LAST}`, { method: "POST", json: draft })).body;
      } catch (error) {
        if (!(error instanceof Problem && error.missing)) throw error;
      }
      this.tried = JSON.stringify(sorted(draft));
      const apply = h("button", { type: "button", className: "primary", id: "apply" }, `Apply as version ${this.current.version + 1}`);
      apply.addEventListener("click", () => this.apply(apply));
      byId("dry-run").replaceChildren(...dryRunResult(result), h("div", { className: "actions" }, apply));
      byId("dry-run").hidden = false;
      byId("dry-run").focus();
    });
  }

  async apply(button) {
    const message = byId("preference-message");
    const draft = this.draft;
    await this.working(button, message, async () => {
      try {
        const { body } = await call(`${URL}${this.signed()}`, { method: "PUT", json: draft, headers: this.ifMatch() });
        await this.stored(body);
        say(message, `Version ${body.version}, “${body.document.name}”, is in force: every scoring that starts now is under it.`, "good");
      } catch (error) {
        if (!(error instanceof Problem && error.status === 412)) throw error;
        await this.conflict(draft);
      }
    });
  }

  /** Somebody was faster: say who, load theirs, keep ours at hand. */
  async conflict(draft) {
    const { body } = await call(URL);
    await this.readHistory(body);
    this.dropped = draft;
    this.newest = null;
    this.load(body);
    byId("restore").hidden = false;
    const mine = this.dropped.name;
    say(byId("preference-message"), `Not applied: ${this.whose(body)} came first and is loaded. “Put my sliders back” brings “${mine}” again; then try it on top of that.`, "bad");
    byId("restore").focus();
  }

  restore() {
    byId("preference-name").value = this.dropped.name;
    for (const row of byId("sliders").querySelectorAll(".slider")) this.set(row, this.dropped.weights[row.dataset.key] ?? 0);
    byId("restore").hidden = true;
    this.edited();
    say(byId("preference-message"), "Your sliders are back; nothing is changed until you try and apply them.");
    byId("try").focus();
  }

  async stored(preference) {
    this.expected = preference.version;
    this.tried = null;
    this.newest = null;
    byId("dry-run").hidden = true;
    byId("restore").hidden = true;
    byId("reason").value = "";
    this.load(preference);
    await this.readHistory(preference);
  }

  async bringBack(version, button = byId("undo")) {
    const message = byId("history-message");
    await this.working(button, message, async () => {
      const { body } = await call(`${URL}/${version.version}:rollback${this.signed()}`, { method: "POST", headers: this.ifMatch() });
      await this.stored(body);
      say(message, `Version ${body.version} repeats version ${version.version}, “${body.document.name}”, and is in force.`, "good");
    });
  }

  ifMatch() {
    return { "If-Match": `"${this.current.version}"` };
  }

  signed() {
    const query = new URLSearchParams();
    for (const name of ["author", "reason"]) if (byId(name).value.trim()) query.set(name, byId(name).value.trim());
    return query.size ? `?${query}` : "";
  }

  whose(preference) {
    const at = preference.stored_s ? ` at ${clock(preference.stored_s)}` : "";
    return `Version ${preference.version}, “${preference.document.name}”, ${preference.author ? `by ${preference.author}` : "by somebody unnamed"}${at},`;
  }

  async readHistory(current = this.current) {
    const older = this.versions.filter((one) => one.version < (current?.version ?? 0) - PAGE + 1);
    this.versions = [...(await this.historyPage(current.version + 1)), ...older];
    this.showHistory();
  }

  async older() {
    await this.working(byId("history-older"), byId("history-message"), async () => {
      const before = this.versions.at(-1).version;
      this.versions = [...this.versions, ...(await this.historyPage(before))];
      this.showHistory();
      await this.readAdaptation(before);
    });
  }

  async historyPage(before) {
    if (this.offers.history) {
      try {
        return (await call(`${URL}/history?before=${before}&limit=${PAGE}`)).body.preferences;
      } catch (error) {
        if (!(error instanceof Problem && (error.missing || error.status === 422))) throw error;
        this.offers.history = false;
        say(byId("history-message"), "This server lists no history with authors, and brings nothing back; apply an earlier one with the sliders.");
      }
    }
    const wanted = Array.from({ length: PAGE }, (_, at) => before - 1 - at).filter((version) => version >= 1);
    const found = await Promise.all(wanted.map((version) => call(`${URL}/${version}`).then((one) => one.body, () => null)));
    return found.filter(Boolean);
  }

  showHistory() {
    const byVersion = new Map(this.versions.map((one) => [String(one.version), one]));
    reconcile(byId("history"), [...byVersion.keys()], (key) => this.versionRow(byVersion.get(key)), (row, key) => {
      const now = row.dataset.key === String(this.versions[0].version);
      row.classList.toggle("current", now);
      const button = row.querySelector("button");
      if (button) button.hidden = now;
      row.querySelector(".pill").hidden = !now;
      say(row.querySelector(".adaptation"), followed(this.adaptations.get(Number(key)), now));
    });
    const [, before] = this.versions;
    byId("undo").hidden = !before || !this.offers.history;
    byId("undo").textContent = before ? `Undo: back to v${before.version} ${before.document.name}` : "";
    byId("history-older").hidden = (this.versions.at(-1)?.version ?? 1) <= 1;
    this.named(this.versions);
  }

  versionRow(one) {
    const repeats = one.restores ? `repeats v${one.restores}` : ORIGINS[one.origin] ?? "";
    const facts = [one.author ? `by ${one.author}` : "", one.stored_s ? clock(one.stored_s) : "", repeats].filter(Boolean).join(" · ");
    const button = this.offers.history ? h("button", { type: "button", "aria-label": `Bring back version ${one.version}` }, "Bring back") : null;
    button?.addEventListener("click", () => this.bringBack(one, button));
    return h("li", {},
      h("div", { className: "grow" },
        h("p", {}, h("span", { className: "strong" }, `v${one.version} ${one.document.name}`), " ", h("span", { className: "pill small", "data-state": "serving" }, "now")),
        h("p", { className: "muted" }, facts),
        one.reason ? h("p", { className: "reason" }, one.reason) : null,
        h("p", { className: "muted small-text" }, weightsOf(one.document)),
        h("p", { className: "muted small-text adaptation", hidden: true })),
      button);
  }

  /** How fast the run followed the newest versions, or a page of older ones. */
  async readAdaptation(before = null) {
    if (!this.offers.adaptation) return;
    try {
      const { body } = await call(`v1/adaptation?limit=${PAGE}${before === null ? "" : `&before=${before}`}`);
      for (const one of body.adaptations) this.adaptations.set(one.version, one);
      if (this.versions.length) this.showHistory();
    } catch (error) {
      if (!(error instanceof Problem && error.missing)) throw error;
      this.offers.adaptation = false;
    }
  }

  async readSchedule() {
    if (!this.offers.schedule) return;
    try {
      this.showSchedule((await call(`${URL}/schedule`)).body.scheduled);
    } catch (error) {
      if (!(error instanceof Problem && (error.missing || error.status === 422))) throw error;
      this.offers.schedule = false;
    }
  }

  showSchedule(waiting) {
    const byNumber = new Map(waiting.map((one) => [String(one.id), one]));
    byId("schedule").hidden = !waiting.length;
    reconcile(byId("schedule"), [...byNumber.keys()], (key) => this.scheduledRow(byNumber.get(key)), (row, key) => {
      const { if_version: wanted } = byNumber.get(key);
      const late = wanted && this.current && wanted !== this.current.version;
      say(row.querySelector(".late"), late ? `Will be refused: v${this.current.version} is current by now.` : "", "bad");
    });
  }

  scheduledRow(one) {
    const when = one.at_s ? `at ${clock(one.at_s)}` : `at update ${one.at_update}`;
    const facts = [one.author ? `by ${one.author}` : "", one.if_version ? `only if v${one.if_version} is still current` : ""].filter(Boolean).join(" · ");
    const button = h("button", { type: "button", "aria-label": `Cancel the switch to ${one.document.name} ${when}` }, "Cancel");
    button.addEventListener("click", () => this.working(button, byId("history-message"), async () => {
      await call(`${URL}/schedule/${one.id}${this.signed()}`, { method: "DELETE" });
      await this.readSchedule();
      say(byId("history-message"), `The switch to “${one.document.name}” ${when} is cancelled.`, "good");
    }));
    return h("li", {},
      h("div", { className: "grow" },
        h("p", {}, h("span", { className: "strong" }, one.document.name), ` ${when} `, h("span", { className: "pill small" }, "waits")),
        facts ? h("p", { className: "muted" }, facts) : null,
        one.reason ? h("p", { className: "reason" }, one.reason) : null,
        h("p", { className: "muted small-text" }, weightsOf(one.document)),
        h("p", { className: "late", hidden: true })),
      button);
  }

  async readHold() {
    if (!this.offers.hold) return;
    try {
      this.showHold((await call(`${URL}/hold`)).body);
    } catch (error) {
      if (!(error instanceof Problem && (error.missing || error.status === 422))) throw error;
      this.offers.hold = false;
    }
  }

  showHold(hold) {
    byId("hold").hidden = false;
    byId("hold").classList.toggle("held", hold.held);
    const who = [hold.author ? `by ${hold.author}` : "", hold.since_s ? `since ${clock(hold.since_s)}` : "", hold.reason ? `: ${hold.reason}` : ""];
    const words = hold.held ? `Changes are held ${who.filter(Boolean).join(" ").replace(" :", ":")}`.trim() : "Changes are open.";
    if (byId("hold-words").textContent !== words) byId("hold-words").textContent = words;
    const button = byId("hold-switch");
    button.textContent = hold.held ? "Let changes through" : "Hold changes";
    button.onclick = () => this.working(button, byId("history-message"), async () => {
      await call(`${URL}:${hold.held ? "resume" : "hold"}${this.signed()}`, { method: "POST" });
      byId("reason").value = "";
      this.showHold((await call(`${URL}/hold`)).body);
      say(byId("history-message"), hold.held ? "Changes go through again." : "Every change is refused until somebody lets them through.", "good");
    });
  }

  /** Do it with its button busy; what goes wrong is said in `message`. */
  async working(button, message, work) {
    if (button.getAttribute("aria-busy") === "true") return;
    button.setAttribute("aria-busy", "true");
    say(message, "");
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Problem || error instanceof Unreachable)) throw error;
      say(message, error.words, "bad");
    } finally {
      button.removeAttribute("aria-busy");
    }
  }
}

const weightsOf = (document) => Object.entries(document.weights).map(([name, weight]) => `${name} ${short(weight)}`).join(", ");

/** How the run followed a version, in seconds from its change on. */
function followed(one, now) {
  if (!one) return "";
  const steps = [["scored", one.first_scored_s], ["trained", one.first_trained_s], ["serving", one.first_served_s]];
  const updates = one.recovered_updates === null ? "" : ` (${plural(one.recovered_updates, "update")})`;
  if (one.level_before !== null) steps.push(["reward back", one.recovered_s]);
  const told = steps.map(([name, at]) => `${name} ${at === null ? (now ? "not yet" : "never") : `after ${number(at, 1)} s`}`);
  return `${told.join(", ")}${updates}`;
}

function formula(wanted) {
  const gates = (wanted.gates ?? []).map((gate) => ` × ${gate}`).join("");
  const offset = wanted.offset ? `${short(wanted.offset)} + ` : "";
  const least = Object.entries(wanted.thresholds ?? {}).map(([name, value]) => `${name} ≥ ${short(value)}`);
  const threshold = least.length ? `; and ${short(wanted.low ?? 0)} unless ${least.join(" and ")}` : "";
  return `reward = clip(${offset}Σ weight × component, ${short(wanted.low ?? 0)}, ${short(wanted.high ?? 1)})${gates}${threshold}`;
}

/** Let the range reach a weight that lies outside it. */
function widen(range, weight) {
  const reach = Math.abs(weight);
  if (Number.isFinite(reach) && reach > Number(range.max)) {
    range.max = Math.ceil(reach);
    range.min = -Math.ceil(reach);
  }
}

function sorted(document) {
  return Object.fromEntries(Object.entries({ ...document, weights: Object.fromEntries(Object.entries(document.weights).sort()) }).sort());
}
