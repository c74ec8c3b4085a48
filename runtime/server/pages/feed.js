// Server-sent events with a key in a header, which EventSource can't send.
// Owns: the connection, its key, when to try again.  Does not know: what events mean.
// Idea: a stream that is silent counts as lost, as samples come each second; each failure waits
// twice as long as the one before, with chance, so that a restart isn't met by all pages at once.

const FIRST_WAIT_MS = 500, LAST_WAIT_MS = 15_000, SILENCE_MS = 12_000;
const KEY_NAME = "radixcache.key";

class Refused extends Error {}

class Feed {
  // told(state, words): connecting, live, lost, refused.  event(kind, message): may raise LostTrack.
  constructor({ base, told, event }) {
    this.base = base;
    this.told = told;
    this.event = event;
    this.failures = 0;
    this.control = null;
    this.key = "";
    try { this.key = sessionStorage.getItem(KEY_NAME) ?? ""; } catch { /* no storage: memory alone */ }
  }

  setKey(key) {
    this.key = key;
    try {
      if (key) sessionStorage.setItem(KEY_NAME, key);
      else sessionStorage.removeItem(KEY_NAME);
    } catch { /* no storage: memory alone */ }
    this.failures = 0;
    this.again();
  }

  headers(accept) {
    const headers = { Accept: accept };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    return headers;
  }

  // The JSON of a path below the page's; raises Refused, or Error with the server's words.
  async get(path) {
    const answer = await fetch(this.base + path, { headers: this.headers("application/json"), cache: "no-store" });
    if (!answer.ok) throw await this.#failure(answer);
    return answer.json();
  }

  async #failure(answer) {
    let words = "";
    try { words = (await answer.json()).error?.message ?? ""; } catch { /* not JSON: the status says it */ }
    const error = answer.status === 401 || answer.status === 403 ? new Refused(words) : new Error(words || `the server answered ${answer.status}`);
    error.status = answer.status;
    return error;
  }

  // Leave the connection that is, if any, and begin another now.
  again() {
    clearTimeout(this.timer);
    this.control?.abort();
    this.run();
  }

  async run() {
    const control = (this.control = new AbortController());
    this.told("connecting", this.failures ? "connecting again" : "connecting");
    let words = "the connection ended";
    try {
      await this.#read(control);
    } catch (error) {
      if (control !== this.control) return;
      if (error instanceof Refused) return this.told("refused", error.message || "this server asks for a key");
      words = error instanceof TypeError ? "no connection" : error.message || "no connection";
    }
    if (control !== this.control) return;
    control.abort();
    const wait = Math.min(LAST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.failures++) * (0.75 + Math.random() / 2);
    this.told("lost", `${words}; next try in ${seconds(wait / 1000)}`);
    this.timer = setTimeout(() => this.run(), wait);
  }

  async #read(control) {
    const answer = await fetch(`${this.base}/feed`, {
      headers: this.headers("text/event-stream"), cache: "no-store", signal: control.signal,
    });
    if (!answer.ok) throw await this.#failure(answer);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let kept = [], kind = "", lines = []; // a snapshot is one line of megabytes, in many pieces
    for (;;) {
      const { done, value } = await within(reader.read(), SILENCE_MS, control);
      if (done) return;
      kept.push(value);
      if (!value.includes("\n")) continue;
      const parts = kept.join("").split("\n");
      kept = [parts.pop()];
      for (const part of parts) {
        const line = part.endsWith("\r") ? part.slice(0, -1) : part;
        if (line.startsWith("event:")) kind = line.slice(6).trim();
        else if (line.startsWith("data:")) lines.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && lines.length) {
          if (control !== this.control) return;
          this.event(kind || "message", JSON.parse(lines.join("\n")));
          if (kind === "snapshot") { this.failures = 0; this.told("live", "live"); }
          kind = "";
          lines = [];
        } else if (line === "") kind = "";
      }
    }
  }
}

function within(promise, limit, control) {
  let timer;
  const silent = new Promise((_, reject) => {
    timer = setTimeout(() => { reject(new Error("the server went silent")); control.abort(); }, limit);
  });
  return Promise.race([promise, silent]).finally(() => clearTimeout(timer));
}
