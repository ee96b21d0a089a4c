// What stands beside the map: one page in words, the table of requests, and the block table of one.

import { STATES } from "./state.js";
import { headers } from "./stream.js";

const element = (name, text, attributes = {}) => {
  const made = Object.assign(document.createElement(name), attributes);
  if (text !== undefined) made.textContent = text;
  return made;
};

const seconds = (value) => (value < 100 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`);
export const short = (id) => id.replace(/^(chatcmpl|cmpl)-/, "").replace(/-0$/, "").slice(0, 10);
const list = (ids) => (ids.length
  ? `${ids.length}: ${ids.slice(0, 12).map(short).join(", ")}${ids.length > 12 ? ", ..." : ""}` : "nobody");

export class PagePanel {
  constructor(place, state) {
    this.place = place;
    this.state = state;
    this.wanted = null;
  }

  // A cell of several pages, in numbers.
  showRange(first, last) {
    this.wanted = null;
    const counts = new Array(STATES.length).fill(0);
    for (let page = first; page <= last; page++) counts[this.state.state[page]]++;
    this.rows([["pages", `${first} to ${last}`], ...STATES.map((name, at) => [name, counts[at]]).filter(([, n]) => n)]);
  }

  // What the frames say at once, and what the page holds as soon as the server has said it.
  async show(page, live) {
    this.wanted = page;
    const { state } = this;
    const facts = [
      ["page", page], ["state", STATES[state.state[page]]], ["sharers", list(state.sharers(page))],
      ["continues", state.parent[page] > 0 ? `page ${state.parent[page]}` : "nothing"],
      ["belongs to", state.accounts.get(state.account[page]) || "nobody"],
      ["unchanged for", seconds(Math.max(0, state.now(live) - state.since[page]))],
    ];
    this.rows(facts);
    await new Promise((later) => setTimeout(later, 120));
    if (this.wanted !== page) return;
    const answer = await fetch(`/v1/pool/pages/${page}`, { headers: headers() }).catch(() => null);
    if (!answer || !answer.ok || this.wanted !== page) return;
    const found = await answer.json();
    facts.push(["tokens", found.tokens === null ? "are not in a record" : found.tokens.join(" ") || "none"]);
    this.rows(facts, found.text);
  }

  rows(facts, text) {
    const terms = element("dl");
    for (const [name, value] of facts) terms.append(element("dt", name), element("dd", String(value)));
    this.place.replaceChildren(terms);
    if (text) this.place.append(element("pre", text));
  }
}

const WAITS = {
  turn: "its turn", pages: "pages", rows: "a row", prefix: "its prefix, which another computes", ceiling: "its tenant's ceiling",
};

export class RequestsPanel {
  constructor(place, count, state, pick) {
    Object.assign(this, { place, count, state, pick, picked: null, rows: new Map() });
  }

  draw() {
    const entries = [...this.state.requests.values()];
    this.count.textContent = `${entries.length} shown`;
    const keys = new Set();
    for (const entry of entries.slice(0, 300)) {
      keys.add(entry.key);
      let row = this.rows.get(entry.key);
      if (!row) this.rows.set(entry.key, (row = this.make(entry)));
      this.fill(row, entry);
    }
    for (const [key, row] of this.rows) {
      if (keys.has(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
  }

  make(entry) {
    const row = element("tr");
    const button = element("button", short(entry.id) + (entry.index ? `/${entry.index}` : ""),
      { type: "button", title: entry.id });
    button.addEventListener("click", () => this.pick(entry.key));
    const name = element("td");
    name.append(button);
    row.append(name, ...Array.from({ length: 5 }, () => element("td")));
    this.place.append(row);
    return row;
  }

  fill(row, entry) {
    const share = entry.prompt ? Math.round((100 * entry.cached) / entry.prompt) : 0;
    const waits = entry.state !== "waiting" ? "" : WAITS[entry.waits_on] + (entry.needed ? ` (${entry.needed}, ${entry.free} there)` : "");
    const texts = [entry.state + (entry.preemptions ? `, preempted ${entry.preemptions}x` : ""),
      `${entry.prompt} + ${entry.tokens - entry.prompt}`, entry.pages, `${share} %`, waits];
    texts.forEach((text, at) => {
      const cell = row.cells[at + 1];
      if (cell.textContent !== String(text)) cell.textContent = text;
    });
    row.setAttribute("aria-selected", String(entry.key === this.picked));
  }
}

// Logical blocks in order and the page of each, as in the picture of the PagedAttention paper.
export class TablePanel {
  constructor(place, state, choose) {
    Object.assign(this, { place, state, choose, drawn: "" });
  }

  draw(entry, ended) {
    if (ended) {
      const note = this.place.querySelector(".hint");
      if (!note.textContent.endsWith("ended")) note.textContent += "; it has ended";
      return;
    }
    const pages = entry && entry.row >= 0 ? this.state.tables.get(entry.row) || [] : [];
    const look = entry ? `${entry.key}:${pages.map((page) => `${page}/${this.state.state[page]}`).join()}` : "";
    if (look === this.drawn) return;
    this.drawn = look;
    if (!entry) {
      this.place.replaceChildren(element("p", "Pick a request: its tokens, in order, and the pages that hold them.", { className: "hint" }));
      return;
    }
    const blocks = element("div", undefined, { className: "blocks" });
    pages.slice(0, 1024).forEach((page, number) => blocks.append(this.block(page, number)));
    const shared = pages.filter((page) => this.state.state[page] >= 3).length;
    this.place.replaceChildren(
      element("p", `${short(entry.id)}: ${pages.length} pages, ${shared} of them shared (striped)`, { className: "hint" }), blocks);
  }

  block(page, number) {
    const shared = this.state.state[page] >= 3;
    const block = element("button", undefined, { type: "button", className: shared ? "block shared" : "block" });
    const size = this.state.pageSize;
    block.append(element("small", `tokens ${number * size} to ${(number + 1) * size - 1}`), "\u2193", element("b", `page ${page}`));
    block.addEventListener("click", () => this.choose(page));
    return block;
  }
}
