// What a proposal would have made of the last trajectories, in words and bars.

import { h, number, plural, shortId, whole } from "./dom.js";

const WORDS = { mean: "mean", min: "lowest", max: "highest", low: "at the lower bound", high: "at the upper bound" };

/** Elements that show a dry run's answer; null: the server has no dry run. */
export function dryRunResult(result, last) {
  if (result === null) return [h("h3", {}, "No dry run"), h("p", {}, "This server cannot try a preference on past trajectories. You can apply it all the same, and undo it.")];
  if (!result.trajectories) return [h("h3", {}, "Nothing to try it on"), h("p", {}, "No archived trajectory has all its components yet. You can apply it all the same, and undo it."), ...missing(result)];
  return [
    h("h3", {}, `On the last ${plural(result.trajectories, "trajectory", "trajectories")}`),
    h("p", { className: "lead" }, verdict(result)),
    ...bars(result),
    table(result),
    ...missing(result),
    ...examples(result),
  ];
}

function verdict({ now, then, flips, trajectories }) {
  const step = then.mean - now.mean;
  const moved = Math.abs(step) < 0.0005 ? "The mean reward stays" : `The mean reward ${step > 0 ? "rises" : "falls"} by ${number(Math.abs(step), 3)}`;
  const count = typeof flips === "number" ? flips : Array.isArray(flips) ? flips.length : flips?.count ?? flips?.total;
  const flipped = count === undefined ? "" : ` ${whole(count)} of ${whole(trajectories)} flip between better and worse than the mean.`;
  return `${moved}.${flipped}`;
}

function table({ now, then }) {
  const names = Object.keys(now).filter((name) => typeof now[name] === "number" && typeof then[name] === "number");
  const rows = names.map((name) => h("tr", {}, h("th", { scope: "row" }, WORDS[name] ?? name.replaceAll("_", " ")),
    h("td", {}, number(now[name], 3)), h("td", {}, number(then[name], 3)), h("td", {}, signed(then[name] - now[name]))));
  return h("table", { className: "numbers" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Reward"), ...["now", "then", "change"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, ...rows));
}

function bars({ now, then }) {
  if (!Array.isArray(now.histogram) || !Array.isArray(then.histogram)) return [];
  const most = Math.max(1, ...now.histogram, ...then.histogram);
  const columns = now.histogram.map((count, at) => h("span", { className: "pair" }, column(count / most, "now"), column((then.histogram[at] ?? 0) / most, "then")));
  const words = `Distribution of rewards, lowest to highest. Now ${now.histogram.join(", ")}; then ${then.histogram.join(", ")}.`;
  return [h("figure", { className: "distribution" }, h("div", { className: "columns", role: "img", "aria-label": words }, ...columns),
    h("figcaption", {}, h("span", { className: "key now" }, "now"), h("span", { className: "key then" }, "then"), h("span", { className: "muted" }, "rewards, lowest to highest")))];
}

function column(share, name) {
  const made = h("span", { className: `column ${name}` });
  made.style.setProperty("--share", `${100 * share}%`);
  return made;
}

function missing(result) {
  return Object.entries(result.missing ?? {}).filter(([, count]) => count).map(([name, count]) =>
    h("p", { className: "notice" }, `${plural(count, "trajectory", "trajectories")} of the archive lack ${name}: they would be scored again before they train.`));
}

function examples({ examples: found }) {
  const shown = (found ?? []).filter((one) => one && typeof one === "object").slice(0, 5);
  if (!shown.length) return [];
  const rows = shown.map((one) => {
    const id = one.trajectory_id ?? one.id ?? one.trajectory ?? "";
    return h("li", {}, h("span", { className: "mono grow" }, id ? shortId(String(id)) : "–"), h("span", { className: "value" }, `${number(one.now, 3)} → ${number(one.then, 3)}`));
  });
  return [h("details", {}, h("summary", {}, "Those that change most"), h("ul", { className: "rows" }, ...rows))];
}

const signed = (value) => (value > 0 ? `+${number(value, 3)}` : number(value, 3));
