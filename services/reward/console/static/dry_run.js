// What a proposal would have made of the last trajectories, in words and bars.

import { h, number, plural, shortId, whole } from "./dom.js";

/** Elements that show a dry run's answer; null: the server has no dry run. */
export function dryRunResult(result) {
  if (result === null) return [h("h3", {}, "No dry run"), h("p", {}, "This server cannot try a preference on past trajectories. You can apply it all the same, and undo it.")];
  if (!result.compared) return [h("h3", {}, "Nothing to try it on"), h("p", {}, "No archived trajectory has what both preferences read. You can apply it all the same, and undo it."), ...notes(result)];
  return [
    h("h3", {}, `On the last ${plural(result.compared, "trajectory", "trajectories")}`),
    h("p", { className: "lead" }, verdict(result)),
    bars(result),
    table(result),
    ...notes(result),
    ...examples(result),
  ];
}

function verdict({ now, then, flips, compared }) {
  const step = then.mean - now.mean;
  const moved = Math.abs(step) < 0.0005 ? "The mean reward stays" : `The mean reward ${step > 0 ? "rises" : "falls"} by ${number(Math.abs(step), 3)}`;
  const still = then.std === 0 ? " All rewards would be equal: nothing would be learnt." : "";
  return `${moved}. ${whole(flips.up + flips.down)} of ${whole(compared)} flip: ${whole(flips.up)} to above the mean, ${whole(flips.down)} to below.${still}`;
}

function table({ now, then }) {
  const of = (one) => [one.mean, one.std, one.deciles[0], one.deciles[5], one.deciles.at(-1)];
  const names = ["mean", "spread", "lowest", "median", "highest"];
  const [before, after] = [of(now), of(then)];
  const rows = names.map((name, at) => h("tr", {}, h("th", { scope: "row" }, name),
    h("td", {}, number(before[at], 3)), h("td", {}, number(after[at], 3)), h("td", {}, signed(after[at] - before[at]))));
  return h("table", { className: "numbers" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Reward"), ...["now", "then", "change"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows));
}

function bars({ now, then, edges }) {
  const most = Math.max(1, ...now.histogram, ...then.histogram);
  const columns = now.histogram.map((count, at) => h("span", { className: "pair" }, column(count / most, "now"), column(then.histogram[at] / most, "then")));
  const words = `Rewards from ${number(edges[0])} to ${number(edges.at(-1))}. Now ${now.histogram.join(", ")}; then ${then.histogram.join(", ")}.`;
  return h("figure", { className: "distribution" }, h("div", { className: "columns", role: "img", "aria-label": words }, ...columns),
    h("div", { className: "ends" }, h("span", {}, number(edges[0])), h("span", {}, number(edges.at(-1)))),
    h("figcaption", {}, h("span", { className: "key now" }, "now"), h("span", { className: "key then" }, "then"), h("span", { className: "muted" }, "trajectories by reward")));
}

function column(share, name) {
  const made = h("span", { className: `column ${name}` });
  made.style.setProperty("--share", `${100 * share}%`);
  return made;
}

function notes(result) {
  const many = (count) => plural(count, "trajectory", "trajectories");
  const lines = Object.entries(result.missing).map(([name, count]) => `${many(count)} of the archive lack ${name}: such ones are scored again before they train.`);
  if (result.missing_now) lines.push(`${many(result.missing_now)} lack a component of the present preference.`);
  if (result.not_finite) lines.push(`${many(result.not_finite)} would have no finite reward.`);
  if (result.unreadable) lines.push(`${plural(result.unreadable, "archived update")} could not be read.`);
  return lines.map((line) => h("p", { className: "notice" }, line));
}

function examples({ examples: found }) {
  if (!found.length) return [];
  const rows = found.slice(0, 5).map((one) => h("li", {}, h("span", { className: "mono grow" }, `${shortId(one.id)}, update ${one.update}`),
    h("span", { className: "value" }, `${number(one.now, 3)} → ${number(one.then, 3)}${one.flips ? " flips" : ""}`)));
  return [h("details", {}, h("summary", {}, "Those that change most"), h("ul", { className: "rows" }, ...rows))];
}

const signed = (value) => (value > 0 ? `+${number(value, 3)}` : number(value, 3));
