// What all frames so far add up to: the same as Picture in monitor/picture.py.

export const STATES = ["free", "cached", "used", "shared", "pinned"];

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const int32 = (text) => new Int32Array(bytes(text).buffer);

export class State {
  constructor() {
    this.begin(0);
  }

  begin(count) {
    this.count = count;
    this.pageSize = 0;
    this.time = 0;
    this.step = 0;
    this.heard = performance.now();
    this.state = new Uint8Array(count + 1);
    this.account = new Int32Array(count + 1);
    this.parent = new Int32Array(count + 1);
    this.since = new Float32Array(count + 1);
    this.owner = new Int32Array(count + 1).fill(-1);
    this.tables = new Map();
    this.requests = new Map();
    this.accounts = new Map();
  }

  apply(frame) {
    if (frame.full) this.begin(frame.num_pages);
    this.time = frame.t;
    this.step = frame.step;
    this.pageSize = frame.page_size;
    this.heard = performance.now();
    const pages = int32(frame.pages);
    const state = bytes(frame.state), account = int32(frame.account), parent = int32(frame.parent);
    const since = frame.full ? new Float32Array(bytes(frame.since).buffer) : null;
    for (let i = 0; i < pages.length; i++) {
      const page = pages[i];
      this.state[page] = state[i];
      this.account[page] = account[i];
      this.parent[page] = parent[i];
      this.since[page] = since ? since[i] : frame.t;
      if (state[i] < 2) this.owner[page] = -1;
    }
    for (const [number, name] of Object.entries(frame.accounts)) this.accounts.set(Number(number), name);
    for (const [row, first, count, ids] of frame.tables) this.changeTable(row, first, count, int32(ids));
    for (const key of frame.gone) this.requests.delete(key);
    for (const entry of frame.requests) this.requests.set(entry.key, entry);
  }

  changeTable(row, first, count, ids) {
    if (!count) return this.tables.delete(row);
    const table = (this.tables.get(row) || []).slice(0, first);
    for (const page of ids) {
      table.push(page);
      this.owner[page] = row;
    }
    this.tables.set(row, table.slice(0, count));
  }

  // Seconds of the engine's clock, which goes on between frames; a replay's does not.
  now(live) {
    return live ? this.time + (performance.now() - this.heard) / 1000 : this.time;
  }

  sharers(page) {
    const names = [];
    for (const request of this.requests.values()) {
      const table = request.row >= 0 && this.tables.get(request.row);
      if (table && table.includes(page)) names.push(request.id);
    }
    return names;
  }

  counts() {
    const counts = new Array(STATES.length).fill(0);
    for (let page = 1; page <= this.count; page++) counts[this.state[page]]++;
    return counts;
  }
}
