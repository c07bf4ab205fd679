// Charts of runs as SVG. The address of the page keeps the steps that are shown, the smoothing and the kind of axis, so that they
// stay when it is loaded again; the entry of the history keeps the focus.
"use strict";

const HUES = ["blue", "red", "teal", "amber", "violet", "brown", "olive", "rose"];
const LEFT = 64, BELOW = 20, TOP = 6, HEIGHT = 230;
const range = { from: 0, to: 1 };
const look = { smooth: 0, log: false };
const MOST_SMOOTH = 0.99;
const all = FACTS.runs.flatMap(({ series }) => Object.values(series).flatMap((points) => points.map(([step]) => step)));
const [FIRST, LAST] = all.reduce(([low, high], step) => [Math.min(low, step), Math.max(high, step)], [Infinity, -Infinity]);
const within = (points) => points.filter(([step], i) => (step >= range.from || (points[i + 1]?.[0] ?? -1) >= range.from) && (step <= range.to || (points[i - 1]?.[0] ?? Infinity) <= range.to));
const dashed = (chart, key) => chart.series.indexOf(key) > 0;
const hue = (chart, run, key) => (FACTS.runs.length > 1 ? HUES[run % HUES.length] : HUES[chart.series.indexOf(key)]);

// Steps from one point of a run's fullest line to the next.
const strideOf = ({ series }) => Math.max(...Object.values(series).map((points) => (points.length > 1 ? (points.length - 1) / (points.at(-1)[0] - points[0][0]) : 0))) || 1;
const STRIDES = FACTS.runs.map((run) => 1 / strideOf(run));

// Loss scales and bytes go by steps of their own: their averages would be of values that never were.
const smooths = (chart) => look.smooth > 0 && chart.form === "number";

// Points with the moving average at each as a fifth number: an exponential one of steps, divided by the sum of its weights so that
// it does not begin at zero. It is of the whole line, so that a zoom does not change it; points far apart, as of evaluations, hardly
// count for each other.
function smoothed(points, stride) {
  let sum = 0, weights = 0, before = points[0]?.[0];
  return points.map((point, index) => {
    const kept = look.smooth ** (index ? (point[0] - before) / stride : 1);
    sum = kept * sum + (1 - kept) * point[1];
    weights = kept * weights + (1 - kept);
    before = point[0];
    return [...point, sum / weights];
  });
}

function valueText(form, value) {
  if (form === "bytes") return bytesText(value);
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e7 || size < 1e-3) ? value.toExponential(2) : ((Number.isInteger(value) ? value : Number(value.toPrecision(5))) + 0).toLocaleString("en", { maximumFractionDigits: 7 });
}

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

// What a chart draws: a line for each series of each run that has any points among the steps that are shown.
const linesOf = (chart) => FACTS.runs.flatMap((run, number) => chart.series.map((key) => ({ run, key, hue: hue(chart, number, key), dashed: dashed(chart, key), points: within(smooths(chart) ? smoothed(run.series[key], STRIDES[number]) : run.series[key]) }))).filter(({ points }) => points.length);

// A chart has a log axis where it is asked for, or always, and all that it shows is above zero; bytes start at zero.
const isLog = (chart, low) => (chart.form === "log" || (look.log && chart.form !== "bytes")) && low > 0;

// 1, 2 and 5 of each decade; of many decades only some ones, within a part of one even steps.
function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), ticks = [];
  for (let power = first; power <= last; power++) for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
  const inside = ticks.filter((tick) => tick >= low && tick <= high), ones = inside.filter((tick) => Math.abs(Math.log10(tick) % 1) < 1e-9);
  if (inside.length > 9) return ones.filter((_, index) => index % Math.ceil(ones.length / 6) === 0);
  if (inside.length > 2) return inside;
  const step = tickStep(high - low, 5);
  return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, index) => (Math.ceil(low / step) + index) * step);
}

function axisOf(chart, lines) {
  let low = Infinity, high = -Infinity;
  for (const { points } of lines) for (const [, , least, most] of points) { low = Math.min(low, least); high = Math.max(high, most); }
  const log = isLog(chart, low), powers = chart.form === "log"; // of two
  const to = log ? Math.log2 : (value) => value;
  if (chart.form === "bytes") low = 0;
  let [bottom, top] = [to(low), to(high)];
  const room = (top - bottom) * 0.06 || (log && !powers ? 0.1 : Math.abs(top) * 0.1) || 1;
  top += room;
  if (chart.form !== "bytes") bottom -= room;
  const y = (value) => TOP + ((top - to(value)) / (top - bottom)) * (HEIGHT - TOP - BELOW);
  const unit = chart.form !== "bytes" ? 1 : top >= 2 ** 28 ? 2 ** 30 : 2 ** 20;
  const step = log ? Math.max(1, Math.ceil((top - bottom) / 5)) : tickStep((top - bottom) / unit, 5) * unit;
  let ticks = [];
  if (log && !powers) ticks = logTicks(2 ** bottom, 2 ** top);
  else for (let tick = Math.ceil(bottom / step); tick * step <= top; tick++) ticks.push(log ? 2 ** (tick * step) : tick * step);
  const label = (tick) => (chart.form !== "bytes" ? valueText(chart.form, tick) : tick === 0 ? "0" : `${Number((tick / unit).toPrecision(4))} ${unit === 2 ** 30 ? "GiB" : "MiB"}`);
  return { y, ticks, label, log };
}

// What kind of axis a chart has, where that is not what it always has.
function tellAxis(chart, figure, log) {
  const asked = look.log && chart.form !== "log", why = chart.form === "bytes" ? "bytes start at zero" : "not all values are above zero";
  figure.querySelector(".axis").textContent = !asked ? "" : log ? "(log axis)" : `(no log axis: ${why})`;
  figure.querySelector(".chart").setAttribute("aria-label", `${chart.title} by step${log ? ", log axis" : ""}${smooths(chart) ? ", smoothed" : ""}`);
}

function draw(chart) {
  const figure = at(chart.name), place = figure.querySelector(".chart"), lines = linesOf(chart);
  place.replaceChildren();
  figure.querySelector(".legend").replaceChildren(...lines.map((line) => {
    const item = document.createElement("li"), mark = document.createElement("i");
    mark.style.background = line.dashed ? `repeating-linear-gradient(90deg, var(--${line.hue}) 0 3px, transparent 3px 5px)` : `var(--${line.hue})`;
    const words = FACTS.words[line.key];
    item.append(mark, FACTS.runs.length > 1 ? `${line.run.name}${chart.series.length > 1 ? `, ${words}` : ""}` : words);
    return item;
  }));
  if (!lines.length) return;
  const svg = element("svg", { "aria-hidden": "true" }, place), width = place.clientWidth || 600;
  const { y, ticks, label, log } = axisOf(chart, lines), x = (step) => LEFT + ((step - range.from) / (range.to - range.from || 1)) * (width - LEFT - 8);
  tellAxis(chart, figure, log);
  for (const tick of ticks) {
    element("line", { class: "grid", x1: LEFT, x2: width, y1: y(tick), y2: y(tick) }, svg);
    element("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, svg).textContent = label(tick);
  }
  const step = Math.max(1, tickStep(Math.max(1, range.to - range.from), Math.max(2, width / 90)));
  for (let tick = Math.ceil(range.from / step) * step; tick <= range.to; tick += step) {
    element("text", { x: x(tick), y: HEIGHT - 5, "text-anchor": x(tick) > width - 24 ? "end" : "middle" }, svg).textContent = tick.toLocaleString("en");
  }
  element("clipPath", { id: `clip-${chart.name}` }, svg).append(element("rect", { x: LEFT, y: 0, width: Math.max(1, width - LEFT), height: HEIGHT - BELOW + 2 }));
  const group = element("g", { "clip-path": `url(#clip-${chart.name})` }, svg);
  for (const line of lines) {
    const { points } = line, ink = `var(--${line.hue})`, path = (side) => points.map((point) => `${x(point[0]).toFixed(1)},${y(point[side]).toFixed(1)}`);
    if (points.some(([, , least, most]) => most > least)) element("polygon", { points: [...path(3), ...path(2).reverse()].join(" "), fill: ink, "fill-opacity": 0.18 }, group);
    const dashes = line.dashed ? { "stroke-dasharray": "5 3" } : {}, faint = smooths(chart) ? { "stroke-opacity": 0.3, class: "raw" } : {};
    element("polyline", { points: path(1).join(" "), fill: "none", stroke: ink, "stroke-width": smooths(chart) ? 1 : 1.6, ...dashes, ...faint }, group);
    if (points.length < 60) for (const [step, value] of points) element("circle", { cx: x(step), cy: y(value), r: 2.2, fill: ink, "fill-opacity": smooths(chart) ? 0.3 : 1 }, group);
    if (smooths(chart)) element("polyline", { class: "smooth", points: path(4).join(" "), fill: "none", stroke: ink, "stroke-width": 1.8, ...dashes }, group);
  }
  place.linesAt = (px) => {
    const wanted = range.from + ((px - LEFT) / (width - LEFT - 8)) * (range.to - range.from);
    const near = lines.map((line) => ({ ...line, point: line.points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a)) }));
    const words = ({ run, key, point: [step, mean, least, most, even] }) =>
      `${FACTS.runs.length > 1 ? `${run.name}, ` : ""}${FACTS.words[key]} ${valueText(chart.form, mean)}` + (most > least ? ` (${valueText(chart.form, least)} to ${valueText(chart.form, most)})` : "") + (smooths(chart) ? `, smoothed ${valueText(chart.form, even)}` : "") + ` at step ${step}`;
    return [chart.title, ...near.map(words)];
  };
}

function drawAll() {
  const width = () => document.documentElement.clientWidth, before = width();
  FACTS.charts.forEach(draw);
  if (width() !== before) FACTS.charts.forEach(draw); // their heights brought a scroll bar, which takes of the width
  document.documentElement.dataset.drawn = document.querySelectorAll("#charts polyline").length;
}

function show(from, to) {
  const whole = from <= FIRST && to >= LAST;
  Object.assign(range, whole ? { from: FIRST, to: LAST } : { from: Math.max(FIRST, from), to: Math.min(LAST, to) });
  writeAddress();
  drawAll();
}

function writeAddress() {
  const words = new URLSearchParams();
  if (range.from > FIRST || range.to < LAST) { words.set("from", Math.round(range.from)); words.set("to", Math.round(range.to)); }
  if (look.smooth) words.set("smooth", look.smooth);
  if (look.log) words.set("log", 1);
  history.replaceState(null, "", `${words}` ? `#${words}` : location.pathname + location.search);
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), number = (key) => Number(given.get(key) ?? NaN);
  look.smooth = Math.min(MOST_SMOOTH, Math.max(0, number("smooth") || 0));
  look.log = given.get("log") === "1";
  tellLook();
  const [from, to] = [number("from"), number("to")];
  if (to > from) show(from, to);
  else show(FIRST, LAST);
}

// What the controls show: the average is of about so many steps, as weights fall to a third in 1 / (1 - weight) points.
function tellLook() {
  const words = look.smooth ? `${look.smooth.toFixed(2)}, about ${Math.round(Math.max(...STRIDES) / (1 - look.smooth)).toLocaleString("en")} steps` : "none";
  at("smooth").value = look.smooth;
  at("smooth").setAttribute("aria-valuetext", words);
  at("smooth-value").textContent = words;
  at("log").checked = look.log;
}

function listenLook() {
  const changed = () => { tellLook(); writeAddress(); drawAll(); };
  at("look").hidden = false;
  at("look").addEventListener("submit", (event) => event.preventDefault());
  at("smooth").addEventListener("input", () => { look.smooth = Number(at("smooth").value); changed(); });
  at("log").addEventListener("change", () => { look.log = at("log").checked; changed(); });
  at("smooth").addEventListener("pointerdown", () => { pointed = true; });
  for (const ending of ["pointerup", "pointercancel"]) at("smooth").addEventListener(ending, () => { pointed = false; });
}

let pointed = false; // the page is not loaded again under the pointer
function listen(place) {
  let begin = null;
  const xOf = (event) => event.clientX - place.getBoundingClientRect().left;
  const stepAt = (px) => range.from + ((px - LEFT) / (place.clientWidth - LEFT - 8)) * (range.to - range.from);
  place.addEventListener("pointerdown", (event) => { if (event.button === 0) begin = xOf(event); });
  place.addEventListener("pointermove", (event) => { pointed = true; showTip(event, place.linesAt?.(xOf(event)) ?? null); });
  place.addEventListener("pointerleave", (event) => { pointed = false; begin = null; showTip(event, null); });
  place.addEventListener("pointerup", (event) => {
    const end = xOf(event);
    if (begin !== null && Math.abs(end - begin) > 6) show(stepAt(Math.min(begin, end)), stepAt(Math.max(begin, end)));
    begin = null;
  });
  place.addEventListener("dblclick", () => show(FIRST, LAST));
  place.addEventListener("keydown", (event) => {
    const middle = (range.from + range.to) / 2, half = (range.to - range.from) / 2;
    const actions = { "+": () => show(middle - half / 2, middle + half / 2), "-": () => show(middle - 2 * half, middle + 2 * half), ArrowLeft: () => show(range.from - half / 2, range.to - half / 2), ArrowRight: () => show(range.from + half / 2, range.to + half / 2), 0: () => show(FIRST, LAST) };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  });
}

// The element that has the focus, as a selector: it has it again after a reload.
function focused() {
  const { activeElement: held } = document, figure = held?.closest("figure");
  return held?.id ? `#${held.id}` : figure ? `#${figure.id} .chart` : null;
}

const back = history.state?.focus; // before the address is written anew, which makes a new state
if (all.length) {
  listenLook();
  readAddress();
  window.addEventListener("hashchange", readAddress);
}
document.querySelectorAll(".chart").forEach(listen);
window.addEventListener("resize", drawAll);
if (back) document.querySelector(back)?.focus({ preventScroll: true });
if (FACTS.reload) {
  const again = () => {
    if (pointed) { setTimeout(again, 1000); return; }
    history.replaceState({ focus: focused() }, "");
    location.reload();
  };
  setTimeout(again, FACTS.reload * 1000);
}
