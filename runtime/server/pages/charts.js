// Small charts of the last minutes, each with its number, its words and its table.
// Owns: buckets, scales, paths.  Does not know: the feed, what the numbers mean.
// Idea: SVG paths in a box of 100 by 100 that the page stretches; colours are the page's own.

const WINDOWS_S = [60, 120, 300], LEAST_BUCKET_S = 1.5;

// One row for each bucket of time that ends at `until`: [samples in it, the last one before it].
function buckets(samples, until, width, length) {
  const found = [], first = until - length, most = Math.round(length / width) - 1;
  let before = null;
  for (const sample of samples) {
    if (sample.time > until) break;
    const at = Math.min(most, Math.floor((sample.time - first) / width));
    if (at < 0) { before = sample; continue; }
    let last = found[found.length - 1];
    if (!last || last.at !== at) found.push((last = { at, time: first + (at + 1) * width, before, last: sample }));
    last.last = sample;
    before = sample;
  }
  return found;
}

// Growth of a counter a second; null where it is not known, as after a restart.
function rate(bucket, name) {
  const { before, last } = bucket;
  if (!before || last.time <= before.time || last[name] < before[name] || last.time - before.time > 30) return null;
  return (last[name] - before[name]) / (last.time - before.time);
}

function part(bucket, name, of) {
  const value = rate(bucket, name), whole = rate(bucket, of);
  return value === null || !whole ? null : value / whole;
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

class Chart {
  // series: [{name, colour, of(bucket), kind: "area" | "line", say}]; areas are stacked.
  constructor({ id, title, series, say, unit = "", number, top = null, words }) {
    Object.assign(this, { id, title, series, say, unit, number, top, words });
    this.element = element("figure", "chart");
    this.element.id = `chart-${id}`;
    const caption = element("figcaption"), heading = element("h3", "", title);
    heading.id = `chart-${id}-title`;
    this.most = element("span", "quiet");
    caption.append(heading, this.most);
    this.now = element("p", "now");
    this.picture = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-labelledby": `chart-${id}-title chart-${id}-words` });
    const swatches = element("ul", "swatches");
    for (const one of series) {
      const item = element("li"), box = element("i", `c-${one.colour}`);
      box.setAttribute("aria-hidden", "true");
      item.append(box, one.name);
      swatches.append(item);
    }
    this.said = element("p", "words unseen");
    this.said.id = `chart-${id}-words`;
    const axis = element("div", "axis");
    this.start = element("span");
    axis.append(this.start, element("span", "", "now"));
    this.more = element("details");
    this.table = element("table");
    this.more.append(element("summary", "", "As a table"), this.table);
    this.more.addEventListener("toggle", () => { if (this.more.open) this.#fillTable(); });
    this.element.append(caption, this.now, this.picture, axis, swatches, this.said, this.more);
  }

  show(samples, until, end) {
    this.samples = samples;
    this.end = end;
    // As long as what is known, so that a page that just opened doesn't show an empty box.
    const known = samples.length ? end - samples[0].time : 0;
    const length = WINDOWS_S.find((one) => known <= one * 1.02) ?? WINDOWS_S[WINDOWS_S.length - 1];
    const width = Math.max(LEAST_BUCKET_S, length / 100), slots = length / width;
    const found = buckets(samples, end, width, length);
    this.length = length;
    this.start.textContent = `${length / 60} min ago`;
    const values = this.series.map((one) => found.map((bucket) => one.of(bucket)));
    const stacked = found.map((_, at) => this.series.reduce((sum, one, s) => sum + (one.kind === "area" ? values[s][at] ?? 0 : 0), 0));
    const lines = this.series.flatMap((one, s) => (one.kind === "line" ? values[s].filter((value) => value !== null) : []));
    const most = this.top?.(found) ?? nice(Math.max(0, ...stacked, ...lines));
    const scale = { edge: 50 / slots, x: (bucket) => ((bucket.at + 0.5) / slots) * 100, y: (value) => 100 - (most ? (value / most) * 100 : 0) };
    this.most.textContent = most && found.length ? `top ${this.say(most)}` : "";
    const drawn = [25, 50, 75, 100].map((y) => svg("path", { class: "grid", d: `M0 ${y}H100` }));
    const base = found.map(() => 0);
    this.series.forEach((one, s) => {
      if (one.kind === "area") drawn.push(svg("path", { class: `area c-${one.colour}`, d: areaPath(found, values[s], base, scale) }));
    });
    this.series.forEach((one, s) => {
      if (one.kind === "line") drawn.push(svg("path", { class: `line c-${one.colour}`, d: linePath(found, values[s], scale) }));
    });
    if (until < end - 0.5) {
      const x = 100 - ((end - until) / length) * 100;
      if (x >= 0) drawn.push(svg("path", { class: "cursor", d: `M${x} 0V100` }));
    }
    this.picture.replaceChildren(...drawn);
    this.#tell(samples, until);
    if (this.more.open) this.#fillTable();
  }

  #tell(samples, until) {
    const found = buckets(samples, until, 10, 60), last = found[found.length - 1] ?? null;
    const text = last === null ? "–" : this.number(last);
    this.now.replaceChildren(text);
    if (this.unit) this.now.append(element("small", "", typeof this.unit === "function" ? this.unit(last) : this.unit));
    const said = last === null ? "Nothing yet." : this.series.map((one) => `${one.name} ${(one.say ?? this.say)(one.of(last))}`).join(", ");
    this.said.textContent = `Now: ${said}.`;
  }

  #fillTable() {
    const head = element("tr"), rows = [];
    for (const name of ["Ago", ...this.series.map((one) => one.name)]) {
      const cell = element("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    for (const bucket of buckets(this.samples, this.end, this.length / 10, this.length).reverse()) {
      const row = element("tr");
      row.append(element("td", "", seconds(Math.max(0, Math.round(this.end - bucket.time)))));
      for (const one of this.series) row.append(element("td", "", (one.say ?? this.say)(one.of(bucket))));
      rows.push(row);
    }
    this.table.replaceChildren(element("caption", "unseen", `${this.title}, over ${this.length / 60} min`), head, ...rows);
  }
}

function areaPath(found, values, base, { x, y, edge }) {
  let path = "";
  for (let from = 0; from < found.length; ) {
    if (values[from] === null) { from++; continue; }
    let to = from;
    while (to < found.length && values[to] !== null && (to === from || found[to].at - found[to - 1].at <= 3)) to++;
    const above = [], under = [];
    for (let at = from; at < to; at++) {
      const left = x(found[at]) - edge, right = x(found[at]) + edge;
      const low = y(base[at]).toFixed(2), high = y(base[at] + values[at]).toFixed(2);
      const next = at + 1 < to ? x(found[at + 1]) - edge : right;
      above.push(`${left.toFixed(2)} ${high}L${next.toFixed(2)} ${high}`);
      under.unshift(`${next.toFixed(2)} ${low}L${left.toFixed(2)} ${low}`);
      base[at] += values[at];
    }
    path += `M${above.join("L")}L${under.join("L")}Z`;
    from = to;
  }
  return path;
}

// A line bridges short silences, as when no request began for some seconds.
function linePath(found, values, { x, y }) {
  let path = "", last = -Infinity;
  found.forEach((bucket, at) => {
    if (values[at] === null || values[at] === undefined) return;
    const place = `${x(bucket).toFixed(2)} ${y(values[at]).toFixed(2)}`;
    path += bucket.at - last <= 8 ? `L${place}` : `M${place}h.01`;
    last = bucket.at;
  });
  return path;
}

// The next round number.
function nice(value) {
  if (!(value > 0)) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}
