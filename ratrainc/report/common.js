// What all pages need: their facts, numbers in words, and what is said under the pointer.
"use strict";

// A page that compares has two reports: elements of each have ids with a prefix, those that both share have none.
const at = (id) => document.getElementById(PREFIX + id) ?? document.getElementById(id);
const FACTS = JSON.parse(at("facts").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function secondsText(seconds) {
  const size = Math.abs(seconds);
  if (size === 0) return "0";
  if (size >= 1) return `${seconds.toFixed(3)} s`;
  return size >= 1e-3 ? `${(seconds * 1e3).toFixed(3)} ms` : `${(seconds * 1e6).toFixed(2)} us`;
}

function bytesText(bytes) {
  const [unit, name] = bytes >= 2 ** 28 ? [2 ** 30, "GiB"] : bytes >= 2 ** 18 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  return `${(bytes / unit).toFixed(2)} ${name}`;
}

function tickStep(span, most) {
  const power = 10 ** Math.floor(Math.log10(span / most));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => span / step <= most);
}

function showTip(event, lines) {
  const tip = at("tip");
  tip.hidden = !lines;
  if (!lines) return;
  const name = document.createElement("b");
  name.textContent = lines[0];
  tip.replaceChildren(name, lines.slice(1).join("\n"));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}
