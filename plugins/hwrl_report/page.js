"use strict";
// Draws the curves of a run from the JSON in the page, and filters its samples. It needs nothing else and loads nothing.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { left: 52, right: 24, top: 6, bottom: 20 };
  const view = { from: null, to: null, smoothing: 0, byTime: false };
  const charts = [];

  // -- small helpers ------------------------------------------------------------------------------------------------

  function make(parent, tag, attributes = {}, text = null) {
    const inSvg = tag === "svg" || parent.namespaceURI === SVG;
    const node = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function format(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit && size >= 1e4) return `${Number((value / unit).toPrecision(4))} ${letter}`;
    if (size > 0 && size < 1e-3) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-6);
    return Array.from({ length: Math.min(50, last - first + 1) }, (_, index) => (first + index) * step);
  }

  // Returns the index of the last of the rising numbers that is at most value; 0 if there is none.
  function indexAt(numbers, value) {
    let low = 0, high = numbers.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (numbers[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  function smooth(values) {
    if (!view.smoothing) return values;
    let mean = 0, weight = 0; // an exponential mean without a bias to its start
    return values.map((value) => {
      if (value === null) return null;
      mean = view.smoothing * mean + (1 - view.smoothing) * value;
      weight = view.smoothing * weight + (1 - view.smoothing);
      return mean / weight;
    });
  }

  // -- the x axis: steps, or seconds of training --------------------------------------------------------------------

  const clock = data.series.time_s;
  function place(step) {
    if (!view.byTime) return step;
    const steps = data.x[clock.x], index = indexAt(steps, step);
    if (step <= steps[0] || index === steps.length - 1) return clock.v[index];
    const share = (step - steps[index]) / (steps[index + 1] - steps[index]);
    return clock.v[index] + share * (clock.v[index + 1] - clock.v[index]);
  }

  function wholeRange() {
    const steps = clock ? data.x[clock.x] : [0, 1];
    const first = steps[0], last = data.bars ? Math.max(data.bars.end, steps[steps.length - 1]) : steps[steps.length - 1];
    return [first, Math.max(last, first + 1)];
  }

  function formatPlace(value) {
    if (!view.byTime) return format(Math.round(value));
    if (value < 120) return format(value) + " s";
    return value < 7200 ? format(value / 60) + " min" : format(value / 3600) + " h";
  }

  // -- one chart ----------------------------------------------------------------------------------------------------

  class Chart {
    constructor(figure, series, stacked) {
      this.figure = figure; this.series = series; this.stacked = stacked;
      this.svg = make(figure, "svg", { role: "img", "aria-label": figure.querySelector("figcaption").textContent });
      this.legend = make(figure, "ul");
      this.readouts = series.map((each) => {
        const item = make(this.legend, "li", { class: each.style });
        make(item, "span", {}, each.label);
        item.addEventListener("click", () => { each.hidden = !each.hidden; item.classList.toggle("off"); this.draw(); });
        return make(item, "b");
      });
      this.listen();
    }

    draw() {
      if (this.figure.closest("details:not([open])")) return;
      this.width = Math.max(100, this.figure.clientWidth - 2);
      this.height = this.figure.classList.contains("wide") ? 200 : 170;
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
      const whole = wholeRange();
      this.range = [place(view.from ?? whole[0]), place(view.to ?? whole[1])];
      const shown = this.series.filter((each) => !each.hidden).map((each) => this.visible(each));
      this.limits = this.findLimits(shown);
      this.drawAxes();
      if (this.stacked) this.drawBars(shown); else for (const each of shown) this.drawCurve(each);
      this.drawEvents();
      this.cross = make(this.svg, "line", { class: "cross", y1: MARGIN.top, y2: this.height - MARGIN.bottom, x1: -9, x2: -9 });
      this.read(null);
    }

    // Returns the points inside the x range, and one more on each side.
    visible(each) {
      const steps = each.steps, from = view.from ?? -Infinity, to = view.to ?? Infinity;
      const first = Math.max(0, indexAt(steps, from)), last = Math.min(steps.length, indexAt(steps, to) + 2);
      const cut = (values) => values && values.slice(first, last);
      const ends = [...steps.slice(first + 1, last), ...(last < steps.length ? [steps[last]] : [each.end ?? steps[last - 1]])];
      return { ...each, steps: cut(steps), ends, v: cut(this.stacked ? each.v : smooth(each.v)), lo: cut(each.lo), hi: cut(each.hi) };
    }

    findLimits(shown) {
      if (this.stacked) {
        const sums = (shown[0]?.steps ?? []).map((_, index) => shown.reduce((sum, each) => sum + (each.v[index] ?? 0), 0));
        return [0, Math.max(1e-9, ...sums)];
      }
      let low = Infinity, high = -Infinity;
      for (const each of shown) for (const values of [each.v, view.smoothing ? null : each.lo, view.smoothing ? null : each.hi])
        for (const value of values ?? []) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
      if (low > high || (low === 0 && high === 0)) return [0, 1];
      if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) // equal but for rounding
        return [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
      const slack = (high - low) * 0.04;
      return [low >= 0 && low - slack < 0 ? 0 : low - slack, high + slack];
    }

    x(step) { return this.xOf(place(step)); }
    xOf(value) {
      const inside = this.width - MARGIN.left - MARGIN.right;
      return MARGIN.left + (value - this.range[0]) / (this.range[1] - this.range[0] || 1) * inside;
    }
    y(value) {
      const inside = this.height - MARGIN.top - MARGIN.bottom;
      return this.height - MARGIN.bottom - (value - this.limits[0]) / (this.limits[1] - this.limits[0]) * inside;
    }

    drawAxes() {
      for (const value of ticks(...this.limits, 5)) {
        const y = this.y(value);
        make(this.svg, "line", { class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y });
        make(this.svg, "text", { class: "y", x: MARGIN.left - 5, y: y + 3.5 }, format(value));
      }
      for (const value of ticks(...this.range, Math.max(2, Math.floor(this.width / 70)))) {
        if (!view.byTime && !Number.isInteger(Number(value.toFixed(6)))) continue;
        make(this.svg, "text", { class: "x", x: this.xOf(value), y: this.height - 5 }, formatPlace(value));
      }
      const clip = make(make(this.svg, "clipPath", { id: `clip-${charts.indexOf(this)}` }), "rect",
        { x: MARGIN.left, y: 0, width: this.width - MARGIN.left - MARGIN.right, height: this.height - MARGIN.bottom + 1 });
      this.plot = make(this.svg, "g", { "clip-path": `url(#${clip.parentNode.id})` });
    }

    drawCurve(each) {
      const point = (index, values) => `${this.x(each.steps[index]).toFixed(1)} ${this.y(values[index]).toFixed(1)}`;
      const known = each.steps.map((_, index) => index).filter((index) => each.v[index] !== null);
      if (each.lo && !view.smoothing && known.length) {
        const path = [...known.map((index) => point(index, each.hi)), ...known.reverse().map((index) => point(index, each.lo))];
        make(this.plot, "path", { class: `band ${each.style}`, d: `M${path.join("L")}Z` });
      }
      let path = "", pen = "M";
      each.v.forEach((value, index) => {
        if (value === null) { pen = "M"; return; }
        path += pen + point(index, each.v);
        pen = "L";
      });
      make(this.plot, "path", { class: `curve ${each.style}`, d: path });
      if (known.length <= 30) for (const index of known)
        make(this.plot, "circle", { class: each.style, r: 2.2, cx: this.x(each.steps[index]), cy: this.y(each.v[index]) });
    }

    drawBars(shown) {
      const base = (shown[0]?.steps ?? []).map(() => 0);
      for (const each of shown) {
        let path = "";
        each.v.forEach((value, index) => {
          if (!value) return;
          const left = this.x(each.steps[index]), right = this.x(each.ends[index]);
          const bottom = this.y(base[index]), top = this.y(base[index] += value);
          const gap = right - left > 4 ? 1 : 0;
          path += `M${left.toFixed(1)} ${bottom.toFixed(1)}H${(right - gap).toFixed(1)}V${top.toFixed(1)}H${left.toFixed(1)}Z`;
        });
        make(this.plot, "path", { class: `bar ${each.style}`, d: path });
      }
    }

    drawEvents() {
      for (const [step, kind] of data.events) {
        const x = this.x(step + (this.stacked ? 1 : 0.5));
        const line = make(this.plot, "line", { class: `event ${kind}`, x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom });
        make(line, "title", {}, `${kind} after step ${step}`);
      }
    }

    // Shows the values at a step in the legend; the newest ones for null.
    read(step) {
      this.series.forEach((each, index) => {
        const values = this.stacked ? each.v : smooth(each.v);
        const at = step === null ? values.length - 1 : indexAt(each.steps, step);
        this.readouts[index].textContent = format(values[at]) + (this.stacked ? " s" : "");
      });
      if (this.cross) {
        const x = step === null ? -9 : this.x(step);
        this.cross.setAttribute("x1", x); this.cross.setAttribute("x2", x);
      }
    }

    // -- the mouse: read all charts at one step; drag to zoom, double click for the whole run

    stepAt(event) {
      const share = (event.clientX - this.svg.getBoundingClientRect().left) * (this.width / this.svg.clientWidth);
      const inside = (share - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right);
      const whole = wholeRange(), from = view.from ?? whole[0], to = view.to ?? whole[1];
      if (!view.byTime) return from + Math.min(1, Math.max(0, inside)) * (to - from);
      const seconds = this.range[0] + inside * (this.range[1] - this.range[0]);
      return Math.min(to, Math.max(from, data.x[clock.x][indexAt(clock.v, seconds)]));
    }

    listen() {
      let began = null;
      this.svg.addEventListener("pointermove", (event) => {
        const step = Math.round(this.stepAt(event));
        for (const chart of charts) if (chart.plot) chart.read(step);
        if (began !== null) this.select(began, this.stepAt(event));
      });
      this.svg.addEventListener("pointerleave", () => { for (const chart of charts) if (chart.plot) chart.read(null); });
      this.svg.addEventListener("pointerdown", (event) => { began = this.stepAt(event); this.svg.setPointerCapture(event.pointerId); });
      this.svg.addEventListener("pointerup", (event) => {
        const ended = this.stepAt(event), [from, to] = [Math.min(began, ended), Math.max(began, ended)];
        began = null;
        if (this.x(to) - this.x(from) > 6) zoom(from, to); else this.select(0, 0);
      });
      this.svg.addEventListener("dblclick", () => zoom(null, null));
    }

    select(from, to) {
      this.selection?.remove();
      const [left, right] = [this.x(Math.min(from, to)), this.x(Math.max(from, to))];
      this.selection = make(this.plot, "rect", { class: "selection", x: left, width: right - left, y: 0, height: this.height });
    }
  }

  // -- the page -----------------------------------------------------------------------------------------------------

  function zoom(from, to) {
    view.from = from; view.to = from === null ? null : Math.max(to, from + 1);
    document.getElementById("reset").disabled = from === null;
    drawAll();
  }

  function drawAll() { for (const chart of charts) chart.draw(); }

  function seriesOf(names) {
    return names.map((name, index) => {
      const each = data.series[name];
      return { label: name, style: `s${index % 8}`, steps: data.x[each.x], v: each.v, lo: each.lo, hi: each.hi };
    });
  }

  function stackOf(side) {
    return Object.entries(data.bars[side]).map(([part, values]) =>
      ({ label: part, style: `part-${part}`, steps: data.bars.steps, v: values, end: data.bars.end }));
  }

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const key = figure.dataset.chart;
    const stacked = key.startsWith("bars-");
    charts.push(new Chart(figure, stacked ? stackOf(key.slice(5)) : seriesOf(data.charts[key]), stacked));
  }
  drawAll();
  new ResizeObserver(drawAll).observe(document.querySelector("main"));
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", drawAll);

  const smoothing = document.getElementById("smoothing"), axis = document.getElementById("x-axis");
  smoothing.addEventListener("input", () => { view.smoothing = Number(smoothing.value); drawAll(); });
  axis.addEventListener("change", () => { view.byTime = axis.value === "time" && Boolean(clock); drawAll(); });
  document.getElementById("reset").addEventListener("click", () => zoom(null, null));

  // -- samples ------------------------------------------------------------------------------------------------------

  const form = document.getElementById("sample-filter");
  function filterSamples() {
    const field = (name) => form.elements[name].value;
    const inside = (value, name) =>
      (field(`${name}-from`) === "" || value >= Number(field(`${name}-from`))) &&
      (field(`${name}-to`) === "" || value <= Number(field(`${name}-to`)));
    const text = field("text").toLowerCase(), samples = [...document.querySelectorAll("#samples article")];
    for (const sample of samples) sample.hidden = !(
      inside(Number(sample.dataset.step), "step") && inside(Number(sample.dataset.reward), "reward") &&
      (!form.elements.truncated.checked || sample.dataset.truncated === "1") &&
      (text === "" || sample.textContent.toLowerCase().includes(text)));
    const shown = samples.filter((sample) => !sample.hidden).length;
    document.getElementById("sample-matches").textContent = shown === samples.length ? "" : `${shown} match`;
  }
  if (form) {
    form.addEventListener("input", filterSamples);
    form.addEventListener("submit", (event) => event.preventDefault());
  }
})();
