// The ranks of an engine: what each did in the last steps, what all sent in this one beside what was to be expected, and
// the load of each expert. Only a trace that tells of ranks has this view.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;
  const ROW = 22; // pixels
  const BETWEEN = 6; // pixels between stages
  const [FEWEST, MOST] = [2, 96]; // steps in the picture

  const SHARES = ["computes", "exchanges", "bubble"];

  class Ranks {
    constructor(context) {
      this.context = context;
      this.count = 12;
      this.summary = h("span", { class: "tl-summary", "data-summary": "ranks" });
      const legend = teachllm.legend(SHARES.map((name) => [name, `${name}, %`]));
      const zoom = (text, label, factor) =>
        h("button", { text, "aria-label": label, onclick: () => this._zoom(factor) });
      const zooms = h("div", { class: "tl-switch" }, zoom("−", "more steps", 1.5), zoom("+", "fewer steps", 1 / 1.5));
      this.root = context.panel("ranks", "Ranks", this.summary, legend, zooms);
      this.labels = h("ol", { class: "tl-rank-labels", "aria-label": "Ranks" });
      this.canvas = h("canvas", { "aria-hidden": "true" });
      this.painter = new teachllm.RanksPainter(context, this.canvas);
      this.picture = h("div", { class: "tl-rank-picture" }, this.canvas);
      this.traffic = h("div", { class: "tl-traffic" });
      this.trafficText = h("p", { class: "tl-note", "data-traffic": "" });
      this.load = h("canvas", { "aria-hidden": "true" });
      this.loadText = h("p", { class: "tl-note", "data-load": "" });
      this.experts = h("section", { class: "tl-experts" }, h("h3", { text: "tokens of experts" }), this.loadText, this.load);
      const sent = h("section", { class: "tl-sent" }, h("h3", { text: "sent in this step" }), this.trafficText, this.traffic);
      this.root.append(h("div", { class: "tl-ranks" }, this.labels, this.picture, sent, this.experts));
      new ResizeObserver(() => this.context.redraw(this)).observe(this.picture);
      this._listen();
    }

    draw({ timeline, k, line }) {
      const window = teachllm.rankWindow(timeline.told, k, this.count);
      this.window = window;
      this._drawTraffic(line?.ranks ?? []);
      this._drawLoad(line?.expert_load, timeline.header.config);
      if (!window) return;
      const stages = new Set(window.rows.map(({ stage }) => stage)).size;
      const bubble = window.rows.reduce((sum, row) => sum + row.bubble, 0) / window.rows.length;
      const ranks = format.count(window.rows.length, "rank");
      const where = `${ranks}${stages > 1 ? ` in ${stages} stages` : ""}`;
      const text = `${where} · the last ${format.count(this.count, "step")} · bubbles ${format.percent(bubble)}`;
      patch(this.summary, { text, "data-bubble": bubble.toFixed(4) });
      this._drawLabels(window);
      const width = this.picture.clientWidth;
      if (width) this.painter.paint(window, this._tops(window), ROW, width);
    }

    light() {}

    _tops({ rows }) {
      let top = 0;
      return rows.map(({ stage }, i) => {
        if (i) top += ROW + (stage === rows[i - 1].stage ? 0 : BETWEEN);
        return top;
      });
    }

    _drawLabels({ rows }) {
      const numStages = new Set(rows.map(({ stage }) => stage)).size;
      list(this.labels, rows, {
        key: (_, rank) => rank,
        create: () => h("li", {}, h("span"), ...SHARES.map((name) => shareOf(name))),
        update: (item, row, rank) => {
          const told = SHARES.map((name) => `${name} ${format.percent(row[name])}`).join(", ");
          const begins = rank > 0 && rows[rank - 1].stage !== row.stage;
          patch(item, { "data-rank": String(rank), "data-stage": String(row.stage), "data-begins": begins });
          patch(item, { title: told, "aria-label": `rank ${rank}: ${told}` });
          const places = [["replica", row.replica], ["stage", numStages > 1 ? row.stage : undefined], ["rank", rank]];
          const known = places.filter(([, number]) => number !== undefined);
          patch(item.firstChild, { text: known.map(([what, number]) => `${what} ${number}`).join(" · ") });
          SHARES.forEach((name, i) => {
            patch(item.children[i + 1], { [`data-${name}`]: row[name].toFixed(4) });
            patch(item.children[i + 1].lastChild, { text: String(Math.round(100 * row[name])) });
          });
        },
      });
    }

    _drawTraffic(ranks) {
      const sent = teachllm.sentInStep(ranks);
      const most = Math.max(1, ...sent.map(({ bytes, expected }) => Math.max(bytes, expected ?? 0)));
      patch(this.trafficText, { text: compared(sent) });
      list(this.traffic, sent.filter(({ bytes }) => bytes), {
        key: ({ operation }) => operation,
        create: ({ operation }) => h("div", { "data-operation": operation }, h("small", { text: operation }), h("i"), h("span")),
        update: (row, { calls, bytes, seconds, expected }) => {
          const parts = [format.bytes(bytes), format.count(calls, "call")];
          if (seconds !== null) parts.push(format.seconds(seconds));
          patch(row, { "data-bytes": String(bytes), "data-expected": expected === null ? null : String(expected) });
          patch(row.children[1], { "--share": bytes / most, "--expected": expected === null ? null : expected / most });
          patch(row.children[1], { "data-known": expected !== null });
          patch(row.lastChild, { text: parts.join(" · ") });
        },
      });
    }

    // A cell for each layer's each expert, the darker the more tokens; a gap between those of two ranks.
    _drawLoad(layers, config) {
      const has = Boolean(layers?.length);
      patch(this.experts, { hidden: !has });
      if (!has) return;
      const { shares, skew } = teachllm.loadOf(layers);
      const text = `${layers[0].length} in each of ${format.count(layers.length, "layer")}; the busiest has`;
      patch(this.loadText, { text: `${text} ${skew.toFixed(1)} × the mean`, "data-skew": skew.toFixed(4) });
      const holders = config.enable_expert_parallel ? config.tensor_parallel_size * config.data_parallel_size : 1;
      const width = this.load.parentElement.clientWidth;
      if (width) paintLoad(this.load, shares, holders, width, this.context.colors);
    }

    _zoom(factor) {
      this.count = Math.max(FEWEST, Math.min(Math.round(this.count * factor), MOST));
      this.context.redraw(this);
    }

    _listen() {
      const hit = (event) => {
        const box = this.canvas.getBoundingClientRect();
        return this.painter.at(event.clientX - box.left, event.clientY - box.top);
      };
      this.canvas.addEventListener("pointermove", (event) => {
        const found = hit(event);
        this.canvas.style.cursor = found ? "pointer" : "";
        const at = { left: event.clientX - 8, right: event.clientX + 8, top: event.clientY, bottom: event.clientY + 12 };
        this.context.hoverOther(found && planCard(found), at);
      });
      this.canvas.addEventListener("pointerleave", () => this.context.hoverOther(null));
      this.canvas.addEventListener("click", (event) => {
        const found = hit(event);
        if (found) this.context.goTo(found.plan.k);
      });
    }
  }

  function shareOf(name) {
    return h("small", {}, h("i", { class: `tl-swatch tl-${name}` }), h("span"));
  }

  // How what was sent compares with what was to be expected, of the operations of which that is known.
  function compared(sent) {
    const known = sent.filter(({ expected }) => expected !== null);
    if (!known.length) return sent.length ? "" : "nothing";
    const [bytes, expected] = ["bytes", "expected"].map((name) => known.reduce((sum, each) => sum + each[name], 0));
    if (bytes === expected) return `${format.bytes(bytes)}, as the model's shape predicts`;
    const [more, than] = bytes > expected ? [bytes - expected, "more"] : [expected - bytes, "less"];
    return `${format.bytes(bytes)}: ${format.bytes(more)} ${than} than the model's shape predicts`;
  }

  // What a rank's part of a step says when asked.
  function planCard({ rank, plan }) {
    const { line, told, parts, begin, end } = plan;
    const title = line.step === undefined ? `rank ${rank} in an empty step` : `rank ${rank} in step ${line.step}`;
    const of = (isWanted) => parts.filter(isWanted).reduce((sum, part) => sum + part.end - part.begin, 0);
    const facts = [["stage", String(told.stage)], ["took", format.seconds(end - begin)]];
    if (told.exchanges) facts.push(["computed", format.seconds(of(({ operation }) => operation === null))]);
    for (const { operation, calls, bytes, seconds } of teachllm.sentInStep([told])) {
      const took = seconds === null ? "" : `, ${format.seconds(seconds)}`;
      facts.push([operation, `${format.count(calls, "call")}, ${format.bytes(bytes)}${took}`]);
    }
    if (line.scheduled) {
      const tokens = line.scheduled.reduce((sum, request) => sum + request.num_tokens, 0);
      facts.push(["tokens", `${tokens} of ${format.count(line.scheduled.length, "request")}`]);
    }
    return { title, facts, data: { "data-card": "rank", "data-card-id": String(rank), "data-card-step": String(plan.k) } };
  }

  function paintLoad(canvas, shares, holders, width, colors) {
    const numExperts = shares[0].length;
    const gap = holders > 1 ? 3 : 0;
    const [w, height] = [(width - gap * (holders - 1)) / numExperts, Math.max(3, Math.min(12, Math.floor(96 / shares.length)))];
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * shares.length * ratio);
    canvas.style.height = `${height * shares.length}px`;
    const plot = canvas.getContext("2d");
    plot.setTransform(ratio, 0, 0, ratio, 0, 0);
    // As `spread` in teachllm/distributed/shards.py.
    const holderOf = (expert) => Math.floor(((expert + 1) * holders - 1) / numExperts);
    shares.forEach((layer, row) => {
      layer.forEach((share, expert) => {
        const x = expert * w + holderOf(expert) * gap;
        plot.globalAlpha = 0.08 + 0.92 * share;
        plot.fillStyle = colors.accent;
        plot.fillRect(x, row * height, Math.max(w - (w > 4 ? 1 : 0), 0.5), height - (height > 4 ? 1 : 0));
      });
    });
  }

  Object.assign(teachllm, { Ranks });
})();
