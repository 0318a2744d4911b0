// Curves over steps: uPlot, with intervals, events, and a legend that is never empty.

import { el, short, tick } from "./dom.js";

const LIGHT = ["#1f5fa8", "#c2601f", "#2a8f5c", "#8a4fb0", "#b03a5b", "#5b7083", "#8a7a12", "#0f8a96"];
const DARK = ["#6fb1f5", "#f0a060", "#62cf98", "#c79bf0", "#f08aa8", "#a9bccd", "#d8c860", "#5fd3de"];
const dark = matchMedia("(prefers-color-scheme: dark)");

export function color(index) {
  return (dark.matches ? DARK : LIGHT)[index % LIGHT.length];
}

export function onScheme(listener) {
  dark.addEventListener("change", listener);
}

function styleOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) if (entry.isIntersecting) entry.target.draw();
  },
  { rootMargin: "400px" },
);
const sized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (target.plot && Math.abs(target.plot.width - contentRect.width) > 1) {
      target.plot.setSize({ width: Math.floor(contentRect.width), height: HEIGHT });
    }
  }
});
const HEIGHT = 190;
const WHOLE = Array.from({ length: 36 }, (_, nth) => [1, 2, 5][nth % 3] * 10 ** Math.floor(nth / 3)); // between two ticks of what is counted

/**
 * A chart that draws itself once it is in sight.
 *
 * title, note: words above it.
 * curves: {label, x, y, color, faint, dash, isPoints, isFilled, isDerived, begins, low, high}, where x is ascending;
 * a derived one stands in no legend; one that begins stands there in a new line.
 * marks: {x, label, brief}: vertical lines; `brief` stands there where the label has no room.
 * xLabel: of the axis. max, min: of the values, where they are known.
 */
export function chart({ title, note, curves, marks = [], xLabel, min = null, max = null }) {
  const area = el("div", { class: "plot" });
  const figure = el(
    "figure",
    { class: "chart", "aria-label": title },
    el("figcaption", {}, el("b", {}, title), note ? el("span", { class: "dim" }, ` ${note}`) : null),
    area,
  );
  area.draw = () => {
    seen.unobserve(area);
    area.plot = plotted(area, { curves, marks, xLabel, min, max });
  };
  seen.observe(area);
  sized.observe(area);
  return figure;
}

/** Draws what is in sight, before the browser shows anything. */
export function drawSeen(root) {
  for (const area of root.querySelectorAll(".plot")) {
    const { top, bottom } = area.getBoundingClientRect();
    if (!area.plot && bottom > 0 && top < innerHeight) area.draw();
  }
}

let zoom = null; // along the axis, kept when a chart is drawn anew

/** Shows all of the axis. */
export function resetZoom() {
  zoom = null;
}

/** Frees what charts hold, before they go. */
export function release(root) {
  for (const area of root.querySelectorAll(".plot")) {
    seen.unobserve(area);
    sized.unobserve(area);
    area.plot?.destroy();
  }
}

function plotted(area, { curves, marks, xLabel, min, max }) {
  const data = uPlot.join(curves.map((curve) => [curve.x, curve.y]));
  const axis = {
    stroke: styleOf("--dim"),
    grid: { stroke: styleOf("--grid"), width: 1 },
    ticks: { stroke: styleOf("--grid"), width: 1 },
    font: "11px system-ui",
  };
  const series = curves.map((curve) => ({
    label: curve.label,
    class: curve.isDerived ? "derived" : curve.begins ? "begins" : undefined,
    stroke: curve.color,
    width: curve.isPoints ? 0 : curve.faint ? 1 : 1.75,
    alpha: curve.faint ? 0.35 : 1,
    dash: curve.dash,
    spanGaps: true,
    ...(curve.isPoints && { paths: () => null }),
    points: { size: curve.isPoints ? (curve.isFilled ? 7 : 9) : 5, fill: curve.isFilled ? curve.color : styleOf("--back"), ...((curve.isPoints || curve.y.filter((value) => value !== null).length < 3) && { show: true }) },
    // of points, which few steps have, the newest one so far
    value: (plot, value, at, index) => short(value ?? (curve.isPoints && index != null ? plot.data[at].slice(0, index + 1).findLast((it) => it != null) : value)),
  }));
  const last = Math.max(0, data[0].length - 1);
  const options = {
    width: Math.max(200, Math.floor(area.clientWidth)),
    height: HEIGHT,
    scales: {
      x: { time: false },
      y: { range: (_, low, high) => rangeOf(curves, low, high, min, max) },
    },
    axes: [
      { ...axis, size: 26, values: (_, ticks) => ticks.map(tick), ...(xLabel !== "minutes" && { incrs: WHOLE }) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map(tick) },
    ],
    legend: { markers: { fill: (_, nth) => (curves[nth - 1]?.isFilled ? curves[nth - 1].color : null) } },
    series: [{ label: xLabel, value: (_, value) => short(value) }, ...series],
    cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, dist: 6 } },
    hooks: {
      draw: [(plot) => drawIntervals(plot, curves), (plot) => drawMarks(plot, marks)],
      setScale: [
        (plot, name) => {
          if (name !== "x") return;
          const { min: from, max: to } = plot.scales.x;
          zoom = from > data[0][0] || to < data[0][last] ? { from, to } : null;
        },
      ],
      setCursor: [
        (plot) => {
          if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: last });
        },
      ],
      ready: [(plot) => plot.setLegend({ idx: last })],
    },
  };
  const kept = zoom;
  const plot = new uPlot(options, data, area);
  if (kept) plot.setScale("x", { min: kept.from, max: kept.to });
  return plot;
}

function rangeOf(curves, low, high, min, max) {
  for (const curve of curves) {
    for (const value of curve.low || []) if (value !== null && value < low) low = value;
    for (const value of curve.high || []) if (value !== null && value > high) high = value;
  }
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [min === null ? low - room : Math.min(min, low), max === null ? high + room : Math.max(max, high)];
}

/** From low to high, at each point that has them. */
function drawIntervals(plot, curves) {
  const pen = plot.ctx;
  pen.save();
  pen.lineWidth = devicePixelRatio * 1.5;
  for (const curve of curves) {
    if (!curve.low) continue;
    pen.strokeStyle = curve.color;
    curve.x.forEach((x, index) => {
      if (curve.low[index] === null || curve.high[index] === null) return;
      const at = plot.valToPos(x, "x", true);
      if (at < plot.bbox.left || at > plot.bbox.left + plot.bbox.width) return;
      pen.beginPath();
      pen.moveTo(at, plot.valToPos(curve.low[index], "y", true));
      pen.lineTo(at, plot.valToPos(curve.high[index], "y", true));
      pen.stroke();
    });
  }
  pen.restore();
}

function drawMarks(plot, marks) {
  const { left, top, width, height } = plot.bbox;
  const pen = plot.ctx;
  pen.save();
  pen.strokeStyle = styleOf("--mark");
  pen.fillStyle = styleOf("--mark");
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  pen.font = `${10 * devicePixelRatio}px system-ui`;
  pen.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  let free = left;
  const inside = marks.map((mark) => ({ ...mark, at: plot.valToPos(mark.x, "x", true) })).filter(({ at }) => at >= left && at <= left + width);
  pen.beginPath();
  for (const { at } of inside) {
    pen.moveTo(at, top);
    pen.lineTo(at, top + height);
  }
  pen.stroke();
  pen.setLineDash([]);
  pen.strokeStyle = styleOf("--back");
  pen.lineWidth = 3 * devicePixelRatio;
  const roomOf = (text) => pen.measureText(text).width + 6 * devicePixelRatio;
  inside.forEach(({ at, label, brief = label }, place) => {
    const until = inside[place + 1]?.at ?? left + width;
    const text = place === 0 || at + roomOf(label) <= until ? label : brief;
    if (at >= free && at + roomOf(text) < left + width) {
      pen.strokeText(text, at + 3 * devicePixelRatio, top + 9 * devicePixelRatio); // the next line does not strike it through
      pen.fillText(text, at + 3 * devicePixelRatio, top + 9 * devicePixelRatio);
      free = at + roomOf(text);
    }
  });
  pen.restore();
}

/** Centred means over up to `size` values; what is missing is left out of each. */
export function smoothed(values, size) {
  const before = Math.floor(size / 2);
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value === null ? 0 : 1));
  }
  return values.map((_, index) => {
    const first = Math.max(0, index - before);
    const end = Math.min(values.length, index - before + size);
    const count = counts[end] - counts[first];
    return count ? (sums[end] - sums[first]) / count : null;
  });
}
