// How numbers and times are said.  Owns: wording.  Does not know: trees, feeds, elements.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function count(value) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : whole.format(value);
}

function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) < size) continue;
    const scaled = value / (letter === "k" ? 1e3 : size);
    return `${scaled.toFixed(scaled < 100 ? 1 : 0)}${letter}`;
  }
  return Math.abs(value) < 10 && value % 1 ? value.toFixed(1) : count(value);
}

function share(value) {
  return value === null || !Number.isFinite(value) ? "–" : `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

function ago(value) {
  return value < 1 ? "just now" : `${seconds(Math.round(value))} ago`;
}

function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

// Block ids in order as runs: 4–9, 12.
function runs(ids, limit = 40) {
  const found = [];
  for (const id of ids) {
    const last = found[found.length - 1];
    if (last && last[1] + 1 === id) last[1] = id;
    else found.push([id, id]);
  }
  const told = found.slice(0, limit).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  return told.join(", ") + (found.length > limit ? `, and ${plural(found.length - limit, "run")} more` : "");
}

const STATES = { p: "pinned", e: "evictable leaf", i: "inner, unpinned", r: "retained" };

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
