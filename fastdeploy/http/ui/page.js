// The page: shows one of its servers, and sends what its buttons ask for.
//
// Text of the server enters the page as text nodes only, never as HTML.

import { Server } from "/ui/server.js";
import { Timeline } from "/ui/timeline.js";

const MAX_ROWS = 40;
const MAX_UPDATES = 4; // rows
const ARMED_MS = 4000; // for the second click of "Abort all"

const $ = (id) => document.getElementById(id);
const timeline = new Timeline($("timeline"), $("tip"));
const origins = ["", ...new URLSearchParams(location.search).getAll("server")];
const servers = [...new Set(origins)].map((origin) => new Server(origin, changed));
let shown = servers[0];

function changed(server) {
  if (server === shown) show();
  if (servers.length > 1) showServers();
}

// ------------------------------------------------------------------ what the page shows

function stateOf(server) {
  if (server.connection !== "live") return server.connection === "key" ? "needs a key" : "disconnected";
  if (server.error) return "failed";
  if (!server.state) return "connecting";
  return server.state.asleep.length ? "asleep" : server.state.phase;
}

function show() {
  const { state } = shown;
  const name = stateOf(shown);
  text("state", name + (name === "asleep" ? `: ${state.asleep.join(", ")}` : ""));
  $("state").dataset.state = name;
  const problem = shown.problem || shown.error;
  text("problem", problem);
  $("problem").hidden = !problem;
  showReplicas();
  text("missed", shown.missed ? `${shown.missed} events came too fast to be shown` : "");
  if (!state) return;
  document.title = `${name} · ${state.version} · FastDeploy`;
  text("version", state.version);
  text("epoch", state.weight_epoch);
  text("boot", state.boot_id.slice(0, 8));
  $("boot").title = state.boot_id;
  flag("is_paused", state.is_paused);
  flag("rejecting", state.rejecting_new_requests);
  showFigures(state);
  showHolds(state);
  showWeights(state);
  showLive();
}

function showReplicas() {
  const { replicas, shownReplica } = shown;
  $("replicas-panel").hidden = !replicas.length;
  const members = replicas.filter(({ state }) => state === "member").length;
  text("num-replicas", `${members} of ${replicas.length} are members`);
  rows("replicas", replicas, "", ({ name, state, why, version, weight_epoch, in_flight, load }) => [
    name, why && state !== "member" ? `${state}: ${why}` : state, version, weight_epoch, in_flight,
    load.running ?? "–", load.waiting ?? "–",
    name === shownReplica ? "shown" : button("Show", `Show ${name}`, () => shown.choose(name)),
  ]);
  $("show-all").hidden = !shownReplica;
  text("shown-replica", shownReplica ? `Everything else on this page is of ${shownReplica} only.` : "");
}

function showFigures({ counts, kv, preemptions }) {
  const rate = shown.rate();
  text("rate", rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en"));
  for (const name of ["running", "waiting", "frozen"]) text(name, counts[name].toLocaleString("en"));
  $("frozen").classList.toggle("on", counts.frozen > 0);
  text("kv", percent(kv.used, kv.total));
  text("kv-blocks", `${kv.used.toLocaleString("en")} of ${kv.total.toLocaleString("en")} blocks`);
  $("kv-bar").value = kv.used / kv.total;
  text("hits", percent(kv.hit_tokens, kv.queried_tokens));
  text("preemptions", plural(preemptions, "preemption"));
}

function showHolds(state) {
  const holds = [...state.holds, ...state.scopes.flatMap((scope) => scope.holds)];
  rows("holds", holds, "No hold stands: the engine runs.", (hold) => [
    hold.id, hold.scope, `${hold.mode} · ${hold.admission}`, hold.placed_by, seconds(hold.age_s),
    hold.ttl_left_s === null ? "–" : seconds(hold.ttl_left_s),
    button(hold.named ? "Resume" : "Resume anonymous", `Resume hold ${hold.id}`, () =>
      act("/v1/resume", { hold_id: hold.named ? hold.id : null, ...loraName(hold.scope) }, summaries.resume)),
  ]);
  options("scope", ["", ...state.adapters.map((adapter) => adapter.lora_name)]);
}

function showWeights({ session, adapters, num_adapters, scopes }) {
  const facts = session
    ? { session: session.session_id, state: session.state, version: session.version ?? "–",
        received: `${bytes(session.nbytes_received)} in ${plural(session.tensors_received, "tensor")}`,
        "opened by": session.placed_by, age: seconds(session.age_s), "lease ends in": seconds(session.lease_left_s),
        kind: [session.delta && "delta", session.partial && "partial"]
          .filter(Boolean).join(", ") || "full" }
    : { session: "none is open" };
  $("session").replaceChildren(...Object.entries(facts).map(([name, value]) => fact(name, value)));
  const updates = shown.marks.filter((mark) => mark.key).slice(-MAX_UPDATES).reverse();
  rows("updates", updates, "No update since this page was opened.", ({ at, key }) => [
    key.label, key.scope, key.scope === "engine" ? key.weightEpoch : `load ${key.adapterEpoch}`,
    seconds(Math.max(shown.now() - at, 0)),
  ]);
  $("adapters-box").hidden = !adapters.length;
  text("num-adapters", num_adapters > adapters.length ? `the first ${adapters.length} of ${num_adapters}` : "");
  const paused = new Map(scopes.map((scope) => [scope.holds[0]?.scope, scope.phase]));
  rows("adapters", adapters, "", (a) => [
    a.lora_name, a.version, a.adapter_epoch, a.requests, a.in_memory ? bytes(a.nbytes) : "not in memory",
    paused.get(`adapter:${a.lora_name}`) ?? "running",
  ]);
}

function showLive() {
  const bars = [...shown.live.values()];
  text("live-more", bars.length > MAX_ROWS ? `the first ${MAX_ROWS} of ${bars.length}` : "");
  const now = shown.now();
  rows("live", bars.slice(0, MAX_ROWS), "No request is in the engine.", (bar) => [
    bar.name, bar.scope, liveState(bar), bar.prompt, `${bar.tokens} of ${bar.limit}`, seconds(Math.max(now - bar.at, 0)),
    button("Abort", `Abort ${bar.name}`, () => act("/v1/abort_requests", { req_ids: [bar.requestId] }, summaries.abort)),
  ]);
}

function liveState(bar) {
  const { what } = bar.parts.at(-1);
  return what === "running" && shown.state.phase === "paused" ? "frozen" : what;
}

function showLegend() {
  const keys = timeline.legend(shown, Number($("window").value));
  const list = $("legend");
  const wanted = keys.map((key) => `${key.id} ${timeline.colorOf(key)}`).join("\n");
  if (list.dataset.keys === wanted) return;
  list.dataset.keys = wanted;
  list.replaceChildren(...keys.map((key) => {
    const item = document.createElement("li");
    item.append(swatch(timeline.colorOf(key)), key.scope === "engine" ? key.label : `${key.scope.slice(8)}: ${key.label}`);
    return item;
  }));
}

function showServers() {
  $("servers").hidden = false;
  const tiles = $("servers").children;
  servers.forEach((server, i) => {
    const tile = tiles[i] ?? $("servers").appendChild(document.createElement("button"));
    tile.setAttribute("aria-pressed", server === shown);
    tile.onclick = () => {
      shown = server;
      $("key").value = "";
      changed(server);
    };
    const counts = server.state?.counts;
    const parts = [["strong", server.name], ["span", stateOf(server)], ["small", server.state?.version ?? ""],
                   ["span", `${Math.round(server.rate())} tokens/s`],
                   ["small", counts ? `${counts.running} running` : ""]];
    tile.replaceChildren(...parts.map(([tag, value]) => element(tag, value)));
  });
}

// The picture is 60 seconds wide and 1 high.
function drawSpark() {
  const to = shown.now();
  const rates = shown.rates.map(([at], i, all) => {
    const last = all.slice(Math.max(i - 3, 0), i + 1);
    return [60 - (to - at), last.reduce((sum, [, rate]) => sum + rate, 0) / last.length];
  });
  const most = Math.max(1, ...rates.map(([, rate]) => rate));
  const line = rates.map(([x, rate]) => [x, 1 - rate / most]);
  const area = line.length ? [[line[0][0], 1], ...line, [line.at(-1)[0], 1]] : [];
  const [polygon, polyline] = $("spark").children;
  polygon.setAttribute("points", area.join(" "));
  polyline.setAttribute("points", line.join(" "));
}

// ------------------------------------------------------------------ what the buttons do

const summaries = {
  pause: (report) => `Paused: ${report.state}, hold ${report.hold_id ?? $("hold").value}.`,
  resume: (report) => {
    const held = report.still_held_by.length ? ` Still held by ${report.still_held_by.join(", ")}.` : "";
    return `Released: ${report.released.join(", ") || "nothing"}.${held}`;
  },
  abort: (report) => {
    const missing = report.not_found.length ? ` Not found: ${report.not_found.join(", ")}.` : "";
    return `Aborted ${plural(report.aborted.length, "request")}.${missing}`;
  },
};

async function act(path, body, tell) {
  const server = shown;
  result(`${path} …`);
  try {
    result(tell(await server.call(path, body)));
  } catch (error) {
    result(error.message, true);
  }
}

function result(message, bad = false) {
  text("result", message);
  $("result").classList.toggle("bad", bad);
}

function loraName(scope) {
  return scope.startsWith("adapter:") ? { lora_name: scope.slice(8) } : {};
}

$("pause-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const scope = $("scope").value;
  const body = { mode: $("mode").value, hold_id: $("hold").value.trim() || null };
  if ($("ttl").value) body.ttl_s = Number($("ttl").value);
  act("/v1/pause", { ...body, ...(scope ? { lora_name: scope } : {}) }, summaries.pause);
});
$("resume").addEventListener("click", () => {
  act("/v1/resume", $("scope").value ? { lora_name: $("scope").value } : {}, summaries.resume);
});
$("abort-all").addEventListener("click", ({ target }) => {
  if (target.classList.contains("armed")) {
    disarm();
    act("/v1/abort_requests", $("scope").value ? { lora_name: $("scope").value } : { abort_all: true }, summaries.abort);
    return;
  }
  target.classList.add("armed");
  target.textContent = `Abort ${shown.live.size}?`;
  setTimeout(disarm, ARMED_MS);
});

function disarm() {
  $("abort-all").classList.remove("armed");
  $("abort-all").textContent = "Abort all";
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  shown.key = $("key").value.trim();
  $("key").value = "";
  $("key").placeholder = shown.key ? "a key is in use" : "if the server has one";
});
$("window").addEventListener("change", showLegend);
$("show-all").addEventListener("click", () => shown.choose(""));

// ------------------------------------------------------------------ helpers

function text(id, value) {
  const node = $(id);
  if (node.textContent !== String(value)) node.textContent = value;
}

function element(tag, content) {
  const node = document.createElement(tag);
  node.textContent = content;
  return node;
}

function flag(id, on) {
  text(id, on ? "yes" : "no");
  $(id).classList.toggle("on", on);
}

function fact(name, value) {
  const node = document.createElement("div");
  node.append(element("dt", name), element("dd", value));
  return node;
}

function button(label, name, onclick) {
  const node = element("button", label);
  node.setAttribute("aria-label", name);
  node.type = "button";
  node.onclick = onclick;
  return node;
}

function swatch(color) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of [["width", 10], ["height", 10], ["fill", color]]) box.setAttribute(name, value);
  svg.append(box);
  svg.setAttribute("aria-hidden", "true");
  return svg;
}

// Fill a table. Cells keep their nodes, so that the focus stays on a button, unless the label of the button changes.
function rows(id, items, empty, cells) {
  const body = $(id).tBodies[0];
  const heads = $(id).tHead.rows[0].cells;
  const wanted = items.length ? items.map(cells) : [[empty]];
  while (body.rows.length > wanted.length) body.deleteRow(-1);
  wanted.forEach((values, i) => {
    const row = body.rows[i] ?? body.insertRow();
    const single = !items.length;
    while (row.cells.length > values.length) row.deleteCell(-1);
    values.forEach((value, j) => {
      const cell = row.cells[j] ?? row.insertCell();
      cell.className = single ? "empty" : heads[j].className;
      cell.colSpan = single ? heads.length : 1;
      setCell(cell, value);
    });
  });
}

function setCell(cell, value) {
  if (!(value instanceof Node)) {
    if (cell.textContent !== String(value) || cell.firstElementChild) cell.textContent = value;
    return;
  }
  const old = cell.firstElementChild;
  if (old?.getAttribute("aria-label") === value.getAttribute("aria-label")) old.onclick = value.onclick;
  else cell.replaceChildren(value);
}

function options(id, values) {
  const select = $(id);
  const now = [...select.options].map((option) => option.value);
  if (now.join("\n") === values.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...values.map((value) => new Option(value || "engine", value)));
  select.value = values.includes(chosen) ? chosen : "";
}

const percent = (part, all) => (all ? `${Math.round((part / all) * 100)} %` : "–");
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const seconds = (s) => (s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`);

function bytes(n) {
  const unit = ["B", "KiB", "MiB", "GiB"].findLast((_, i) => n >= 1024 ** i) ?? "B";
  return `${(n / 1024 ** ["B", "KiB", "MiB", "GiB"].indexOf(unit)).toFixed(unit === "B" ? 0 : 1)} ${unit}`;
}

function draw() {
  timeline.draw(shown, Number($("window").value));
  drawSpark();
  showLegend();
  $("timeline").setAttribute("aria-label", `Timeline of requests: ${shown.live.size} live, ${shown.ended.length} ended`);
  requestAnimationFrame(draw);
}

for (const server of servers) server.run();
requestAnimationFrame(draw);
