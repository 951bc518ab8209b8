// Two timelines in figures, side by side, at the steps that they show: the right one's is set in bold where it differs.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;

  const least = (text, side) => (side.isLeast ? `≥ ${text}` : text);
  const ROWS = [
    ["steps", "steps", (side) => `${side.steps} (0 to ${side.step})`],
    ["finished", "finished", (side) => `${side.finished} of ${side.requests}`],
    ["ttft", "mean TTFT", (side) => least(`${format.seconds(side.ttft)}, ${format.plain(side.ttftSteps)} steps`, side)],
    ["longest", "longest ITL", (side) => format.seconds(side.longest)],
    ["waste", "empty slots in used blocks", (side) => format.percent(side.waste)],
    ["preemptions", "preemptions", (side) => String(side.preemptions)],
    ["mostTokens", "most tokens in a step", (side) => String(side.mostTokens)],
  ];

  class Comparison {
    constructor() {
      this.root = h("dl", { class: "tl-compare", "data-compare": "", "aria-label": "comparison", hidden: true });
      this.views = [];
    }

    // Two views from now on, or none. What comes after a step of both counts.
    watch(views, since) {
      this.views = views;
      this.figures = views.map(() => new teachllm.Figures(since));
      for (const view of views) view.ondraw = () => this.draw();
      this.draw();
    }

    draw() {
      const sides = this.views.map(({ timeline, k }, i) => {
        this.figures[i].extend(timeline);
        return this.figures[i].at(k);
      });
      const [left, right] = sides;
      const rows = left && right ? ROWS.filter(([name]) => left[name] !== null || right[name] !== null) : [];
      patch(this.root, { hidden: rows.length === 0 });
      list(this.root, rows, {
        key: ([name]) => name,
        create: ([name, title]) => h("div", { "data-figure": name }, h("dt", { text: title }), h("dd"), h("dd")),
        update: (node, [name, , show]) => {
          const [, a, b] = node.children;
          const text = (side) => (side[name] === null ? "–" : show(side));
          patch(a, { text: text(left), "data-value": String(left[name]) });
          patch(b, { text: text(right), "data-value": String(right[name]) });
          patch(node, { "data-differs": text(left) !== text(right) });
          patch(a, { "aria-label": `left: ${text(left)}` });
          patch(b, { "aria-label": `right: ${text(right)}` });
        },
      });
    }
  }

  Object.assign(teachllm, { Comparison });
})();
