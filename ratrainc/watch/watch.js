// Charts of runs as SVG. The address of the page keeps the steps that are shown, so that they stay when it is loaded again.
"use strict";

const HUES = ["blue", "red", "teal", "amber", "violet", "brown", "olive", "rose"];
const LEFT = 64, BELOW = 20, TOP = 6, HEIGHT = 230;
const range = { from: 0, to: 1 };
const all = FACTS.runs.flatMap(({ series }) => Object.values(series).flatMap((points) => points.map(([step]) => step)));
const [FIRST, LAST] = all.reduce(([low, high], step) => [Math.min(low, step), Math.max(high, step)], [Infinity, -Infinity]);
const within = (points) => points.filter(([step], i) => (step >= range.from || (points[i + 1]?.[0] ?? -1) >= range.from) && (step <= range.to || (points[i - 1]?.[0] ?? Infinity) <= range.to));
const dashed = (chart, key) => chart.series.indexOf(key) > 0;
const hue = (chart, run, key) => (FACTS.runs.length > 1 ? HUES[run % HUES.length] : HUES[chart.series.indexOf(key)]);

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
const linesOf = (chart) => FACTS.runs.flatMap((run, number) => chart.series.map((key) => ({ run, key, hue: hue(chart, number, key), dashed: dashed(chart, key), points: within(run.series[key]) }))).filter(({ points }) => points.length);

function axisOf(chart, lines) {
  let low = Infinity, high = -Infinity;
  for (const { points } of lines) for (const [, , least, most] of points) { low = Math.min(low, least); high = Math.max(high, most); }
  const log = chart.form === "log" && low > 0;
  const to = log ? Math.log2 : (value) => value;
  if (chart.form === "bytes") low = 0;
  let [bottom, top] = [to(low), to(high)];
  const room = (top - bottom) * 0.06 || Math.abs(top) * 0.1 || 1;
  top += room;
  if (chart.form !== "bytes") bottom -= room;
  const y = (value) => TOP + ((top - to(value)) / (top - bottom)) * (HEIGHT - TOP - BELOW);
  const unit = chart.form !== "bytes" ? 1 : top >= 2 ** 28 ? 2 ** 30 : 2 ** 20;
  const step = log ? Math.max(1, Math.ceil((top - bottom) / 5)) : tickStep((top - bottom) / unit, 5) * unit;
  const ticks = [];
  for (let tick = Math.ceil(bottom / step); tick * step <= top; tick++) ticks.push(log ? 2 ** (tick * step) : tick * step);
  const label = (tick) => (chart.form !== "bytes" ? valueText(chart.form, tick) : tick === 0 ? "0" : `${Number((tick / unit).toPrecision(4))} ${unit === 2 ** 30 ? "GiB" : "MiB"}`);
  return { y, ticks, label };
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
  const { y, ticks, label } = axisOf(chart, lines), x = (step) => LEFT + ((step - range.from) / (range.to - range.from || 1)) * (width - LEFT - 8);
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
    element("polyline", { points: path(1).join(" "), fill: "none", stroke: ink, "stroke-width": 1.6, ...(line.dashed ? { "stroke-dasharray": "5 3" } : {}) }, group);
    if (points.length < 60) for (const [step, value] of points) element("circle", { cx: x(step), cy: y(value), r: 2.2, fill: ink }, group);
  }
  place.linesAt = (px) => {
    const wanted = range.from + ((px - LEFT) / (width - LEFT - 8)) * (range.to - range.from);
    const near = lines.map((line) => ({ ...line, point: line.points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a)) }));
    const words = ({ run, key, point: [step, mean, least, most] }) =>
      `${FACTS.runs.length > 1 ? `${run.name}, ` : ""}${FACTS.words[key]} ${valueText(chart.form, mean)}` + (most > least ? ` (${valueText(chart.form, least)} to ${valueText(chart.form, most)})` : "") + ` at step ${step}`;
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
  history.replaceState(null, "", whole ? location.pathname + location.search : `#from=${Math.round(range.from)}&to=${Math.round(range.to)}`);
  drawAll();
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

const given = new URLSearchParams(location.hash.slice(1)), from = Number(given.get("from") ?? NaN), to = Number(given.get("to") ?? NaN);
if (all.length) show(to > from ? from : FIRST, to > from ? to : LAST);
document.querySelectorAll(".chart").forEach(listen);
window.addEventListener("resize", drawAll);
if (FACTS.reload) {
  const again = () => (pointed ? setTimeout(again, 1000) : location.reload());
  setTimeout(again, FACTS.reload * 1000);
}
