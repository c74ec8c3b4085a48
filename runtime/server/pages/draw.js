// One frame of the tree on a canvas.
// Owns: what is drawn at which size, and the list of it, for pointing.  Does not know: events.
// Idea: level of detail by pixels, not by nodes.  Siblings lower than MIN_PX become rows of two
// pixels inside one marked aggregate with its count; a row is found by bisection, so that a frame
// costs what the window shows, whatever the tree holds.

const MIN_PX = 3, ROW_PX = 2, NARROW_PX = 1.5, RULER_PX = 24, GUTTER_PX = 16, MAX_LANE_PX = 28, BORN_S = 1.2;
const FONT = '11px Inter, system-ui, -apple-system, "Segoe UI", Roboto, "Open Sans", sans-serif';

const SAMPLE = "You are a helpful assistant. 2,048 tokens";
const BOLD = `600 ${FONT}`, LINE_PX = 15;

class Drawing {
  constructor(context, layout, view, colours) {
    Object.assign(this, { context, layout, view, colours });
    this.shown = [];      // {index, x, y, w, h}
    this.aggregates = []; // {from, to, parent, x, y, w, h}
    this.visited = 0;
    this.drawnNodes = 0;
    this.labels = [];
    this.stepOf = new Int8Array(layout.size).fill(-1);
  }

  x(tokens) { return GUTTER_PX + (tokens - this.view.x) * this.view.kx; }
  y(lane) { return RULER_PX + 6 + (lane - this.view.y) * this.view.ky; }
  laneAt(y) { return (y - RULER_PX - 6) / this.view.ky + this.view.y; }
  tokenAt(x) { return (x - GUTTER_PX) / this.view.kx + this.view.x; }

  frame(now, selected, hovered) {
    const { context, view, layout, colours } = this;
    context.fillStyle = colours.ground;
    context.fillRect(0, 0, view.width, view.height);
    this.now = now;
    this.#grid();
    context.save();
    context.beginPath();
    context.rect(0, RULER_PX, view.width, view.height - RULER_PX);
    context.clip();
    const waiting = [...layout.roots].reverse();
    while (waiting.length) this.#visit(waiting.pop(), waiting);
    this.#outlines();
    for (const many of this.aggregates) this.#many(many);
    this.#texts();
    this.#marks(selected, hovered);
    this.#gutters();
    context.restore();
    this.#ruler();
  }

  #visit(index, waiting) {
    const { layout, view } = this;
    this.visited++;
    const top = this.y(layout.lane0[index]), bottom = this.y(layout.lane1[index]);
    if (bottom < RULER_PX || top > view.height) return;
    const left = this.x(layout.x0[index]), right = this.x(layout.x1[index]);
    if (left > view.width) return;
    if (layout.parent[index] >= 0) this.#node(index, left, right, top, bottom);
    const below = layout.below(index);
    if (below === null || right > view.width) return;
    const reach = this.x(layout.reach[index]);
    if (reach < GUTTER_PX) return;
    if (reach - right < NARROW_PX) this.#aggregate(index + 1, layout.end[index], index, right, top, bottom, reach);
    else this.#siblings(index, below, right, top, waiting);
  }

  #node(index, left, right, top, bottom) {
    const { context, colours, layout, view } = this;
    if (right < GUTTER_PX) return;
    const step = colours.step(layout.warm[index], layout.found(index), this.now);
    const x = Math.max(left, GUTTER_PX - 2), w = Math.max(1, Math.min(right, view.width + 2) - x - (right - left > 3 ? 1 : 0));
    const h = Math.max(1, bottom - top - (bottom - top > 4 ? 1 : 0));
    context.fillStyle = colours.steps[step];
    context.fillRect(x, top, w, h);
    this.drawnNodes++;
    this.stepOf[index] = step;
    this.shown.push({ index, x, y: top, w, h });
  }

  // Children side by side: tall ones are visited, runs of low ones become aggregates.
  #siblings(parent, below, left, top, waiting) {
    const { layout, view } = this;
    let at = layout.firstBelow(below, this.laneAt(RULER_PX));
    let run = null;
    while (at < below.length) {
      const child = layout.placeOf(below[at]), y0 = this.y(layout.lane0[child]), y1 = this.y(layout.lane1[child]);
      this.visited++;
      if (y0 > view.height) break;
      if (y1 - y0 >= MIN_PX) {
        if (run) run = this.#close(run);
        waiting.push(child);
        at++;
        continue;
      }
      let next = Math.max(at + 1, layout.firstBelow(below, this.laneAt(y0 + ROW_PX), at));
      // One that begins within this row belongs to it, unless it is tall and ends it.
      if (next < below.length && this.y(layout.lane0[layout.placeOf(below[next])]) < y0 + ROW_PX && !this.#isTall(layout.placeOf(below[next]))) next++;
      const last = layout.placeOf(below[next - 1]);
      run ??= { from: child, to: 0, parent, x: left, y: y0, w: 0, h: 0 };
      run.to = layout.end[last];
      run.h = this.y(layout.lane1[last]) - run.y;
      this.#row(child, run.to, left, y0, run.y + run.h, run);
      at = next;
    }
    if (run) this.#close(run);
  }

  #isTall(index) { return (this.layout.lane1[index] - this.layout.lane0[index]) * this.view.ky >= MIN_PX; }

  #row(from, to, left, y0, y1, run) {
    const { context, colours, layout, view } = this, about = layout.about(from, to);
    const right = Math.min(view.width, Math.max(left + 2, this.x(about.reach)));
    context.fillStyle = colours.steps[colours.step(about.used, about.hits, this.now)];
    const x = Math.max(left, GUTTER_PX);
    if (right > x) context.fillRect(x, y0, right - x, Math.max(0.75, y1 - y0 - (y1 - y0 >= 1.8 ? 0.5 : 0)));
    run.w = Math.max(run.w, right - left);
  }

  #close(run) {
    this.aggregates.push(run);
    return null;
  }

  // A whole subtree that is too narrow to draw.
  #aggregate(from, to, parent, left, top, bottom, reach) {
    this.aggregates.push({ from, to, parent, x: left, y: top, w: Math.max(2, reach - left), h: bottom - top, isNarrow: true });
  }

  #outlines() {
    const { context, colours, layout } = this;
    for (const kind of ["e", "other", "r", "p"]) {
      context.beginPath();
      for (const { index, x, y, w, h } of this.shown) {
        const { row } = layout.node(index);
        const its = row.state === "i" ? "other" : row.state;
        if (its !== kind || h < (kind === "e" ? 9 : 4)) continue; // dashes hide what is low
        if (w < 5) context.rect(x, y, Math.min(2, w), h);
        else context.rect(x + 0.5 + (kind === "p" || kind === "r" ? 0.5 : 0), y + 0.5, w - 1 - (kind === "p" || kind === "r" ? 1 : 0), h - 1);
      }
      context.setLineDash(kind === "e" ? [4, 3] : []);
      context.lineWidth = kind === "p" ? 2 : 1;
      context.strokeStyle = { e: colours.evictable, other: colours.edge, r: colours.retained, p: colours.pinned }[kind];
      context.stroke();
    }
    context.setLineDash([]);
    for (const { index, x, y, w, h } of this.shown) {
      const { row } = layout.node(index);
      if (h < 4 || w < 5) continue;
      if (row.state === "r" && h > 8) {
        context.strokeStyle = colours.retained;
        context.strokeRect(x + 3.5, y + 3, w - 7, h - 6);
      }
      if (row.tier && row.tier !== "gpu") this.#hatch(x, y, w, h);
    }
  }

  #hatch(x, y, w, h) {
    const { context, colours } = this;
    context.save();
    context.beginPath();
    context.rect(x, y, w, h);
    context.clip();
    context.beginPath();
    for (let at = x - h; at < x + w; at += 6) { context.moveTo(at, y + h); context.lineTo(at + h, y); }
    context.strokeStyle = colours.hatch;
    context.lineWidth = 1;
    context.stroke();
    context.restore();
  }

  #many({ from, to, x, y, h, isNarrow }) {
    const { context, colours, layout, view } = this;
    if (isNarrow) { context.fillStyle = colours.many; context.fillRect(x, y, 2, h); return; }
    context.fillStyle = colours.many;
    context.fillRect(Math.max(GUTTER_PX, x), y, 3, h);
    const about = layout.about(from, to);
    if (about.pinned) { context.fillStyle = colours.pinned; context.fillRect(Math.max(GUTTER_PX, x) + 3, y, 2, h); }
    const top = Math.max(y, RULER_PX), bottom = Math.min(y + h, view.height);
    if (bottom - top < 17) return;
    const words = `${count(about.nodes)} nodes`;
    this.labels.push({ words, x: Math.max(x, GUTTER_PX) + 9, y: (top + bottom) / 2, pill: true });
  }

  #texts() {
    const { context, colours, layout, view } = this;
    context.font = FONT;
    context.textBaseline = "middle";
    this.letter = context.measureText(SAMPLE).width / SAMPLE.length;
    for (const { index, x, y, w, h } of this.shown) {
      const top = Math.max(y, RULER_PX), bottom = Math.min(y + h, view.height), left = Math.max(x, GUTTER_PX);
      const room = Math.min(x + w, view.width) - left - 12;
      if (bottom - top < 13 || room < 22) continue;
      const { row } = layout.node(index);
      context.fillStyle = colours.inks[this.stepOf[index]];
      this.#caption(row, layout.found(index), left + 7, top, bottom, room);
    }
    for (const { words, x, y } of this.labels) {
      const width = context.measureText(words).width;
      context.fillStyle = colours.pill;
      context.beginPath();
      context.roundRect(x - 5, y - 8, width + 10, 16, 4);
      context.fill();
      context.fillStyle = colours.ink;
      context.fillText(words, x, y + 0.5);
    }
  }

  // Numbers, and under or behind them the text, as far as there is room.
  #caption(row, found, x, top, bottom, room) {
    const { context } = this, height = bottom - top;
    const text = room > 130 ? this.textOf(row) : null;
    const facts = room > 118 ? `${short(row.tokens)} tokens · ${plural(found, "hit")}` : room > 56 ? `${short(row.tokens)} tok` : short(row.tokens);
    if (!text) return context.fillText(facts, x, (top + bottom) / 2 + 0.5);
    const lines = Math.min(7, Math.floor((height - 22) / LINE_PX));
    if (lines < 1) return context.fillText(this.#fitted(`${short(row.tokens)} tok  ${text}`, room), x, (top + bottom) / 2 + 0.5);
    const wrapped = this.#wrapped(text, room, lines), first = (top + bottom - wrapped.length * LINE_PX) / 2;
    context.font = BOLD;
    context.fillText(facts, x, first);
    context.font = FONT;
    wrapped.forEach((line, at) => context.fillText(line, x, first + (at + 1) * LINE_PX));
  }

  // Letters of a text that have room; guessed from the mean width, and measured once or twice.
  #letters(text, room) {
    let letters = Math.min(text.length, Math.ceil((room / this.letter) * 1.1));
    for (let width; letters > 1 && (width = this.context.measureText(text.slice(0, letters)).width) > room;) {
      letters = Math.min(letters - 1, Math.floor((letters * room) / width));
    }
    return letters;
  }

  #fitted(text, room) {
    const letters = this.#letters(text, room);
    return letters === text.length ? text : `${text.slice(0, Math.max(1, this.#letters(text, room - 10)))}…`;
  }

  #wrapped(text, room, most) {
    const lines = [];
    let rest = text;
    while (rest && lines.length < most) {
      const letters = this.#letters(rest, room);
      if (lines.length === most - 1 || letters === rest.length) { lines.push(this.#fitted(rest, room)); break; }
      const space = rest.lastIndexOf(" ", letters), end = space > letters / 2 ? space : letters;
      lines.push(rest.slice(0, end));
      rest = rest.slice(end).trimStart();
    }
    return lines;
  }

  #marks(selected, hovered) {
    const { context, colours, layout, view, now } = this;
    const above = new Set();
    for (let at = selected; at >= 0; at = layout.parent[at]) above.add(at);
    for (const { index, x, y, w, h } of this.shown) {
      const node = layout.node(index), age = now - node.born;
      if (node.born && age >= 0 && age < BORN_S && !view.reduced.matches) {
        context.globalAlpha = 1 - age / BORN_S;
        context.lineWidth = 2;
        context.strokeStyle = colours.born;
        context.strokeRect(x - 1 - 3 * age, y - 1 - 3 * age, w + 2 + 6 * age, h + 2 + 6 * age);
        context.globalAlpha = 1;
      }
      if (!above.has(index) && index !== hovered) continue;
      context.lineWidth = index === selected ? 3 : 1.25;
      context.strokeStyle = colours.ink;
      context.strokeRect(x - 0.5, y - 0.5, Math.max(3, w + 1), Math.max(3, h + 1));
    }
  }

  #gutters() {
    const { context, colours, layout, view } = this;
    layout.roots.forEach((index, at) => {
      const top = Math.max(this.y(layout.lane0[index]), RULER_PX), bottom = Math.min(this.y(layout.lane1[index]), view.height);
      if (bottom <= top) return;
      context.fillStyle = colours.gutter[at % 2];
      context.fillRect(0, top, GUTTER_PX - 3, Math.max(1, bottom - top - 1));
      const words = this.nameOf(layout.node(index).row), width = context.measureText(words).width;
      if (bottom - top < width + 8) return;
      context.save();
      context.translate((GUTTER_PX - 3) / 2 + 0.5, Math.min((top + bottom) / 2, top + 200) + width / 2);
      context.rotate(-Math.PI / 2);
      context.fillStyle = colours.ink;
      context.fillText(words, 0, 0);
      context.restore();
    });
  }

  #ticks() {
    const target = 90 / this.view.kx, power = 2 ** Math.ceil(Math.log2(Math.max(1, target)));
    const first = Math.max(0, Math.floor(this.view.x / power)) * power, ticks = [];
    for (let at = first; this.x(at) < this.view.width; at += power) ticks.push(at);
    return ticks;
  }

  #grid() {
    const { context, colours, view } = this;
    context.fillStyle = colours.line;
    for (const tick of this.#ticks()) context.fillRect(Math.round(this.x(tick)), RULER_PX, 1, view.height);
  }

  #ruler() {
    const { context, colours, view } = this;
    context.fillStyle = colours.ground;
    context.fillRect(0, 0, view.width, RULER_PX);
    context.fillStyle = colours.line;
    context.fillRect(0, RULER_PX - 1, view.width, 1);
    context.font = FONT;
    context.textBaseline = "middle";
    context.fillStyle = colours.muted;
    for (const tick of this.#ticks()) {
      const x = Math.round(this.x(tick)), words = tick === 0 ? "token 0" : short(tick);
      if (x < 0 || x + 50 > view.width + 30) continue;
      context.fillRect(x, RULER_PX - 5, 1, 4);
      context.fillText(words, x + 4, RULER_PX / 2);
    }
  }

  // What stands at a place: {index} or {many}, or null.
  at(x, y) {
    if (y < RULER_PX) return null;
    for (const many of this.aggregates) if (inside(many, x, y)) return { many };
    for (let place = this.shown.length - 1; place >= 0; place--) {
      if (inside(this.shown[place], x, y)) return { index: this.shown[place].index };
    }
    return null;
  }
}

function inside(box, x, y) {
  return x >= box.x && x <= box.x + Math.max(3, box.w) && y >= box.y && y < box.y + Math.max(2, box.h);
}
