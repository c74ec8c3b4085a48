// Where each node stands: x in tokens from the start of the prompt, y in lanes, one a leaf.
// Owns: the tree in preorder as typed arrays, with sums over any run of it.  Does not know: pixels.
// Idea: in preorder a subtree is one range, and so are siblings side by side, so that count, mean
// reach and mean heat of whatever is too small to draw cost one subtraction, at any size.
//
//   x0 ──── edge ──── x1          reach: where the longest prefix below ends
//   [ system prompt    ][ a chat ][ a turn ]   lane0
//   [                  ][ another chat     ]   lane1

const ROOT_GAP = 0.6; // lanes between namespaces

class Layout {
  constructor(model) {
    const size = model.size;
    this.shape = model.shape;
    this.version = -1;
    this.size = size;
    this.nodes = new Array(size);
    this.x0 = new Float64Array(size);
    this.x1 = new Float64Array(size);
    this.lane0 = new Float64Array(size);
    this.lane1 = new Float64Array(size);
    this.reach = new Float64Array(size);
    this.end = new Int32Array(size);      // one beyond the subtree
    this.parent = new Int32Array(size);
    this.children = new Array(size);      // indexes, by lane; undefined for leaves
    this.sumReach = new Float64Array(size + 1);
    this.sumLeaves = new Float64Array(size + 1);
    this.sumHits = new Float64Array(size + 1);
    this.sumUsed = new Float64Array(size + 1);
    this.sumPinned = new Float64Array(size + 1);
    this.sumTokens = new Float64Array(size + 1);
    this.warm = new Float64Array(size);   // last use of the node or of anything below it
    this.roots = [];
    this.#order(model);
    this.#place();
    this.refresh(model);
  }

  #order(model) {
    const waiting = [];
    const push = (nodes, above) => {
      for (let at = nodes.length - 1; at >= 0; at--) waiting.push([nodes[at], above]);
    };
    push(model.childrenOf(model.root), -1);
    let index = 0;
    while (waiting.length) {
      const [node, above] = waiting.pop();
      node.index = index;
      this.nodes[index] = node;
      this.parent[index] = above;
      this.x0[index] = above < 0 ? 0 : this.x1[above];
      this.x1[index] = this.x0[index] + node.row.tokens;
      if (above < 0) this.roots.push(index);
      else (this.children[above] ??= []).push(index);
      const below = model.childrenOf(node);
      if (below.length) push(below, index);
      index++;
    }
    this.size = index;
  }

  #place() {
    const { x1, lane0, lane1, reach, end, parent, children, size } = this;
    const lanes = new Float64Array(size);
    for (let at = size - 1; at >= 0; at--) {
      if (children[at] === undefined) { lanes[at] = 1; reach[at] = x1[at]; end[at] = at + 1; }
      const above = parent[at];
      if (above < 0) continue;
      lanes[above] += lanes[at];
      if (reach[at] > reach[above]) reach[above] = reach[at];
      if (end[at] > end[above]) end[above] = end[at];
    }
    let top = 0;
    for (const at of this.roots) {
      lane0[at] = top;
      top += lanes[at] + ROOT_GAP;
    }
    this.lanes = Math.max(1, top - ROOT_GAP);
    this.reachAll = this.roots.reduce((most, at) => Math.max(most, reach[at]), 1);
    for (let at = 0; at < size; at++) {
      lane1[at] = lane0[at] + lanes[at];
      let lane = lane0[at];
      for (const child of children[at] ?? []) { lane0[child] = lane; lane += lanes[child]; }
    }
  }

  // Sums of what changes without the shape; O(nodes), once a change at most.
  refresh(model) {
    if (this.version === model.version) return false;
    this.version = model.version;
    for (let at = 0; at < this.size; at++) {
      const { row } = this.nodes[at], isLeaf = this.children[at] === undefined;
      this.sumReach[at + 1] = this.sumReach[at] + (isLeaf ? this.reach[at] : 0);
      this.sumLeaves[at + 1] = this.sumLeaves[at] + (isLeaf ? 1 : 0);
      this.sumHits[at + 1] = this.sumHits[at] + row.hits;
      this.sumPinned[at + 1] = this.sumPinned[at] + (row.state === "p" ? 1 : 0);
      this.sumTokens[at + 1] = this.sumTokens[at] + row.tokens;
      this.warm[at] = row.used;
    }
    for (let at = this.size - 1; at >= 0; at--) {
      const above = this.parent[at];
      if (above >= 0 && this.warm[at] > this.warm[above]) this.warm[above] = this.warm[at];
    }
    for (let at = 0; at < this.size; at++) this.sumUsed[at + 1] = this.sumUsed[at] + this.warm[at];
    return true;
  }

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
      tokens: this.sumTokens[to] - this.sumTokens[from],
    };
  }

  // The first of some siblings that ends below a lane.
  firstBelow(siblings, lane, from = 0) {
    let low = from, high = siblings.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.lane1[siblings[middle]] > lane) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}
