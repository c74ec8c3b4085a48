// The tree as the feed tells it, and how to take a change back.
// Owns: nodes, parents, the order of siblings.  Does not know: time, pixels, the feed's wire.
// Idea: a change is a set of whole rows and a set of ids; what it replaces is the same, so one
// method goes forward and back.

const COLUMNS = ["id", "parent", "tokens", "blocks", "hits", "used", "pins", "state", "tier", "namespace"];

// Rows of a message's columns; fields as the feed names them.  `order` is this page's own, 0 as long
// as a row is not in the tree.  Written out, so that all rows have one shape in memory.
function rowsOf(nodes) {
  const { id, parent, tokens, blocks = [], hits, used, pins = [], state, tier = [], namespace } = nodes;
  const size = id.length, rows = new Array(size);
  for (let at = 0; at < size; at++) {
    rows[at] = {
      id: id[at], parent: parent[at], tokens: tokens[at], blocks: blocks[at], hits: hits[at], used: used[at],
      pins: pins[at], state: state[at], tier: tier[at], namespace: namespace[at], order: 0,
    };
  }
  return rows;
}

class LostTrack extends Error {}

class TreeModel {
  constructor() {
    this.nodes = new Map();   // id -> node
    this.slots = 0;           // numbers of nodes that are or were in use, and
    this.freeSlots = [];      // those that no node has any more
    this.root = this.#node({ id: 0, parent: null, tokens: 0, order: 0 }, 0); // above the roots of namespaces
    this.namespaces = [];
    this.shape = 0;           // goes up when an edge or a parent changes
    this.version = 0;         // goes up with every change
    this.arrivals = 0;
    this.tokens = 0;          // sum over the nodes
    this.hasOtherTier = false;
    this.touched = new Set();    // nodes that are new, or whose rows changed, and
    this.regrouped = new Set();  // those whose children did, since the layout looked
  }

  get size() { return this.nodes.size; }

  get(id) { return this.nodes.get(id); }

  #node(row, order) {
    const slot = this.freeSlots.pop() ?? this.slots++;
    return { row, order, slot, children: null, sorted: null, born: 0 };
  }

  // Put rows in place and take ids away; returns {rows, removed} that undoes it.
  // Raises LostTrack where a parent is not known: a new snapshot is needed then.
  apply(rows, removed, born = 0) {
    const before = [], made = [], moved = [];
    for (const row of rows) {
      if (row.tier && row.tier !== "gpu") this.hasOtherTier = true;
      const node = this.nodes.get(row.id);
      if (node === undefined) {
        const fresh = this.#node(row, row.order || ++this.arrivals);
        row.order = fresh.order;
        fresh.born = born;
        this.nodes.set(row.id, fresh);
        this.touched.add(fresh);
        this.regrouped.add(fresh);
        this.tokens += row.tokens;
        made.push(row.id);
        moved.push([fresh, null]);
      } else {
        before.push(node.row);
        row.order = node.order;
        this.tokens += row.tokens - node.row.tokens;
        if (row.parent !== node.row.parent) moved.push([node, node.row.parent]);
        else if (row.tokens !== node.row.tokens) this.shape++;
        node.row = row;
        this.touched.add(node);
      }
    }
    this.#attach(moved);
    for (const id of removed) {
      const node = this.nodes.get(id);
      if (node === undefined) continue;
      before.push(node.row);
      this.nodes.delete(id);
      this.touched.delete(node);
      this.regrouped.delete(node);
      this.freeSlots.push(node.slot);
      this.tokens -= node.row.tokens;
      this.#detach(node, node.row.parent);
      this.shape++;
    }
    if (moved.length) this.shape++;
    this.version++;
    return { rows: before, removed: made };
  }

  // The whole tree anew, as a change from what is here.
  differences(rows) {
    const named = new Set();
    const changed = rows.filter((row) => {
      named.add(row.id);
      const old = this.nodes.get(row.id);
      return old === undefined || COLUMNS.some((name) => old.row[name] !== row[name]);
    });
    return { rows: changed, removed: [...this.nodes.keys()].filter((id) => !named.has(id)) };
  }

  #attach(moved) {
    for (const [node, from] of moved) {
      const parent = node.row.parent === 0 ? this.root : this.nodes.get(node.row.parent);
      if (parent === undefined) throw new LostTrack(`node ${node.row.id} has an unknown parent`);
      if (from !== null) {
        this.#detach(node, from);
        // A node that came between two takes the place of the one it was put above.
        if (node.row.parent !== 0 && node.order < parent.order) {
          parent.order = parent.row.order = node.order;
          const above = this.#parent(parent);
          if (above) this.#regroup(above);
        }
      }
      (parent.children ??= new Set()).add(node);
      this.#regroup(parent);
    }
  }

  #detach(node, parentId) {
    const parent = parentId === 0 ? this.root : this.nodes.get(parentId);
    if (parent === undefined || parent.children === null) return;
    parent.children.delete(node);
    if (!parent.children.size) parent.children = null;
    this.#regroup(parent);
  }

  #regroup(node) {
    node.sorted = null;
    this.regrouped.add(node);
  }

  #parent(node) {
    return node === this.root ? null : node.row.parent === 0 ? this.root : this.nodes.get(node.row.parent) ?? null;
  }

  // Null above the roots of namespaces.
  parentOf(node) {
    const parent = this.#parent(node);
    return parent === this.root ? null : parent;
  }

  childrenOf(node) {
    if (node.children === null) return [];
    return (node.sorted ??= [...node.children].sort((a, b) => a.order - b.order));
  }

  siblingsOf(node) { return this.childrenOf(this.#parent(node)); }

  // From a namespace's root down to the node.
  pathOf(node) {
    const path = [];
    for (let at = node; at !== null; at = this.parentOf(at)) path.push(at);
    return path.reverse();
  }

  labelOf(row) {
    const namespace = this.namespaces[row.namespace];
    if (!namespace) return `namespace ${row.namespace}`;
    const parts = [namespace.tenant, namespace.label].filter((part) => part);
    return parts.join(" · ") || "default namespace";
  }
}
