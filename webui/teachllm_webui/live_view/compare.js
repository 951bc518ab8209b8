// Two timelines in figures, side by side: the right one's is set in bold where it differs.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list } = teachllm;
  const ASK_MS = 700;

  const count = (value) => String(value);
  const percent = (value) => `${(100 * value).toFixed(0)} %`;
  const ROWS = [
    ["steps", "steps", count],
    ["finished", "finished", (value, side) => `${value} of ${side.requests}`],
    ["ttft_steps", "TTFT", (value) => `${value.toFixed(1)} steps`],
    ["waste", "empty slots in used blocks", percent],
    ["preemptions", "preemptions", count],
    ["most_tokens", "most tokens in a step", count],
  ];

  class Comparison {
    constructor(ask) {
      this.ask = ask;
      this.root = h("dl", { class: "tl-compare", "data-compare": "", "aria-label": "comparison", hidden: true });
    }

    // Asks again, but not too often.
    refresh() {
      if (this._timer) return;
      const wait = Math.max(0, (this._at ?? -1e9) + ASK_MS - performance.now());
      this._timer = setTimeout(async () => {
        this._timer = 0; // lines that come from here on are asked for again
        this._at = performance.now();
        const { _mounted } = this;
        const answer = await Promise.resolve(this.ask()).catch(() => null); // the poll reports that the server does not answer
        if (answer && _mounted === this._mounted) this.draw(answer);
      }, wait);
    }

    // For two timelines that are new.
    clear() {
      this._mounted = (this._mounted ?? 0) + 1;
      this.draw([]);
    }

    draw([left, right]) {
      const rows = left && right ? ROWS.filter(([name]) => left[name] !== null || right[name] !== null) : [];
      patch(this.root, { hidden: rows.length === 0 });
      list(this.root, rows, {
        key: ([name]) => name,
        create: ([name, title]) => h("div", { "data-figure": name }, h("dt", { text: title }), h("dd"), h("dd")),
        update: (node, [name, , show]) => {
          const [, a, b] = node.children;
          const text = (side) => (side[name] === null ? "–" : show(side[name], side));
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
