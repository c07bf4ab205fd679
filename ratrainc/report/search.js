// Search for ops and tensors by name, and what is chosen: an op or a tensor of a stage, which the charts mark.
"use strict";

const LISTED = 200; // of the matches; all of them are marked and stepped through
let found = { text: "", hits: [], ops: new Set(), tensors: new Set(), at: -1 };
let asked = 0;

// The words of a query: @2 is a stage, m7 a micro-batch, %x a tensor's name; any other is part of a name. All of them must hold.
function queryOf(text) {
  const query = { stage: null, batch: null, tensors: false, parts: [] };
  for (const word of text.toLowerCase().split(/\s+/).filter(Boolean)) {
    if (/^@\d+$/.test(word)) query.stage = Number(word.slice(1));
    else if (/^m\d+$/.test(word)) query.batch = Number(word.slice(1));
    else if (word.startsWith("%")) { query.tensors = true; query.parts.push(word.slice(1)); }
    else query.parts.push(word);
  }
  return query;
}

// Titles are looked through once each, and not once an op. Events are kept stream by stream: matches come in the order of time.
function matchingOps({ stage, batch, tensors, parts }) {
  if (tensors) return [];
  const { ops, titles, events } = shown;
  const fits = titles.map((title) => parts.every((part) => title.toLowerCase().includes(part)));
  const rows = [];
  for (let stream = 0; stream < events.streamStop.length; stream++) {
    const place = Math.floor(stream / STREAMS), [low, high] = rangeOf(events.streamStop, stream);
    if (stage !== null && stage !== place) continue;
    for (let row = low; row < high; row++) {
      const op = events.op[row];
      if (events.step[row] === 0 && fits[ops.title[op]] && (batch === null || ops.microBatch[op] === batch)) rows.push({ op, row, stage: place });
    }
  }
  return rows.sort((a, b) => events.start[a.row] - events.start[b.row]);
}

// A tensor's name says its micro-batch at a dot: x.mlp.0.m3. One that begins with m1 is a moment.
async function matchingTensors({ stage, batch, parts }) {
  const stages = stage === null ? FACTS.stages.map((_, index) => index) : [stage].filter((index) => index < FACTS.stages.length);
  const own = new RegExp(`\\.m${batch}(?![0-9])`), hits = [];
  for (const [place, names] of await Promise.all(stages.map(async (index) => [index, await load(`names-${index}`)]))) {
    names.forEach((name, tensor) => {
      const low = name.toLowerCase();
      if (name && parts.every((part) => low.includes(part)) && (batch === null || own.test(low))) hits.push({ tensor, name, stage: place });
    });
  }
  return hits;
}

// How well a name fits: 0 it is what was typed, 1 and 2 it begins with that, 3 and 4 it has that elsewhere. The lower of the two
// is for names that have it as whole words: w.mlp.1 has mlp.1 as words, w.mlp.10 has not.
function rankOf(name, parts) {
  const low = name.toLowerCase(), wanted = parts.join(" ");
  if (low === wanted) return 0;
  const edge = (letter) => letter === undefined || " .+".includes(letter);
  const whole = parts.every((part) => {
    for (let at = low.indexOf(part); at >= 0; at = low.indexOf(part, at + 1)) if (edge(low[at - 1]) && edge(low[at + part.length])) return true;
    return false;
  });
  return (low.startsWith(wanted) ? 1 : 3) + (whole ? 0 : 1);
}

// The best first; those that fit equally well stay in their order: ops by time, then tensors by stage and number.
function ranked(hits, { parts, batch }) {
  if (!parts.length) return hits;
  const ranks = new Map(), own = new RegExp(`\\.m${batch}(?![0-9])`);
  const nameOf = ({ op, name }) => (op === undefined ? (batch === null ? name : name.replace(own, "")) : shown.titles[shown.ops.title[op]]);
  const rank = (name) => {
    if (!ranks.has(name)) ranks.set(name, rankOf(name, parts));
    return ranks.get(name);
  };
  return hits.map((hit) => [hit.name?.toLowerCase() === parts.join(" ") ? 0 : rank(nameOf(hit)), hit]).sort((a, b) => a[0] - b[0]).map(([, hit]) => hit);
}

async function search(text) {
  const turn = ++asked, query = queryOf(text), empty = !text.trim();
  const hits = empty ? [] : ranked([...matchingOps(query), ...(await matchingTensors(query))], query);
  if (turn !== asked) return; // more was typed meanwhile
  found = { text, hits, at: -1, ops: new Set(hits.filter((hit) => hit.op !== undefined).map((hit) => hit.op)),
    tensors: new Set(hits.filter((hit) => hit.tensor !== undefined).map((hit) => `${hit.stage} ${hit.tensor}`)) };
  listMatches();
  later();
  for (const peer of PEERS) peer.follow(text);
}

const hitText = (hit) => `@${hit.stage} ${hit.op === undefined ? `%${hit.name}` : opLabel(shown.ops, shown.titles, hit.op)[0]}`;

function listMatches() {
  const { hits, text } = found, list = at("matches");
  list.hidden = !hits.length;
  list.replaceChildren(...hits.slice(0, LISTED).map((hit, index) => {
    const item = document.createElement("li");
    item.textContent = hitText(hit);
    item.addEventListener("click", () => goTo(index));
    return item;
  }));
  tellPlace();
  if (!text.trim()) at("count").textContent = "";
}

function tellPlace() {
  const { hits, at: place } = found, more = hits.length > LISTED ? `, ${LISTED} listed` : "";
  at("count").textContent = hits.length ? `${place < 0 ? "" : `${place + 1} of `}${hits.length.toLocaleString("en")}${more}` : "no match";
  [...at("matches").children].forEach((item, index) => item.classList.toggle("chosen", index === place));
  at("matches").children[place]?.scrollIntoView({ block: "nearest" });
}

function goTo(index) {
  const { hits } = found;
  if (!hits.length) return Promise.resolve();
  found.at = (index + hits.length) % hits.length;
  tellPlace();
  return choose(hits[found.at]);
}

// Choose an op or a tensor, and show it in the middle.
async function choose(hit) {
  state.chosen = hit;
  state.time = null;
  if (hit.stage !== state.stage) wholeAddresses(hit.stage);
  if (hit.tensor !== undefined) {
    for (const { name } of FACTS.stages[hit.stage].memories) {
      const intervals = await load(`intervals-${state.view}-${hit.stage}-${name}`);
      if (!intervals.tensor.includes(hit.tensor)) continue;
      if (name !== memoryOf(state).name) { state.memory = name; wholeAddresses(hit.stage); }
      break;
    }
  } else if (state.lanes === "compute" && laneEngine(hit.op) > 0) state.lanes = "chosen";
  await refresh();
  const span = spanOf(hit);
  if (span) centre(...span);
  later();
}

function wholeAddresses(stage) {
  Object.assign(state, { stage, asked: undefined });
  Object.assign(state, { low: 0, high: topOf(state) });
}

function laneEngine(op) {
  const stream = shown.events.streamStop.findIndex((_, index) => rowOf(shown.events, index, 0, op) >= 0);
  return stream < 0 ? 0 : stream % STREAMS;
}

// When something chosen starts and ends, null where it has no place in the step.
function spanOf({ op, stage, tensor }) {
  const { events, held } = shown;
  if (op !== undefined) {
    for (let stream = stage * STREAMS; stream < (stage + 1) * STREAMS; stream++) {
      const row = rowOf(events, stream, 0, op);
      if (row >= 0) return [events.start[row], events.end[row]];
    }
    return null;
  }
  const place = held.intervals.tensor.indexOf(tensor);
  return place < 0 ? null : [held.starts[place], held.ends[place]];
}

// The range is kept where that shows it well, else it becomes ten times as long as what is shown.
function centre(start, end) {
  const middle = (start + end) / 2, span = state.to - state.from, long = end - start;
  const wanted = long > span * 0.9 || long < span / 200 ? Math.max(long * 10, 1e-9) : span;
  setRange(middle - wanted / 2, middle + wanted / 2);
}

// The words of an address for what is chosen; of ops of one name in a stage the place among them is said too.
function chosenWords({ op, name, stage, tensor }) {
  if (tensor !== undefined) return { tensor: name };
  const title = opLabel(shown.ops, shown.titles, op)[0], alike = opsNamed(stage, title);
  return alike.length > 1 ? { op: title, nth: alike.indexOf(op) + 1 } : { op: title };
}

function opsNamed(stage, title) {
  const { ops, titles, events } = shown, named = [];
  const [low] = rangeOf(events.streamStop, stage * STREAMS), [, high] = rangeOf(events.streamStop, (stage + 1) * STREAMS - 1);
  for (let row = low; row < high; row++) if (events.step[row] === 0 && opLabel(ops, titles, events.op[row])[0] === title) named.push(events.op[row]);
  return named;
}

// What a stage has by the words of an address, null where it has no such thing.
async function hitNamed(stage, { tensor, op, nth }) {
  if (tensor !== undefined) {
    const place = (await load(`names-${stage}`)).indexOf(tensor);
    return place < 0 ? null : { tensor: place, name: tensor, stage };
  }
  const number = opsNamed(stage, op)[Math.max(0, Number(nth ?? 1) - 1)];
  return number === undefined ? null : { op: number, stage };
}

const absent = (stage, { tensor, op }) => `stage @${stage} has no ${tensor === undefined ? `op ${op}` : `tensor %${tensor}`}`;

// What an address chooses; a name that the stage does not have is said.
async function chooseFrom(given) {
  const { tensor, op, nth } = Object.fromEntries(given), stage = state.stage;
  if (tensor === undefined && op === undefined) return;
  const hit = await hitNamed(stage, { tensor, op, nth });
  if (!hit) { at("count").textContent = absent(stage, { tensor, op }); return; }
  const range = given.has("from") ? [state.from, state.to] : null, time = state.time, { low, high, memory } = state;
  await choose(hit);
  if (range) setRange(...range);
  if (given.has("bytes") && memory === state.memory) Object.assign(state, { low, high });
  state.time = time;
  later();
}

function listenSearch() {
  const box = at("search");
  let waiting = 0;
  box.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => search(box.value).catch(complain), 120); });
  box.addEventListener("keydown", (event) => {
    const by = { Enter: event.shiftKey ? -1 : 1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") { box.value = ""; search("").catch(complain); }
    if (by === undefined) return;
    event.preventDefault();
    const stepped = () => goTo(found.at < 0 && by < 0 ? -1 : found.at + by);
    clearTimeout(waiting);
    (box.value === found.text ? stepped() : search(box.value).then(stepped)).catch(complain);
  });
}
