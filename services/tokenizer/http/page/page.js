/**
 * The page of a cell: a chat over the HTTP API, and the cell's state, asked for each second while the page is seen.
 *
 * What a model, a server or a person wrote becomes text by `textContent` or a property, and never markup.
 */

const POLL_MS = 1000;
const WINDOW_MS = 120_000;
// How often an answer is laid out while it streams.
const SHOW_MS = 100;
const MAX_SHOWN_EVENTS = 20;
const NUM_ALTERNATIVES = 3;
// Probabilities below which a token is marked.
const UNSURE = 0.25;
const UNLIKELY = 0.05;
const KEY = "lockstep-key";
const CHART_WIDTH = 120;
const CHART_HEIGHT = 40;
const SVG = "http://www.w3.org/2000/svg";

/** The fields of a rank's step counts by kind, from the lowest band of a chart. */
const STEP_FIELDS = {
  prefill: "numPrefillSteps",
  decode: "numDecodeSteps",
  mixed: "numMixedSteps",
  dummy: "numDummySteps",
};

const EVENT_WORDS = {
  KIND_ATTACHED: "attached",
  KIND_LOST: "lost",
  KIND_RELEASED: "released after a drain",
  KIND_DRAINING: "draining",
  KIND_UNDRAINED: "no longer draining",
  KIND_RESUMED: "all requests of a loss continue",
  KIND_SUSPECTED: "requests suspected",
  KIND_TRIED: "suspected requests tried",
  KIND_CLEARED: "no request is suspected",
  KIND_POISONED: "a request that crashes its workers ended",
};

const byId = (id) => document.getElementById(id);
const access = document.documentElement.dataset;

// Elements.

/** An element with attributes and children, strings among them as text. */
function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, ...children);
}

function svgElement(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, ...children);
}

function fill(made, attributes, ...children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// The HTTP API.

/** A refusal by the server, or an error in the middle of a stream. */
class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const key = byId("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** An answer with status 200; throws `ApiError` with the server's message, or what `fetch` throws. */
async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `HTTP status ${response.status}`, response.status);
}

/** The data of a stream's events; `EventSource` would do, but cannot send a key. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
  }
}

// The chat.

/** How an answer looks while it streams. */
class AnswerView {
  constructor() {
    this.reasoning = element("div", { class: "text" });
    this.folded = element("details", { class: "reasoning" }, element("summary", {}, "Reasoning"), this.reasoning);
    this.folded.hidden = true;
    this.text = element("div", { class: "text" });
    this.note = element("p", { class: "note" });
    const label = "Answer; with log-probabilities, the arrow keys go from token to token";
    this.body = element("div", { role: "group", tabindex: "0", "aria-label": label }, this.folded, this.text);
    this.body.addEventListener("keydown", (event) => this.#walk(event));
    this.facts = element("p", { class: "note", "aria-live": "polite" });
    this.turn = element("div", { class: "turn" }, element("h3", {}, "Assistant"), this.body, this.facts, this.note);
    // Tokens whose text the server still holds back, as it may belong to a stop string or to markup.
    this.held = [];
  }

  /** Add a piece of a stream. */
  add({ delta, logprobs }) {
    this.held.push(...(logprobs?.content ?? []));
    if (delta.reasoning) {
      this.folded.hidden = false;
      this.#addText(this.reasoning, delta.reasoning);
    }
    if (delta.content) this.#addText(this.text, delta.content);
  }

  #addText(parent, text) {
    const tokens = this.held;
    this.held = [];
    if (!tokens.length) parent.append(text);
    else if (tokens.map(({ token }) => token).join("") === text) parent.append(...tokens.map(tokenSpan));
    else parent.append(textSpan(text, tokens));
  }

  #walk(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const spans = [...this.body.querySelectorAll("span")].filter((span) => span.checkVisibility());
    const here = spans.indexOf(document.activeElement);
    const next = spans[here < 0 && step < 0 ? spans.length - 1 : here + step];
    if (!next) return;
    next.focus();
    this.facts.textContent = next.title;
    event.preventDefault();
  }
}

function tokenSpan(token) {
  return textSpan(token.token, [token]);
}

/** A text with what is known of its tokens, which is shown on hover; its class says how sure the model was. */
function textSpan(text, tokens) {
  const span = element("span", { title: tokens.map(describeToken).join("\n"), tabindex: "-1" }, text);
  const lowest = Math.min(...tokens.map(({ logprob }) => Math.exp(logprob)));
  if (lowest < UNSURE) span.className = lowest < UNLIKELY ? "unlikely" : "unsure";
  return span;
}

function describeToken({ token, logprob, top_logprobs: alternatives }) {
  const others = alternatives.filter((other) => other.token !== token).map(describeProbability);
  return [`${describeProbability({ token, logprob })} (${logprob.toFixed(2)})`, ...others].join(" · ");
}

function describeProbability({ token, logprob }) {
  return `${JSON.stringify(token)} ${(100 * Math.exp(logprob)).toFixed(1)} %`;
}

class Chat {
  constructor() {
    this.messages = [];
    this.abort = null;
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.abort) this.#send(byId("message").value);
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("ask").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
  }

  /** Ask for an answer. */
  async #send(text) {
    const view = new AnswerView();
    const question = element("div", { class: "turn" }, element("h3", {}, "You"), element("div", { class: "text" }, text));
    byId("conversation").append(question, view.turn);
    byId("message").value = "";
    byId("failure").textContent = "";
    const aborting = this.#begin();
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    try {
      await this.#stream(view, messages, aborting.signal);
    } catch (error) {
      if (aborting.signal.aborted) view.note.textContent = "Stopped.";
      else byId("failure").textContent = error.message;
    }
    const answer = view.text.textContent;
    if (answer) messages.push({ role: "assistant", content: answer });
    else this.#takeBack(text, messages, question, view);
    this.#end();
  }

  async #stream(view, messages, signal) {
    const startedAt = performance.now();
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(makeBody(messages)),
      signal,
    });
    const log = byId("conversation");
    const isNearEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    let [follows, shownAt] = [isNearEnd(), startedAt];
    for await (const data of readEvents(response)) {
      const isLast = data === "[DONE]";
      const piece = isLast ? { choices: [] } : JSON.parse(data);
      if (piece.error) throw new ApiError(piece.error.message);
      for (const choice of piece.choices) view.add(choice);
      if (piece.usage) view.note.textContent = describeUsage(piece.usage, performance.now() - startedAt);
      if (!isLast && performance.now() - shownAt < SHOW_MS) continue;
      if (follows) log.scrollTop = log.scrollHeight;
      if (isLast) return;
      // Events may come faster than a long answer is laid out; the person at the page has a turn between them.
      await new Promise((resolve) => setTimeout(resolve));
      [follows, shownAt] = [isNearEnd(), performance.now()];
    }
    throw new ApiError("The connection ended before the answer.");
  }

  /** Without any answer, the message is there to be changed, and the next request has no two questions in a row. */
  #takeBack(text, messages, question, view) {
    messages.pop();
    question.remove();
    view.turn.remove();
    if (this.messages === messages && !byId("message").value) byId("message").value = text;
  }

  #begin() {
    const hadFocus = document.activeElement === byId("send");
    this.abort = new AbortController();
    byId("send").disabled = true;
    byId("stop").disabled = false;
    byId("conversation").setAttribute("aria-busy", "true");
    if (hadFocus) byId("stop").focus();
    return this.abort;
  }

  #end() {
    const hadFocus = document.activeElement === byId("stop");
    this.abort = null;
    byId("send").disabled = false;
    byId("stop").disabled = true;
    byId("conversation").removeAttribute("aria-busy");
    if (hadFocus) byId("message").focus();
  }

  #clear() {
    this.abort?.abort();
    this.messages = [];
    byId("conversation").replaceChildren();
    byId("failure").textContent = "";
    byId("message").focus();
  }
}

/** A request: an empty field leaves its parameter to the model and the server. */
function makeBody(messages) {
  const system = byId("system").value;
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("model").value) body.model = byId("model").value;
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (byId(name).value) body[name] = Number(byId(name).value);
  }
  if (byId("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  return body;
}

function describeUsage(usage, elapsedMs) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const seconds = (elapsedMs / 1000).toFixed(1);
  return `${usage.prompt_tokens} prompt tokens (${cached} cached), ${usage.completion_tokens} tokens in ${seconds} s`;
}

async function showModels() {
  const { data } = await (await request("v1/models")).json();
  byId("model-name").textContent = data[0].id;
  byId("model").replaceChildren(...data.map(({ id }) => element("option", {}, id)));
  byId("model-field").hidden = data.length < 2;
}

// The cell.

/** The states of the last two minutes, of one run of the scheduler. */
class Samples {
  constructor() {
    this.states = [];
  }

  add(state) {
    const at = Date.parse(state.time);
    if (this.last?.instanceId !== state.instanceId) this.states = [];
    // Pages share an answer, so one may come twice.
    if (at === this.last?.at) return;
    this.states.push({ ...state, at, ranks: new Map(state.rankSteps.map((rank) => [rank.dpRank, rank])) });
    while (this.states[0].at < at - WINDOW_MS) this.states.shift();
  }

  get last() {
    return this.states.at(-1);
  }

  /** For each interval between two states, from when to when it lasted and what `measure` says of its ends. */
  intervals(measure) {
    const end = this.last.at;
    const place = (at) => CHART_WIDTH * (1 - (end - at) / WINDOW_MS);
    return this.states.slice(1).map((state, index) => {
      const before = this.states[index];
      return { from: place(before.at), to: place(state.at), value: measure(before, state, (state.at - before.at) / 1000) };
    });
  }
}

/** How much a counter rose each second; 0 where a rank was not there before. */
function rate(before, after, field, seconds) {
  return before && after ? Math.max(0, Number(after[field]) - Number(before[field])) / seconds : 0;
}

/** The path of a band of steps, from `low` to `high` of each interval, of which `top` fills the chart. */
function bandPath(intervals, top, low, high) {
  const y = (value) => (CHART_HEIGHT * (1 - value / top)).toFixed(2);
  return intervals
    .filter(({ value }) => high(value) > low(value))
    .map(({ from, to, value }) => {
      return `M${from.toFixed(2)} ${y(low(value))}V${y(high(value))}H${to.toFixed(2)}V${y(low(value))}Z`;
    })
    .join("");
}

/** A chart's paths, made when they are first drawn. */
function setPath(chart, kind, path) {
  let band = chart.querySelector(`path.${kind}`);
  if (!band) chart.append((band = svgElement("path", { class: kind })));
  band.setAttribute("d", path);
}

function makeChart(kind) {
  const box = `0 0 ${CHART_WIDTH} ${kind === "bar" ? 4 : CHART_HEIGHT}`;
  return svgElement("svg", { class: kind, role: "img", viewBox: box, preserveAspectRatio: "none" });
}

/** Draw parts of a whole as a bar, from the left. */
function drawBar(bar, total, parts, label) {
  let x = 0;
  for (const [kind, count] of parts) {
    const width = total ? (CHART_WIDTH * count) / total : 0;
    setPath(bar, kind, `M${x} 0h${width}v4h${-width}Z`);
    x += width;
  }
  bar.setAttribute("aria-label", label);
}

class RankView {
  constructor(number) {
    this.title = element("h4");
    this.steps = makeChart("chart");
    this.rates = element("p");
    this.blocks = makeChart("bar");
    this.blocksNote = element("p");
    this.slots = makeChart("bar");
    this.slotsNote = element("p");
    const parts = [this.title, this.steps, this.rates, this.blocksNote, this.blocks, this.slotsNote, this.slots];
    this.article = element("article", { "data-rank": number }, ...parts);
  }

  show(samples, number) {
    const rank = samples.last.ranks.get(number);
    const condition = !rank.isAttached ? "not attached" : rank.isDraining ? "draining" : "attached";
    this.title.textContent = `Rank ${number}: ${condition}, ${rank.numRunning} running, ${rank.numWaiting} waiting`;
    this.article.dataset.condition = condition;
    this.#showSteps(samples, number);
    const { numBlocks, numUsedBlocks, numCachedBlocks, numCheckpoints, numUsedCheckpoints } = rank;
    const blocks = `KV blocks: ${numUsedBlocks} used and ${numCachedBlocks} cached of ${numBlocks}`;
    this.blocksNote.textContent = blocks;
    drawBar(this.blocks, numBlocks, [["used", numUsedBlocks], ["cached", numCachedBlocks]], blocks);
    this.slots.toggleAttribute("hidden", !numCheckpoints);
    this.slotsNote.hidden = !numCheckpoints;
    this.slotsNote.textContent = `State slots: ${numUsedCheckpoints} used of ${numCheckpoints}`;
    drawBar(this.slots, numCheckpoints, [["used", numUsedCheckpoints]], this.slotsNote.textContent);
  }

  #showSteps(samples, number) {
    const intervals = samples.intervals((before, after, seconds) => {
      const [was, is] = [before.ranks.get(number), after.ranks.get(number)];
      // From 0 on: where each kind's band ends.
      const edges = [0];
      for (const field of Object.values(STEP_FIELDS)) edges.push(edges.at(-1) + rate(was, is, field, seconds));
      return { edges, isLost: !is?.isAttached };
    });
    const top = Math.max(1, ...intervals.map(({ value }) => value.edges.at(-1)));
    const now = intervals.at(-1)?.value.edges ?? [0, 0, 0, 0, 0];
    Object.keys(STEP_FIELDS).forEach((kind, index) => {
      const path = bandPath(intervals, top, ({ edges }) => edges[index], ({ edges }) => edges[index + 1]);
      setPath(this.steps, kind, path);
    });
    setPath(this.steps, "lost", bandPath(intervals, top, () => 0, ({ isLost }) => (isLost ? top : 0)));
    const rates = Object.keys(STEP_FIELDS).map((kind, index) => `${(now[index + 1] - now[index]).toFixed(0)} ${kind}`);
    this.rates.textContent = `Steps per second: ${rates.join(", ")}; at most ${top.toFixed(0)}`;
    this.steps.setAttribute("aria-label", this.rates.textContent);
  }
}

class CellView {
  constructor() {
    this.samples = new Samples();
    this.ranks = new Map();
    this.lastEvent = 0;
  }

  /** Show a state. */
  show(state) {
    if (this.samples.last?.instanceId !== state.instanceId) this.lastEvent = 0;
    this.samples.add(state);
    byId("cell-body").hidden = false;
    setText(byId("verdict"), state.ready ? "Ready." : "No worker is attached.");
    this.#showTotals();
    this.#showRanks();
    this.#showTenants(state);
    this.#showEvents(state.events);
  }

  #showTotals() {
    const { samples } = this;
    const [first, last] = [samples.states[0], samples.last];
    const intervals = samples.intervals((...ends) => rate(ends[0], ends[1], "numCompletionTokens", ends[2]));
    const now = intervals.at(-1)?.value ?? 0;
    const top = Math.max(1, ...intervals.map(({ value }) => value));
    setPath(byId("token-rate"), "decode", bandPath(intervals, top, () => 0, (value) => value));
    const note = `Tokens per second in the last two minutes: ${now.toFixed(0)} now, at most ${top.toFixed(0)}`;
    byId("token-rate").setAttribute("aria-label", note);
    byId("token-rate-note").textContent = note;
    const queried = rate(first, last, "numPrefixQueriedTokens", 1);
    const hits = rate(first, last, "numPrefixHitTokens", 1);
    const totals = {
      "tokens per second": now.toFixed(0),
      running: last.numRunning,
      waiting: last.numWaiting,
      "prefix hits": queried ? `${((100 * hits) / queried).toFixed(0)} %` : "–",
      "KV blocks used": last.numBlocks ? `${((100 * last.numUsedBlocks) / last.numBlocks).toFixed(0)} %` : "–",
      suspects: last.numSuspects,
    };
    const rows = Object.entries(totals).map(([name, value]) => {
      return element("div", {}, element("dt", {}, name), element("dd", {}, String(value)));
    });
    byId("totals").replaceChildren(...rows);
  }

  #showRanks() {
    const present = this.samples.last.ranks;
    for (const number of this.ranks.keys()) if (!present.has(number)) this.ranks.delete(number);
    for (const number of present.keys()) {
      if (!this.ranks.has(number)) this.ranks.set(number, new RankView(number));
      this.ranks.get(number).show(this.samples, number);
    }
    const articles = [...this.ranks.values()].map(({ article }) => article);
    if (articles.length !== byId("ranks").childElementCount || articles.some(({ parentNode }) => !parentNode)) {
      byId("ranks").replaceChildren(...articles);
    }
  }

  #showTenants({ tenants, numWaiting, numRunning }) {
    // Without keys the server names no tenants.
    const everybody = { name: "all clients", numWaiting, numInFlight: numWaiting + numRunning };
    const shown = (tenants.length ? tenants : [everybody]).sort((one, other) => other.numInFlight - one.numInFlight);
    const most = Math.max(1, ...shown.map(({ numInFlight }) => numInFlight));
    const rows = shown.map(({ name, numWaiting: waiting, numInFlight: all }) => {
      const bar = makeChart("bar");
      const label = `${name}: ${waiting} waiting, ${all - waiting} admitted`;
      drawBar(bar, most, [["used", all - waiting], ["prefill", waiting]], label);
      return element("li", {}, label, bar);
    });
    byId("tenants").replaceChildren(...rows);
  }

  #showEvents(events) {
    const list = byId("events");
    if (!this.lastEvent) list.replaceChildren();
    for (const event of events.filter(({ number }) => Number(number) > this.lastEvent)) {
      const time = element("time", { datetime: event.time }, new Date(event.time).toLocaleTimeString());
      list.prepend(element("li", { "data-kind": event.kind }, time, describeEvent(event)));
      this.lastEvent = Number(event.number);
    }
    while (list.childElementCount > MAX_SHOWN_EVENTS) list.lastElementChild.remove();
  }
}

function describeEvent({ kind, dpRanks, duration, numRequests, reason }) {
  const place = dpRanks.length ? `${dpRanks.length > 1 ? "ranks" : "rank"} ${dpRanks.join(", ")}: ` : "";
  const count = numRequests ? ` (${numRequests})` : "";
  const delay = duration ? ` after ${Math.round(1000 * Number.parseFloat(duration))} ms` : "";
  return `${place}${EVENT_WORDS[kind] ?? "an event of another kind"}${count}${delay}${reason ? `: ${reason}` : ""}`;
}

/** Change a live region only if its text changes: it would be read out again. */
function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// The page.

/** Resolves at the next event of a kind. */
function next(target, kind) {
  return new Promise((resolve) => target.addEventListener(kind, resolve, { once: true }));
}

/** Ask for the state each second, while the page is seen and the key, if one is needed, is an operator's. */
async function watchCell() {
  const view = new CellView();
  byId("cell").hidden = false;
  for (;;) {
    if (document.hidden) await next(document, "visibilitychange");
    if (access.needsKey === "true" && !byId("key").value) await next(byId("key"), "change");
    try {
      view.show(await (await request("lockstep/state")).json());
    } catch (error) {
      const isRefused = [401, 403].includes(error.status);
      setText(byId("verdict"), isRefused ? `Not shown: ${error.message}.` : `Trying again: ${error.message}.`);
      if (isRefused) {
        byId("cell-body").hidden = true;
        await next(byId("key"), "change");
      }
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

/** Show the models as soon as the server has them and the key, if one is needed, is known. */
async function watchModels() {
  for (;;) {
    if (access.needsKey === "true" && !byId("key").value) await next(byId("key"), "change");
    try {
      await showModels();
      byId("failure").textContent = "";
      return;
    } catch (error) {
      setText(byId("failure"), error.message);
      if (error.status === 401) await next(byId("key"), "change");
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

function keepKey() {
  byId("key-form").hidden = access.needsKey !== "true";
  byId("key-form").addEventListener("submit", (event) => event.preventDefault());
  byId("key").value = sessionStorage.getItem(KEY) ?? "";
  byId("key").addEventListener("change", () => sessionStorage.setItem(KEY, byId("key").value));
}

keepKey();
new Chat();
watchModels();
if (access.hasState === "true") watchCell();
