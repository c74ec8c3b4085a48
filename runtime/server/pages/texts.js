// What the wide bars say: the beginning of each one's text, asked for as it comes into view.
// Owns: texts by node, and how often one is asked for.  Does not know: who may read what.
// Idea: the server decides what may be read; the first refusal ends the asking.  One at a time and
// two a second at most, so that a page that is left open costs the engine next to nothing.

const ASK_EVERY_MS = 500, MAX_TEXTS = 4000, TEXT_LEN = 400;

class Texts {
  constructor({ feed, ready }) {
    Object.assign(this, { feed, ready });
    this.known = new Map(); // id -> {tokens, text}
    this.wanted = null;
    this.isOn = true;
    this.forget(false);
    setInterval(() => this.#ask(), ASK_EVERY_MS);
  }

  // A snapshot tells whether its reader may see any text.
  forget(mayRead) {
    this.mayRead = mayRead;
    this.known.clear();
    this.wanted = null;
  }

  // The text of a row, or null; what is not known yet is asked for.  A leaf that grew begins as before.
  of(row) {
    if (!this.isOn || !this.mayRead) return null;
    const found = this.known.get(row.id);
    if (found !== undefined && row.tokens >= found.tokens) return found.text;
    this.wanted ??= row;
    return found?.text ?? null;
  }

  async #ask() {
    const row = this.wanted;
    if (row === null || document.hidden) return;
    this.wanted = null;
    let text = null;
    try {
      const node = await this.feed.get(`/nodes/${encodeURIComponent(row.id)}`);
      if (node.text_hidden && !node.text) this.mayRead = false;
      text = node.text?.slice(0, TEXT_LEN).replace(/\s+/g, " ").trim() ?? null;
    } catch { /* gone, or no connection: nothing to say of it */ }
    if (this.known.size >= MAX_TEXTS) this.known.clear();
    this.known.set(row.id, { tokens: row.tokens, text });
    this.ready();
  }
}
