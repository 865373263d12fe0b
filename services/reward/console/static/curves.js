// The live curves: points kept as the server keeps them, drawn as SVG by hand.

import { call } from "./api.js";
import { byId, h, number, say, whole } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 44, right: 14, top: 26, bottom: 26 };
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2"];
const COLOURS = 6;

export class Curves {
  constructor() {
    this.points = [];
    this.latest = null;
    this.switches = [];
    this.history = null;
    this.names = new Map();
    this.hidden = new Set();
    this.cursor = null;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("tabindex", "0");
    byId("chart").append(this.svg);
    new ResizeObserver(() => this.draw()).observe(byId("chart"));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.read(null));
  }

  /** Names of preference versions, for the switches. */
  name(versions) {
    for (const one of versions) this.names.set(one.version, one.document.name);
    this.draw();
  }

  async refresh() {
    const after = this.points.at(-1)?.trajectory ?? 0;
    const { body } = await call(`v1/curves?after=${after}`);
    if (this.history !== null && body.history !== this.history) {
      this.points = [];
      this.history = body.history;
      return this.refresh();
    }
    this.history = body.history;
    this.points = [...this.points.filter((one) => one.trajectory % body.stride === 0), ...body.points];
    this.latest = body.latest;
    this.switches = body.switches;
    say(byId("curves-problem"), body.caught_up ? "" : "The run's folder is still being read; older points come first.");
    this.draw();
  }

  get all() {
    const newer = this.latest && this.latest.trajectory > (this.points.at(-1)?.trajectory ?? 0);
    return newer ? [...this.points, this.latest] : this.points;
  }

  get series() {
    const names = Object.keys(this.latest?.components ?? {}).sort();
    const components = names.map((name, at) => ({
      key: name,
      name,
      of: (point) => point.components[name],
      className: `line component c${at % COLOURS}`,
      dash: DASHES[at % DASHES.length],
    }));
    return [{ key: "", name: "reward", of: (point) => point.moving_average, className: "line reward", dash: "" }, ...components];
  }

  draw() {
    const points = this.all;
    const width = Math.max(240, byId("chart").clientWidth);
    const height = width < 480 ? 240 : 300;
    const series = this.series;
    const shown = series.filter((one) => !this.hidden.has(one.key));
    const values = points.flatMap((point) => shown.map((one) => one.of(point)).filter(Number.isFinite));
    const [low, high] = limits(values);
    const first = points[0]?.trajectory ?? 0;
    const last = Math.max(points.at(-1)?.trajectory ?? 1, first + 1);
    const x = (trajectory) => MARGIN.left + ((trajectory - first) / (last - first)) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => height - MARGIN.bottom - ((value - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom);
    this.scale = { x, y, first, last, width, height };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("aria-label", this.summary());
    const marks = [];
    for (const value of ticks(low, high, 5)) {
      marks.push(line(MARGIN.left, y(value), width - MARGIN.right, y(value), "grid"));
      marks.push(label(MARGIN.left - 8, y(value) + 4, number(value, high - low < 0.5 ? 2 : 1), "end"));
    }
    if (points.length) {
      for (const value of ticks(first, last, width < 480 ? 3 : 6)) {
        marks.push(label(x(value), height - 6, whole(value), "middle"));
      }
    } else marks.push(label(width / 2, height / 2, "no trajectory was trained on yet", "middle"));
    marks.push(...this.drawSwitches(x, width, height, first));
    for (const one of shown.toReversed()) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", one.className);
      path.setAttribute("d", outline(points, one.of, x, y));
      if (one.dash) path.setAttribute("stroke-dasharray", one.dash);
      marks.push(path);
    }
    this.marker = document.createElementNS(SVG, "g");
    marks.push(this.marker);
    this.svg.replaceChildren(...marks);
    this.read(this.cursor);
    this.drawLegend(series);
  }

  drawSwitches(x, width, height, first) {
    let free = 0;
    return this.switches.filter((one) => one.trajectory >= first).flatMap((one) => {
      const at = x(one.trajectory);
      const name = this.names.get(one.to_version);
      const words = `v${one.to_version}${name ? ` ${name.length > 16 ? `${name.slice(0, 15)}…` : name}` : ""}`;
      const room = words.length * 6.6;
      const left = Math.min(at, width - MARGIN.right - room);
      const mark = line(at, MARGIN.top - 4, at, height - MARGIN.bottom, "switch");
      mark.dataset.version = one.to_version;
      if (left < free) return [mark];
      free = left + room + 8;
      return [mark, label(left, 14, words, "start", "switch-label")];
    });
  }

  drawLegend(series) {
    const legend = byId("legend");
    const keys = series.map((one) => one.key);
    if (legend.dataset.keys !== JSON.stringify(keys)) {
      legend.dataset.keys = JSON.stringify(keys);
      legend.replaceChildren(...series.map((one) => h("li", {}, this.legendButton(one))));
    }
    series.forEach((one, at) => {
      const button = legend.children[at].firstChild;
      button.setAttribute("aria-pressed", String(!this.hidden.has(one.key)));
      button.lastChild.textContent = this.latest ? number(one.of(this.latest), 2) : "–";
    });
  }

  legendButton(one) {
    const sample = document.createElementNS(SVG, "svg");
    sample.setAttribute("width", 26);
    sample.setAttribute("height", 8);
    sample.setAttribute("aria-hidden", "true");
    const stroke = line(0, 4, 26, 4, one.className);
    if (one.dash) stroke.setAttribute("stroke-dasharray", one.dash);
    sample.append(stroke);
    const button = h("button", { type: "button" }, sample, h("span", {}, one.name), h("span", { className: "value" }));
    button.addEventListener("click", () => {
      if (!this.hidden.delete(one.key)) this.hidden.add(one.key);
      this.draw();
    });
    return button;
  }

  summary() {
    if (!this.latest) return "Curves: no trajectory was trained on yet.";
    const { trajectory, moving_average: mean } = this.latest;
    return `Curves. Reward ${number(mean, 3)} after ${whole(trajectory)} trajectories. Left and right arrow keys read them.`;
  }

  point(event) {
    const points = this.all;
    if (!points.length) return;
    const { first, last, width } = this.scale;
    const box = this.svg.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * width;
    const wanted = first + ((across - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (last - first);
    let best = 0;
    points.forEach((one, at) => {
      if (Math.abs(one.trajectory - wanted) < Math.abs(points[best].trajectory - wanted)) best = at;
    });
    this.read(points[best].trajectory);
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    const points = this.all;
    if (event.key === "Escape") return this.read(null);
    if (step === undefined || !points.length) return undefined;
    event.preventDefault();
    const known = this.cursor === null ? -1 : points.findIndex((one) => one.trajectory >= this.cursor);
    // The first arrow key shows the newest point; Home and End go where they say.
    const at = known >= 0 ? known + step : Number.isFinite(step) ? points.length - 1 : step;
    const next = Math.min(points.length - 1, Math.max(0, at));
    return this.read(points[next].trajectory);
  }

  /** Show the numbers at a trajectory; null: none. */
  read(trajectory) {
    this.cursor = trajectory;
    this.marker?.replaceChildren();
    const readout = byId("chart-readout");
    const point = trajectory === null ? null : this.all.find((one) => one.trajectory >= trajectory);
    if (!point) {
      readout.textContent = "";
      return;
    }
    const { x, height } = this.scale;
    this.marker.append(line(x(point.trajectory), MARGIN.top, x(point.trajectory), height - MARGIN.bottom, "cursor"));
    const values = this.series.filter((one) => !this.hidden.has(one.key)).map((one) => `${one.name} ${number(one.of(point), 2)}`);
    readout.textContent = `trajectory ${whole(point.trajectory)}, update ${whole(point.update)}: ${values.join(" · ")}`;
  }
}

function outline(points, of, x, y) {
  let pen = "M";
  return points
    .map((point) => {
      const value = of(point);
      if (!Number.isFinite(value)) {
        pen = "M";
        return "";
      }
      const step = `${pen}${x(point.trajectory).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
      return step;
    })
    .join("");
}

/** The range shown: 0 to 1 where everything lies in it. */
function limits(values) {
  const low = Math.min(0, ...values);
  const high = Math.max(...values, values.length ? -Infinity : 1);
  return low >= 0 && high <= 1 ? [0, 1] : [low, high > low ? high : low + 1];
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(+value.toFixed(10));
  return found;
}

function line(x1, y1, x2, y2, className) {
  const made = document.createElementNS(SVG, "line");
  for (const [name, value] of Object.entries({ x1, y1, x2, y2, class: className })) made.setAttribute(name, value);
  return made;
}

function label(x, y, text, anchor, className = "tick") {
  const made = document.createElementNS(SVG, "text");
  for (const [name, value] of Object.entries({ x, y, "text-anchor": anchor, class: className })) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}
