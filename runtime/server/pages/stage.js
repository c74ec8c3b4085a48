// The canvas: frames, mouse, fingers and keys.
// Owns: when a frame is drawn, and what was chosen or asked for by hand.  Does not know: the feed.
// Idea: whatever happens only asks for a frame; one is drawn for all that happened since the last.

const LAYOUT_SHARE = 12;

class Stage {
  constructor({ model, colours, texts, choose, pause, drawn }) {
    Object.assign(this, { model, colours, texts, choose, pause, drawn });
    this.element = document.getElementById("stage");
    this.canvas = document.getElementById("canvas");
    this.tip = document.getElementById("tip");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.view = new View();
    this.layout = new Layout(model);
    this.selected = null;  // id
    this.hovered = null;   // index
    this.now = () => Date.now() / 1000;
    this.work = { frames: 0, layouts: 0, refreshes: 0, visited: 0, drawn: 0, aggregates: 0, inAggregates: 0, most: 0 };
    this.isAsked = false;
    this.nextLayout = 0;
    this.timer = null;
    this.pointers = new Map();
    this.moved = 0;
    new ResizeObserver(() => this.#resize()).observe(this.element);
    this.#resize();
    this.#listen();
  }

  ask() {
    if (this.isAsked) return;
    this.isAsked = true;
    requestAnimationFrame(() => { this.isAsked = false; this.#frame(); });
  }

  use(model) {
    this.model = model;
    this.layout = new Layout(model);
    this.ask();
  }

  #resize() {
    const box = this.element.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    if (!box.width) return;
    this.ratio = ratio;
    this.canvas.width = Math.round(box.width * ratio);
    this.canvas.height = Math.round(box.height * ratio);
    this.view.width = box.width;
    this.view.height = box.height;
    this.view.isPlaced = this.view.isPlaced && !this.view.follows;
    this.ask();
  }

  // Lay out what changed.  A large tree that changes all the time takes a twelfth of the time at
  // most; until then the picture stands as it was.
  #settle(isUrgent = false) {
    const { layout, model } = this, began = performance.now();
    if (layout.shape === model.shape) {
      if (layout.refresh(model)) this.work.refreshes++;
    } else if (isUrgent || began >= this.nextLayout) {
      layout.rebuild(model);
      this.work.layouts++;
      this.hovered = null;
      this.nextLayout = began + LAYOUT_SHARE * (performance.now() - began);
    } else if (!this.timer) {
      this.timer = setTimeout(() => { this.timer = null; this.ask(); }, this.nextLayout - began);
    }
    return layout;
  }

  indexOf(id) {
    const node = id === null ? undefined : this.model.get(id);
    return node === undefined ? -1 : this.layout.placeOf(node);
  }

  placeOf(id) {
    const { layout } = this, index = this.indexOf(id); // as last drawn
    return index < 0 || layout.node(index)?.row.id !== id ? null : { found: layout.found(index), warm: layout.warm[index] };
  }

  #frame() {
    const layout = this.#settle(), moves = this.view.step(layout), now = this.now();
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    const drawing = (this.drawing = new Drawing(this.context, layout, this.view, this.colours));
    drawing.nameOf = (row) => this.model.labelOf(row);
    drawing.textOf = (row) => this.texts.of(row);
    drawing.frame(now, this.indexOf(this.selected), this.hovered);
    const inside = drawing.aggregates.reduce((sum, many) => sum + many.to - many.from, 0);
    Object.assign(this.work, {
      frames: this.work.frames + 1, visited: drawing.visited, drawn: drawing.drawnNodes,
      aggregates: drawing.aggregates.length, inAggregates: inside, most: Math.max(this.work.most, drawing.visited),
    });
    this.drawn(this.work, layout);
    if (moves || drawing.shown.some(({ index }) => { const { born } = layout.node(index); return born && now - born < BORN_S && now >= born; })) this.ask();
  }

  #listen() {
    const on = (name, react, options) => this.element.addEventListener(name, react, options);
    on("wheel", (event) => { event.preventDefault(); this.#wheel(event); }, { passive: false });
    on("pointerdown", (event) => this.#down(event));
    on("pointermove", (event) => this.#move(event));
    for (const name of ["pointerup", "pointercancel"]) on(name, (event) => this.#up(event));
    on("pointerleave", (event) => { if (event.pointerType !== "touch") this.#hover(null); });
    on("dblclick", (event) => this.#closer(event));
    on("keydown", (event) => { if (this.#key(event)) event.preventDefault(); });
    document.getElementById("in").addEventListener("click", () => this.zoom(1.6));
    document.getElementById("out").addEventListener("click", () => this.zoom(1 / 1.6));
    document.getElementById("fit").addEventListener("click", () => this.fit());
  }

  #place(event) {
    const box = this.element.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #wheel(event) {
    const amount = event.deltaMode === 1 ? 24 : 1, factor = Math.exp(-(event.deltaY || event.deltaX) * amount * 0.0022);
    const [x, y] = this.#place(event);
    if (event.shiftKey) this.view.zoom(this.layout, factor, 1, x, y);
    else if (event.ctrlKey) this.view.zoom(this.layout, factor, factor, x, y); // a pinch of a touchpad
    else if (Math.abs(event.deltaX) > 2 * Math.abs(event.deltaY)) this.view.pan(this.layout, -event.deltaX, 0);
    else this.view.zoom(this.layout, 1, factor, x, y);
    this.ask();
  }

  zoom(factor) {
    const { width, height } = this.view, [box] = this.drawing?.shown.filter((one) => one.index === this.indexOf(this.selected)) ?? [];
    const [x, y] = box ? [Math.max(box.x, GUTTER_PX), box.y + box.h / 2] : [width / 4, height / 2];
    this.view.zoom(this.layout, Math.sqrt(factor), factor, x, y);
    this.ask();
  }

  fit() {
    this.view.follows = true;
    this.ask();
  }

  #down(event) {
    this.element.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.#place(event));
    if (this.pointers.size === 1) this.moved = 0;
    this.#hover(null);
  }

  #move(event) {
    const place = this.#place(event), before = this.pointers.get(event.pointerId);
    if (before === undefined) return this.#hover(place);
    this.#hover(null);
    this.moved += Math.hypot(place[0] - before[0], place[1] - before[1]);
    if (this.pointers.size === 1) {
      if (this.moved > 4) this.view.pan(this.layout, place[0] - before[0], place[1] - before[1]);
    } else if (this.pointers.size === 2) {
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const apart = (one, axis) => Math.max(24, Math.abs(one[axis] - other[axis]));
      this.view.zoom(this.layout, apart(place, 0) / apart(before, 0), apart(place, 1) / apart(before, 1), (place[0] + other[0]) / 2, (place[1] + other[1]) / 2);
    }
    this.pointers.set(event.pointerId, place);
    this.ask();
  }

  #up(event) {
    const wasDown = this.pointers.delete(event.pointerId);
    if (!wasDown || event.type === "pointercancel" || this.pointers.size || this.moved > 4) return;
    const found = this.drawing?.at(...this.#place(event)) ?? null;
    if (event.pointerType === "touch") this.#hover(this.#place(event)); // a finger can't hover: tell now
    if (found === null) this.choose(null);
    else if (found.many) this.#enter(found.many);
    else this.choose(this.layout.node(found.index)?.row.id ?? null);
  }

  // What is too small to tell apart is come nearer to.
  #enter({ from, to, parent, isNarrow }) {
    const { layout } = this;
    if (isNarrow) this.view.frameNode(layout, parent);
    else this.view.frameLanes(layout, layout.lane0[from], layout.lane1[to - 1], layout.x1[parent]);
    this.ask();
  }

  #closer(event) {
    const found = this.drawing?.at(...this.#place(event));
    if (found?.index === undefined) return;
    this.view.frameNode(this.layout, found.index);
    this.ask();
  }

  #hover(place) {
    const found = place && this.drawing ? this.drawing.at(...place) : null, index = found?.index ?? null;
    if (index !== this.hovered) { this.hovered = index; this.ask(); }
    this.tip.hidden = found === null;
    if (found === null) return;
    this.tip.textContent = found.many ? this.#aboutMany(found.many) : this.#aboutNode(index);
    const { offsetWidth, offsetHeight } = this.tip;
    const x = place[0] + 14 + offsetWidth > this.view.width ? place[0] - offsetWidth - 10 : place[0] + 14;
    const y = clamp(place[1] + 16, 0, this.view.height - offsetHeight - 4);
    this.tip.style.transform = `translate(${Math.max(2, x)}px, ${y}px)`;
  }

  #aboutNode(index) {
    const { row } = this.layout.node(index);
    return `${plural(row.tokens, "token")} from ${count(this.layout.x0[index])} · ${plural(this.layout.found(index), "hit")}\n${STATES[row.state] ?? row.state}, used ${ago(this.now() - this.layout.warm[index])}`;
  }

  #aboutMany({ from, to }) {
    const about = this.layout.about(from, to);
    return `${count(about.nodes)} nodes in ${plural(about.leaves, "leaf", "leaves")}${about.pinned ? `, ${count(about.pinned)} pinned` : ""}\ntoo small to draw apart: click to come nearer`;
  }

  #key(event) {
    if (event.altKey || event.metaKey || event.ctrlKey) return false;
    const { model } = this, node = this.selected === null ? undefined : model.get(this.selected);
    const actions = {
      "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6), "0": () => this.fit(),
      " ": () => this.pause(), Escape: () => { this.choose(null); this.fit(); },
      Enter: () => { if (node) { const layout = this.#settle(true); this.view.frameNode(layout, layout.placeOf(node)); this.ask(); } },
    };
    if (actions[event.key]) { actions[event.key](); return true; }
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return false;
    if (!model.size) return true;
    const to = node === undefined ? model.childrenOf(model.root)[0] : this.#next(node, event.key);
    if (to) this.choose(to.row.id, true);
    return true;
  }

  #next(node, key) {
    const { model } = this, siblings = model.siblingsOf(node), at = siblings.indexOf(node);
    if (key === "ArrowLeft") return model.parentOf(node);
    if (key === "ArrowRight") return model.childrenOf(node)[0];
    if (key === "Home") return siblings[0];
    if (key === "End") return siblings[siblings.length - 1];
    return siblings[at + (key === "ArrowUp" ? -1 : 1)];
  }

  select(id, reveal) {
    this.selected = id;
    if (reveal && this.model.get(id) !== undefined) this.view.reveal(this.#settle(true), this.indexOf(id));
    this.ask();
  }
}
