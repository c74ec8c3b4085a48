// What is shown of the whole cache: charts, the curve of size, and who runs.
// Owns: which numbers, and their words.  Does not know: how a chart is drawn.

function allCharts() {
  const of = (name) => (bucket) => bucket.last[name] ?? null;
  const each = (name) => (bucket) => rate(bucket, name);
  return [
    new Chart({
      id: "hits", title: "Prompt tokens", say: (value) => `${short(value)}/s`,
      number: (bucket) => share(part(bucket, "hit", "asked")), unit: "of tokens hit",
      series: [
        { name: "hit", colour: "hit", kind: "area", of: each("hit") },
        { name: "computed", colour: "computed", kind: "area", of: each("computed") },
      ],
    }),
    new Chart({
      id: "rate", title: "Hit rate", say: share, top: () => 1,
      number: ({ last }) => share(last.asked ? last.hit / last.asked : null), unit: "since the start",
      series: [{ name: "hit of asked", colour: "hit", kind: "line", of: (bucket) => part(bucket, "hit", "asked") }],
    }),
    new Chart({
      id: "pool", title: "Pool", say: (value) => plural(Math.round(value ?? 0), "block"), top: (found) => found.length ? found[found.length - 1].last.total : null,
      number: ({ last }) => share(last.total ? 1 - last.free / last.total : null), unit: (bucket) => bucket ? `of ${plural(bucket.last.total, "block")} in use` : "",
      series: [
        { name: "pinned", colour: "pinned", kind: "area", of: of("pinned") },
        { name: "evictable", colour: "cached", kind: "area", of: of("cached") },
        { name: "private", colour: "computed", kind: "area", of: ({ last }) => Math.max(0, last.total - last.free - last.cached - last.pinned) },
        { name: "free", colour: "free", kind: "area", of: of("free") },
      ],
    }),
    new Chart({
      id: "evicted", title: "Evictions", say: (value) => `${short(value)} blocks/s`,
      number: (bucket) => short(rate(bucket, "evicted")), unit: "blocks/s",
      series: [{ name: "evicted", colour: "evicted", kind: "area", of: each("evicted") }],
    }),
    new Chart({
      id: "queue", title: "Queue", say: (value) => count(value),
      number: ({ last }) => count(last.waiting), unit: (bucket) => bucket ? `waiting, ${count(bucket.last.running_total)} running` : "",
      series: [
        { name: "running", colour: "running", kind: "line", of: of("running_total") },
        { name: "waiting", colour: "waiting", kind: "line", of: of("waiting") },
      ],
    }),
    new Chart({
      id: "generated", title: "Generated tokens", say: (value) => `${short(value)}/s`,
      number: (bucket) => short(rate(bucket, "generated")), unit: "tokens/s",
      series: [{ name: "generated", colour: "generated", kind: "area", of: each("generated") }],
    }),
    new Chart({
      id: "ttft", title: "Time to first token", say: seconds,
      number: ({ last }) => seconds(last.ttft_warm ?? last.ttft_cold), unit: (bucket) => bucket && bucket.last.ttft_warm !== null && bucket.last.ttft_warm !== undefined ? `warm, ${seconds(bucket.last.ttft_cold)} cold` : "cold",
      series: [
        { name: "warm (with a hit)", colour: "warm", kind: "line", of: of("ttft_warm") },
        { name: "cold", colour: "cold", kind: "line", of: of("ttft_cold") },
      ],
    }),
  ];
}

// What a smaller or larger cache would hit: `/cache/curve`, which may be off.
class CurvePanel {
  constructor() {
    this.element = element("figure", "chart");
    this.element.id = "chart-curve";
    this.element.hidden = true;
    const caption = element("figcaption"), title = element("h3", "", "Hit rate by size of the cache");
    title.id = "chart-curve-title";
    caption.append(title, element("span", "quiet", "top 100 %"));
    this.picture = svg("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-labelledby": "chart-curve-title chart-curve-words" });
    this.axis = element("div", "axis");
    this.words = element("p", "words");
    this.words.id = "chart-curve-words";
    this.more = element("details");
    this.table = element("table");
    this.more.append(element("summary", "", "As a table"), this.table);
    this.element.append(caption, this.picture, this.axis, this.words, this.more);
  }

  show({ curves }) {
    const curve = curves[0];
    this.element.hidden = curve === undefined || !curve.references;
    if (this.element.hidden) return;
    const { points } = curve, least = Math.log2(points[0].size), most = Math.log2(points[points.length - 1].size);
    const x = (size) => ((Math.log2(size) - least) / (most - least || 1)) * 100, y = (value) => 100 - value * 100;
    const line = points.map((point, at) => `${at ? "L" : "M"}${x(point.size).toFixed(2)} ${y(point.hit_rate).toFixed(2)}`).join("");
    this.picture.replaceChildren(
      ...[25, 50, 75, 100].map((at) => svg("path", { class: "grid", d: `M0 ${at}H100` })),
      svg("path", { class: "mark-now", d: `M${x(1)} 0V100` }),
      svg("path", { class: "line c-curve", d: line }),
    );
    this.axis.replaceChildren(...points.filter((_, at) => at === 0 || at === points.length - 1).map((point) => element("span", "", `${point.size}×`)));
    this.words.textContent = curve.text;
    const rows = points.map((point) => {
      const row = element("tr");
      for (const text of [`${point.size}×`, count(point.num_blocks), share(point.hit_rate)]) row.append(element("td", "", text));
      return row;
    });
    const head = element("tr");
    for (const name of ["Size", "Blocks", "Hit rate"]) head.append(element("th", "", name));
    this.table.replaceChildren(element("caption", "unseen", "Estimated hit rate by size"), head, ...rows);
  }
}

class RunningTable {
  constructor() {
    this.body = document.querySelector("#running tbody");
    this.count = document.getElementById("running-count");
  }

  show(sample) {
    const running = sample?.running ?? [], total = sample?.running_total ?? running.length;
    this.count.textContent = total > running.length ? `the first ${count(running.length)} of ${count(total)}` : total ? `${count(total)}` : "";
    if (!running.length) {
      const row = element("tr"), cell = element("td", "quiet", "Nothing runs.");
      cell.colSpan = 7;
      row.append(cell);
      this.body.replaceChildren(row);
      return;
    }
    this.body.replaceChildren(...running.map((one) => this.#row(one)));
  }

  #row(one) {
    const row = element("tr"), cached = element("td", "", count(one.cached)), bar = element("span", "share"), filled = element("i");
    filled.style.width = `${one.prompt ? Math.min(100, (100 * one.cached) / one.prompt) : 0}%`;
    bar.setAttribute("aria-hidden", "true");
    bar.append(filled);
    cached.append(bar);
    const id = element("td", "", one.id);
    id.title = String(one.id);
    row.append(id, element("td", "", one.tenant || "–"), element("td", "", count(one.prompt)), cached);
    for (const name of ["computed", "output", "blocks"]) row.append(element("td", "", count(one[name])));
    return row;
  }
}
