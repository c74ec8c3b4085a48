// The last minutes of the tree: a bounded log of changes, and a place in it.
// Owns: the log, the model's place in it, samples.  Does not know: pixels, the feed's wire.
// Idea: what was applied keeps what it replaced.  Going back takes entries back, newest first;
// going on applies them again.  What is dropped at the old end is said: `reach`.

const MAX_LOG_S = 600;
const MAX_LOG_ROWS = 400_000;   // about 100 MB of rows at worst
const MAX_SAMPLES = 1_000;      // a little over the quarter of an hour that the server tells

class Timeline {
  constructor(model) {
    this.model = model;
    this.log = [];        // {time, rows, removed, whole, before}
    this.place = 0;       // entries before it are in the model
    this.rows = 0;        // in the log
    this.from = null;     // the oldest moment that can be shown
    this.newest = null;   // server's time of the last event
    this.heard = 0;       // page's clock when it came
    this.held = null;     // the moment shown, or null for live
    this.samples = [];
  }

  // Seconds since 1970 by the server's clock.
  now() {
    return this.newest === null ? Date.now() / 1000 : this.newest + (performance.now() - this.heard) / 1000;
  }

  get shown() { return this.held ?? this.now(); }

  get isLive() { return this.held === null; }

  get reach() { return this.from === null ? 0 : Math.max(0, this.now() - this.from); }

  snapshot(message) {
    this.#hear(message.time);
    this.model.namespaces = message.nodes.namespaces ?? [];
    this.#add({ time: message.time, rows: rowsOf(message.nodes), removed: [], whole: true, before: null });
    if (message.sample) this.sample(message.sample);
  }

  change(message) {
    this.#hear(message.time);
    if (message.nodes.namespaces) this.model.namespaces = message.nodes.namespaces;
    this.#add({ time: message.time, rows: rowsOf(message.nodes), removed: message.removed ?? [], whole: false, before: null });
  }

  sample(sample) {
    const last = this.samples[this.samples.length - 1];
    if (last && sample.time <= last.time) return;
    this.#hear(sample.time);
    this.samples.push(sample);
    if (this.samples.length > MAX_SAMPLES) this.samples.splice(0, this.samples.length - MAX_SAMPLES);
  }

  // What the server remembers from before this page opened, or while the connection was lost.
  history(samples) {
    const known = new Set(this.samples.map((sample) => Math.round(sample.time)));
    const missed = samples.filter((sample) => !known.has(Math.round(sample.time)));
    this.samples = [...missed, ...this.samples].sort((a, b) => a.time - b.time).slice(-MAX_SAMPLES);
  }

  #hear(time) {
    if (this.newest !== null && time < this.newest) return;
    this.newest = time;
    this.heard = performance.now();
  }

  #add(entry) {
    this.log.push(entry);
    this.rows += entry.rows.length + entry.removed.length + 1;
    if (this.isLive) this.#forward();
    this.#trim();
  }

  #trim() {
    while (this.log.length > 1 && (this.rows > MAX_LOG_ROWS || this.newest - this.log[0].time > MAX_LOG_S)) {
      if (!this.place) {  // what is shown would be lost: go on with it
        this.#forward();
        this.held = Math.max(this.held ?? 0, this.log[0].time);
      }
      const entry = this.log.shift();
      this.place--;
      this.rows -= entry.rows.length + entry.removed.length + 1;
      this.from = entry.time;
    }
  }

  #forward() {
    const entry = this.log[this.place];
    let { rows, removed } = entry;
    if (entry.whole) {
      const first = this.log.length === 1 && this.model.size === 0;
      ({ rows, removed } = this.model.differences(rows));
      this.rows += rows.length + removed.length - entry.rows.length - entry.removed.length;
      Object.assign(entry, { rows, removed, whole: false });
      entry.before = this.model.apply(rows, removed, first ? 0 : entry.time);
      if (first) { // nothing stands before it, and its rows are in the model already
        this.log.pop();
        this.rows = 0;
        this.from = entry.time;
        return;
      }
    } else {
      const before = this.model.apply(rows, removed, entry.time);
      entry.before ??= before;
    }
    this.place++;
  }

  // Show a moment; null is live.  Costs the rows that changed between.
  show(time) {
    this.held = time === null ? null : Math.min(Math.max(time, this.from ?? time), this.now());
    const until = this.held ?? Infinity;
    while (this.place < this.log.length && this.log[this.place].time <= until) this.#forward();
    while (this.place > 0 && this.log[this.place - 1].time > until) {
      const { before } = this.log[--this.place];
      this.model.apply(before.rows, before.removed);
    }
  }

  // The last sample at or before the moment shown.
  sampleShown() {
    let at = this.samples.length - 1;
    while (at > 0 && this.samples[at].time > this.shown) at--;
    return this.samples[at] ?? null;
  }
}
