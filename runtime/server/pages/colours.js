// Colours of the canvas, in light and in dark, and what is hot.
// Owns: heat and its colours.  Does not know: where anything is drawn.
// Idea: heat falls with the logarithm of the time since the last use, and rises with that of hits:
// a prefix used now is hot, one used a minute ago often is warm, one of an hour ago is cold.

const STEPS = 24, COLD_S = 1800;

const PALETTES = {
  light: {
    ramp: ["#e1e7ed", "#ccd7e0", "#e4d8c2", "#f0c68b", "#e99a50", "#d5642c", "#ab3a14"],
    ground: "#fbfbfa", ink: "#1a1d21", muted: "#6a727c", line: "#e4e7e4",
    pinned: "#2447c6", retained: "#0b7a5c", edge: "rgba(26,29,33,.20)", evictable: "rgba(26,29,33,.55)",
    many: "#8a939c", pill: "rgba(255,255,255,.92)", hatch: "rgba(26,29,33,.34)", born: "#d5642c", gutter: ["#c3c9c4", "#aeb6b0"],
  },
  dark: {
    ramp: ["#222b35", "#2c3a48", "#4a4139", "#74512f", "#a66628", "#de8836", "#ffc67c"],
    ground: "#14181d", ink: "#e8eaed", muted: "#93a0ad", line: "#262c35",
    pinned: "#82a6ff", retained: "#48d3a4", edge: "rgba(255,255,255,.13)", evictable: "rgba(232,234,237,.5)",
    many: "#7d8996", pill: "rgba(24,29,36,.92)", hatch: "rgba(255,255,255,.3)", born: "#ffc67c", gutter: ["#3d4550", "#333a44"],
  },
};

function heat(used, hits, now) {
  const age = Math.max(0, now - used);
  const recency = Math.max(0, 1 - Math.log1p(age) / Math.log1p(COLD_S));
  const frequency = Math.min(1, Math.log1p(hits) / Math.log1p(200));
  return Math.min(1, 0.72 * recency + 0.28 * frequency * (0.35 + 0.65 * recency) + 0.1 * frequency);
}

function mixed(ramp, at) {
  const place = at * (ramp.length - 1), low = Math.min(ramp.length - 2, Math.floor(place)), part = place - low;
  const numbers = [ramp[low], ramp[low + 1]].map((colour) => [1, 3, 5].map((from) => parseInt(colour.slice(from, from + 2), 16)));
  return numbers[0].map((value, channel) => Math.round(value + (numbers[1][channel] - value) * part));
}

class Colours {
  constructor() {
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.choose("auto");
  }

  choose(theme) {
    this.theme = theme;
    this.isDark = theme === "dark" || (theme === "auto" && this.system.matches);
    Object.assign(this, PALETTES[this.isDark ? "dark" : "light"]);
    this.steps = [];
    this.inks = [];
    for (let step = 0; step < STEPS; step++) {
      const [red, green, blue] = mixed(this.ramp, step / (STEPS - 1));
      const linear = [red, green, blue].map((value) => (value / 255) ** 2.2);
      const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
      this.steps.push(`rgb(${red},${green},${blue})`);
      this.inks.push(light > 0.179 ? "#000000" : "#ffffff"); // at least 4.5 to 1 either way
    }
  }

  step(used, hits, now) {
    return Math.min(STEPS - 1, Math.floor(heat(used, hits, now) * STEPS));
  }

  get gradient() { return `linear-gradient(90deg, ${this.ramp.join(", ")})`; }
}
