// Metrics over time, drawn by Plotly once they are in sight. Plotly is large, so it is evaluated only then: it lies in
// the page as text (see `export.py`), or comes from the function given as `plotly`. A line marks the step shown; since
// moving it must cost nothing, it is an element over the plots and no part of them.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch } = teachllm;
  const REDRAW_MS = 400; // while lines arrive
  const MARGIN = { l: 40, r: 12, t: 26, b: 24 };
  const PLOTS = [
    ["ttft", "TTFT, ms"],
    ["itl", "ITL, ms"],
    ["throughput", "output tokens/s"],
    ["kv", "KV blocks in use, %"],
    ["hitRate", "prefix hit rate, %"],
  ];

  let loading = null;
  function embeddedPlotly() {
    if (globalThis.Plotly) return Promise.resolve(globalThis.Plotly);
    loading ??= new Promise((resolve, reject) => {
      const text = document.querySelector("script[data-teachllm-plotly]")?.textContent;
      if (!text) return reject(new Error("Plotly is not part of this page"));
      document.head.append(h("script", { text }));
      return resolve(globalThis.Plotly);
    });
    return loading;
  }

  class Metrics {
    constructor(context, plotly = embeddedPlotly) {
      this.context = context;
      this.load = plotly;
      this.series = new teachllm.Series();
      const note = h("span", { class: "tl-summary", text: "over the whole trace; the line is the step shown" });
      this.root = context.panel("metrics", "Metrics", note);
      this.body = h("div", { class: "tl-metrics" });
      this.plots = PLOTS.map(([name, title]) => {
        const plot = h("div", { class: "tl-plot", "data-plot": name, role: "img", "aria-label": title });
        const cursor = h("div", { class: "tl-plot-cursor" });
        this.body.append(h("div", { class: "tl-plot-frame" }, plot, cursor));
        return { name, title, plot, cursor };
      });
      this.root.append(this.body);
      new ResizeObserver(() => this._refresh()).observe(this.body);
    }

    draw({ timeline, k }) {
      this.k = k;
      this.series.extend(timeline);
      if (this.series.length !== this._drawn || this.context.colors.key !== this._colors) this._refresh();
      this._moveCursor();
    }

    light() {}

    destroy() {
      clearTimeout(this._timer);
      for (const { plot } of this.plots) globalThis.Plotly?.purge(plot);
    }

    _refresh() {
      if (this._timer || !this.context.isVisible(this)) return;
      const wait = Math.max(0, (this._drawnAt ?? -Infinity) + REDRAW_MS - performance.now());
      this._timer = setTimeout(() => {
        this._timer = 0;
        this._plot().catch((error) => patch(this.body, { "data-error": error.message }));
      }, wait);
    }

    async _plot() {
      const Plotly = await this.load();
      patch(this.body, { "data-error": null });
      if (!this.body.clientWidth) return;
      this._drawn = this.series.length;
      this._drawnAt = performance.now();
      this._colors = this.context.colors.key;
      const { colors } = this.context;
      this._range = [0, Math.max(this.series.time.at(-1) ?? 1, 1e-3)];
      for (const { name, title, plot } of this.plots) {
        const look = layout(title, colors, this._range, plot);
        plot._width = plot.clientWidth;
        await Plotly.react(plot, [this._trace(name, colors)], look, { displayModeBar: false });
      }
      patch(this.body, { "data-drawn": String(this._drawn) });
      this._moveCursor();
    }

    _trace(name, colors) {
      if (name !== "ttft") {
        const isState = name === "kv" || name === "hitRate"; // stays as it is between two steps
        const line = { color: colors.accent, width: 1.5, shape: isState ? "hv" : "linear" };
        const hovertemplate = "%{y:.3~g} at %{x:.3~f} s<extra></extra>";
        return { ...this.series.points(name), mode: "lines", line, hovertemplate };
      }
      const { x, y, text } = this.series.ttft;
      const color = text.map((id) => this.context.timeline.palette.of(id).css);
      const marker = { size: 6, color, line: { width: 0.5, color: colors.ink } };
      const hovertemplate = "%{text}: %{y:.3~g} ms<extra></extra>";
      return { x: [...x], y: [...y], text: text.map(escaped), mode: "markers", marker, hovertemplate };
    }

    _moveCursor() {
      const isPlaced = this._range && this.k >= 0;
      const share = isPlaced ? this.series.time[this.k] / this._range[1] : 0;
      for (const { plot, cursor } of this.plots) {
        const x = Math.round(MARGIN.l + share * ((plot._width ?? 0) - MARGIN.l - MARGIN.r));
        patch(cursor, { hidden: !isPlaced, "--x": `${x}px` });
      }
    }
  }

  // Plotly reads some markup in texts.
  function escaped(id) {
    return id.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  }

  function layout(title, colors, range, plot) {
    plot._width = plot.clientWidth;
    const { line } = colors;
    const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, fixedrange: true, nticks: 5 };
    const place = { x: 0, xref: "paper", y: 1, yref: "container", yanchor: "top", pad: { t: 6 } };
    return {
      width: plot.clientWidth,
      height: plot.clientHeight,
      margin: MARGIN,
      title: { text: title, font: { size: 12 }, ...place },
      font: { size: 10, color: colors.muted, family: "system-ui, sans-serif" },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: false,
      hovermode: "closest",
      xaxis: { ...axis, range, ticksuffix: " s", showgrid: false },
      yaxis: { ...axis, rangemode: "tozero" },
    };
  }

  Object.assign(teachllm, { Metrics });
})();
