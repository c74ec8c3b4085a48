// Where each node stands: x in tokens from the start of the prompt, y in lanes, one a leaf.
// Owns: the tree in preorder as typed arrays, with sums over any run of it.  Does not know: pixels.
// Idea: in preorder a subtree is one range, and so are siblings side by side, so that count, mean
// reach and mean heat of whatever is too small to draw cost one subtraction, at any size.  What is
// read of nodes is kept by slot, so that only nodes that changed are looked at: they lie all over
// memory, and a hundred thousand of them cost ten times what the arrays do.
//
//   x0 ──── edge ──── x1          reach: where the longest prefix below ends
//   [ system prompt    ][ a chat ][ a turn ]   lane0
//   [                  ][ another chat     ]   lane1

const ROOT_GAP = 0.6; // lanes between namespaces

const BY_SLOT = ["tokens", "hits", "used", "pinned"];
const BY_PLACE = [
  "x0", "x1", "lane0", "lane1", "reach", "lanesOf", "cursor", "warm",
  "sumReach", "sumLeaves", "sumHits", "sumUsed", "sumPinned",
];

class Layout {
  constructor(model) {
    this.room = -1;
    this.rebuild(model);
  }

  // Order and place all nodes anew.
  rebuild(model) {
    this.shape = model.shape;
    this.version = model.version;
    if (model.slots > this.room) this.#makeRoom(model);
    this.#take(model);
    this.#order(model.root.slot);
    this.#place();
    this.#sum();
  }

  // Take over rows that changed without the shape; false where nothing did.
  refresh(model) {
    if (this.version === model.version) return false;
    this.version = model.version;
    this.#take(model);
    this.#sum();
    return true;
  }

  // Room for a quarter more nodes; all of them are to be looked at again.
  #makeRoom(model) {
    const room = (this.room = Math.ceil(model.slots * 1.25) + 64);
    for (const name of [...BY_SLOT, ...BY_PLACE]) this[name] = new Float64Array(room + 1);
    for (const name of ["first", "next", "place"]) this[name] = new Int32Array(room); // by slot
    for (const name of ["slot", "parent"]) this[name] = new Int32Array(room);         // by place
    this.end = new Int32Array(room);      // one beyond the subtree
    this.nodeOf = new Array(room).fill(undefined);
    this.belowOf = new Array(room).fill(null); // children by lane, null for a leaf; never changed
    for (const node of [model.root, ...model.nodes.values()]) {
      model.touched.add(node);
      model.regrouped.add(node);
    }
  }

  // Look at what changed since the last time: rows, and who stands below whom.
  #take(model) {
    const { tokens, hits, used, pinned, first, next, nodeOf, belowOf } = this;
    for (const node of model.touched) {
      const { slot, row } = node;
      nodeOf[slot] = node;
      tokens[slot] = row.tokens;
      hits[slot] = row.hits;
      used[slot] = row.used;
      pinned[slot] = row.state === "p" ? 1 : 0;
    }
    for (const node of model.regrouped) {
      const below = node.children === null ? null : model.childrenOf(node);
      belowOf[node.slot] = below;
      let later = -1;
      for (let at = below === null ? -1 : below.length - 1; at >= 0; at--) {
        next[below[at].slot] = later;
        later = below[at].slot;
      }
      first[node.slot] = later;
    }
    model.touched.clear();
    model.regrouped.clear();
  }

  #order(top) {
    const { parent, x0, x1, slot, place, first, next, tokens } = this;
    this.roots = [];
    let size = 0, above = -1, at = first[top];
    while (at >= 0) {
      const here = size++;
      slot[here] = at;
      place[at] = here;
      parent[here] = above;
      x0[here] = above < 0 ? 0 : x1[above];
      x1[here] = x0[here] + tokens[at];
      if (above < 0) this.roots.push(here);
      if (first[at] >= 0) { above = here; at = first[at]; continue; }
      while (next[at] < 0 && above >= 0) { at = slot[above]; above = parent[above]; }
      at = next[at];
    }
    this.size = size;
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
    const { size, end, parent, reach, warm, hits, used, pinned, slot } = this;
    const { sumReach, sumLeaves, sumHits, sumUsed, sumPinned } = this;
    for (let at = 0; at < size; at++) warm[at] = used[slot[at]];
    for (let at = size - 1; at >= 0; at--) { // last use of a node or of anything below it
      const above = parent[at];
      if (above >= 0 && warm[at] > warm[above]) warm[above] = warm[at];
    }
    for (let at = 0; at < size; at++) {
      const leaf = end[at] === at + 1 ? 1 : 0;
      sumReach[at + 1] = sumReach[at] + leaf * reach[at];
      sumLeaves[at + 1] = sumLeaves[at] + leaf;
      sumHits[at + 1] = sumHits[at] + hits[slot[at]];
      sumUsed[at + 1] = sumUsed[at] + warm[at];
      sumPinned[at + 1] = sumPinned[at] + pinned[slot[at]];
    }
  }

  // Roots stand for namespaces, and are no nodes of the tree.
  get numNodes() { return this.size - this.roots.length; }

  // The node that stands at a place; undefined beyond the last.
  node(place) { return place < this.size ? this.nodeOf[this.slot[place]] : undefined; }

  // Its children by lane, null for a leaf.
  below(place) { return this.belowOf[this.slot[place]]; }

  // Where a node stands; -1 for one that came since.
  placeOf(node) { return this.nodeOf[node.slot] === node ? this.place[node.slot] : -1; }

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
      if (this.lane1[this.place[siblings[middle].slot]] > lane) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
