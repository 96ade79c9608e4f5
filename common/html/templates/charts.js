"use strict";
// Draws the JSON in each figure with uPlot. A drag selects a range, a double click shows all again, a click in the legend hides a curve.
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const font = "12px system-ui, sans-serif";
const short = value => value == null ? "-" : Math.abs(value) >= 100 ? value.toLocaleString("en", {maximumFractionDigits: 1}) : String(+value.toPrecision(5));

function axis(more) {
  return {stroke: () => css("--dim"), grid: {stroke: () => css("--line"), width: 1}, ticks: {show: false}, font, labelFont: font, ...more};
}

// The band of x behind the curves, and the level of the target before them.
function levels(spec) {
  const paint = (plot, work) => { plot.ctx.save(); work(plot.ctx, plot.bbox); plot.ctx.restore(); };
  return {hooks: {
    drawClear: plot => spec.band && plot.scales.x.max > spec.band[0] && paint(plot, (ctx, box) => {
      const [left, right] = spec.band.map(x => Math.min(Math.max(plot.valToPos(x, "x", true), box.left), box.left + box.width));
      ctx.fillStyle = css("--band");
      ctx.fillRect(left, box.top, Math.max(right - left, 1), box.height);
    }),
    draw: plot => spec.target != null && paint(plot, (ctx, box) => {
      const y = plot.valToPos(spec.target, "y", true);
      if (y < box.top || y > box.top + box.height) return;
      ctx.strokeStyle = css("--target");
      ctx.setLineDash([6, 4]);
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.beginPath(); ctx.moveTo(box.left, y); ctx.lineTo(box.left + box.width, y); ctx.stroke();
    }),
  }};
}

// The legend shows the last value of each curve, except while the mouse is over the chart. Separate points have no last one.
function lastValues(spec) {
  const last = values => separatePoints(spec) ? null : values.findLastIndex(value => value != null);
  const show = plot => plot.cursor.idx == null && plot.setLegend({idxs: plot.data.map(last)});
  return {hooks: {ready: show, setCursor: show}};
}

const separatePoints = spec => spec.series.every(curve => curve.scatter);

// Curves begin at 0 in x, unless the axis is logarithmic. Separate points fill the chart. In both, a range can be selected. The target lies within y.
function ranges(spec) {
  const bases = spec.log || {};
  const scale = base => base ? {distr: 3, log: base} : {};
  const xs = spec.series.flatMap(curve => curve.data[0]);
  const [start, end] = [Math.min(...xs), Math.max(...xs)];
  const last = Math.max(end, ...(spec.band || []).filter(x => x < 2 * end));
  const whole = bases.x ? uPlot.rangeLog(start, end, bases.x, false) : separatePoints(spec) ? uPlot.rangeNum(start, end, 0.08, false) : [Math.min(0, start), last * 1.02 || 1];
  const y = (plot, low, high) => {
    const all = [low, high, spec.target].filter(value => value != null);
    if (bases.y) return uPlot.rangeLog(low, high, bases.y, false);
    return uPlot.rangeNum(Math.min(...all), Math.max(...all), 0.08, false);
  };
  return {x: {...scale(bases.x), time: false, range: (plot, low, high) => low === plot.data[0][0] && high === plot.data[0].at(-1) ? whole : [low, high]}, y: {...scale(bases.y), range: y}};
}

// A screen reader reads the words of the still picture, and the names in the legend are buttons for the keyboard.
function name(figure, plot) {
  const canvas = figure.querySelector("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", figure.querySelector("svg").getAttribute("aria-label"));
  figure.querySelectorAll(".u-legend tr").forEach((row, index) => {
    row.querySelector("th").setAttribute("scope", "row");
    if (!index) return;
    const label = row.querySelector(".u-label");
    const tell = () => label.setAttribute("aria-pressed", String(plot.series[index].show));
    Object.assign(label, {tabIndex: 0, role: "button"});
    label.addEventListener("keydown", event => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      label.click();
    });
    row.addEventListener("click", () => setTimeout(tell));
    tell();
  });
}

function draw(figure) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const size = () => ({width: figure.clientWidth, height: figure.clientWidth < 560 ? 220 : 300});
  const series = spec.series.map(curve => ({
    label: curve.name, stroke: curve.color, width: curve.dots ? 2 : 1.4, dash: curve.dash, spanGaps: true,
    ...(curve.scatter ? {paths: () => null} : {}),
    points: {show: curve.dots || curve.data[0].length === 1, size: 7, fill: curve.color}, value: (plot, value) => short(value),
  }));
  // uPlot leaves some ticks of a logarithmic axis without a text: null.
  const ticks = (plot, values, index, space, step) => {
    const maximumFractionDigits = spec.log ? 3 : Math.max(0, 1 - Math.floor(Math.log10(step)));
    return values.map(value => value == null ? "" : value.toLocaleString("en", {maximumFractionDigits}));
  };
  const room = (plot, values) => 14 + 7 * Math.max(...(values || [""]).map(text => text.length));
  const plot = figure.plot = new uPlot({
    ...size(), series: [{label: spec.x, value: (plot, value) => short(value)}, ...series], scales: ranges(spec),
    axes: [axis({label: spec.x, labelSize: 18, size: 28, space: 80, ...(spec.log ? {values: ticks} : {})}), axis({size: room, values: ticks})], plugins: [levels(spec), lastValues(spec)],
    cursor: {sync: spec.sync ? {key: spec.sync, setSeries: true} : undefined, focus: {prox: 24}}, focus: {alpha: 0.25},
  }, uPlot.join(spec.series.map(curve => curve.data)), figure);
  figure.classList.add("drawn");
  name(figure, plot);
  new ResizeObserver(() => figure.clientWidth === plot.width || plot.setSize(size())).observe(figure);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false, true));
}

document.querySelectorAll("figure.chart").forEach(draw);
document.querySelector(".hint").hidden = false;
