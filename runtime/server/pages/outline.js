// The tree for those who don't see the canvas: tree items around the chosen node.
// Owns: the items, and which one is active.  Does not know: pixels, keys.
// Idea: position and size of each set are told to assistive technology, so that the path, some
// siblings and some children stand for a tree of any size.

const AROUND = 4;

class Outline {
  constructor(model) {
    this.model = model;
    this.stage = document.getElementById("stage");
    this.element = document.getElementById("outline");
    this.told = "";
  }

  // Costs the path and one window of siblings, at most once a call; nothing where nothing changed.
  show(id) {
    const { model } = this, chosen = id === null ? undefined : model.get(id);
    const items = [];
    if (chosen === undefined) this.#window(items, model.childrenOf(model.root), 0, 1);
    else {
      const path = model.pathOf(chosen);
      path.slice(0, -1).forEach((node, at) => items.push(this.#facts(node, model.siblingsOf(node), at + 1)));
      const siblings = model.siblingsOf(chosen);
      this.#window(items, siblings, siblings.indexOf(chosen), path.length);
      const at = items.findIndex((item) => item.id === id), below = [];
      this.#window(below, model.childrenOf(chosen), 0, path.length + 1);
      items.splice(at + 1, 0, ...below);
    }
    const words = JSON.stringify([items, id]);
    if (words === this.told) return;
    this.told = words;
    this.element.replaceChildren(...items.map((item) => this.#item(item, item.id === id)));
    if (chosen === undefined) this.stage.removeAttribute("aria-activedescendant");
    else this.stage.setAttribute("aria-activedescendant", `item-${id}`);
  }

  #window(items, siblings, at, level) {
    for (const node of siblings.slice(Math.max(0, at - AROUND), at + AROUND + 1)) items.push(this.#facts(node, siblings, level));
  }

  #facts(node, siblings, level) {
    const { row } = node, children = node.children?.size ?? 0;
    const what = row.parent === 0 ? `Namespace ${this.model.labelOf(row)}` : `${plural(row.tokens, "token")}, ${plural(row.hits, "hit")}, ${STATES[row.state] ?? row.state}`;
    return {
      id: row.id, level, at: siblings.indexOf(node) + 1, of: siblings.length, children,
      words: children ? `${what}, ${plural(children, "child", "children")}` : what,
    };
  }

  #item(facts, isChosen) {
    const item = element("div", "", facts.words);
    item.id = `item-${facts.id}`;
    const attributes = { role: "treeitem", "aria-level": facts.level, "aria-posinset": facts.at, "aria-setsize": facts.of, "aria-selected": isChosen };
    if (facts.children) attributes["aria-expanded"] = isChosen;
    for (const [name, value] of Object.entries(attributes)) item.setAttribute(name, String(value));
    return item;
  }
}
