// teachllm.mount(element, { lines, live, plotly }): all views of one trace, of one step, linked: a request under the
// pointer lights up everywhere, a click pins it. Each view is a class with `draw(frame)` and `light(ids)`; this file
// holds what they share, with place.js (which step), pointed.js (which request, which block) and panels.js.
//
//   lines    trace lines, objects or JSON texts, as many as there are yet
//   live     functions play(), pause(), step(), abort(id), setSpeed(x) that drive an engine (each may be async), and
//            the flags `playing`, `done` (on all sides) and `sideDone`; the view then follows the newest step until
//            the user scrubs back
//   grows    lines may still come, so that the newest step can be followed without an engine, too
//   opensAt  the number of the step that is shown until the user goes elsewhere, or "best" (place.js)
//   fork     of a fork: { forkedAt, workBefore }, the step after which it begins and the seconds of work up to there
//   place    which step is shown, if several views share it
//   title    of the trace; with one, the model and the settings are told, too
//   axis     of the batch timeline: "steps" or "ms"
//   follows  it is followed from the beginning, and again when the user has come back to it
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch } = teachllm;
  const SETTLE_MS = 150; // what has been left out is drawn when the step has not changed for so long
  const FAST_MS = 50; // steps that come closer to each other are too fast to be read
  const SCROLL_MS = 400; // so long after the page has scrolled, the wheel goes on scrolling it

  class View extends teachllm.Pointed {
    constructor(element, { lines = [], live = null, grows = false, follows = false, axis = "steps", title = null, opensAt = null, fork = null, place = null } = {}) {
      super();
      Object.assign(this, { element, live, grows, follows, k: -1 });
      this.timeline = new teachllm.Timeline([], fork ?? {});
      (place ?? new teachllm.Place({ following: (Boolean(live) || follows) && opensAt === null, opensAt })).add(this);
      this.timeline.palette = new teachllm.Palette();
      this.root = h("div", { class: "teachllm", "data-teachllm": "" });
      this.banner = h("p", { class: "tl-banner", role: "alert", hidden: true });
      this.grid = h("div", { class: "tl-grid" });
      element.append(this.root);
      this.theme = new teachllm.Theme(this.root, () => this.draw());
      this._visible = new Set();
      this._observer = new IntersectionObserver((entries) => this._see(entries), { rootMargin: "-48px" }); // not a head
      this.panels = new teachllm.Panels(this);
      this.transport = new teachllm.Transport(this);
      const { Pool, Batch, Step, Queue, Tokens, Tables, Metrics } = teachllm;
      this.about = title === null ? null : new teachllm.About(title);
      if (this.about) this.root.append(this.about.root);
      this.root.append(this.transport.root, this.banner, this.grid);
      this.pool = new Pool(this);
      this.batch = new Batch(this, axis);
      this.tokens = new Tokens(this);
      this.texts = [new Step(this), new Queue(this), this.tokens, new Tables(this)]; // to be read
      this.metrics = new Metrics(this);
      this.views = [this.pool, this.batch, ...this.texts, this.metrics];
      for (const view of this.views) this.grid.append(view.root);
      for (const view of this.views) this._observer.observe(view.root);
      this.card = new teachllm.Card(this.root, () => this.unpin());
      this._gone = new AbortController();
      const scrolled = { capture: true, passive: true, signal: this._gone.signal };
      document.addEventListener("scroll", (event) => this._scrolled(event), scrolled);
      this.root.addEventListener("wheel", (event) => this._wheel(event), { passive: false, signal: this._gone.signal });
      addEventListener("beforeprint", () => this._drawForPrint(), { signal: this._gone.signal });
      this.told = h("p", { class: "tl-sr", role: "status", "aria-live": "polite", "data-told": "" });
      this.root.append(this.told);
      this._releaseKeys = teachllm.takeKeys(this);
      this.push(lines);
    }

    // -- what the page calls

    // Appends lines; a view that follows, or shows nothing yet, moves on.
    push(lines) {
      this.take(lines);
      this.place.advance();
    }

    // The same without drawing: of several at one place, all take their lines before it moves on.
    take(lines) {
      const first = this.timeline.header === null;
      this.timeline.push(lines);
      for (const { arrival } of this.timeline.rows.values()) this.timeline.palette.add(arrival);
      const message = this.timeline.problem ?? this.timeline.notice;
      patch(this.banner, { text: message ?? "", hidden: !message });
      if (this.timeline.told.length && !this.ranks) this._addRanks();
      if (first && this.timeline.header) this.about?.draw(this.timeline.header);
    }

    // Shows the state after step k.
    show(k) {
      this.place.goTo(this.timeline.first + k);
    }

    // Goes to the newest step, and with a live engine stays there.
    follow() {
      this.transport.stop();
      this.place.follow();
    }

    // Changes flags of the live controls: setLive({ playing: true }).
    setLive(flags) {
      const goesOn = this.live.done && flags.done === false;
      Object.assign(this.live, flags);
      if (goesOn) this.follow(); // of a run that had ended
      else this.draw();
    }

    get state() {
      return this.timeline.header ? this.timeline.stateAt(this.k) : null;
    }

    // Draws at once what is out of sight, too.
    settle() {
      clearTimeout(this._settling);
      if (!this._late) return;
      const frame = { ...this._frame(), whole: true };
      for (const view of this._late.add(this.tokens)) view.draw(frame);
      for (const part of [this.transport, this.batch]) part.settle(frame);
      if (!this.transport.isPlaying) patch(this.told, { text: spoken(frame) });
      this._late = null;
      this._light();
    }

    destroy() {
      this.panels.grow(null);
      this.transport.stop();
      this._releaseKeys();
      this._observer.disconnect();
      this._gone.abort();
      this.theme.destroy();
      for (const view of this.views) view.destroy?.();
      clearTimeout(this._settling);
      this.root.remove();
    }

    // -- what views call

    get colors() {
      return this.theme.colors;
    }

    get following() {
      return this.place.following;
    }

    // The place as an index of this view's steps: it may lie before the first and after the last.
    get position() {
      return this.place.step - this.timeline.first;
    }

    // Those beside it.
    get peers() {
      return this.place.views.filter((view) => view !== this);
    }

    // Whether what is shown was before this view, a fork, began.
    get isBeforeFork() {
      const { forkedAt } = this.timeline;
      return forkedAt !== null && this.place.step < forkedAt;
    }

    goTo(k) {
      this.place.visit(this.timeline.first + k);
    }

    drive(action, ...given) {
      Promise.resolve(this.live[action]?.(...given)).catch((error) => {
        patch(this.banner, { text: String(error.message ?? error), hidden: null });
      });
      if (["play", "step"].includes(action)) this.follow();
    }

    panel(name, title, ...head) {
      return this.panels.create(name, title, ...head);
    }

    chip(id) {
      const { label, css, ink } = this.timeline.palette.of(id);
      return h("b", { class: "tl-chip", text: label, "--fill": css, "--ink": ink });
    }

    abortButton(id) {
      if (!this.live?.abort) return null;
      const abort = (event) => {
        event.stopPropagation();
        this.drive("abort", id);
      };
      const button = h("button", { class: "tl-abort", text: "abort", onclick: abort });
      return patch(button, { "data-action": "abort", "data-abort": id, "aria-label": `abort ${id}` });
    }

    canAbort(id) {
      return !(this.live?.sideDone ?? this.live?.done) && this.timeline.isLive(id);
    }

    // Pictures have the size that they had on the screen, and are scaled to the paper by the style sheet.
    get isOnPaper() {
      return matchMedia("print").matches;
    }

    isVisible(view) {
      return this._visible.has(view.root);
    }

    // For a view whose size or settings have changed.
    redraw(view) {
      if (this.timeline.header) view.draw(this._frame());
    }

    // Above the others, once a trace has told of ranks.
    _addRanks() {
      this.ranks = new teachllm.Ranks(this);
      this.views.unshift(this.ranks);
      this.grid.prepend(this.ranks.root);
      this._observer.observe(this.ranks.root);
      patch(this.root, { "data-ranks": String(this.timeline.told[0].line.ranks.length) });
    }

    // While the page scrolls, no panel that comes under the pointer takes the wheel.
    _wheel(event) {
      const isPanel = event.target.closest?.(".tl-scroll, .tl-scroller") && !event.target.closest(".tl-grown");
      if (!isPanel || event.ctrlKey || performance.now() - (this._scrolledAt ?? -Infinity) > SCROLL_MS) return;
      event.preventDefault();
      document.scrollingElement.scrollBy(event.deltaX, event.deltaY);
    }

    _scrolled(event) {
      if (event.target === document) this._scrolledAt = performance.now();
      this.card.follow();
    }

    _drawForPrint() {
      if (!this.timeline.header) return;
      this._late = new Set(this.views);
      this.settle();
      for (const view of this.views) view.print?.();
    }

    // -- drawing

    _frame() {
      const { timeline, k } = this;
      const line = timeline.steps[k] ?? null;
      const aborted = timeline.endedOutside(k);
      return { timeline, k, line, aborted, state: timeline.stateAt(k), events: timeline.eventsOf(k) };
    }

    // Of the step at its place.
    draw() {
      const { timeline } = this;
      this.k = Math.max(timeline.lowest, Math.min(this.position, timeline.last));
      if (!timeline.header) return;
      patch(this.root, { "data-before-fork": this.isBeforeFork });
      const frame = this._frame();
      patch(this.root, { "data-step-index": String(this.k) });
      this.transport.draw(frame);
      this._late = new Set(this.views.filter((view) => !this.isVisible(view)));
      this._leaveOut();
      for (const view of this.views) if (!this._late.has(view)) view.draw(frame);
      clearTimeout(this._settling);
      this._settling = setTimeout(() => this.settle(), SETTLE_MS);
      if (this.pinned !== null || this.hovered !== null || this.hoveredBlock !== null) this._light();
      this._drawCard();
    }

    // When steps come too fast to be read, each draws one of the texts: the next one in turn.
    _leaveOut() {
      const now = performance.now();
      const isFast = now - this._drawnAt < FAST_MS;
      this._drawnAt = now;
      if (!isFast) return;
      const visible = this.texts.filter((view) => !this._late.has(view));
      this._turn = (this._turn ?? 0) + 1;
      visible.forEach((view, i) => i !== this._turn % visible.length && this._late.add(view));
    }

    _drawOne(view) {
      this._late?.delete(view);
      this.redraw(view);
      this._light();
    }

    _see(entries) {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) this._visible.delete(target);
        else {
          this._visible.add(target);
          const view = this.views.find((other) => other.root === target);
          if (this.timeline.header) this._drawOne(view);
        }
      }
    }
  }

  // A step in a sentence, for those who listen to the page.
  function spoken({ line, state, aborted }) {
    if (!line) return "before the first step";
    const { format } = teachllm;
    const tokens = line.scheduled.reduce((sum, each) => sum + each.num_tokens, 0);
    const waiting = Object.keys(line.waiting).length;
    const used = `${line.blocks.used} of ${format.count(state.blocks.length, "block")} in use`;
    const ends = [...line.preempted.map((id) => `${id} preempted`)];
    for (const [id, reason] of [...Object.entries(line.finished), ...aborted]) ends.push(`${id} ${format.ended[reason]}`);
    const computed = `${format.count(tokens, "token")} of ${format.count(line.scheduled.length, "request")} computed`;
    return [`Step ${line.step}: ${computed}`, `${waiting} waiting`, used, ...ends].join(", ") + ".";
  }

  teachllm.mount = (element, options) => new View(element, options);
})();
