// One server: its event stream, its key, and a model of what happened, for the page to draw.

const KEEP_S = 330; // of history; a little more than the longest window
const MAX_ENDED = 2000; // bars of ended requests
const RETRY_MS = 1000;
const SPARK_POINTS = 240;

export class Server {
  // onChange(server) is called after each message, and when the connection comes or goes.
  constructor(origin, onChange) {
    this.origin = origin; // "" = the server of this page
    this.name = origin.replace(/^https?:\/\//, "") || location.host;
    this.onChange = onChange;
    this.connection = "connecting"; // connecting | live | lost | key
    this.problem = "";
    this.abort = null;
    this.replica = ""; // of a fleet: the one to show; "" = all
    this.replicas = []; // of a fleet
    this.shownReplica = "";
    this.forget();
  }

  // Show another replica of the fleet.
  choose(replica) {
    this.replica = replica;
    this.boot = undefined;
    this.forget();
    this.abort?.abort();
    this.retry?.();
  }

  get key() {
    return sessionStorage.getItem(`key ${this.origin}`) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(`key ${this.origin}`, value);
    else sessionStorage.removeItem(`key ${this.origin}`);
    this.abort?.abort(); // connect again, with the new key
    this.retry?.();
  }

  forget() {
    this.state = null;
    this.error = "";
    this.missed = 0;
    this.rates = []; // [time, tokens per second]
    this.lastTokens = null;
    this.live = new Map(); // name -> bar
    this.ended = []; // bars, in order of their end
    this.pauses = []; // of the whole engine: {from, closed, to, mode}; no request runs from ``closed`` on
    this.marks = []; // {at, text, key}: commits and restarts
    this.weights = new Map(); // scope -> [{from, key}]
    this.offset = -Infinity; // engine's clock - this page's clock
  }

  // Seconds on the engine's clock.
  now() {
    return performance.now() / 1000 + this.offset;
  }

  // ---------------------------------------------------------------- stream

  async run() {
    for (;;) {
      this.abort = new AbortController();
      try {
        await this.readStream();
        this.lost("The server closed the stream.");
      } catch (error) {
        if (error.name !== "AbortError") this.lost(this.describe(error));
      }
      this.onChange(this);
      await new Promise((resolve) => {
        this.retry = resolve;
        // With a missing key nothing changes by itself.
        if (this.connection !== "key") setTimeout(resolve, RETRY_MS);
      });
    }
  }

  lost(why) {
    if (this.connection !== "key") this.connection = "lost";
    this.problem = why;
  }

  describe(error) {
    if (this.connection === "key") return error.message;
    if (!this.origin) return `No answer from this server (${error.message}).`;
    return (
      `No answer from ${this.origin}. The server is down, or it does not allow this page: ` +
      `start it with --allowed-origins ${location.origin}`
    );
  }

  async readStream() {
    this.connection = "connecting";
    const query = this.replica ? `?replica=${encodeURIComponent(this.replica)}` : "";
    const response = await fetch(`${this.origin}/ui/events${query}`, {
      headers: this.headers(),
      signal: this.abort.signal,
      cache: "no-store",
    });
    if (!response.ok) {
      const { error } = await response.json();
      if (response.status === 401 || response.status === 403) this.connection = "key";
      throw new Error(error.message);
    }
    this.connection = "live";
    this.problem = "";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (buffer + value).split("\n\n");
      buffer = parts.pop();
      for (const part of parts) this.receive(part);
      this.onChange(this);
    }
  }

  headers() {
    return this.key ? { Authorization: `Bearer ${this.key}` } : {};
  }

  // Call a control route. Returns the result, or throws an Error with the server's message.
  async call(path, body) {
    const response = await fetch(this.origin + path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify(body),
    });
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error.message);
    return answer.result;
  }

  // ---------------------------------------------------------------- model

  receive(text) {
    if (text.startsWith("event: missed\n")) {
      this.missed += Number(text.slice(text.indexOf("data: ") + 6));
      return;
    }
    const message = JSON.parse(text.slice(6));
    this.error = message.error ?? "";
    this.replicas = message.replicas ?? [];
    this.shownReplica = message.replica ?? "";
    if (message.state === null) {
      this.state = null;
      return;
    }
    const before = this.boot;
    this.boot = message.state.boot_id;
    if (before && before !== this.boot) this.restarted(message.now);
    this.setClock(message.now);
    this.missed += message.lost;
    if (message.requests) this.setRequests(message);
    for (const [at, kind, name, fields] of message.events) HANDLERS[kind]?.call(this, at, name, fields);
    this.setState(message.state, message.now);
    this.dropOld(message.now);
  }

  setClock(now) {
    const offset = now - performance.now() / 1000;
    // The largest offset belongs to the fastest message. The slow decrease follows clocks that drift.
    const far = Math.abs(offset - this.offset) > 2;
    this.offset = far ? offset : Math.max(this.offset - 0.0005, offset);
  }

  // A new engine: its requests and holds are new, and its clock and weight_epoch may be.
  restarted(now) {
    for (const bar of [...this.live.values()]) this.end(bar, this.lastNow, "lost");
    this.setPhase(this.lastNow, "running");
    this.weights.clear();
    this.lastTokens = null;
    this.marks.push({ at: now, text: "engine restarted", key: null });
  }

  setState(state, now) {
    this.state = state;
    this.lastNow = now;
    this.setWeights(now, "engine", state.version, state.weight_epoch, 0);
    for (const a of state.adapters) {
      this.setWeights(now, `adapter:${a.lora_name}`, a.version, state.weight_epoch, a.adapter_epoch);
    }
    const age = Math.max(0, ...state.holds.map((hold) => hold.age_s));
    this.setPhase(now - (this.pauses.length ? 0 : age), state.phase, state.phase === "paused" || state.mode !== "wait");
    if (this.pauses.length && state.mode) this.pauses.at(-1).mode = state.mode;
    for (const [name, tokens] of Object.entries(state.progress)) {
      const bar = this.live.get(name);
      if (bar) bar.tokens = tokens;
    }
    if (this.lastTokens) {
      const seconds = now - this.lastTokens.at;
      if (seconds > 0.05) this.rates.push([now, (state.tokens - this.lastTokens.tokens) / seconds]);
      if (this.rates.length > SPARK_POINTS) this.rates.shift();
    }
    this.lastTokens = { at: now, tokens: state.tokens };
  }

  // Take in the live requests, at the first message and after lost events. Bars that are known stay.
  setRequests({ now, requests }) {
    const names = new Set(requests.map((request) => request.name));
    for (const bar of [...this.live.values()]) if (!names.has(bar.name)) this.end(bar, now, "unknown");
    for (const request of requests) {
      let bar = this.live.get(request.name);
      if (!bar) {
        bar = this.queue(now - request.age_s, request.name, request);
        if (request.state !== "waiting") this.enter(bar, now - request.age_s, "running");
      }
      bar.tokens = request.output_tokens;
      this.enter(bar, now, request.state);
    }
  }

  queue(at, name, fields) {
    const bar = {
      name, at, scope: fields.scope, requestId: fields.request_id,
      session: (fields.session ?? "").replace(/#[0-9a-f]*$/, ""), prompt: fields.prompt_tokens, limit: fields.max_tokens, tokens: 0,
      parts: [{ from: at, what: "waiting" }], to: null, reason: "", spans: null, lane: null,
    };
    this.live.set(name, bar);
    return bar;
  }

  enter(bar, at, what) {
    if (bar && bar.parts.at(-1).what !== what) bar.parts.push({ from: at, what });
  }

  end(bar, at, reason, fields = {}) {
    this.live.delete(bar.name);
    bar.to = at;
    bar.reason = reason;
    bar.tokens = fields.output_tokens ?? bar.tokens;
    bar.spans = fields.spans ?? null;
    this.ended.push(bar);
  }

  setWeights(at, scope, version, weightEpoch, adapterEpoch) {
    const id = `${scope} ${version} ${scope === "engine" ? weightEpoch : adapterEpoch}`;
    const key = { label: version, id, scope, weightEpoch, adapterEpoch };
    let history = this.weights.get(scope);
    if (!history) this.weights.set(scope, (history = [{ from: -Infinity, key }]));
    if (history.at(-1).key.id === key.id) return;
    history.push({ from: at, key });
    const name = scope === "engine" ? "" : `${scope.slice(8)} `;
    this.marks.push({ at, text: name + version, key });
  }

  // The weights that served ``scope`` from one time to another: [{from, to, key}].
  weightsBetween(scope, from, to) {
    const history = this.weights.get(scope) ?? this.weights.get("engine") ?? [];
    return history
      .map(({ from: start, key }, i) => ({
        from: Math.max(start, from), to: Math.min(history[i + 1]?.from ?? Infinity, to), key,
      }))
      .filter((part) => part.to > part.from);
  }

  // closed: whether no request runs.
  setPhase(at, phase, closed) {
    const last = this.pauses.at(-1);
    const open = last && last.to === null ? last : null;
    if (phase === "running") {
      if (open) open.to = at;
      return;
    }
    const pause = open ?? { from: at, closed: null, to: null, mode: "" };
    if (!open) this.pauses.push(pause);
    if (closed) pause.closed ??= at;
  }

  dropOld(now) {
    const first = now - KEEP_S;
    const old = Math.max(this.ended.findIndex((bar) => bar.to > first), this.ended.length - MAX_ENDED);
    if (old > 0) this.ended.splice(0, old);
    while (this.pauses.length && this.pauses[0].to !== null && this.pauses[0].to < first) this.pauses.shift();
    while (this.marks.length && this.marks[0].at < first) this.marks.shift();
    for (const history of this.weights.values()) while (history[1]?.from < first) history.shift();
  }

  // Tokens per second over the last second.
  rate() {
    const recent = this.rates.slice(-4);
    return recent.reduce((sum, [, rate]) => sum + rate, 0) / (recent.length || 1);
  }
}

// What an event does to the model. ``this`` is the server.
const HANDLERS = {
  queued(at, name, fields) {
    if (!this.live.has(name)) this.queue(at, name, fields);
  },
  admitted(at, name) {
    this.enter(this.live.get(name), at, "running");
  },
  frozen(at, name) {
    this.enter(this.live.get(name), at, "frozen");
  },
  thawed(at, name) {
    this.enter(this.live.get(name), at, "running");
  },
  preempted(at, name) {
    this.enter(this.live.get(name), at, "waiting");
  },
  final(at, name, fields) {
    const bar = this.live.get(name);
    if (bar) this.end(bar, at, fields.reason, fields);
  },
  phase(at, scope, fields) {
    if (scope === "engine") this.setPhase(at, fields.phase, fields.gate === "closed");
  },
  committed(at, scope, fields) {
    this.setWeights(at, scope, fields.version, fields.weight_epoch, fields.adapter_epoch ?? 0);
  },
};
