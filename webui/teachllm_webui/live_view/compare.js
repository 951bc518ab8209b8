// Two timelines in figures, one row each, at the step that both show: the second one's is set in bold where it differs.
// Of a fork and its original only what comes after the fork is told.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;

  const least = (text, side) => (side.isLeast ? `≥ ${text}` : text);
  const ROWS = [
    ["steps", "steps", (side) => `${side.steps} (0 to ${side.step})`],
    ["finished", "finished", (side) => `${side.finished} of ${side.requests}`],
    ["ttft", "mean TTFT", (side) => least(`${format.seconds(side.ttft)}, ${format.count(side.ttftSteps, "step")}`, side)],
    ["longest", "longest pause between tokens", (side) => format.seconds(side.longest)],
    ["waste", "empty slots in used blocks", (side) => format.percent(side.waste)],
    ["preemptions", "preemptions", (side) => String(side.preemptions)],
    ["mostTokens", "most tokens in a step", (side) => String(side.mostTokens)],
  ];
  const NOTHING = Object.fromEntries(ROWS.map(([name]) => [name, null]));

  class Comparison {
    constructor() {
      this.root = h("dl", { class: "tl-compare", "data-compare": "", "aria-label": "comparison", hidden: true });
      this.views = [];
    }

    // Two views from now on, or none. What comes after a step of both counts.
    watch(views, { titles, since }) {
      Object.assign(this, { views, titles, since });
      const original = new teachllm.Figures(since);
      this.figures = [original, new teachllm.Figures(since, since < 0 ? null : original)];
      if (views.length) views[0].place.ondraw = () => this.draw();
      this.draw();
    }

    draw() {
      this.views.forEach(({ timeline }, i) => this.figures[i].extend(timeline));
      const isSame = this.since >= 0 && this.views[0]?.place.step <= this.since; // there is no fork yet
      const sides = this.views.map(({ k }, i) => (isSame ? NOTHING : this.figures[i].at(k)));
      const [left, right] = sides;
      const rows = left && right ? ROWS.filter(([name]) => isSame || left[name] !== null || right[name] !== null) : [];
      patch(this.root, { hidden: rows.length === 0 });
      const titles = ["titles", this.since < 0 ? "" : `after step ${this.since}`, null];
      list(this.root, rows.length ? [titles, ...rows] : [], {
        key: ([name]) => name,
        create: ([name, title]) => h("div", { "data-figure": name }, h("dt", { text: title }), h("dd"), h("dd")),
        update: (node, [name, , show]) => {
          const values = show ? sides.map((side) => side[name]) : this.titles;
          const texts = show ? sides.map((side) => (side[name] === null ? "–" : show(side))) : this.titles;
          texts.forEach((text, i) => {
            const told = show ? `${this.titles[i]}: ${text}` : text;
            patch(node.children[i + 1], { text, "data-value": String(values[i]), "aria-label": told, title: told });
          });
          patch(node, { "data-differs": texts[0] !== texts[1] });
        },
      });
    }
  }

  Object.assign(teachllm, { Comparison });
})();
