// The timeline: a bar for each request, coloured by the weights that computed it, with pauses as gaps.

const TOP = 20; // pixels for the labels of commits
const BOTTOM = 18; // pixels for the axis
const LANES = 14; // at least
const OWN_LANES = 48; // with more lanes, a session that has no request keeps its lane no longer
const NUM_COLORS = 8;
const DELAY_S = 0.4; // events arrive a little late; drawing the past of 0.4 s moves evenly

export class Timeline {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.context = canvas.getContext("2d");
    this.colors = new Map(); // id of weights -> number of the colour
    this.boxes = []; // drawn bars, for the pointer
    this.pointer = null;
    canvas.addEventListener("pointermove", (event) => (this.pointer = event));
    canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
      tip.hidden = true;
    });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.readTheme());
    this.readTheme();
  }

  readTheme() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    this.palette = Array.from({ length: NUM_COLORS }, (_, i) => get(`--v${i}`));
    this.theme = { ink: get("--ink"), dim: get("--dim"), line: get("--line"), panel: get("--panel"), bad: get("--bad"),
                   pause: get("--pause"), waiting: get("--waiting") };
    this.hatch = null;
  }

  colorOf(key) {
    if (!this.colors.has(key.id)) this.colors.set(key.id, this.colors.size % NUM_COLORS);
    return this.palette[this.colors.get(key.id)];
  }

  // Versions that are on the picture, the newest last.
  legend(server, seconds) {
    const now = server.now();
    const keys = new Map();
    for (const scope of server.weights.keys()) {
      for (const { key } of server.weightsBetween(scope, now - seconds, now)) keys.set(key.id, key);
    }
    return [...keys.values()].slice(-10);
  }

  draw(server, seconds) {
    const { canvas, context } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const to = server.now() - DELAY_S;
    if (!Number.isFinite(to)) return;
    const view = { from: to - seconds, to, width, height, x: (t) => ((t - to + seconds) / seconds) * width };
    this.drawAxis(view, seconds);
    this.drawBars(server, view);
    this.drawPauses(server, view);
    this.drawMarks(server, view);
    this.showTip();
  }

  drawAxis({ width, height, to, x }, seconds) {
    const { context, theme } = this;
    const step = [5, 10, 30, 60].find((s) => (s / seconds) * width > 70) ?? 60;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "alphabetic";
    for (let ago = 0; ago < seconds; ago += step) {
      const at = Math.round(x(to - ago)) - 0.5;
      context.fillStyle = theme.line;
      context.fillRect(at, TOP, 1, height - TOP - BOTTOM);
      context.fillStyle = theme.dim;
      context.textAlign = ago ? "center" : "right";
      context.fillText(ago ? `−${ago} s` : "now", at, height - 5);
    }
  }

  drawBars(server, view) {
    const bars = [...server.ended, ...server.live.values()].filter((bar) => (bar.to ?? view.to) > view.from);
    const lanes = setLanes(bars);
    const pitch = (view.height - TOP - BOTTOM - 6) / Math.max(lanes, LANES);
    const thick = Math.max(1, Math.min(pitch - (pitch > 4 ? 2 : 0.5), 14));
    this.boxes = [];
    for (const bar of bars) {
      const y = TOP + 4 + bar.lane * pitch;
      const end = Math.min(bar.to ?? view.to, view.to);
      if (end <= bar.at) continue;
      this.boxes.push({ bar, x0: view.x(bar.at), x1: view.x(end), y, pitch });
      bar.parts.forEach((part, i) => {
        const to = Math.min(bar.parts[i + 1]?.from ?? end, end);
        if (to > part.from) this.drawPart(server, view, bar, { from: part.from, to, what: part.what }, y, thick);
      });
      if (bar.to !== null && (bar.reason === "abort" || bar.reason === "error" || bar.reason === "lost")) {
        this.context.fillStyle = this.theme.bad;
        this.context.fillRect(view.x(end) - 2, y - 1, 2.5, thick + 2);
      }
    }
  }

  drawPart(server, view, bar, { from, to, what }, y, thick) {
    const { context, theme } = this;
    if (what === "waiting") {
      context.fillStyle = theme.waiting;
      context.fillRect(view.x(from), y + thick / 2 - 0.75, view.x(to) - view.x(from), 1.5);
      return;
    }
    context.globalAlpha = what === "frozen" ? 0.3 : 1;
    for (const part of server.weightsBetween(bar.scope, from, to)) {
      const x0 = view.x(part.from);
      context.fillStyle = this.colorOf(part.key);
      context.fillRect(x0, y, Math.max(view.x(part.to) - x0 - 0.5, 1), thick);
    }
    context.globalAlpha = 1;
  }

  drawPauses(server, view) {
    const { context, theme } = this;
    const [top, tall] = [TOP, view.height - TOP - BOTTOM];
    for (const pause of server.pauses) {
      const end = Math.min(pause.to ?? view.to, view.to);
      if (end <= view.from) continue;
      context.fillStyle = theme.pause;
      context.globalAlpha = 0.12;
      context.fillRect(view.x(pause.from), top, view.x(end) - view.x(pause.from), tall);
      context.globalAlpha = 1;
      if (pause.closed === null || end <= pause.closed) continue;
      const x0 = view.x(pause.closed);
      const wide = Math.max(view.x(end) - x0, 1);
      context.fillStyle = theme.panel;
      context.fillRect(x0, top, wide, tall);
      context.fillStyle = this.hatching();
      context.fillRect(x0, top, wide, tall);
      context.fillStyle = theme.pause;
      context.fillRect(x0, top, 1, tall);
      context.fillRect(x0 + wide - 1, top, 1, tall);
      context.font = "600 11px system-ui, sans-serif";
      context.textAlign = "center";
      const text = [`paused · ${pause.mode}`, "paused"].find((one) => context.measureText(one).width + 6 < wide);
      if (text) context.fillText(text, x0 + wide / 2, top + tall - 6);
    }
  }

  hatching() {
    if (!this.hatch) {
      const tile = new OffscreenCanvas(8, 8);
      const context = tile.getContext("2d");
      context.strokeStyle = this.theme.pause;
      context.globalAlpha = 0.25;
      context.beginPath();
      for (const shift of [-8, 0, 8]) {
        context.moveTo(shift, 8);
        context.lineTo(shift + 8, 0);
      }
      context.stroke();
      this.hatch = this.context.createPattern(tile, "repeat");
    }
    return this.hatch;
  }

  drawMarks(server, view) {
    const { context, theme } = this;
    let free = view.width; // labels are drawn from the right, where there is room
    for (const mark of server.marks.toReversed()) {
      const x = Math.round(view.x(mark.at)) - 0.5;
      if (x < 0 || mark.at > view.to) continue;
      context.fillStyle = mark.key ? this.colorOf(mark.key) : theme.bad;
      context.fillRect(x, TOP - 4, 1.5, view.height - TOP - BOTTOM + 4);
      context.font = "600 11px system-ui, sans-serif";
      const wide = context.measureText(mark.text).width;
      const left = Math.min(x, view.width - wide);
      if (left + wide + 8 > free) continue;
      free = left;
      context.textAlign = "left";
      context.fillText(mark.text, left, 12);
    }
  }

  showTip() {
    const { pointer, tip } = this;
    if (!pointer) return;
    const box = this.boxes.find(
      ({ x0, x1, y, pitch }) =>
        pointer.offsetX >= x0 - 2 && pointer.offsetX <= x1 + 2 && pointer.offsetY >= y && pointer.offsetY < y + pitch,
    );
    tip.hidden = !box;
    if (!box) return;
    tip.textContent = describe(box.bar);
    const left = Math.min(pointer.offsetX + 14, this.canvas.clientWidth - tip.offsetWidth - 4);
    tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(pointer.offsetY + 14)}px)`;
  }
}

function describe(bar) {
  const spans = (bar.spans ?? []).map(([version, , , start, end]) => `${version}: ${end - start}`).join(", ");
  const state = bar.reason || bar.parts.at(-1).what;
  const scope = bar.scope === "engine" ? "" : ` · ${bar.scope}`;
  const session = bar.session ? ` · session ${bar.session}` : "";
  return `${bar.name}${scope}${session}\n${state} · ${bar.prompt} prompt + ${bar.tokens} of ${bar.limit} tokens` +
    (spans ? `\ntokens by version: ${spans}` : "");
}

// Give each bar that has none a lane in which no other bar is. A session keeps its lane as long as one of its bars is on
// the picture, so its turns lie behind each other, unless there are more sessions than lanes can be seen. Returns the
// number of lanes.
export function setLanes(bars) {
  const taken = []; // lane -> end of its last bar
  const owners = []; // lane -> its session, or "" for bars without one
  const take = (bar, lane) => {
    bar.lane = lane;
    taken[lane] = Math.max(taken[lane] ?? 0, bar.to ?? Infinity);
    owners[lane] = bar.session;
  };
  for (const bar of bars) if (bar.lane !== null) take(bar, bar.lane);
  for (const bar of bars.filter((one) => one.lane === null).sort((a, b) => a.at - b.at)) {
    let lane = bar.session ? owners.findIndex((owner, i) => owner === bar.session && taken[i] <= bar.at) : -1;
    const shared = taken.length >= OWN_LANES;
    const isFree = (i) =>
      taken[i] === undefined || (taken[i] <= bar.at - 0.02 && (shared || (!owners[i] && !bar.session)));
    if (lane < 0) for (lane = 0; !isFree(lane); lane += 1);
    take(bar, lane);
  }
  return taken.length;
}
