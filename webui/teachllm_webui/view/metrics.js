// Metrics over time, drawn while they are in sight. A line marks the step shown.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch } = teachllm;
  const REDRAW_MS = 400; // while lines arrive
  const CHARTS = [
    ["ttft", "TTFT, ms", "ms", "points"],
    ["itl", "ITL, ms", "ms", "line"],
    ["throughput", "output tokens/s", "tokens/s", "line"],
    ["kv", "KV blocks in use, %", "%", "steps"],
    ["hitRate", "prefix hit rate, %", "%", "steps"],
  ];

  class Metrics {
    constructor(context) {
      this.context = context;
      this.series = new teachllm.Series();
      const note = h("span", { class: "tl-summary", text: "over the whole trace, on the engine's clock; the line is the step shown" });
      this.root = context.panel("metrics", "Metrics", note);
      this.body = h("div", { class: "tl-metrics" });
      this.charts = CHARTS.map(([name, ...look]) => ({ name, chart: new teachllm.Chart(name, ...look) }));
      this.body.append(...this.charts.map(({ chart }) => chart.root));
      this.root.append(this.body);
      new ResizeObserver(() => this._refresh()).observe(this.body);
    }

    // Out of sight it is drawn when the step has not changed for a moment.
    draw({ timeline, k, whole = false }) {
      this.k = k;
      this.series.extend(timeline);
      if (this.series.length !== this._drawn || this.context.colors.key !== this._colors) this._refresh(whole);
      this._moveCursor();
    }

    light() {}

    print() {
      this._plot();
    }

    destroy() {
      clearTimeout(this._timer);
    }

    _refresh(whole = false) {
      if (this._timer || !(whole || this.context.isVisible(this))) return;
      const wait = Math.max(0, (this._drawnAt ?? -Infinity) + REDRAW_MS - performance.now());
      this._timer = setTimeout(() => {
        this._timer = 0;
        this._plot();
      }, wait);
    }

    _plot() {
      if (!this.body.clientWidth) return;
      const { series, context } = this;
      [this._drawn, this._drawnAt, this._colors] = [series.length, performance.now(), context.colors.key];
      const { ranges, key } = this._ranges();
      const request = ({ id }) => context.timeline.palette.of(id);
      for (const { name, chart } of this.charts) {
        chart.draw(series.points(name), ranges[name], context.colors, name === "ttft" ? request : undefined);
      }
      patch(this.body, { "data-drawn": String(this._drawn) });
      this._moveCursor();
      this._rangesKey = key;
      for (const { metrics } of context.peers) {
        if (!metrics._drawn || metrics._rangesKey === key) continue;
        metrics._drawn = -1; // it is to be drawn again, as soon as it is in sight
        metrics._refresh();
      }
    }

    // The ends of the axes of each chart: the same on all sides.
    _ranges() {
      const all = [this.context, ...this.context.peers].map(({ metrics }) => metrics.series);
      const seconds = Math.max(...all.map(({ time }) => time.at(-1) ?? 1e-3));
      const top = (name) => Math.max(0, ...all.map((series) => series.most(name)));
      const ranges = Object.fromEntries(CHARTS.map(([name]) => [name, { seconds, top: top(name) }]));
      return { ranges, key: JSON.stringify(ranges) };
    }

    _moveCursor() {
      const time = this.k >= 0 && this._drawn > 0 ? this.series.time[Math.min(this.k, this._drawn - 1)] : null;
      for (const { chart } of this.charts) chart.mark(time);
    }
  }

  Object.assign(teachllm, { Metrics });
})();
