// The map itself: every page a cell, or several pages a cell where there are too many to see.

import { STATES } from "./state.js";

const SMALLEST = 5; // pixels of a cell
const LARGEST = 40;

export class Grid {
  constructor(canvas, state) {
    this.canvas = canvas;
    this.state = state;
    this.paint = canvas.getContext("2d", { alpha: false });
    this.zoom = 0; // 0: all pages are visible
    this.first = 0; // the first visible cell
    this.cursor = 0;
    this.marked = new Set(); // pages of the picked request
    this.mode = "state";
    this.live = true;
    this.readColours();
    this.measure();
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = Object.fromEntries(
      [...STATES, "mark", "card", "ink"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  measure() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.layOut();
  }

  // Cell size, columns, and pages per cell at this zoom: halving the pages per cell first, then larger cells.
  layOut() {
    const pages = Math.max(this.state.count, 1);
    let size = LARGEST;
    const fits = (cell) => Math.floor(this.width / cell) * Math.floor(this.height / cell);
    while (size > SMALLEST && fits(size) < pages) size--;
    let per = Math.max(1, Math.ceil(pages / Math.max(fits(size), 1)));
    for (let step = 0; step < this.zoom; step++) {
      if (per > 1) per = Math.ceil(per / 2);
      else size = Math.min(LARGEST, Math.ceil(size * 1.5));
    }
    this.size = size;
    this.per = per;
    this.columns = Math.max(1, Math.floor(this.width / size));
    this.rows = Math.max(1, Math.floor(this.height / size));
    this.cells = Math.ceil(this.state.count / per);
    this.scrollTo(this.first);
  }

  scrollTo(cell) {
    const most = Math.max(0, Math.ceil(this.cells / this.columns) - this.rows) * this.columns;
    this.first = Math.min(most, Math.max(0, Math.floor(cell / this.columns) * this.columns));
  }

  scrollRows(rows) {
    this.scrollTo(this.first + rows * this.columns);
  }

  change(zoom) {
    const page = this.cursor || 1 + this.first * this.per;
    this.zoom = Math.max(0, Math.min(24, this.zoom + zoom));
    this.layOut();
    this.show(page);
  }

  show(page) {
    const cell = Math.floor((page - 1) / this.per);
    const row = Math.floor((cell - this.first) / this.columns);
    if (row < 0 || row >= this.rows) this.scrollTo(cell - Math.floor(this.rows / 2) * this.columns);
  }

  // Pages first..last of the cell under a point; null where there is none.
  at(x, y) {
    const column = Math.floor(x / this.size), row = Math.floor(y / this.size);
    const cell = this.first + row * this.columns + column;
    if (column < 0 || column >= this.columns || row < 0 || row >= this.rows || cell >= this.cells) return null;
    return [1 + cell * this.per, Math.min((cell + 1) * this.per, this.state.count)];
  }

  // The page of a cell that speaks for it: the one of the most noteworthy state.
  speaker(cell) {
    const begin = 1 + cell * this.per, end = Math.min(begin + this.per, this.state.count + 1);
    let best = begin;
    for (let page = begin + 1; page < end; page++) if (this.state.state[page] > this.state.state[best]) best = page;
    return best;
  }

  colour(page, now) {
    const state = this.state.state[page];
    if (state === 0) return this.colours.free;
    if (this.mode === "owner") {
      const owner = this.state.owner[page] >= 0 ? this.state.owner[page] : 1000 + this.state.account[page];
      return `hsl(${(owner * 137.508) % 360} ${state > 1 ? 62 : 25}% ${state > 1 ? 48 : 60}%)`;
    }
    if (this.mode === "age") {
      const age = Math.log2(1 + Math.max(0, now - this.state.since[page])) / 10; // 1 after 17 minutes
      return `hsl(${210 - 150 * (1 - Math.min(age, 1))} 75% ${78 - 45 * Math.min(age, 1)}%)`;
    }
    return this.colours[STATES[state]];
  }

  draw() {
    const { paint, size } = this;
    const now = this.state.now(this.live);
    const gap = size > 6 ? 1 : 0;
    paint.fillStyle = this.colours.card;
    paint.fillRect(0, 0, this.width, this.height);
    const last = Math.min(this.cells, this.first + this.columns * this.rows);
    let colour = null;
    for (let cell = this.first; cell < last; cell++) {
      const page = this.per === 1 ? cell + 1 : this.speaker(cell);
      const x = ((cell - this.first) % this.columns) * size, y = Math.floor((cell - this.first) / this.columns) * size;
      const next = this.colour(page, now);
      if (next !== colour) paint.fillStyle = colour = next;
      paint.fillRect(x, y, size - gap, size - gap);
      if (size >= 9) {
        shape(paint, this.state.state[page], x, y, size - gap, this.colours.card);
        colour = null;
      }
    }
    this.drawMarks();
  }

  drawMarks() {
    const { paint, size } = this;
    paint.strokeStyle = this.colours.mark;
    paint.lineWidth = size > 8 ? 2 : 1;
    const seen = new Set();
    for (const page of this.marked) {
      const cell = Math.floor((page - 1) / this.per);
      if (!seen.has(cell)) this.outline(cell);
      seen.add(cell);
    }
    if (this.cursor) {
      paint.strokeStyle = this.colours.ink;
      this.outline(Math.floor((this.cursor - 1) / this.per));
    }
  }

  outline(cell) {
    const at = cell - this.first;
    if (at < 0 || at >= this.columns * this.rows) return;
    this.paint.strokeRect((at % this.columns) * this.size + 0.5, Math.floor(at / this.columns) * this.size + 0.5,
      this.size - 2, this.size - 2);
  }
}

// What tells the states apart without colour: a ring for cached, stripes for shared, a cross for pinned.
export function shape(paint, state, x, y, size, ink) {
  paint.strokeStyle = ink;
  paint.lineWidth = Math.max(1, size / 9);
  paint.beginPath();
  if (state === 1) paint.arc(x + size / 2, y + size / 2, size / 4.5, 0, 7);
  if (state === 3) {
    paint.moveTo(x, y + size * 0.6), paint.lineTo(x + size * 0.6, y);
    paint.moveTo(x + size * 0.4, y + size), paint.lineTo(x + size, y + size * 0.4);
  }
  if (state === 4) {
    paint.moveTo(x + size / 2, y + size / 5), paint.lineTo(x + size / 2, y + size * 0.8);
    paint.moveTo(x + size / 5, y + size / 2), paint.lineTo(x + size * 0.8, y + size / 2);
  }
  paint.stroke();
}
