// Which part of the tree the window shows, and how it moves there.
// Owns: scale and place, for both axes apart.  Does not know: nodes, events.
// Idea: a target, and a view that eases to it a part of the way in each frame; at once where the
// system asks for less motion.

const EASE = 0.3;

class View {
  constructor() {
    Object.assign(this, { x: 0, y: 0, kx: 1, ky: 1, width: 1, height: 1, follows: true });
    this.target = { x: 0, y: 0, kx: 1, ky: 1 };
    this.reduced = matchMedia("(prefers-reduced-motion: reduce)");
    this.isPlaced = false;
  }

  get innerWidth() { return Math.max(40, this.width - GUTTER_PX - 8); }
  get innerHeight() { return Math.max(40, this.height - RULER_PX - 14); }

  fitted(layout) {
    return { x: 0, y: 0, kx: this.innerWidth / layout.reachAll, ky: Math.min(MAX_LANE_PX, this.innerHeight / layout.lanes) };
  }

  // One step; true while there are more to go.
  step(layout) {
    if (this.follows) this.target = this.fitted(layout);
    if (!this.isPlaced || this.reduced.matches) {
      Object.assign(this, this.target);
      this.isPlaced = layout.size > 0;
      return false;
    }
    let moves = false;
    for (const name of ["x", "y", "kx", "ky"]) {
      const rest = this.target[name] - this[name];
      const scale = name === "x" ? 1 / this.kx : name === "y" ? 1 / this.ky : this[name];
      if (Math.abs(rest) < 0.002 * Math.abs(scale)) this[name] = this.target[name];
      else { this[name] += rest * EASE; moves = true; }
    }
    return moves;
  }

  // Scale about a place of the window, which stays where it is.
  zoom(layout, factorX, factorY, px, py) {
    const t = this.target, least = this.fitted(layout);
    const kx = clamp(t.kx * factorX, least.kx * 0.8, 40), ky = clamp(t.ky * factorY, least.ky * 0.8, 400);
    t.x += (px - GUTTER_PX) * (1 / t.kx - 1 / kx);
    t.y += (py - RULER_PX - 6) * (1 / t.ky - 1 / ky);
    Object.assign(t, { kx, ky });
    this.#bound(layout);
    this.follows = false;
  }

  pan(layout, dx, dy) {
    this.target.x -= dx / this.target.kx;
    this.target.y -= dy / this.target.ky;
    this.#bound(layout);
    this.follows = false;
    this.x = this.target.x; // the hand is followed at once
    this.y = this.target.y;
  }

  // Show a whole subtree.
  frameNode(layout, index) {
    const lanes = layout.lane1[index] - layout.lane0[index], start = layout.x0[index];
    const reach = Math.max(layout.reach[index] - start, layout.x1[index] - start, 8);
    const kx = Math.min(40, (this.innerWidth / reach) * 0.96), ky = Math.min(MAX_LANE_PX * 1.6, (this.innerHeight / lanes) * 0.94);
    const slack = (this.innerHeight - lanes * ky) / 2 / ky;
    this.target = { kx, ky, x: start - 12 / kx, y: layout.lane0[index] - Math.min(slack, layout.lane0[index]) };
    this.#bound(layout);
    this.follows = false;
  }

  frameLanes(layout, lane0, lane1, x) {
    const ky = Math.min(MAX_LANE_PX, (this.innerHeight * 0.9) / Math.max(1, lane1 - lane0));
    this.target.ky = ky;
    this.target.y = Math.max(0, lane0 - 0.5);
    if (x < this.target.x) this.target.x = x;
    this.#bound(layout);
    this.follows = false;
  }

  // Move, and come nearer if need be, until a node can be seen.
  reveal(layout, index) {
    const t = this.target, lane0 = layout.lane0[index], lane1 = layout.lane1[index];
    let changed = false;
    if ((lane1 - lane0) * t.ky < 12) {
      t.ky = Math.min(MAX_LANE_PX, 18 / (lane1 - lane0));
      t.y = lane0 - this.innerHeight / 2 / t.ky;
      changed = true;
    }
    const rows = this.innerHeight / t.ky, columns = this.innerWidth / t.kx;
    if (lane1 <= t.y + 0.5 / t.ky || lane0 >= t.y + rows - 0.5 / t.ky) { t.y = (lane0 + lane1) / 2 - rows / 2; changed = true; }
    else if (lane1 - lane0 < rows && (lane0 < t.y || lane1 > t.y + rows)) { t.y = lane0 < t.y ? lane0 : lane1 - rows; changed = true; }
    if (layout.x0[index] < t.x || layout.x0[index] > t.x + columns * 0.9) { t.x = layout.x0[index] - columns * 0.15; changed = true; }
    if (!changed) return;
    this.follows = false;
    this.#bound(layout);
  }

  #bound(layout) {
    const t = this.target, columns = this.innerWidth / t.kx, rows = this.innerHeight / t.ky;
    t.x = clamp(t.x, -columns * 0.05, Math.max(0, layout.reachAll - columns * 0.5));
    t.y = clamp(t.y, Math.min(0, -rows * 0.02), Math.max(0, layout.lanes - rows * 0.7));
  }
}

function clamp(value, least, most) { return Math.min(Math.max(value, least), most); }
