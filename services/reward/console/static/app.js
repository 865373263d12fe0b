// Wires the page: what is asked how often, and what a lost connection looks like.

import { Problem, Unreachable, allowAsking, call } from "./api.js";
import { byId, clock, number, percent, plural, say, span, whole, h } from "./dom.js";
import { Curves } from "./curves.js";
import { Fleet } from "./fleet.js";
import { Inspector } from "./inspector.js";
import { Preferences } from "./preferences.js";
import { Trajectories } from "./trajectories.js";

const EVERY_MS = 2000;
const LONGEST_WAIT_MS = 30000;

const curves = new Curves();
const preferences = new Preferences((versions) => curves.name(versions));
const inspector = new Inspector();
const trajectories = new Trajectories((id, from) => inspector.open(id, from));
const fleet = new Fleet((id, from) => inspector.open(id, from));

/** What is asked at each round, and every how many rounds. */
const parts = [
  [1, showRun],
  [1, () => curves.refresh()],
  [1, () => preferences.refresh()],
  [2, () => preferences.readAdaptation()],
  [2, () => trajectories.refresh()],
  [2, () => fleet.refresh()],
];

async function showRun() {
  const { body: run } = await call("v1/run");
  document.title = `${run.name} · SAO`;
  byId("run-name").textContent = run.name;
  byId("run-task").textContent = `${run.task} · ${run.algorithm} · seed ${run.seed}`;
  const pill = byId("run-state");
  pill.textContent = run.stall ? "stalled" : run.state ?? "not started";
  pill.dataset.state = run.stall ? "stalled" : run.state ?? "none";
  pill.hidden = false;
  const age = run.last_update_s === null ? "" : `${span(run.now_s - run.last_update_s)} ago`;
  showFigures([
    ["reward", number(run.reward, 3), "mean of 100"],
    ["update", whole(run.update), [run.updates === null ? "" : `of ${whole(run.updates)}`, age].filter(Boolean).join(", ")],
    ["trajectories", whole(run.trajectories), `${number(run.trajectories_per_s, 1)} /s`],
    ["version", run.version ?? "–", "published"],
    ["lag", number(run.lag, 1), "updates"],
    ["tokens", whole(run.tokens_per_s), "a second"],
    ["rejected", percent(run.rejected), "of the tokens"],
    ["critic", number(run.explained_variance, 2), "expl. variance"],
    ["waiting", whole(run.waiting_for_scoring), `to score; ${whole(run.waiting_for_training)} before a checkpoint`],
  ]);
  const held = run.held.map((reason) => `Publishing is held: ${reason} (docs/algorithm.md, Guards).`);
  const phase = run.phase ? [`${run.phase}; the policy waits for it.`] : [];
  const reading = run.caught_up ? [] : ["The run's folder is still being read: these numbers are of an earlier moment."];
  const words = [...reading, ...(run.stall ? [`Stalled: ${run.stall}.`] : []), ...held, ...phase];
  if (byId("stall").textContent !== words.join(" ")) say(byId("stall"), words.join(" "), run.stall || run.held.length ? "bad" : "");
  const alarms = run.alarms.map(alarm).join(" ");
  if (byId("alarms").textContent !== alarms) say(byId("alarms"), alarms, "bad");
}

function alarm(one) {
  const move = (name, from, to) => `${name} (${number(from)} → ${number(to)})`;
  const rises = move(one.rising, one.rising_from, one.rising_to);
  const falls = move(one.collapsing === "(length)" ? "the length" : one.collapsing, one.collapsing_from, one.collapsing_to);
  return `Reward hacking suspected: ${rises} rises while ${falls} collapses, under preference v${one.preference}. Read a few trajectories before you go on.`;
}

function showFigures(figures) {
  const list = byId("figures");
  if (!list.children.length) {
    list.append(...figures.map(([name]) => h("div", {}, h("dt", {}, name), h("dd", {}), h("dd", { className: "unit" }))));
  }
  figures.forEach(([, value, unit], at) => {
    const [, shown, small] = list.children[at].children;
    shown.textContent = value;
    small.textContent = unit;
  });
}

let round = 0;
let lostSince = null;
let tries = 0;
let wake = () => {};

async function once() {
  const due = parts.filter(([every]) => round % every === 0);
  round += 1;
  const results = await Promise.allSettled(due.map(([, run]) => run()));
  const errors = results.filter((one) => one.status === "rejected").map((one) => one.reason);
  const away = errors.find((error) => error instanceof Unreachable);
  const odd = errors.find((error) => !(error instanceof Unreachable) && !(error instanceof Problem));
  if (odd) throw odd;
  if (away && errors.length === results.length) return lost();
  lostSince = null;
  tries = 0;
  document.body.classList.remove("lost");
  byId("retry").hidden = true;
  const problem = errors.find((error) => error instanceof Problem);
  connection(problem ? problem.words : away ? "Some answers did not come; asking again." : "live", problem ? "bad" : "good");
  return EVERY_MS;
}

function lost() {
  lostSince ??= Date.now() / 1000;
  tries += 1;
  document.body.classList.add("lost");
  byId("retry").hidden = false;
  const wait = Math.min(LONGEST_WAIT_MS, 1000 * 2 ** (tries - 1));
  const times = plural(tries, "try", "tries");
  connection(`No answer since ${clock(lostSince)} (${times}); the next in ${span(wait / 1000)}. What is shown is from before.`, "bad");
  return wait;
}

function connection(text, kind) {
  if (byId("connection").textContent !== text) say(byId("connection"), text, kind);
}

/** A fault of the page itself: said, and no reason to stop asking. */
function failed(error) {
  console.error(error);
  connection(`Something in this page failed (${error.message}); reload it.`, "bad");
  return EVERY_MS;
}

async function watch() {
  for (;;) {
    const wait = await once().catch(failed);
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, wait);
    });
    while (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
  }
}

byId("retry").addEventListener("click", () => wake());
byId("enter-token").addEventListener("click", () => {
  allowAsking();
  wake();
});
watch();
