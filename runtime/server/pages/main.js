// The page put together: feed → timeline → model → canvas and panels.
// Owns: which part is told what, and when.  Does not know: how any of them does it.

const base = location.pathname.replace(/\/+$/, "");
const at = (id) => document.getElementById(id);
const colours = new Colours();
let model = new TreeModel();
let timeline = new Timeline(model);
let state = { name: "connecting", words: "connecting" };
let selected = null;
let hasAsked = false;   // for history and curve, once a connection

const feed = new Feed({ base, told, event: hear });
const outline = new Outline(model);
const details = new Details({ feed, model, choose, timeline, place: (id) => stage.placeOf(id) });
const texts = new Texts({ feed, ready: () => stage.ask() });
const stage = new Stage({ model, colours, texts, choose, pause: togglePause, drawn: tellDrawn });
const charts = allCharts(), curve = new CurvePanel(), running = new RunningTable();
stage.now = () => timeline.shown;
at("charts").append(...charts.map((chart) => chart.element), curve.element);

function say(words) { at("told").textContent = words; }

function told(name, words) {
  if (name === "lost" && state.name === "live") say(`The connection is lost: ${words}`);
  if (name === "live" && state.name !== "live") say("Connected; the tree is live.");
  state = { name, words };
  if (name === "connecting") hasAsked = false;
  if (name === "refused") askForKey(words);
  if (name === "live") at("key-dialog").close();
  showState();
  showEmpty();
}

function showState() {
  const isHeld = state.name === "live" && !timeline.isLive;
  at("state").dataset.state = isHeld ? "paused" : state.name;
  at("state-text").textContent = isHeld ? "paused" : state.words;
}

function hear(kind, message) {
  try {
    if (kind === "snapshot") timeline.snapshot(message);
    else if (kind === "change") timeline.change(message);
    else if (kind === "sample") timeline.sample(message);
  } catch (error) {
    if (!(error instanceof LostTrack)) throw error;
    restart();
    throw error; // the feed connects again, and so gets a snapshot
  }
  if (kind === "snapshot") {
    texts.forget(Boolean(message.show_text));
    at("texts").hidden = !message.show_text;
    if (!hasAsked) askOnce();
  }
  if (kind === "sample") showPanels();
  else showTree();
}

// What was held does not fit the server's tree any more: begin with an empty one.
function restart() {
  model = new TreeModel();
  timeline = new Timeline(model);
  outline.model = details.model = model;
  details.timeline = timeline;
  stage.use(model);
}

async function askOnce() {
  hasAsked = true;
  try {
    const answer = await feed.get("/history");
    timeline.history(answer.samples ?? answer);
    showPanels();
  } catch { /* the panels begin with what comes from now on */ }
  askCurve();
}

async function askCurve() {
  if (state.name !== "live") return;
  try {
    const answer = await fetch(`${base.replace(/\/tree$/, "")}/cache/curve`, { headers: feed.headers("application/json") });
    if (answer.ok) curve.show(await answer.json());
  } catch { /* no curve, as where it is switched off */ }
}

function showTree() {
  if (selected !== null && model.get(selected) === undefined && timeline.isLive && !details.isGone) {
    details.isGone = true;
    say("The chosen node is not in the tree any more.");
    details.ask();
  }
  details.refresh();
  outline.show(selected);
  stage.ask();
  showCounts();
  showTime();
  showEmpty();
}

function showCounts() {
  at("legend-tier").hidden = !model.hasOtherTier;
  const bold = (text) => element("b", "", text);
  const size = model.size - (model.root.children?.size ?? 0);
  at("counts").replaceChildren(bold(count(size)), ` ${size === 1 ? "node" : "nodes"} · `, bold(short(model.tokens)), " tokens");
}

function showEmpty() {
  const isEmpty = model.size === 0 || model.tokens === 0;
  at("empty").hidden = !isEmpty;
  if (!isEmpty) return;
  const texts = {
    live: ["Nothing is cached yet", "The tree grows here as soon as the server computes a prompt."],
    refused: ["A key is needed", "Give a tenant's or an operator's key to see its tree."],
    lost: ["No connection", state.words],
    connecting: ["Connecting", "Waiting for the first snapshot of the tree."],
  };
  [at("empty-title").textContent, at("empty-text").textContent] = texts[state.name];
}

function showPanels() {
  if (document.hidden) return;
  const until = timeline.shown, end = timeline.now();
  for (const chart of charts) chart.show(timeline.samples, until, end);
  running.show(timeline.sampleShown());
}

function tellDrawn(work, layout) {
  const words = work.aggregates
    ? `${plural(work.drawn, "node")} drawn, ${count(work.inAggregates)} more in ${plural(work.aggregates, "aggregate")} (the bars with a grey edge): come nearer to tell them apart. ${count(layout.numNodes)} in all.`
    : work.drawn < layout.numNodes ? `${plural(work.drawn, "node")} in this window of ${count(layout.numNodes)}.` : `All ${plural(layout.numNodes, "node")} drawn.`;
  const full = layout.size ? `Across: tokens from the start of the prompt. Down: one lane a leaf. ${words}` : "";
  if (at("drawn").textContent !== full) at("drawn").textContent = full;
}

// Time: the slider runs over what the log holds, from the oldest moment to now.
function showTime() {
  const slider = at("scrub"), reach = timeline.reach;
  slider.min = String(-Math.max(1, reach));
  slider.max = "0";
  if (document.activeElement !== slider || timeline.isLive) slider.value = timeline.isLive ? "0" : String(timeline.shown - timeline.now());
  const back = timeline.isLive ? "live" : `${ago(timeline.now() - timeline.shown)}`;
  const words = `${back} · goes back ${seconds(Math.floor(reach))}`;
  at("scrub-text").textContent = words;
  slider.setAttribute("aria-valuetext", `${back}, the log goes back ${seconds(Math.floor(reach))}`);
  at("pause").textContent = timeline.isLive ? "Pause" : "Go live";
  at("pause").setAttribute("aria-pressed", String(!timeline.isLive));
}

function showMoment(time) {
  try {
    timeline.show(time);
  } catch (error) {
    if (!(error instanceof LostTrack)) throw error;
    restart();
    feed.again();
  }
  showState();
  showTree();
  showPanels();
}

function togglePause() {
  const pauses = timeline.isLive;
  showMoment(pauses ? timeline.now() : null);
  say(pauses ? "Paused." : "Live again.");
}

function choose(id, reveal = false) {
  selected = id;
  details.isGone = false;
  details.show(id);
  outline.show(id);
  stage.select(id, reveal);
}

// A dialog that is closed by hand stays closed until the key is wanted by hand.
function askForKey(words) {
  at("key-error").textContent = feed.key ? words : "";
  if (!at("key-dialog").open) at("key-dialog").showModal();
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = at("key").value.trim();
  at("key").value = "";
  at("key-error").textContent = "";
  restart();
  choose(null);
  feed.setKey(key);
});
at("key-forget").addEventListener("click", () => { restart(); choose(null); feed.setKey(""); });
at("key-close").addEventListener("click", () => at("key-dialog").close());
at("key-open").addEventListener("click", () => askForKey(""));
at("texts").addEventListener("click", () => {
  texts.isOn = !texts.isOn;
  at("texts").setAttribute("aria-pressed", String(texts.isOn));
  stage.ask();
});
at("pause").addEventListener("click", togglePause);
at("scrub").addEventListener("input", () => {
  const value = Number(at("scrub").value);
  showMoment(value > -0.4 ? null : timeline.now() + value);
});

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

function useTheme(theme) {
  colours.choose(theme);
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  at("theme").textContent = THEMES[theme];
  at("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system has them" : theme}`);
  at("ramp").style.background = colours.gradient;
  try { localStorage.setItem("radixcache.theme", theme); } catch { /* no storage: until the page closes */ }
  stage.ask();
}

at("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  useTheme(names[(names.indexOf(colours.theme) + 1) % names.length]);
});
colours.system.addEventListener("change", () => useTheme(colours.theme));
let theme = "auto";
try { theme = localStorage.getItem("radixcache.theme") ?? "auto"; } catch { /* no storage */ }
useTheme(theme in THEMES ? theme : "auto");

// Heat cools and times go on where nothing changes.
setInterval(() => {
  if (document.hidden) return;
  stage.ask();
  showTime();
  details.refresh();
}, 1000);
setInterval(askCurve, 20_000);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  showMoment(timeline.held);
  if (state.name === "lost") feed.again(); // somebody looks: don't wait
});
addEventListener("online", () => { if (state.name === "lost") feed.again(); });

feed.run();
// What was done to draw, for tests and for who wonders; nothing reads it here.
window.radixcacheTree = { work: stage.work, stage, get model() { return model; }, get timeline() { return timeline; }, get selected() { return selected; } };
