// The page map: listens to frames, keeps the state they add up to, and draws it at most ten times a second.

import { Charts } from "./charts.js";
import { Grid, shape } from "./grid.js";
import { PagePanel, RequestsPanel, TablePanel } from "./panels.js";
import { State, STATES } from "./state.js";
import { headers, key, listen } from "./stream.js";

const at = (id) => document.getElementById(id);
const state = new State();
const grid = new Grid(at("map"), state);
const page = new PagePanel(at("page"), state);
const table = new TablePanel(at("table"), state, choose);
const requests = new RequestsPanel(at("requests"), at("requests-count"), state, pick);
const charts = new Charts(at("charts"));
const times = []; // script time of the last frames in milliseconds
let due = false, latest = null, live = true;

window.pagedkv = { state, grid, times };

function choose(number) {
  grid.cursor = number;
  grid.show(number);
  page.show(number, live);
  due = true;
}

function pick(wanted) {
  requests.picked = requests.picked === wanted ? null : wanted;
  due = true;
}

function point(x, y) {
  const found = grid.at(x, y);
  if (!found) return;
  if (found[0] === found[1]) choose(found[0]);
  else page.showRange(...found), (grid.cursor = found[0]), (due = true);
}

function summarize() {
  const counts = state.counts();
  at("summary").textContent = `${state.count} pages of ${state.pageSize} tokens, step ${state.step}: ` +
    STATES.map((name, number) => `${counts[number]} ${name}`).filter((text) => !text.startsWith("0 pinned")).join(", ") +
    (latest ? `; ${latest.running} running, ${latest.waiting} waiting` : "");
}

let lastDraw = 0;
function frame(now) {
  requestAnimationFrame(frame);
  const begin = performance.now();
  if (now - lastDraw > 95 && (due || grid.mode === "age")) {
    due = false;
    lastDraw = now;
    const entry = requests.picked === null ? null : state.requests.get(requests.picked);
    grid.marked = new Set(entry && entry.row >= 0 ? state.tables.get(entry.row) : []);
    grid.draw();
    requests.draw();
    table.draw(entry, requests.picked !== null && !entry);
    summarize();
  } else if (!charts.draw()) {
    return;
  }
  times.push(performance.now() - begin);
  if (times.length > 600) times.shift();
}

function connection(text, kind) {
  at("connection").textContent = text;
  at("connection").dataset.state = kind;
}

function begin() {
  listen({
    hello: (hello) => {
      live = grid.live = !hello.replay;
      connection(live ? "live" : "replay", "live");
      charts.reset(hello.figures);
      at("replay").hidden = live;
      if (hello.replay) at("time").max = hello.replay.frames - 1;
    },
    frame: (each) => {
      const start = performance.now();
      if (each.full && (state.count !== each.num_pages || !live)) grid.cursor = Math.min(grid.cursor, each.num_pages);
      state.apply(each);
      if (each.full) grid.layOut(), scale();
      if (each.moment) showMoment(each.moment);
      due = true;
      times.push(performance.now() - start);
    },
    figures: (figures) => {
      latest = figures;
      charts.add(figures);
      connection(live ? "live" : "replay", "live");
    },
    down: () => connection("the engine is being restarted", "down"),
    lost: () => connection("not connected; trying again", "down"),
    refused: () => {
      connection("an admin key is needed", "down");
      at("key").hidden = false;
    },
  });
}

function scale() {
  at("scale").textContent = grid.per > 1 ? `${grid.per} pages per cell` : grid.zoom ? `page: ${grid.size} px` : "all pages";
}

function showMoment(moment) {
  at("time").value = moment.frame;
  at("moment").textContent = `${moment.t.toFixed(1)} s, frame ${moment.frame + 1}`;
  at("play").textContent = moment.playing ? "Pause" : "Play";
}

const steer = (order) => fetch("/v1/replay", {
  method: "POST", headers: { "content-type": "application/json", ...headers() }, body: JSON.stringify(order),
});
at("play").addEventListener("click", () => steer({ play: at("play").textContent === "Play" }));
at("step").addEventListener("click", () => steer({ step: 1 }));
at("speed").addEventListener("change", (event) => steer({ speed: Number(event.target.value) }));
at("time").addEventListener("input", (event) => steer({ frame: Number(event.target.value) }));

at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(at("admin-key").value);
  at("key").hidden = true;
  begin();
});
at("colour").addEventListener("change", (event) => {
  grid.mode = event.target.value;
  due = true;
});
for (const [id, by] of [["zoom-in", 1], ["zoom-out", -1]]) at(id).addEventListener("click", () => zoom(by));

function zoom(by) {
  grid.change(by);
  scale();
  due = true;
}

const map = at("map");
let hovering = null;
map.addEventListener("pointermove", (event) => {
  if (event.pointerType !== "mouse") return;
  clearTimeout(hovering);
  hovering = setTimeout(() => point(event.offsetX, event.offsetY), 60);
});
map.addEventListener("click", (event) => point(event.offsetX, event.offsetY));
map.addEventListener("wheel", (event) => {
  if (!grid.zoom) return;
  event.preventDefault();
  grid.scrollRows(Math.sign(event.deltaY) * 2);
  due = true;
}, { passive: false });
map.addEventListener("keydown", (event) => {
  const stride = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid.columns, ArrowDown: grid.columns }[event.key];
  const rows = { PageUp: -grid.rows, PageDown: grid.rows }[event.key];
  if (stride) {
    const next = (grid.cursor || 1) + stride * grid.per;
    choose(Math.min(Math.max(next, 1), state.count));
  } else if (rows) grid.scrollRows(rows), (due = true);
  else if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 1 : -1);
  else if (event.key === "Home" || event.key === "End") choose(event.key === "Home" ? 1 : state.count);
  else return;
  event.preventDefault();
});

function drawLegend() {
  at("legend").replaceChildren(...STATES.map((name, number) => {
    const item = document.createElement("li"), sample = document.createElement("canvas");
    sample.width = sample.height = 32;
    const paint = sample.getContext("2d");
    paint.fillStyle = grid.colours[name];
    paint.fillRect(0, 0, 32, 32);
    shape(paint, number, 0, 0, 32, grid.colours.card);
    item.append(sample, name === "used" ? "used by one" : name === "shared" ? "shared by several" : name);
    return item;
  }));
}

new ResizeObserver(() => {
  grid.measure();
  scale();
  due = true;
}).observe(map);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  grid.readColours();
  drawLegend();
  charts.reset(charts.history);
  due = true;
});

drawLegend();
begin();
requestAnimationFrame(frame);
