// What is shown, and what the reader does about it. The address of the page keeps the choice, as #stage=3&from=0.1&to=0.2&op=forward+block.1+m0.
"use strict";

const MEMORIES = [...new Set(FACTS.stages.flatMap(({ memories }) => memories.map(({ name }) => name)))];
const MEMORY_WORDS = { ddr: "DDR", host: "Host memory", file: "File" };
const state = { view: "steady", stage: 0, memory: "ddr", lanes: FACTS.stages.length > 8 ? "chosen" : "all", path: false, chosen: null, time: null, from: 0, to: 1, low: 0, high: 1 };
// What a stage has of the chosen memory; of one that it has nothing in, of that in which it computes.
const memoryOf = ({ stage, memory }) => FACTS.stages[stage].memories.find(({ name }) => name === memory) ?? FACTS.stages[stage].memories[0];
// Where the axes of a view and a memory end: two reports that are compared have them in common.
const endOf = (view) => FACTS.views[view].start + (FACTS.seconds?.[view] ?? FACTS.views[view].end - FACTS.views[view].start);
const topOf = (choice) => Math.max(1, memoryOf(choice).most ?? memoryOf(choice).arena);
let shown = null; // the unpacked data of the step and the stage that are drawn

function wholeStep() {
  const { start } = FACTS.views[state.view], end = endOf(state.view);
  Object.assign(state, { from: start, to: end > start ? end : start + 1, low: 0, high: topOf(state) });
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("view") in FACTS.views) state.view = given.get("view");
  const stage = Number(given.get("stage"));
  if (Number.isInteger(stage) && stage >= 0 && stage < FACTS.stages.length) state.stage = stage;
  if (MEMORIES.includes(given.get("memory"))) state.memory = given.get("memory");
  if (["chosen", "compute", "all"].includes(given.get("lanes"))) state.lanes = given.get("lanes");
  state.path = given.get("path") === "1";
  wholeStep();
  const zero = FACTS.views[state.view].start, from = Number(given.get("from") ?? NaN), to = Number(given.get("to") ?? NaN);
  if (to > from) setRange(zero + from, zero + to);
  const time = Number(given.get("time") ?? NaN), [, low, high] = /^(\w+)-(\w+)$/.exec(given.get("bytes") ?? "") ?? [];
  state.chosen = null;
  state.time = Number.isFinite(time) ? zero + time : null;
  if (state.time !== null && (state.time < state.from || state.time > state.to)) setRange(state.time - (state.to - state.from) / 2, state.time + (state.to - state.from) / 2);
  if (Number(low) >= 0 && Number(high) - Number(low) >= UNIT) Object.assign(state, { low: Number(low), high: Math.min(Number(high), Math.max(UNIT, topOf(state))) });
}

// What the address says: the range at once, what it chooses when the stage is unpacked.
async function openAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  readAddress();
  await refresh();
  await chooseFrom(given);
}

function writeAddress() {
  const { start } = FACTS.views[state.view], end = endOf(state.view), words = { view: state.view, stage: state.stage, lanes: state.lanes };
  if (MEMORIES.length > 1) words.memory = state.memory;
  if (state.path) words.path = 1;
  if (state.from > start || state.to < end) Object.assign(words, { from: state.from - start, to: state.to - start });
  if (state.low > 0 || state.high < topOf(state)) words.bytes = `0x${Math.round(state.low).toString(16)}-0x${Math.round(state.high).toString(16)}`;
  if (state.time !== null) words.time = state.time - start;
  if (state.chosen?.stage === state.stage) Object.assign(words, chosenWords(state.chosen));
  history.replaceState(null, "", `#${new URLSearchParams(words)}`);
}

function setRange(from, to) {
  const { start } = FACTS.views[state.view], end = endOf(state.view), least = Math.max((end - start) * 1e-7, 1e-9);
  const span = Math.min(Math.max(to - from, least), end - start || 1);
  state.from = Math.min(Math.max(from, start), Math.max(start, end - span));
  state.to = state.from + span;
}

async function refresh() {
  const { view, stage } = state, memory = memoryOf(state).name;
  const [ops, titles, waits, works, events, idle, path, held] = await Promise.all([
    load("ops"), load("titles"), load("waits"), load("works"), load(`events-${view}`), load(`idle-${view}`), load(`path-${view}`), loadStage(view, stage, memory),
  ]);
  if (view !== state.view || stage !== state.stage || memory !== memoryOf(state).name) return; // another choice was made meanwhile
  shown = { ops, titles, waits, works, events, idle, path, held };
  draw();
}

function draw() {
  if (!shown) return;
  at("view").value = state.view;
  at("stage").value = state.asked ?? state.stage;
  at("memory").value = PEERS.length ? state.memory : memoryOf(state).name;
  at("lanes").value = state.lanes;
  at("path").checked = state.path;
  const zero = FACTS.views[state.view].start;
  at("range").textContent = `${secondsText(state.from - zero)} to ${secondsText(state.to - zero)}`;
  for (const name of at("charts").querySelectorAll(".stage-name")) name.textContent = `@${state.stage}`;
  const { name: memory, arena, capacity } = memoryOf(state);
  for (const name of at("charts").querySelectorAll(".memory-name")) name.textContent = MEMORY_WORDS[memory];
  const listed = memory === "ddr" ? `, ${bytesText(FACTS.stages[state.stage].peakLive)} in list order` : "";
  const peak = shown.held.curve.totals.reduce((a, b) => Math.max(a, b), 0);
  at("peaks").textContent =
    `(peak ${bytesText(peak)} in simulated time${listed}; arena ${bytesText(arena)}, capacity ${bytesText(capacity)})`;
  drawTimeline(at("timeline"), state, shown);
  drawMap(at("map"), state, shown.held);
  drawCurve(at("curve"), state, shown.held);
  const root = (PREFIX ? at("charts") : document.documentElement).dataset;
  Object.assign(root, { peak, intervals: shown.held.starts.length, events: shown.events.op.length });
  root.paintedMs ??= performance.now().toFixed(0);
  if (!PEERS.length) writeAddress();
  else tellPeers();
}

let waiting = 0;
const later = () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); };

// Hover ------------------------------------------------------------------------------------------------------------------------

function opName(op, step) {
  const name = opLabel(shown.ops, shown.titles, op)[0];
  return step === 0 ? name : `${name} (${step < 0 ? "the step before" : "the next step"})`;
}

const doneText = (before) => (before === 0 ? ", done when this starts" : `, done ${secondsText(before)} before`);

function opLines(row, lane) {
  const { ops, events, works, waits } = shown, op = events.op[row], step = events.step[row], start = events.start[row];
  const zero = FACTS.views[state.view].start, work = ops.work[op];
  const lines = [
    opName(op, step),
    `stage @${lane.stage}, ${FACTS.engines[lane.engine]} engine` + (ops.microBatch[op] < 0 ? "" : `, micro-batch ${ops.microBatch[op]}`),
    `${secondsText(start - zero)} to ${secondsText(events.end[row] - zero)}: ${secondsText(events.end[row] - start)}, alone ${secondsText(works.seconds[work])}`,
    `DDR ${bytesText(works.ddr_bytes[work])}, link ${bytesText(works.link_bytes[work])}`,
  ];
  const [low, high] = rangeOf(ops.waitStop, op);
  if (low === high) lines.push("waits for nothing but its engine");
  for (let wait = low; wait < high; wait++) {
    const awaited = waits.awaited[wait], engine = lane.stage * STREAMS, from = step - waits.previous[wait];
    const place = Array.from({ length: STREAMS }, (_, i) => rowOf(shown.events, engine + i, from, awaited)).find((found) => found >= 0);
    lines.push(`waits for ${opName(awaited, from)}` + (place === undefined ? "" : doneText(start - events.end[place])));
  }
  return lines;
}

// The row of what a lane does at a time, -1 where it is idle.
function eventAt(lane, time) {
  const { events } = shown, [low, high] = rangeOf(events.streamStop, lane.stream);
  const row = firstWhere(low, high, (i) => events.end[i] > time);
  return row < high && events.start[row] <= time ? row : -1;
}

function timelineLines(x, y, time) {
  const lane = lanesOf(state).lanes.find((each) => y >= each.y && y < each.y + each.height);
  if (!lane) return null;
  const { idle } = shown, zero = FACTS.views[state.view].start, row = eventAt(lane, time);
  if (row >= 0) return opLines(row, lane);
  const [first, stop] = rangeOf(idle.streamStop, lane.stream);
  const piece = firstWhere(first, stop, (i) => idle.end[i] > time);
  if (piece === stop || idle.start[piece] > time) return null;
  const cause = FACTS.causes[idle.cause[piece]], other = idle.stage[piece];
  return [
    `idle: ${cause}`,
    `stage @${lane.stage}, ${FACTS.engines[lane.engine]} engine` + (other >= 0 && other !== lane.stage ? `, waits for stage @${other}` : ""),
    `${secondsText(idle.start[piece] - zero)} to ${secondsText(idle.end[piece] - zero)}: ${secondsText(idle.end[piece] - idle.start[piece])}`,
  ];
}

// The live interval at a place of the map, -1 where there is none.
function intervalAt(y, time) {
  const { tensors, intervals, starts, ends } = shown.held, height = at("map").clientHeight;
  const address = state.low + ((height - y) / (height - AXIS)) * (state.high - state.low);
  return starts.findIndex((start, i) => {
    const bottom = tensors.offset[intervals.tensor[i]] * UNIT;
    return time >= start && time <= ends[i] && address >= bottom && address < bottom + tensors.size[intervals.tensor[i]] * UNIT;
  });
}

function mapLines(x, y, time) {
  const { tensors, intervals, starts, ends, names, types } = shown.held, { events } = shown, zero = FACTS.views[state.view].start, i = intervalAt(y, time);
  if (i < 0) return null;
  const tensor = intervals.tensor[i], bottom = tensors.offset[tensor] * UNIT, size = tensors.size[tensor] * UNIT;
  const first = intervals.first[i], last = intervals.last[i];
  return [
    `%${names[tensor]}`,
    `${FACTS.kinds[tensors.kind[tensor]]}${tensors.carried[tensor] ? ", carried" : ""}, ${types[tensors.type[tensor]]}, ${bytesText(size)} at 0x${bottom.toString(16)}`,
    first < 0 ? "live from before" : `from ${secondsText(starts[i] - zero)}, ${opName(events.op[first], events.step[first])}`,
    last < 0 ? "live until after" : `to ${secondsText(ends[i] - zero)}, ${opName(events.op[last], events.step[last])}`,
  ];
}

function curveLines(x, y, time) {
  const { times, totals, parts } = shown.held.curve, kinds = FACTS.kinds.length;
  const place = firstWhere(0, times.length, (i) => times[i] > time) - 1;
  if (place < 0) return null;
  const held = FACTS.kinds.map((kind, index) => [parts[place * kinds + index], kind]).filter(([bytes]) => bytes > 0);
  return [`${bytesText(totals[place])} live`, ...held.sort((a, b) => b[0] - a[0]).map(([bytes, kind]) => `${kind} ${bytesText(bytes)}`)];
}

// Zoom -------------------------------------------------------------------------------------------------------------------------

function zoomed(factor, centre = (state.from + state.to) / 2) {
  setRange(centre - (centre - state.from) * factor, centre + (state.to - centre) * factor);
  later();
}

function moved(share) {
  const by = share * (state.to - state.from);
  setRange(state.from + by, state.to + by);
  later();
}

function listen(canvas, linesAt) {
  const placeOf = (event) => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left;
    return { x, y: event.clientY - box.top, time: state.from + ((x - GUTTER) / (box.width - GUTTER)) * (state.to - state.from) };
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && shown) { drag = placeOf(event); canvas.setPointerCapture?.(event.pointerId); }
  });
  canvas.addEventListener("pointermove", (event) => {
    const place = placeOf(event);
    if (!shown) return;
    if (!drag) return showTip(event, place.x < GUTTER ? null : linesAt(place.x, place.y, place.time));
    showTip(event, null);
    draw();
    const context = canvas.getContext("2d");
    context.fillStyle = "#7f7f7f55";
    if (canvas === at("map")) context.fillRect(drag.x, drag.y, place.x - drag.x, place.y - drag.y);
    else context.fillRect(drag.x, AXIS, place.x - drag.x, canvas.clientHeight);
  });
  canvas.addEventListener("pointerup", (event) => {
    const place = placeOf(event), begin = drag;
    drag = null;
    if (!begin) return;
    if (Math.abs(place.x - begin.x) > 4) {
      setRange(Math.min(begin.time, place.time), Math.max(begin.time, place.time));
      if (canvas === at("map") && Math.abs(place.y - begin.y) > 4) zoomAddresses(begin.y, place.y, canvas.clientHeight);
    } else if (place.x >= GUTTER || canvas === at("timeline")) pick(canvas, place);
    later();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; later(); });
  canvas.addEventListener("pointerleave", (event) => { if (!drag) showTip(event, null); });
  canvas.addEventListener("dblclick", () => { wholeStep(); later(); });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
    event.preventDefault();
    const turned = event.deltaY || event.deltaX;
    if (event.shiftKey) moved(Math.sign(turned) * 0.1);
    else zoomed(turned > 0 ? 1.25 : 0.8, placeOf(event).time);
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const actions = { "+": () => zoomed(0.5), "=": () => zoomed(0.5), "-": () => zoomed(2), ArrowLeft: () => moved(-0.2), ArrowRight: () => moved(0.2), 0: () => { wholeStep(); later(); } };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  });
}

// A click chooses the moment and what is there; on a lane its stage too.
function pick(canvas, { x, y, time }) {
  const lane = canvas === at("timeline") ? lanesOf(state).lanes.find((each) => y >= each.y && y < each.y + each.height) : null;
  if (x >= GUTTER) {
    const row = lane ? eventAt(lane, time) : -1, place = canvas === at("map") ? intervalAt(y, time) : -1;
    Object.assign(state, { time, chosen: null });
    if (row >= 0 && shown.events.step[row] === 0) state.chosen = { op: shown.events.op[row], stage: lane.stage };
    if (place >= 0) state.chosen = { tensor: shown.held.intervals.tensor[place], name: shown.held.names[shown.held.intervals.tensor[place]], stage: state.stage };
  }
  if (lane && lane.stage !== state.stage) chooseStage(lane.stage);
}

function zoomAddresses(one, other, height) {
  const address = (y) => state.low + ((height - Math.max(y, AXIS)) / (height - AXIS)) * (state.high - state.low);
  const low = Math.max(0, address(Math.max(one, other))), high = address(Math.min(one, other));
  if (high - low >= UNIT) Object.assign(state, { low, high });
}

function chooseStage(stage) {
  if (stage >= FACTS.stages.length) return Promise.resolve(); // of the other report
  wholeAddresses(stage);
  return refresh().catch(complain);
}

function chooseMemory(memory) {
  state.memory = memory;
  return chooseStage(state.stage);
}

// Start ------------------------------------------------------------------------------------------------------------------------

function complain(error) {
  at("problem").hidden = false;
  at("problem").textContent = `The charts cannot be drawn by this browser (${error}). The tables below hold the figures.`;
}

function legend(list, names, colourOf) {
  for (const name of names) {
    const item = document.createElement("li"), mark = document.createElement("i");
    mark.style.background = `var(--${colourOf(name)})`;
    item.append(mark, name.replaceAll("_", " "));
    list.append(item);
  }
}

// Add what a choice does not have yet: reports that are compared share it.
function offer(choice, options) {
  const known = new Set([...choice.options].map(({ value }) => value));
  for (const [text, value] of options) if (!known.has(value)) choice.append(new Option(text, value));
}

function start() {
  offer(at("stage"), FACTS.stages.map((_, index) => [`@${index}`, String(index)]));
  offer(at("memory"), MEMORIES.map((memory) => [MEMORY_WORDS[memory], memory]));
  at("memory-choice").hidden = at("memory").options.length === 1;
  legend(at("op-legend"), FACTS.keywords, opColour);
  legend(at("kind-legend"), FACTS.held, kindColour);
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  at("view").addEventListener("change", () => { state.view = at("view").value; wholeStep(); refresh().catch(complain); });
  at("stage").addEventListener("change", () => chooseStage(Number(at("stage").value)));
  at("memory").addEventListener("change", () => chooseMemory(at("memory").value));
  at("lanes").addEventListener("change", () => { state.lanes = at("lanes").value; later(); });
  at("path").addEventListener("change", () => { state.path = at("path").checked; later(); });
  at("in").addEventListener("click", () => zoomed(0.5));
  at("out").addEventListener("click", () => zoomed(2));
  at("left").addEventListener("click", () => moved(-0.2));
  at("right").addEventListener("click", () => moved(0.2));
  at("whole").addEventListener("click", () => { wholeStep(); later(); });
  at("link").addEventListener("click", copyLink);
  for (const kind of ["svg", "png"]) at(kind).addEventListener("click", () => savePicture(kind).catch(complain));
  listenSearch();
  listen(at("timeline"), timelineLines);
  listen(at("map"), mapLines);
  listen(at("curve"), curveLines);
  window.addEventListener("resize", later);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  window.addEventListener("hashchange", () => { openAddress().catch(complain); });
  return openAddress().catch(complain);
}

const started = start();
