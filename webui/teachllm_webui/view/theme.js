// The colours of the style sheet, resolved, for what is painted on canvases. They change with the system's scheme and
// with a `data-theme` ("light", "dark") on the view or on anything around it.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const NAMES = ["back", "panel", "ink", "muted", "line", "wait", "alarm", "accent", "hit"];

  class Theme {
    constructor(root, changed) {
      this.probe = teachllm.h("span", { class: "tl-probe", "aria-hidden": "true" });
      root.append(this.probe);
      this.colors = this._read();
      const check = () => {
        const colors = this._read();
        if (colors.key === this.colors.key) return;
        this.colors = colors;
        changed();
      };
      this._gone = new AbortController();
      const { signal } = this._gone;
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", check, { signal });
      this._observer = new MutationObserver(check);
      const watched = { attributes: true, attributeFilter: ["data-theme", "class"] };
      for (const node of [root, document.body, document.documentElement]) this._observer.observe(node, watched);
    }

    destroy() {
      this._gone.abort();
      this._observer.disconnect();
    }

    _read() {
      const colors = {};
      for (const name of NAMES) {
        this.probe.style.color = `var(--${name})`;
        colors[name] = getComputedStyle(this.probe).color;
      }
      return Object.assign(colors, { key: NAMES.map((name) => colors[name]).join() });
    }
  }

  Object.assign(teachllm, { Theme });
})();
