// The three charts, drawn on canvases. Times are seconds, places are CSS pixels.
"use strict";

const GUTTER = 92, AXIS = 22, GAP = 2;
const OP_COLOURS = {
  forward: "blue", backward: "teal", backward_input: "teal", backward_weight: "mint", recompute: "amber", send: "violet", recv: "lilac",
  store: "slate", peer_offload: "slate", donor_accept: "slate", fetch: "steel", donor_return: "steel", peer_reload: "steel",
  reduce_scatter: "red", all_reduce: "red", all_gather: "rose", update: "brown",
  add_branch: "blue", add_branch_backward: "teal", gather_rows: "olive", reduce_rows: "moss", combine_loss: "moss",
  project: "blue", backward_heads: "teal", reduce_sums: "moss", gather_keys: "olive", reduce_keys: "moss",
  attend: "blue", attend_backward: "teal", gather_heads: "olive", return_heads: "moss",
  route: "blue", forward_experts: "blue", backward_experts: "teal", dispatch: "olive", combine: "moss",
};
const opColour = (keyword) => OP_COLOURS[keyword] ?? "grey";
const opColours = () => FACTS.keywords.map((keyword) => colour(opColour(keyword)));
const kindColour = (kind) => `kind-${kind}`; // the style sheet has one of that name for each kind
const kindColours = () => FACTS.kinds.map((kind) => colour(kindColour(kind)));

// A canvas of the size it is shown at, sharp on any screen, cleared, with the time axis above.
function prepared(canvas, state, height) {
  if (height) canvas.style.height = `${height}px`;
  const width = canvas.clientWidth, tall = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(tall * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const x = (time) => GUTTER + ((time - state.from) / (state.to - state.from)) * (width - GUTTER);
  drawTimeAxis(context, state, x, width, tall);
  return { context, width, height: tall, x };
}

function drawTimeAxis(context, state, x, width, height) {
  const zero = FACTS.views[state.view].start, step = tickStep(state.to - state.from, width / 110);
  const [unit, name] = step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e-3, "ms"] : [1e-6, "us"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.textAlign = "left";
  for (let tick = Math.ceil((state.from - zero) / step); tick * step + zero <= state.to; tick++) {
    const place = Math.round(x(tick * step + zero)) + 0.5;
    context.beginPath();
    context.moveTo(place, AXIS - 6);
    context.lineTo(place, height);
    context.stroke();
    if (place < width - 60) context.fillText(`${((tick * step) / unit).toFixed(digits)} ${name}`, place + 3, AXIS / 2);
  }
}

// Which streams are shown, and where.
function lanesOf(state) {
  const found = [];
  let y = AXIS;
  const many = FACTS.stages.length > 8;
  FACTS.stages.forEach((stage, index) => {
    const first = found.length;
    stage.lanes.forEach((busy, engine) => {
      const wanted = state.lanes === "all" || engine === 0 || (state.lanes === "chosen" && index === state.stage);
      if (!busy || !wanted) return;
      const height = engine === 0 ? (many ? 13 : 24) : 12;
      found.push({ stage: index, engine, stream: index * STREAMS + engine, y, height, named: found.length === first });
      y += height + 1;
    });
    y += found.length - first > 1 ? 3 * GAP : GAP - 1;
  });
  return { lanes: found, height: y + 4 };
}

function drawTimeline(canvas, state, data) {
  const { lanes, height } = lanesOf(state);
  const chart = prepared(canvas, state, height);
  const { context, width } = chart, colours = opColours();
  for (const lane of lanes) {
    context.fillStyle = colour("lane");
    context.fillRect(GUTTER, lane.y, Math.min(width, chart.x(FACTS.views[state.view].end)) - GUTTER, lane.height);
    context.fillStyle = colour(lane.stage === state.stage ? "ink" : "soft");
    context.textAlign = "left";
    if (lane.named) context.fillText(`@${lane.stage}`, 2, lane.y + lane.height / 2);
    context.fillText(FACTS.engines[lane.engine], 32, lane.y + lane.height / 2);
  }
  context.save();
  context.beginPath();
  context.rect(GUTTER, 0, width - GUTTER, height);
  context.clip();
  let drawn = 0;
  for (const lane of lanes) drawn += drawLane(chart, state, data, lane, colours);
  if (state.path) for (const lane of lanes) drawPath(chart, state, data.path, lane);
  for (const lane of lanes) drawHits(chart, state, data.events, lane);
  drawMoment(chart, state);
  context.restore();
  canvas.dataset.drawn = drawn;
}

// Ops wider than a pixel are rectangles; narrower ones fill their pixel by how busy it is, in the colour of the largest part.
function drawLane({ context, x }, state, { events, ops, titles }, lane, colours) {
  const [low, high] = rangeOf(events.streamStop, lane.stream);
  const parts = new Float64Array(colours.length);
  let column = -1, drawn = 0;
  const flush = () => {
    if (column < 0) return;
    let most = 0, sum = 0;
    parts.forEach((part, index) => { sum += part; if (part > parts[most]) most = index; });
    context.globalAlpha = Math.min(1, 0.15 + 0.85 * sum);
    context.fillStyle = colours[most];
    context.fillRect(column, lane.y, 1, lane.height);
    context.globalAlpha = 1;
    parts.fill(0);
    column = -1;
  };
  const ink = "#10151c";
  for (let row = firstWhere(low, high, (i) => events.end[i] > state.from); row < high && events.start[row] < state.to; row++) {
    const left = x(events.start[row]), span = x(events.end[row]) - left, op = events.op[row];
    drawn++;
    if (span < 1.5) {
      if (Math.floor(left) !== column) flush();
      column = Math.floor(left);
      parts[ops.keyword[op]] += span;
      continue;
    }
    flush();
    context.globalAlpha = events.step[row] ? 0.35 : 1;
    context.fillStyle = colours[ops.keyword[op]];
    context.fillRect(left, lane.y, Math.max(1, span - (span > 4 ? 1 : 0)), lane.height);
    if (span > 26) drawLabel(context, lane, Math.max(left, GUTTER), Math.min(left + span, context.canvas.clientWidth), opLabel(ops, titles, op), ink);
    context.globalAlpha = 1;
  }
  flush();
  return drawn;
}

function opLabel(ops, titles, op) {
  const title = titles[ops.title[op]], batch = ops.microBatch[op];
  return batch < 0 ? [title] : [`${title} m${batch}`, `m${batch}`];
}

// The longest of the texts that fits.
function drawLabel(context, lane, left, right, texts, ink) {
  const fitting = texts.find((text) => context.measureText(text).width < right - left - 6);
  if (!fitting) return;
  context.fillStyle = ink;
  context.textAlign = "left";
  context.fillText(fitting, left + 3, lane.y + lane.height / 2 + 0.5);
}

// A bar over every op that a search found, a frame around the one that is chosen.
function drawHits({ context, x }, state, events, lane) {
  const chosen = state.chosen?.stage === lane.stage ? state.chosen.op : undefined;
  if (!found.ops.size && chosen === undefined) return;
  const [low, high] = rangeOf(events.streamStop, lane.stream);
  let covered = -1;
  for (let row = firstWhere(low, high, (i) => events.end[i] > state.from); row < high && events.start[row] < state.to; row++) {
    if (events.step[row] || !(found.ops.has(events.op[row]) || events.op[row] === chosen)) continue;
    const left = x(events.start[row]), span = Math.max(1.5, x(events.end[row]) - left);
    if (events.op[row] === chosen) frame(context, left, lane.y, span, lane.height);
    if (left + span < covered + 1) continue;
    context.fillStyle = colour("ink");
    context.fillRect(left, lane.y, span, 3);
    covered = left + span;
  }
}

function frame(context, left, top, width, height) {
  context.strokeStyle = colour("alarm");
  context.lineWidth = 2;
  context.strokeRect(left - 1, top, Math.max(4, width + 1), Math.max(4, height));
  context.lineWidth = 1;
}

// The moment that is chosen.
function drawMoment({ context, x, height }, state) {
  if (state.time === null || state.time < state.from || state.time > state.to) return;
  context.strokeStyle = colour("alarm");
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(x(state.time), AXIS - 6);
  context.lineTo(x(state.time), height);
  context.stroke();
  context.setLineDash([]);
}

function drawPath({ context, x }, state, path, lane) {
  context.fillStyle = colour("alarm");
  for (let i = 0; i < path.stream.length; i++) {
    if (path.stream[i] !== lane.stream || path.end[i] < state.from || path.start[i] > state.to) continue;
    const left = x(path.start[i]);
    context.fillRect(left, lane.y + lane.height - 3, Math.max(1, x(path.end[i]) - left), 3);
  }
}

function byteAxis({ context, width, height }, low, high, y) {
  const [unit, name] = high - low >= 2 ** 29 ? [2 ** 30, "GiB"] : high - low >= 2 ** 19 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  const step = tickStep((high - low) / unit, 8);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  context.textAlign = "right";
  for (let tick = Math.ceil(low / unit / step); tick * step * unit <= high; tick++) {
    const place = Math.round(y(tick * step * unit)) + 0.5;
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(GUTTER, place);
    context.lineTo(width, place);
    context.stroke();
    context.fillStyle = colour("soft");
    context.fillText(`${(tick * step).toFixed(digits)} ${name}`, GUTTER - 6, Math.min(Math.max(place, AXIS + 6), height - 7));
  }
}

const mapY = (state, height) => (address) => height - ((address - state.low) / (state.high - state.low)) * (height - AXIS);

function drawMap(canvas, state, { tensors, intervals, names, starts, ends }) {
  const chart = prepared(canvas, state), { context, width, height, x } = chart, y = mapY(state, height);
  byteAxis(chart, state.low, state.high, y);
  context.save();
  context.beginPath();
  context.rect(GUTTER, AXIS, width - GUTTER, height - AXIS);
  context.clip();
  const colours = kindColours(), labelled = [], framed = [];
  let drawn = 0;
  for (let kind = 0; kind < colours.length; kind++) {
    context.fillStyle = colours[kind];
    for (let i = 0; i < starts.length; i++) {
      const tensor = intervals.tensor[i];
      if (tensors.kind[tensor] !== kind || ends[i] < state.from || starts[i] > state.to) continue;
      const top = (tensors.offset[tensor] + tensors.size[tensor]) * UNIT, bottom = tensors.offset[tensor] * UNIT;
      if (top < state.low || bottom > state.high) continue;
      const left = x(starts[i]), span = Math.max(0.6, x(ends[i]) - left), above = y(top), tall = Math.max(0.6, y(bottom) - above);
      const border = span > 4 && tall > 3 ? 0.7 : 0;
      context.fillRect(left, above, span - border, tall - border);
      drawn++;
      if (state.chosen?.tensor === tensor && state.chosen.stage === state.stage) framed.push([left, above, span, tall, true]);
      else if (span > 4 && tall > 6 && found.tensors.has(`${state.stage} ${tensor}`)) framed.push([left, above, span, tall, false]);
      if (span > 60 && tall > 13) labelled.push([{ y: above, height: tall }, Math.max(left, GUTTER), Math.min(left + span, width), [names[tensor]]]);
    }
  }
  for (const label of labelled) drawLabel(context, ...label, "#10151c");
  context.strokeStyle = colour("ink");
  for (const [left, above, span, tall, chosen] of framed) if (!chosen) context.strokeRect(left + 0.5, above + 0.5, Math.max(1, span - 1), Math.max(1, tall - 1));
  for (const [left, above, span, tall, chosen] of framed) if (chosen) frame(context, left, above, span, tall);
  drawMoment(chart, state);
  context.restore();
  canvas.dataset.drawn = drawn;
}

function drawCurve(canvas, state, { curve }) {
  const chart = prepared(canvas, state), { context, width, height } = chart;
  const { times, totals, parts } = curve, { arena, capacity, top } = memoryOf(state), kinds = FACTS.kinds.length;
  const most = (top ?? Math.max(arena, capacity < 1.5 * arena ? capacity : 0)) * 1.06;
  const y = (bytes) => height - (bytes / most) * (height - AXIS);
  byteAxis(chart, 0, most, y);
  const colours = kindColours(), timeAt = (place) => state.from + ((place - GUTTER) / (width - GUTTER)) * (state.to - state.from);
  let next = firstWhere(0, times.length, (i) => times[i] > state.from);
  for (let place = GUTTER; place < width; place++) {
    // Of all moments of a pixel the fullest one is drawn, so that no peak is lost.
    let best = Math.max(0, next - 1);
    for (const until = timeAt(place + 1); next < times.length && times[next] <= until; next++) if (totals[next] > totals[best]) best = next;
    let reached = 0;
    for (let kind = 0; kind < kinds; kind++) {
      const bytes = parts[best * kinds + kind];
      if (bytes <= 0) continue;
      context.fillStyle = colours[kind];
      context.fillRect(place, y(reached + bytes), 1, y(reached) - y(reached + bytes));
      reached += bytes;
    }
  }
  drawLimit(chart, y(arena), "arena", colour("ink"), arena < capacity * 0.94 || capacity < arena ? -7 : 9);
  drawMoment(chart, state);
  if (capacity <= most) drawLimit(chart, y(capacity), "capacity", colour("alarm"), -7);
}

function drawLimit({ context, width }, place, text, ink, aside) {
  context.strokeStyle = context.fillStyle = ink;
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(GUTTER, place);
  context.lineTo(width, place);
  context.stroke();
  context.setLineDash([]);
  context.textAlign = "right";
  context.fillText(text, width - 6, place + aside);
}
