// What the page holds: columns of numbers and lines of text, deflated, in base64; unpacked when they are first needed.
"use strict";

const TYPES = { u1: Uint8Array, i1: Int8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };
const STREAMS = FACTS.engines.length;
const UNIT = 64; // bytes: addresses and sizes are kept in units of the alignment
const known = new Map();

async function inflated(element) {
  const text = atob(element.textContent);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function unpacked(name) {
  const element = at(name);
  const buffer = await inflated(element);
  if (element.dataset.columns === "text") return new TextDecoder().decode(buffer).split("\n");
  const found = {};
  let place = 0;
  for (const entry of element.dataset.columns.split(" ")) {
    const [column, type, length] = entry.split(":");
    found[column] = new TYPES[type](buffer, place, Number(length));
    place += found[column].byteLength;
  }
  return found;
}

function load(name) {
  if (!known.has(name)) known.set(name, unpacked(name));
  return known.get(name);
}

// The first place in [low, high) where `holds` is true; it is false before and true after.
function firstWhere(low, high, holds) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

const rangeOf = (stops, index) => [index ? stops[index - 1] : 0, stops[index]];

// The row of an event among those shown, -1 where it is not: a stream has its events step by step, op by op.
function rowOf(events, stream, step, op) {
  const [low, high] = rangeOf(events.streamStop, stream);
  const row = firstWhere(low, high, (i) => events.step[i] > step || (events.step[i] === step && events.op[i] >= op));
  return row < high && events.step[row] === step && events.op[row] === op ? row : -1;
}

async function loadStage(view, stage, memory) {
  const name = `curve-${view}-${stage}-${memory}`;
  if (!known.has(name)) {
    known.set(name, (async () => {
      const [tensors, intervals, events, names, types] = await Promise.all([
        load(`tensors-${stage}`), load(`intervals-${view}-${stage}-${memory}`), load(`events-${view}`), load(`names-${stage}`), load(`types-${stage}`),
      ]);
      const { start, end } = FACTS.views[view];
      const starts = Float64Array.from(intervals.first, (row) => (row < 0 ? start : events.start[row]));
      const ends = Float64Array.from(intervals.last, (row) => (row < 0 ? end : events.end[row]));
      return { tensors, intervals, names, types, starts, ends, curve: liveCurve(tensors, intervals, starts, ends) };
    })());
  }
  return known.get(name);
}

// Live bytes by kind after each change; at one time bytes are freed before others are taken.
function liveCurve(tensors, intervals, starts, ends) {
  const count = starts.length, kinds = FACTS.kinds.length;
  const order = Uint32Array.from({ length: 2 * count }, (_, i) => i);
  const timeOf = (i) => (i < count ? ends[i] : starts[i - count]);
  order.sort((a, b) => timeOf(a) - timeOf(b) || a - b);
  // What is live before the first change is none: intervals from before are cut at the start of what is shown.
  const times = [], totals = [], parts = [], now = new Float64Array(kinds);
  let total = 0;
  for (let at = 0; at < order.length; ) {
    const time = timeOf(order[at]);
    for (; at < order.length && timeOf(order[at]) === time; at++) {
      const i = order[at], interval = i < count ? i : i - count, tensor = intervals.tensor[interval];
      const change = (i < count ? -1 : 1) * tensors.size[tensor] * UNIT;
      now[tensors.kind[tensor]] += change;
      total += change;
    }
    times.push(time);
    totals.push(total);
    for (const bytes of now) parts.push(bytes);
  }
  return { times: Float64Array.from(times), totals: Float64Array.from(totals), parts: Float64Array.from(parts) };
}
