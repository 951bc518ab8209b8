// The batch timeline: requests x steps. What each step did with each request is one cell; its number counts tokens.
// Thousands of steps make it a canvas of which only the visible window is drawn; the step that is shown is also a list
// in the DOM, for those who listen to pages and for tests.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;
  const GUTTER = 84; // pixels for the labels of rows
  const HEADER = 16; // pixels for the axis
  const MOST_TOLD = 100; // waiting requests in the list for those who listen

  class Batch {
    constructor(context, axis) {
      this.context = context;
      this.rowHeight = 18;
      this.rows = []; // of requests that are alive somewhere in the window
      this._scroll = { left: 0, top: 0 };
      this._content = [0, 0]; // width and height of all that can be scrolled through
      new BatchScale(axis).add(this);
      this._build();
      this.painter = new teachllm.BatchPainter(this, this.plot, this.gutter, { GUTTER, HEADER });
      this._listen();
    }

    draw({ k, line, state, timeline }) {
      this.k = k;
      if (!this.height) this._resize();
      patch(this.drafts, { hidden: !timeline.header.config.speculative_config });
      this._measure(timeline);
      this._follow();
      this._choose(state);
      this._drawCursor();
      this.painter.request();
    }

    settle({ line, state }) {
      this._tell(line, state);
    }

    light(ids) {
      this.lit = ids && new Set(ids);
      this.painter.request();
    }

    // Left edge and width of step k, in pixels from the first step.
    span(k) {
      if (this.axis === "steps") return [k * this.cellWidth, this.cellWidth];
      const [begin, end] = this.context.timeline.spanOf(k);
      const scale = this.scale.pixelsPerSecond;
      return [(begin - this.context.timeline.workBefore) * scale, Math.max((end - begin) * scale, 1)];
    }

    // First and last step between two places.
    between(left, right) {
      const { timeline } = this.context;
      const clamp = (k) => Math.max(0, Math.min(k, timeline.last));
      if (this.axis === "steps") return [left, right].map((x) => clamp(Math.floor(x / this.cellWidth)));
      const at = (x) => timeline.stepAtWork(timeline.workBefore + x / this.scale.pixelsPerSecond);
      return timeline.last < 0 ? [0, -1] : [clamp(at(left)), clamp(at(right) + 1)];
    }

    get axis() {
      return this.scale.axis;
    }

    get cellWidth() {
      return this.scale.cellWidth;
    }

    _build() {
      const axis = h("div", { class: "tl-switch", role: "group", "aria-label": "Time axis" });
      for (const name of ["steps", "ms"]) {
        const button = h("button", { text: name, "data-axis": name, onclick: () => this.scale.set({ axis: name }) });
        axis.append(patch(button, { "aria-pressed": String(name === this.axis) }));
      }
      const zoom = (text, label, factor) =>
        h("button", { text, "aria-label": label, onclick: () => this._zoom(factor) });
      const zooms = h("div", { class: "tl-switch" }, zoom("−", "narrower", 1 / 1.4), zoom("+", "wider", 1.4));
      const legend = teachllm.legend([
        ["prefill", "prefill"],
        ["decode", "decode"],
        ["draft", "2/4: accepted of drafted"],
        ["preempt", "preempted"],
        ["wait", "waiting"],
        ["held", "held"],
      ]);
      this.drafts = legend.querySelector(".tl-draft").parentElement;
      this.root = this.context.panel("batch", "Batch timeline", legend, axis, zooms);
      this.plot = h("canvas", { "aria-hidden": "true" });
      this.gutter = h("canvas", { "aria-hidden": "true", class: "tl-gutter" });
      this.cursor = h("div", { class: "tl-cursor" });
      this.veil = h("div", { class: "tl-veil" });
      this.spacer = h("div");
      this.scroller = h("div", { class: "tl-scroller", tabindex: "-1" }, this.spacer);
      const overlay = h("div", { class: "tl-overlay" }, this.veil, this.cursor);
      this.body = h("div", { class: "tl-batch", "--gutter": `${GUTTER}px` });
      this.body.append(this.plot, overlay, this.gutter, this.scroller);
      this.told = h("ol", { class: "tl-sr", "aria-label": "Requests in this step" });
      this.root.append(this.body, this.told);
    }

    _measure(timeline) {
      const [x, w] = timeline.last < 0 ? [0, 0] : this.span(timeline.last);
      this._content[0] = Math.ceil(GUTTER + x + w + 24);
      patch(this.spacer, { "--width": `${this._content[0]}px` });
    }

    // Keeps the step in sight by turning pages, so that the picture stands still in between.
    _follow() {
      if (this.k < 0) return;
      const [x, w] = this.span(this.k);
      const room = this.width - GUTTER;
      const at = x - this._scroll.left;
      if (w > room - 8) this._scrollTo(x, null); // wider than the window
      else if (at < 0) this._scrollTo(x - room * 0.8, null);
      else if (at + w > room - 8) this._scrollTo(x - Math.min(room * 0.2, room - w), null);
    }

    // The rows of the window; of those, the first that is alive in this step comes into sight when it changes.
    _choose(state) {
      const { timeline, peers } = this.context;
      const [first, last] = this.between(this._scroll.left, this._scroll.left + this.width - GUTTER);
      const end = last >= timeline.last ? Infinity : last; // who has just arrived has no cell yet
      this.window = [first, end];
      this._fillRows();
      for (const { batch } of peers) if (batch.window) batch._fillRows();
      if (!state) return;
      const top = this.rows.findIndex((row) => state.live.has(row.id));
      if (top >= 0 && this.rows[top] !== this._top) this._scrollTo(null, top * this.rowHeight);
      this._top = this.rows[top];
    }

    // Those that are alive in its window or in that of another side, so that all sides have the same.
    _fillRows() {
      const { timeline, peers } = this.context;
      const isShown = ({ id }) => this.covers(id) || peers.some((peer) => peer.batch.covers(id));
      const rows = [...timeline.rows.values()].filter(isShown);
      if (this.rows.length !== rows.length || rows.some((row, i) => row !== this.rows[i])) this.painter.request();
      this.rows = rows;
      this.rowHeight = Math.max(13, Math.min(Math.floor((this.height - HEADER) / Math.max(this.rows.length, 1)), 20));
      this._content[1] = HEADER + this.rows.length * this.rowHeight;
      patch(this.spacer, { "--height": `${this._content[1]}px` });
    }

    // Whether a request is alive in the window.
    covers(id) {
      const row = this.context.timeline.rows.get(id);
      return Boolean(this.window && row && row.first <= this.window[1] && row.last >= this.window[0]);
    }

    print() {
      this.painter.paint();
      this.painter.join();
    }

    _scrollTo(left, top) {
      const [width, height] = this._content;
      const clamp = (value, end) => Math.round(Math.max(0, Math.min(value, end)));
      const whole = this.axis === "steps" ? this.cellWidth : 1; // no cell is cut by the labels
      if (left !== null) this._scroll.left = clamp(Math.ceil(left / whole) * whole, width - this.width);
      if (top !== null) this._scroll.top = clamp(top, height - this.height);
      this._moved = true;
    }

    // The scroll bars follow in the frame, when layout is due anyway.
    moveBars() {
      if (!this._moved) return;
      this._moved = false;
      this.scroller.scrollTo(this._scroll.left, this._scroll.top);
      this._readScroll();
    }

    _readScroll() {
      this._scroll = { left: this.scroller.scrollLeft, top: this.scroller.scrollTop };
    }

    _drawCursor() {
      const [x, w] = this.k >= 0 ? this.span(this.k) : [-9999, 0];
      const at = Math.round(x - this._scroll.left);
      patch(this.cursor, { "--x": `${at}px`, "--w": `${Math.max(Math.round(w), 2)}px` });
      patch(this.veil, { "--x": `${Math.max(at + Math.round(w), 0)}px` });
    }

    _resize() {
      if (this.context.isOnPaper) return;
      this.width = this.body.clientWidth;
      this.height = this.body.clientHeight;
      if (this.width) this.painter.resize(this.width, this.height);
    }

    _listen() {
      new ResizeObserver(() => {
        this._resize();
        this._top = null;
        this.context.redraw(this);
      }).observe(this.body);
      this.scroller.addEventListener("scroll", () => {
        if (this._moved) return; // what we are about to set
        this._readScroll();
        this._choose(null);
        this._drawCursor();
        this.painter.request();
      });
      this.scroller.addEventListener("pointermove", (event) => this._hover(event));
      this.scroller.addEventListener("pointerleave", () => this.context.leave());
      this.scroller.addEventListener("click", (event) => this._click(event));
      this.scroller.addEventListener(
        "wheel",
        (event) => {
          if (!event.ctrlKey) return;
          event.preventDefault();
          this._zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15);
        },
        { passive: false },
      );
    }

    // What lies under the pointer: a row, and the step unless it is its label.
    _hit(event) {
      const box = this.body.getBoundingClientRect();
      const [x, y] = [event.clientX - box.left, event.clientY - box.top];
      const row = y < HEADER ? undefined : this.rows[Math.floor((y - HEADER + this._scroll.top) / this.rowHeight)];
      if (x < GUTTER) return { row, x, y };
      const [k] = this.between(x - GUTTER + this._scroll.left, x - GUTTER + this._scroll.left);
      return { row, x, y, k: this.context.timeline.last < 0 ? undefined : k };
    }

    _hover(event) {
      if (this.context.isStill(event)) return;
      const { row, k } = this._hit(event);
      const at = { left: event.clientX - 6, right: event.clientX + 6, top: event.clientY, bottom: event.clientY + 10 };
      const cell = row && k !== undefined ? row.at(k) : undefined;
      this.scroller.style.cursor = k !== undefined || row ? "pointer" : "";
      if (!row || (k !== undefined && !cell)) this.context.leave();
      else this.context.hoverRequest(row.id, at, cell && teachllm.cellCard(row, cell, k, this.context.timeline));
    }

    _click(event) {
      const { row, k } = this._hit(event);
      if (k !== undefined) this.context.goTo(k);
      else if (row) this.context.select(row.id);
    }

    // The scale is another one.
    rescale() {
      for (const button of this.root.querySelectorAll("[data-axis]")) {
        patch(button, { "aria-pressed": String(button.dataset.axis === this.axis) });
      }
      this.context.redraw(this);
    }

    _zoom(factor) {
      this.scale.set({ cellWidth: Math.max(5, Math.min(this.cellWidth * factor, 60)) });
    }

    _tell(line, state) {
      const all = [...state.live].filter((id) => state.requests.get(id).status !== "running");
      const waiting = all.slice(0, MOST_TOLD);
      const scheduled = line ? line.scheduled : [];
      patch(this.told, { "data-timeline-step": line ? String(line.step) : null });
      const entries = [...scheduled.map((each) => [each.request_id, each]), ...waiting.map((id) => [id, null])];
      list(this.told, entries, {
        key: ([id, scheduled]) => `${scheduled ? "s" : "w"} ${id}`,
        create: () => h("li"),
        update: (item, [id, scheduled]) => {
          const { status, wait } = state.requests.get(id);
          const refused = wait ? wait[1] : "has just arrived";
          const what = scheduled
            ? `${scheduled.phase}, ${format.count(scheduled.num_tokens, "token")}`
            : `${status}, ${refused}`;
          patch(item, {
            text: `${id}: ${what}`,
            "data-request": id,
            "data-phase": scheduled ? scheduled.phase : status,
            "data-num-tokens": scheduled ? String(scheduled.num_tokens) : null,
          });
        },
      });
    }
  }

  // How wide a step is: the same in all timelines that are compared, so that equal times have equal widths.
  class BatchScale {
    constructor(axis) {
      Object.assign(this, { axis, cellWidth: 22, batches: [] });
    }

    add(batch) {
      this.batches.push(batch);
      batch.scale = this;
    }

    // Another axis or width of a cell.
    set(given) {
      Object.assign(this, given);
      for (const batch of this.batches) batch.rescale();
    }

    // Half of the steps are shorter than the median: that one is as wide as a cell.
    get pixelsPerSecond() {
      const all = this.batches.map((batch) => batch.context.timeline.steps);
      const n = all.reduce((sum, steps) => sum + steps.length, 0);
      if (!this._for || (n !== this._for && (n < 16 || n > 1.3 * this._for))) {
        const stride = Math.ceil(n / 500);
        const sample = all.flatMap((steps) => steps.filter((_, i) => i % stride === 0)).map((step) => step.end - step.time);
        sample.sort((a, b) => a - b);
        Object.assign(this, { _for: n, _median: sample[sample.length >> 1] || 1e-3 });
      }
      return this.cellWidth / this._median;
    }
  }

  Object.assign(teachllm, { Batch, BatchScale });
})();
