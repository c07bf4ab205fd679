// What is seen, as a picture: the same drawing, on a canvas that is saved, or on one that writes SVG.
"use strict";

const CHARTS = { timeline: (canvas) => drawTimeline(canvas, state, shown), map: (canvas) => drawMap(canvas, state, shown.held), curve: (canvas) => drawCurve(canvas, state, shown.held) };
const pictureTitle = () => (PREFIX ? at("name").textContent : document.title);
const marked = (text) => String(text).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
const short = (number) => Number(number.toFixed(2));

// As much of a canvas's context as the charts use, in SVG.
function svgContext(canvas) {
  const measure = document.createElement("canvas").getContext("2d"), lines = [];
  let open = 0, path = "", dash = "";
  const shade = () => (context.globalAlpha < 1 ? ` opacity="${short(context.globalAlpha)}"` : "");
  const box = (x, y, w, h) => `x="${short(Math.min(x, x + w))}" y="${short(Math.min(y, y + h))}" width="${short(Math.abs(w))}" height="${short(Math.abs(h))}"`;
  const context = {
    canvas, lines, globalAlpha: 1, fillStyle: "#000", strokeStyle: "#000", textAlign: "left", lineWidth: 1, font: "11px system-ui, sans-serif",
    scale() {},
    save() {},
    restore() { for (; open; open--) lines.push("</svg>"); },
    beginPath() { path = ""; },
    rect(...sides) { path = box(...sides); },
    clip() { // a part that is an image of its own shows nothing beyond its sides
      lines.push(`<svg ${path} viewBox="${path.match(/[\d.-]+/g).join(" ")}">`);
      open++;
    },
    moveTo(x, y) { path += `M${short(x)} ${short(y)}`; },
    lineTo(x, y) { path += `L${short(x)} ${short(y)}`; },
    stroke() { lines.push(`<path d="${path}" stroke="${context.strokeStyle}" fill="none"${dash}/>`); },
    setLineDash(gaps) { dash = gaps.length ? ` stroke-dasharray="${gaps.join(" ")}"` : ""; },
    fillRect(...sides) { lines.push(`<rect ${box(...sides)} fill="${context.fillStyle}"${shade()}/>`); },
    strokeRect(...sides) { lines.push(`<rect ${box(...sides)} fill="none" stroke="${context.strokeStyle}" stroke-width="${context.lineWidth}"/>`); },
    measureText(text) { measure.font = context.font; return measure.measureText(text); },
    fillText(text, x, y) {
      const anchor = context.textAlign === "right" ? "end" : "start";
      lines.push(`<text x="${short(x)}" y="${short(y)}" fill="${context.fillStyle}" text-anchor="${anchor}" dominant-baseline="central"${shade()}>${marked(text)}</text>`);
    },
  };
  return context;
}

// The charts below each other, each with its caption: [id, caption, top of the chart], and the size of it all.
function layout() {
  let height = 34;
  const charts = Object.keys(CHARTS).map((id) => {
    const top = height + 22, caption = at(id).parentElement.querySelector("figcaption").firstElementChild.textContent.replace(/\s+/g, " ").trim();
    height = top + at(id).clientHeight + 12;
    return { id, caption, top };
  });
  return { charts, width: at("timeline").clientWidth, height, title: `${pictureTitle()}, ${at("range").textContent}, simulated` };
}

function pictureSvg() {
  const { charts, width, height, title } = layout(), ink = colour("ink");
  const text = (y, words, size) => `<text x="4" y="${y}" font-size="${size}" font-weight="600" fill="${ink}">${marked(words)}</text>`;
  const parts = charts.map(({ id, caption, top }) => {
    const canvas = { id, style: {}, dataset: {}, clientWidth: width, clientHeight: at(id).clientHeight, getContext: () => context }, context = svgContext(canvas);
    CHARTS[id](canvas);
    return `${text(top - 6, caption, 12)}<g transform="translate(0 ${top})">${context.lines.join("")}</g>`;
  });
  const head = `<svg xmlns="${"http"}://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" font-family="system-ui, sans-serif" font-size="11">`;
  return `${head}<rect width="${width}" height="${height}" fill="${colour("page")}"/>${text(20, title, 13)}${parts.join("")}</svg>\n`;
}

function picturePng() {
  const { charts, width, height, title } = layout(), canvas = document.createElement("canvas"), ratio = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = colour("page");
  context.fillRect(0, 0, width, height);
  context.fillStyle = colour("ink");
  context.font = "600 13px system-ui, sans-serif";
  context.fillText(title, 4, 20);
  context.font = "600 12px system-ui, sans-serif";
  for (const { id, caption, top } of charts) {
    context.fillText(caption, 4, top - 6);
    context.drawImage(at(id), 0, top, width, at(id).clientHeight);
  }
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

async function savePicture(kind) {
  if (!shown) return;
  draw();
  const blob = kind === "svg" ? new Blob([pictureSvg()], { type: "image/svg+xml" }) : await picturePng();
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${pictureTitle().replace(/[^\w.-]+/g, "-")}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function copyLink() {
  draw();
  const button = at("link");
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "copied";
  } catch {
    button.textContent = "copy the address above";
  }
  setTimeout(() => { button.textContent = "copy link"; }, 2000);
}
