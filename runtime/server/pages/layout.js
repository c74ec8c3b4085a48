// Where each node stands: x in tokens from the start of the prompt, y in lanes, one a leaf.
// Owns: the tree in preorder as typed arrays, with sums over any run of it.  Does not know: pixels.
// Idea: in preorder a subtree is one range, and so are siblings side by side, so that count, mean
// reach and mean heat of whatever is too small to draw cost one subtraction, at any size.
//
//   x0 ──── edge ──── x1          reach: where the longest prefix below ends
//   [ system prompt    ][ a chat ][ a turn ]   lane0
//   [                  ][ another chat     ]   lane1

const ROOT_GAP = 0.6; // lanes between namespaces

const NUMBERS = [
  "x0", "x1", "lane0", "lane1", "reach", "lanesOf", "cursor", "hits", "used", "pinned", "warm",
  "sumReach", "sumLeaves", "sumHits", "sumUsed", "sumPinned",
];

class Layout {
  constructor(model) {
    this.room = -1;
    this.rebuild(model);
  }

  // Order and place all nodes anew.  Rows are looked at once, for they lie all over memory; the rest
  // runs over arrays, which are kept for the next time.
  rebuild(model) {
    this.shape = model.shape;
    this.version = model.version;
    this.nodes = [];
    this.below = [];      // children by lane, null for a leaf; these arrays are never changed
    this.roots = [];
    if (model.size > this.room) this.#makeRoom(Math.ceil(model.size * 1.25) + 64);
    this.#order(model);
    model.touched = [];
    this.#place();
    this.#sum();
  }

  // Take over rows that changed without the shape; false where nothing did.
  refresh(model) {
    if (this.version === model.version) return false;
    this.version = model.version;
    for (const node of model.touched) this.#take(node.index, node.row);
    model.touched = [];
    this.#sum();
    return true;
  }

  #makeRoom(room) {
    this.room = room;
    for (const name of NUMBERS) this[name] = new Float64Array(room + 1);
    this.end = new Int32Array(room);      // one beyond the subtree
    this.parent = new Int32Array(room);
  }

  #take(index, { hits, used, state }) {
    this.hits[index] = hits;
    this.used[index] = used;
    this.pinned[index] = state === "p" ? 1 : 0;
  }

  #order(model) {
    const { parent, x0, x1, nodes } = this, waiting = [], above = [];
    const push = (below, from) => {
      for (let at = below.length - 1; at >= 0; at--) { waiting.push(below[at]); above.push(from); }
    };
    push(model.childrenOf(model.root), -1);
    while (waiting.length) {
      const node = waiting.pop(), from = above.pop(), index = nodes.length;
      node.index = index;
      nodes.push(node);
      parent[index] = from;
      x0[index] = from < 0 ? 0 : x1[from];
      x1[index] = x0[index] + node.row.tokens;
      this.#take(index, node.row);
      if (from < 0) this.roots.push(index);
      const below = node.children === null ? null : model.childrenOf(node);
      this.below.push(below);
      if (below !== null) push(below, index);
    }
    this.size = nodes.length;
  }

  #place() {
    const { x1, lane0, lane1, reach, end, parent, size, cursor } = this, lanes = this.lanesOf;
    lanes.fill(0, 0, size);
    reach.fill(0, 0, size);
    for (let at = size - 1; at >= 0; at--) {
      if (lanes[at] === 0) { lanes[at] = 1; reach[at] = x1[at]; end[at] = at + 1; }
      const above = parent[at];
      if (above < 0) continue;
      if (lanes[above] === 0) end[above] = end[at]; // its last child: the first that comes from behind
      lanes[above] += lanes[at];
      if (reach[at] > reach[above]) reach[above] = reach[at];
    }
    let top = 0;
    for (let at = 0; at < size; at++) { // a parent stands before its children
      const above = parent[at];
      if (above < 0) { lane0[at] = top; top += lanes[at] + ROOT_GAP; }
      else { lane0[at] = cursor[above]; cursor[above] += lanes[at]; }
      cursor[at] = lane0[at];
      lane1[at] = lane0[at] + lanes[at];
    }
    this.lanes = Math.max(1, top - ROOT_GAP);
    this.reachAll = this.roots.reduce((most, at) => Math.max(most, reach[at]), 1);
  }

  #sum() {
    const { size, end, parent, reach, warm, hits, used, pinned } = this;
    const { sumReach, sumLeaves, sumHits, sumUsed, sumPinned } = this;
    warm.set(used.subarray(0, size)); // last use of a node or of anything below it
    for (let at = size - 1; at >= 0; at--) {
      const above = parent[at];
      if (above >= 0 && warm[at] > warm[above]) warm[above] = warm[at];
    }
    for (let at = 0; at < size; at++) {
      const leaf = end[at] === at + 1 ? 1 : 0;
      sumReach[at + 1] = sumReach[at] + leaf * reach[at];
      sumLeaves[at + 1] = sumLeaves[at] + leaf;
      sumHits[at + 1] = sumHits[at] + hits[at];
      sumUsed[at + 1] = sumUsed[at] + warm[at];
      sumPinned[at + 1] = sumPinned[at] + pinned[at];
    }
  }

  // Roots stand for namespaces, and are no nodes of the tree.
  get numNodes() { return this.size - this.roots.length; }

  // Requests that found a node: those that ended there, and those that went on below.
  found(index) { return this.sumHits[this.end[index]] - this.sumHits[index]; }

  // What a range of the preorder holds.
  about(from, to) {
    const nodes = to - from, leaves = this.sumLeaves[to] - this.sumLeaves[from];
    return {
      nodes, leaves,
      reach: leaves ? (this.sumReach[to] - this.sumReach[from]) / leaves : this.x1[to - 1],
      hits: (this.sumHits[to] - this.sumHits[from]) / nodes,
      used: (this.sumUsed[to] - this.sumUsed[from]) / nodes,
      pinned: this.sumPinned[to] - this.sumPinned[from],
    };
  }

  // The first of some siblings, nodes by lane, that ends below a lane.
  firstBelow(siblings, lane, from = 0) {
    let low = from, high = siblings.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.lane1[siblings[middle].index] > lane) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
