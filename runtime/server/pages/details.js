// One node in full, as the server tells it.
// Owns: the panel, and when it asks again.  Does not know: the canvas.
// Idea: every text of the server becomes textContent, never markup.

class Details {
  // place(id): {found, warm} as the picture has them, or null.
  constructor({ feed, model, choose, timeline, place }) {
    Object.assign(this, { feed, model, choose, timeline, place });
    this.body = document.getElementById("details-body");
    this.none = document.getElementById("details-none");
    this.title = document.getElementById("details-title");
    this.id = null;
    this.row = null;
    this.asked = 0;
  }

  show(id) {
    this.id = id;
    this.row = null;
    this.none.hidden = id !== null;
    this.body.hidden = id === null;
    this.title.textContent = id === null ? "Node" : `Node ${id}`;
    this.body.replaceChildren();
    if (id !== null) this.ask();
  }

  // Ask again where the node changed; rarely otherwise, as its place in the order moves with others.
  refresh() {
    if (this.id === null || !this.timeline.isLive) return;
    const row = this.model.get(this.id)?.row ?? null;
    if (row !== this.row || Date.now() - this.asked > 4000) this.ask();
  }

  async ask() {
    const id = this.id, number = (this.number = (this.number ?? 0) + 1);
    this.asked = Date.now();
    this.row = this.model.get(id)?.row ?? null;
    try {
      const node = await this.feed.get(`/nodes/${encodeURIComponent(id)}`);
      if (id === this.id && number === this.number) this.#fill(node);
    } catch (error) {
      if (id === this.id && number === this.number) this.#failed(error);
    }
  }

  #failed(error) {
    const words = error.status === 404 ? "This node is not in the tree any more: it was evicted, merged or cut." : `Could not be read: ${error.message}`;
    if (this.body.querySelector(".gone")) return;
    this.body.prepend(element("p", "gone", words));
  }

  #fill(node) {
    const parts = [this.#path(), this.#facts(node), this.#text(node)];
    if (!this.timeline.isLive) parts.unshift(element("p", "quiet", "As it is now; the picture shows an earlier moment."));
    const scrolled = this.body.querySelector("pre")?.scrollTop ?? 0;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.id : undefined;
    this.body.replaceChildren(...parts.filter((part) => part));
    const pre = this.body.querySelector("pre");
    if (pre) pre.scrollTop = scrolled;
    if (focused !== undefined) this.body.querySelector(`[data-id="${Number(focused)}"]`)?.focus();
  }

  #path() {
    const node = this.model.get(this.id);
    if (node === undefined) return null;
    const nav = element("nav", "path"), path = this.model.pathOf(node);
    nav.setAttribute("aria-label", "From the root to this node");
    const shown = path.length > 8 ? [...path.slice(0, 2), null, ...path.slice(-5)] : path;
    shown.forEach((step, at) => {
      if (at) nav.append(element("span", "quiet", "›"));
      if (step === null) return nav.append(element("span", "quiet", `… ${path.length - 7} more`));
      const button = element("button", "", step.row.parent === 0 ? this.model.labelOf(step.row) : `${short(step.row.tokens)} tok`);
      button.type = "button";
      button.dataset.id = step.row.id;
      if (step === node) button.setAttribute("aria-current", "true");
      else button.addEventListener("click", () => this.choose(step.row.id, true));
      nav.append(button);
    });
    return nav;
  }

  #facts(node) {
    const list = element("dl", "facts"), row = this.model.get(this.id)?.row;
    const add = (name, value, more = "") => {
      if (value === null || value === undefined) return;
      const term = element("dt", "", name), detail = element("dd", more);
      detail.append(value instanceof Node ? value : document.createTextNode(String(value)));
      list.append(term, detail);
    };
    if (row) add("State", element("span", `badge ${row.state}`, STATES[row.state] ?? row.state));
    add("Edge", plural(node.tokens, "token"));
    add("Prefix up to its end", plural(node.path_tokens, "token"));
    add("Hits", this.#hits(node));
    add("Last use", node.used ? ago(this.timeline.now() - this.#warm(node)) : "never");
    if (node.created) add("Published", ago(this.timeline.now() - node.created));
    add("Pinned by", this.#pins(node));
    add("Evicted", this.#eviction(node));
    add("Children", count(node.children));
    add("Tier", node.tier);
    add("Tenant", node.tenant);
    add("Namespace", typeof node.namespace === "string" ? node.namespace : row ? this.model.labelOf(row) : null);
    const blocks = node.num_blocks ?? node.blocks.length;
    add("Blocks", node.blocks?.length ? `${plural(blocks, "block")}: ${runs(node.blocks)}` : plural(blocks, "block"));
    return list;
  }

  // Requests that ended here, and with them those that went on below.
  #hits(node) {
    const place = this.place(this.id), found = place === null ? node.hits : place.found;
    return found > node.hits ? `${count(found)}, of which ${count(node.hits)} ended here` : count(node.hits);
  }

  #warm(node) { return Math.max(node.used, this.place(this.id)?.warm ?? 0); }

  #pins(node) {
    const by = node.pinned_by ?? [];
    if (!node.pins && !by.length) return "nobody";
    const named = by.slice(0, 12).map(({ kind, id }) => (id === null || id === undefined || id === "" ? kind : `${kind} ${id}`));
    const others = Math.max(node.pins ?? 0, by.length) - named.length;
    if (others > 0) named.push(named.length ? `${count(others)} more` : plural(others, "user"));
    return named.join(", ");
  }

  #eviction(node) {
    const rank = node.eviction_rank;
    if (rank === null || rank === undefined) return node.pins ? "not while it is pinned" : node.children ? "after its children" : node.state === "e" ? "far from next" : "not now";
    return rank === 0 ? "goes next" : `after ${plural(rank, "other")}`;
  }

  #text(node) {
    const part = element("div");
    if (node.text === null || node.text === undefined) {
      if (!node.text_hidden && !node.tokens) return null;
      part.append(element("p", "hidden-text", node.text_hidden || "Its text is not shown."));
      return part;
    }
    const label = element("p", "label", "Text of the edge"), pre = element("pre", "", node.text);
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", "Text of the edge");
    part.append(label, pre);
    if (node.token_ids?.length) {
      const more = element("details", "tokens");
      more.append(element("summary", "label", "Token ids"), element("pre", "", node.token_ids.join(" ")));
      part.append(more);
    }
    return part;
  }
}
