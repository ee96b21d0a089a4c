// The last minutes in five charts. One is redrawn per animation frame, so that none keeps the map waiting.

const rate = (name) => (now, before) => (now[name] - before[name]) / (now.t - before.t);
const mean = (name, scale) => (now, before) => {
  const count = now[name][1] - before[name][1];
  return count ? (scale * (now[name][0] - before[name][0])) / count : null;
};

const CHARTS = [
  ["Pool, % of pages", "stack", [
    ["used", "--used", (now) => (100 * now.used) / now.total],
    ["cached", "--cached", (now) => (100 * now.cached) / now.total]]],
  ["Pages per second", "line", [
    ["allocated", "--used", rate("allocations")], ["evicted", "--mark", rate("evictions")]]],
  ["Requests", "line", [["running", "--used", (now) => now.running], ["waiting", "--shared", (now) => now.waiting]]],
  ["Latency, ms", "line", [
    ["first token", "--shared", mean("first_token", 1000)], ["between tokens", "--accent", mean("inter_token", 1000)]]],
  ["Prompt tokens found in the cache, %", "line", [["hits", "--cached", (now, before) => {
    const asked = now.prompt_tokens - before.prompt_tokens;
    return asked ? (100 * (now.cached_tokens - before.cached_tokens)) / asked : null;
  }]]],
];

export class Charts {
  constructor(place) {
    this.places = CHARTS.map(() => place.appendChild(document.createElement("div")));
    this.history = [];
    this.due = [];
  }

  reset(history) {
    this.history = history.slice(-600);
    this.due = CHARTS.map((_, number) => number);
  }

  add(figures) {
    const last = this.history[this.history.length - 1];
    if (last && figures.t < last.t) this.history = []; // another engine
    this.history.push(figures);
    if (this.history.length > 600) this.history.shift();
    this.due = CHARTS.map((_, number) => number);
  }

  // Draw the next chart that is due; false if none is.
  draw() {
    if (!this.due.length || !window.Plotly || this.history.length < 2) return false;
    const number = this.due.shift();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const [title, kind, lines] = CHARTS[number];
    const end = this.history[this.history.length - 1].t;
    const x = this.history.slice(1).map((each) => (each.t - end) / 60);
    const data = lines.map(([name, shade, value]) => ({
      name, x, y: this.history.slice(1).map((each, at) => value(each, this.history[at])),
      mode: "lines", line: { color: colour(shade), width: 2 }, connectgaps: true,
      ...(kind === "stack" ? { stackgroup: "one" } : {}),
    }));
    const axis = { color: colour("--soft"), gridcolor: colour("--line"), zeroline: false };
    window.Plotly.react(this.places[number], data, {
      title: { text: title, font: { size: 13 }, x: 0, xanchor: "left", y: 0.97 }, font: { color: colour("--ink") },
      margin: { l: 44, r: 8, t: 40, b: 30 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } }, showlegend: true,
      xaxis: { ...axis, ticksuffix: " min", nticks: 5 }, yaxis: { ...axis, rangemode: "tozero", nticks: 5 },
    }, { displayModeBar: false, responsive: true, staticPlot: true });
    return true;
  }
}
