"use strict";
// Draws the curves. A chart's points are joined by pixel column: the line is a column's mean, the band its extremes. So a chart
// costs its width, not the length of the runs, and all runs share the columns as x.
(() => {
  const runs = JSON.parse(document.getElementById("data").textContent);
  // Okabe and Ito's colours, which colour-blind readers can distinguish; further runs repeat them with dashes.
  const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7a4fbf", "#4d4d4d"];
  const DARK = ["#4da6ff", "#ff8c42", "#2fd6a3", "#f09ccb", "#e6c229", "#8fd3ff", "#b79cff", "#c9c9c9"];
  const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3]];
  const MAIN = ["loss", "validation loss", "tokens_per_second", "lr"];
  const UNITS = {
    loss: "training loss, nats per token", "validation loss": "validation loss, nats per token",
    "validation bits per byte": "validation, bits per byte", tokens_per_second: "tokens per second", lr: "learning rate",
    grad_norm: "gradient norm before clipping", memory_bytes: "memory in use, bytes", mfu_percent: "MFU, percent",
    dense_mfu_percent: "MFU as if attention were dense, percent", tflops: "executed TFLOP/s of one device",
  };
  const AXES = { step: "steps", tokens: "tokens", seconds: "training time", flops: "FLOPs of one device" };
  const isLoss = (name) => /loss|perplexity|bits/.test(name);
  const byId = (id) => document.getElementById(id);
  const state = { axis: "step", range: null, log: false, join: true, band: true, smooth: 1, hidden: new Set(), charts: [] };

  const numbers = (text) => {
    const binary = atob(text), bytes = new Uint8Array(binary.length);
    for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
    return new Float32Array(bytes.buffer);
  };
  for (const run of runs) {
    for (const key of Object.keys(run.knots)) run.knots[key] = numbers(run.knots[key]);
    for (const series of Object.values(run.series)) {
      // A series is decoded when it is first drawn.
      for (const key of Object.keys(series)) {
        const text = series[key];
        Object.defineProperty(series, key, {
          configurable: true,
          get() {
            const value = numbers(text);
            Object.defineProperty(this, key, { value });
            return value;
          },
        });
      }
      series.at = {};
    }
  }

  // Training time is in the unit that fits the longest run.
  const longest = Math.max(...runs.map((run) => run.knots.seconds.at(-1) || 0));
  const [SECONDS_A_UNIT, TIME_UNIT] = longest < 120 ? [1, "seconds"] : longest < 7200 ? [60, "minutes"] : [3600, "hours"];
  AXES.seconds = TIME_UNIT + " of training";

  const isDark = () => getComputedStyle(document.documentElement).colorScheme.includes("dark");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // A line is a run, or a group of seeds. Its colour is that of its kind of attention, its dashes tell recipes of a kind apart.
  const lineOf = (run) => state.join ? run.group : runs.indexOf(run);
  const nameOf = (members) => members.length > 1 ? members[0].family : members[0].name;
  const colour = (run) => (isDark() ? DARK : LIGHT)[run.colour % LIGHT.length];
  const dash = (run) => DASHES[(run.dash + Math.floor(run.colour / LIGHT.length)) % DASHES.length];

  // A series' steps on the chosen axis; between two knots, tokens, seconds and FLOPs are interpolated linearly.
  const positions = (run, series) => {
    if (state.axis === "step") return series.step;
    const known = series.at[state.axis];
    if (known) return known;
    const scale = state.axis === "seconds" ? 1 / SECONDS_A_UNIT : 1;
    const from = run.knots.step, to = run.knots[state.axis], out = new Float32Array(series.step.length);
    let k = 0;
    for (let i = 0; i < out.length; i++) {
      const step = series.step[i];
      while (k < from.length && from[k] < step) k++;
      const before = k === 0 ? [0, 0] : [from[k - 1], to[k - 1]];
      if (k === from.length) out[i] = before[1] * scale;
      else out[i] = (before[1] + (to[k] - before[1]) * (step - before[0]) / (from[k] - before[0] || 1)) * scale;
    }
    return (series.at[state.axis] = out);
  };

  const firstAtLeast = (sorted, value) => {
    let low = 0, high = sorted.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (sorted[mid] < value) low = mid + 1; else high = mid;
    }
    return low;
  };

  // The lines of a chart are runs, or groups of seeds.
  const lines = () => {
    const all = new Map();
    for (const run of runs) {
      if (state.hidden.has(run)) continue;
      const idx = lineOf(run);
      if (!all.has(idx)) all.set(idx, []);
      all.get(idx).push(run);
    }
    return [...all];
  };

  const fullRange = () => {
    let low = Infinity, high = -Infinity;
    for (const run of runs) {
      if (state.hidden.has(run)) continue;
      for (const name of ["loss", "validation loss"]) {
        const series = run.series[name];
        if (!series) continue;
        const at = positions(run, series);
        low = Math.min(low, at[0]);
        high = Math.max(high, at[at.length - 1]);
      }
    }
    return low < high ? [low, high] : [Math.min(low, 0), Number.isFinite(high) ? high + 1 : 1];
  };

  const columns = (name, low, high, width) => {
    const num = Math.max(2, Math.floor(width)), step = (high - low) / (num - 1);
    const x = Float64Array.from({ length: num }, (_, i) => low + i * step), data = [x];
    for (const [, members] of lines()) {
      const sum = new Float64Array(num), count = new Uint32Array(num);
      const least = new Float64Array(num).fill(Infinity), most = new Float64Array(num).fill(-Infinity);
      for (const run of members) {
        const series = run.series[name];
        if (!series) continue;
        const at = positions(run, series), mean = series.mean, down = series.low || mean, up = series.high || mean;
        // One point beyond each edge is kept, so that lines continue to the edge of the chart.
        const from = Math.max(0, firstAtLeast(at, low) - 1), to = Math.min(at.length, firstAtLeast(at, high) + 1);
        for (let i = from; i < to; i++) {
          if (!Number.isFinite(mean[i])) continue;
          const column = Math.min(num - 1, Math.max(0, Math.round((at[i] - low) / step)));
          if ((at[i] < low && column === 0 || at[i] > high && column === num - 1) && count[column] > 0) continue;
          sum[column] += mean[i];
          count[column]++;
          if (down[i] < least[column]) least[column] = down[i];
          if (up[i] > most[column]) most[column] = up[i];
        }
      }
      const value = (of) => Array.from({ length: num }, (_, i) => (count[i] ? of(i) : null));
      data.push(value((i) => sum[i] / count[i]), value((i) => least[i]), value((i) => most[i]));
    }
    return data;
  };

  const short = (value) => {
    const size = Math.abs(value);
    for (const [unit, sign] of [[1e18, "e18"], [1e15, "e15"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit) return +(value / (sign === "k" ? 1e3 : unit)).toPrecision(4) + sign;
    }
    return size > 0 && size < 1e-2 ? value.toExponential(2).replace(/\.?0*e/, "e") : String(+value.toPrecision(4));
  };

  const axisStyle = () => ({
    stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 },
    font: "12px system-ui", labelFont: "12px system-ui", labelSize: 18, values: (_, splits) => splits.map((v) => v === null ? "" : short(v)),
  });

  class Chart {
    constructor(name) {
      this.name = name;
      this.box = document.createElement("div");
      this.box.className = "chart";
      this.box.tabIndex = 0;
      this.box.setAttribute("role", "group");
      this.box.setAttribute("aria-label", UNITS[name] || name);
      this.box.innerHTML = "<h3></h3><div></div><div class=values></div>";
      this.values = this.box.lastChild;
      this.box.addEventListener("keydown", (event) => this.key(event));
      byId("charts").append(this.box);
    }
    key(event) {
      const [low, high] = state.range || fullRange(), width = high - low, middle = (low + high) / 2;
      const to = { ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5],
        "+": [middle - width / 4, middle + width / 4], "=": [middle - width / 4, middle + width / 4],
        "-": [middle - width, middle + width], Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      zoom(to);
    }
    draw() {
      const [low, high] = state.range || fullRange();
      const width = Math.max(240, this.box.clientWidth), shownLines = lines();
      const data = columns(this.name, low, high, (width - 70) / state.smooth);
      if (this.plot) this.plot.destroy();
      const few = (values) => values.reduce((sum, value) => sum + (value !== null), 0) <= 60;
      const series = [{}], bands = [];
      shownLines.forEach(([, [first]], i) => {
        const stroke = colour(first), points = { show: few(data[1 + 3 * i]), size: 5, fill: stroke };
        series.push({ stroke, width: 1.5, dash: dash(first), spanGaps: true, points });
        for (let edge = 0; edge < 2; edge++) series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
        if (state.band) bands.push({ series: [3 + 3 * i, 2 + 3 * i], fill: stroke + "30" });
      });
      const axis = axisStyle();
      // Diverged runs do not set the scale of the others' losses: their lines leave the chart at its edge.
      const diverged = shownLines.map(([, members]) => members.some((run) => run.diverged));
      const isCut = isLoss(this.name) && diverged.includes(true) && diverged.includes(false);
      this.box.firstChild.textContent = (UNITS[this.name] || this.name) + (isCut ? " (to the scale of runs that did not diverge)" : "");
      const drawn = data.slice(1).filter((_, i) => (state.band || i % 3 === 0) && !(isCut && diverged[Math.floor(i / 3)]));
      let least = Infinity, most = -Infinity;
      for (const column of drawn) for (const value of column) if (value !== null) { least = Math.min(least, value); most = Math.max(most, value); }
      const log = state.log && isLoss(this.name) && least > 0;
      const range = least > most ? [0, 1] : log ? [least / 1.02, most * 1.02]
        : [least - (most - least || 1) * 0.05, most + (most - least || 1) * 0.05];
      this.plot = new uPlot({
        width, height: 280, series, bands, legend: { show: false },
        cursor: { drag: { setScale: false, x: true, y: false }, points: { show: false } },
        scales: { x: { time: false, range: () => [low, high] }, y: { distr: log ? 3 : 1, range: () => range } },
        axes: [{ ...axis, label: AXES[state.axis] }, { ...axis, size: 58 }],
        hooks: {
          setSelect: [(plot) => {
            const { left, width: chosen } = plot.select;
            if (chosen > 4) zoom([plot.posToVal(left, "x"), plot.posToVal(left + chosen, "x")]);
          }],
          setCursor: [(plot) => this.tell(plot, data, shownLines)],
        },
      }, data, this.box.children[1]);
    }
    // Shows each line's value in the column nearest to the pointer.
    tell(plot, data, shownLines) {
      const at = plot.cursor.idx;
      this.values.replaceChildren();
      if (at === null || at === undefined) return;
      const add = (text, run) => {
        const part = document.createElement("span");
        if (run) part.append(mark(run));
        part.append(text);
        this.values.append(part);
      };
      add(`${AXES[state.axis]} ${short(data[0][at])}`);
      shownLines.forEach(([, [first]], i) => {
        const column = data[1 + 3 * i];
        for (let away = 0; away < 40; away++) {
          const found = [column[at - away], column[at + away]].find((value) => value !== null && value !== undefined);
          if (found !== undefined) return add(short(found), first);
        }
      });
    }
  }

  // Draws an evaluation by tokens seen or by distance: a line for each run over its bins, on a logarithmic axis.
  class Curve {
    constructor(name) {
      this.name = name;
      this.box = document.createElement("div");
      this.box.className = "chart";
      this.box.innerHTML = "<h3></h3><div></div>";
      this.box.firstChild.textContent = name;
      byId("evaluationCharts").append(this.box);
    }
    draw() {
      if (this.plot) this.plot.destroy();
      const shown = runs.filter((run) => !state.hidden.has(run) && run.curves[this.name]);
      // A bin that begins at token 0 has no place on a logarithmic axis and is drawn at token 1.
      const tables = shown.map((run) => new Map(run.curves[this.name].map(([from, value]) => [Math.max(from, 1), value])));
      const x = [...new Set(tables.flatMap((table) => [...table.keys()]))].sort((a, b) => a - b);
      if (x.length < 2) return;
      const data = [x, ...tables.map((table) => x.map((at) => table.get(at) ?? null))];
      const axis = axisStyle();
      const series = shown.map((run) => {
        const stroke = colour(run);
        return { stroke, width: 1.5, dash: dash(run), spanGaps: true, points: { show: true, size: 5, fill: stroke } };
      });
      this.plot = new uPlot({
        width: Math.max(240, this.box.clientWidth), height: 280, series: [{}, ...series], legend: { show: false },
        scales: { x: { time: false, distr: 3, log: 2 } },
        axes: [{ ...axis, label: "tokens from which a bin begins" }, { ...axis, size: 58 }],
      }, data, this.box.children[1]);
    }
  }

  const mark = (run) => {
    const span = document.createElement("span");
    span.className = "swatch";
    span.dataset.run = runs.indexOf(run);
    paint(span, run);
    return span;
  };
  const paint = (span, run) => {
    span.style.borderTopColor = colour(run);
    span.style.borderTopStyle = dash(run).length ? (dash(run)[0] > 4 ? "dashed" : "dotted") : "solid";
  };
  const drawAll = () => {
    document.querySelectorAll(".swatch[data-run]").forEach((span) => paint(span, runs[+span.dataset.run]));
    state.charts.forEach((chart) => chart.draw());
  };
  const zoom = (range) => { state.range = range; drawAll(); };

  // Lists the curves: the main ones are shown at once, the others on demand.
  const all = [...new Set(runs.flatMap((run) => Object.keys(run.series)))];
  for (const name of MAIN) if (all.includes(name)) state.charts.push(new Chart(name));
  for (const name of new Set(runs.flatMap((run) => Object.keys(run.curves)))) state.charts.push(new Curve(name));
  const more = byId("more");
  for (const name of all.filter((name) => !MAIN.includes(name)).sort()) more.add(new Option(UNITS[name] || name, name));
  more.addEventListener("change", () => {
    const option = more.selectedOptions[0];
    if (!option.value) return;
    const chart = new Chart(option.value);
    state.charts.push(chart);
    option.remove();
    more.value = "";
    chart.draw();
    chart.box.focus();
  });

  // A box for each line that can be drawn.
  const listLines = () => {
    const all = new Map();
    for (const run of runs) all.set(lineOf(run), [...(all.get(lineOf(run)) || []), run]);
    byId("shown").replaceChildren(...[...all.values()].map((members) => {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.checked = members.some((run) => !state.hidden.has(run));
      box.addEventListener("change", () => {
        for (const run of members) box.checked ? state.hidden.delete(run) : state.hidden.add(run);
        drawAll();
      });
      const diverged = members.some((run) => run.diverged);
      label.append(box, mark(members[0]), diverged ? `${nameOf(members)} (diverged)` : nameOf(members));
      return label;
    }));
  };
  listLines();
  byId("joinBox").hidden = new Set(runs.map((run) => run.group)).size === runs.length;
  byId("axis").addEventListener("change", (event) => { state.axis = event.target.value; zoom(null); });
  for (const id of ["log", "join", "band"]) byId(id).addEventListener("change", (event) => { state[id] = event.target.checked; listLines(); drawAll(); });
  byId("smooth").addEventListener("change", (event) => { state.smooth = +event.target.value; drawAll(); });
  byId("reset").addEventListener("click", () => zoom(null));
  byId("theme").addEventListener("change", (event) => {
    if (event.target.value) document.documentElement.dataset.theme = event.target.value;
    else delete document.documentElement.dataset.theme;
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  drawAll();
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
