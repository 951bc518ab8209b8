// A small chart on a canvas: a line, steps or points over the engine's time. What lies under the pointer is told in words
// above it; the line that marks the step shown is an element over the canvas, since moving it must cost nothing.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, format } = teachllm;
  const FONT = "10px system-ui, sans-serif";
  const MARGIN = { left: 40, right: 10, top: 8, bottom: 18 };
  const MAX_POINTS = 4000; // of a line; more have no pixel of their own

  class Chart {
    // shape: "line", "steps" (as it is until the next point) or "points"
    constructor(name, title, unit, shape) {
      Object.assign(this, { title, unit, shape, points: [] });
      this.canvas = h("canvas", { "aria-hidden": "true" });
      this.cursor = h("div", { class: "tl-plot-cursor" });
      this.reading = h("span", { class: "tl-reading" });
      this.plot = h("div", { class: "tl-plot", "data-plot": name, role: "img", "aria-label": title }, this.canvas, this.cursor);
      this.root = h("figure", { class: "tl-plot-frame" }, h("figcaption", {}, h("b", { text: title }), this.reading), this.plot);
      this.plot.addEventListener("pointermove", (event) => this._read(event));
      this.plot.addEventListener("pointerleave", () => patch(this.reading, { text: "" }));
    }

    // points: [{ time, value, id? }]; range: the axes' ends, { seconds, top }; of: a point's colour and, if it has one,
    // its label
    draw(points, { seconds, top }, colors, of = () => ({ css: colors.accent })) {
      Object.assign(this, { points, seconds, top: ceiling(top), colors, of });
      const [width, height] = [this.plot.clientWidth, this.plot.clientHeight];
      if (!width || !height) return;
      Object.assign(this, { width, height });
      const ratio = devicePixelRatio || 1;
      Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
      const paper = (this.paper = this.canvas.getContext("2d"));
      paper.scale(ratio, ratio);
      this._drawAxes();
      if (this.shape === "points") this._drawPoints();
      else this._drawLine();
      patch(this.plot, { "aria-label": `${this.title}: ${this._summary()}` });
    }

    mark(seconds) {
      const isPlaced = seconds !== null && this.width > 0;
      patch(this.cursor, { hidden: !isPlaced, "--x": isPlaced ? `${Math.round(this._x(seconds))}px` : null });
    }

    _x(seconds) {
      return MARGIN.left + (seconds / this.seconds) * (this.width - MARGIN.left - MARGIN.right);
    }

    _y(value) {
      return MARGIN.top + (1 - value / this.top) * (this.height - MARGIN.top - MARGIN.bottom);
    }

    _drawAxes() {
      const { paper, colors, width } = this;
      Object.assign(paper, { font: FONT, textBaseline: "middle", lineWidth: 1 });
      for (const share of [0, 0.5, 1]) {
        const y = Math.round(this._y(share * this.top)) + 0.5;
        paper.strokeStyle = colors.line;
        paper.beginPath();
        paper.moveTo(MARGIN.left, y);
        paper.lineTo(width - MARGIN.right, y);
        paper.stroke();
        paper.fillStyle = colors.muted;
        paper.textAlign = "right";
        paper.fillText(format.plain(share * this.top), MARGIN.left - 5, y);
      }
      const y = this.height - MARGIN.bottom / 2 + 1;
      paper.textAlign = "left";
      paper.fillText("0", MARGIN.left, y);
      paper.textAlign = "right";
      paper.fillText(format.seconds(this.seconds), width - MARGIN.right, y);
    }

    _drawLine() {
      const { paper, points, colors } = this;
      if (!points.length) return;
      paper.strokeStyle = colors.accent;
      paper.lineWidth = 1.5;
      paper.beginPath();
      let before = null;
      for (const { time, value } of thinned(points)) {
        const [x, y] = [this._x(time), this._y(value)];
        if (before === null) paper.moveTo(x, y);
        else if (this.shape === "steps") paper.lineTo(x, before);
        if (before !== null) paper.lineTo(x, y);
        before = y;
      }
      paper.stroke();
    }

    _drawPoints() {
      const { paper, points, colors } = this;
      paper.strokeStyle = colors.ink;
      paper.lineWidth = 0.5;
      for (const point of points) {
        paper.fillStyle = this.of(point).css;
        paper.beginPath();
        paper.arc(this._x(point.time), this._y(point.value), 3, 0, 7);
        paper.fill();
        paper.stroke();
      }
    }

    _read(event) {
      const at = event.clientX - this.plot.getBoundingClientRect().left;
      let nearest = null;
      for (const point of this.points) {
        const away = Math.abs(this._x(point.time) - at);
        if (!nearest || away < nearest.away) nearest = { ...point, away };
      }
      if (!nearest) return;
      const label = this.of(nearest).label;
      const value = `${format.plain(nearest.value)} ${this.unit}`;
      patch(this.reading, { text: `${label ? `${label}: ` : ""}${value} at ${format.seconds(nearest.time)}` });
    }

    _summary() {
      const { points, unit } = this;
      if (!points.length) return "nothing yet";
      const values = points.map(({ value }) => value);
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      const most = values.reduce((a, b) => Math.max(a, b));
      return `mean ${format.plain(mean)} ${unit}, most ${format.plain(most)} ${unit}, last ${format.plain(values.at(-1))} ${unit}`;
    }
  }

  // 1, 2 or 5 times a power of ten that is no smaller.
  function ceiling(value) {
    if (!(value > 0)) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= value * (1 - 1e-9));
  }

  // Of the points that share a pixel, the lowest and the highest.
  function thinned(points) {
    if (points.length <= MAX_POINTS) return points;
    const stride = Math.ceil((2 * points.length) / MAX_POINTS);
    const kept = [];
    for (let i = 0; i < points.length; i += stride) {
      const few = points.slice(i, i + stride);
      const [low, high] = [(a, b) => (b.value < a.value ? b : a), (a, b) => (b.value > a.value ? b : a)].map((f) => few.reduce(f));
      kept.push(...(low.time <= high.time ? [low, high] : [high, low]));
    }
    return kept;
  }

  Object.assign(teachllm, { Chart });
})();
