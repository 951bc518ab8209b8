// teachllm.mount(element, { lines, live, plotly }): all views of one trace, of one step, linked: a request under the
// pointer lights up everywhere, a click pins it. Each view is a class with `draw(frame)` and `light(ids)`; this file
// holds what they share: which step, which request, which block.
//
//   lines    trace lines, objects or JSON texts, as many as there are yet
//   live     functions play(), pause(), step(), abort(id), setSpeed(x) that drive an engine (each may be async), and
//            the flags `playing` and `done`; the view then follows the newest step until the user scrubs back
//   grows    lines may still come, so that the newest step can be followed without an engine, too
//   opensOnBest  the step is shown at which most blocks are in use, until the user goes elsewhere
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

  let pointer = null; // where it was last: [x, y]
  document.addEventListener("pointermove", (event) => (pointer = [event.clientX, event.clientY]), { capture: true, passive: true });

  class View {
    constructor(element, { lines = [], live = null, grows = false, follows = false, axis = "steps", title = null, opensOnBest = false } = {}) {
      Object.assign(this, { element, live, grows, follows, k: -1, following: (Boolean(live) || follows) && !opensOnBest });
      Object.assign(this, { atBest: opensOnBest, peers: [], _stillAt: pointer });
      Object.assign(this, { pinned: null, hovered: null, pinnedBlock: null, hoveredBlock: null });
      this.timeline = new teachllm.Timeline();
      this.timeline.palette = new teachllm.Palette();
      this.root = h("div", { class: "teachllm", "data-teachllm": "" });
      this.banner = h("p", { class: "tl-banner", role: "alert", hidden: true });
      this.grid = h("div", { class: "tl-grid" });
      element.append(this.root);
      this.theme = new teachllm.Theme(this.root, () => this._draw());
      this._visible = new Set();
      this._observer = new IntersectionObserver((entries) => this._see(entries), { rootMargin: "-48px" }); // not a head
      this.transport = new teachllm.Transport(this);
      const { Pool, Batch, Step, Queue, Tokens, Tables, Metrics } = teachllm;
      this.about = title === null ? null : new teachllm.About(title);
      if (this.about) this.root.append(this.about.root);
      this.root.append(this.transport.root, this.banner, this.grid);
      this.pool = new Pool(this);
      this.batch = new Batch(this, axis);
      this.tokens = new Tokens(this);
      this.texts = [new Step(this), new Queue(this), this.tokens, new Tables(this)]; // to be read
      this.views = [this.pool, this.batch, ...this.texts, new Metrics(this)];
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
      const first = this.timeline.header === null;
      this.timeline.push(lines);
      for (const { arrival } of this.timeline.rows.values()) this.timeline.palette.add(arrival);
      const message = this.timeline.problem ?? this.timeline.notice;
      patch(this.banner, { text: message ?? "", hidden: !message });
      if (this.timeline.told.length && !this.ranks) this._addRanks();
      if (first && this.timeline.header) this.about?.draw(this.timeline.header);
      if (this.following) this.k = this.timeline.last;
      else if (this.atBest) this.k = this.timeline.best;
      else if (first && this.timeline.last >= 0) this.k = 0;
      this._draw();
    }

    // Shows the state after step k.
    show(k) {
      this.k = Math.max(Math.min(k, this.timeline.last), Math.min(this.timeline.last, 0));
      this._draw();
    }

    // Goes to the newest step, and with a live engine stays there.
    follow() {
      this.following = Boolean(this.live) || this.grows;
      this.atBest = false;
      this.transport.stop();
      this.show(this.timeline.last);
    }

    // Pins a request, or with null unpins it.
    select(id) {
      this.pinned = id === this.pinned ? null : id;
      this._light();
      if (this.pinned !== null) {
        this.settle();
        this._drawOne(this.tokens);
        this.tokens.reveal(id);
      }
    }

    // Changes flags of the live controls: setLive({ playing: true }).
    setLive(flags) {
      const goesOn = this.live.done && flags.done === false;
      Object.assign(this.live, flags);
      if (goesOn) this.follow(); // of a run that had ended
      else this._draw();
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

    goTo(k) {
      this.atBest = false;
      this.following = Boolean(this.follows || (this.live && !this.live.done)) && k >= this.timeline.last;
      this.show(k);
    }

    drive(action, ...given) {
      Promise.resolve(this.live[action]?.(...given)).catch((error) => {
        patch(this.banner, { text: String(error.message ?? error), hidden: null });
      });
      if (["play", "step"].includes(action)) this.follow();
    }

    panel(name, title, ...head) {
      const root = h("section", { class: `tl-panel tl-view-${name}`, "data-view": name, "aria-label": title });
      const onclick = () => this._grow(root, !root.classList.contains("tl-grown"));
      const grow = h("button", { class: "tl-grow", "data-action": "grow", onclick }, teachllm.icon("grow"));
      Object.assign(root, { _grower: grow, _title: title });
      this._label(root, false);
      root.append(h("header", { class: "tl-head" }, h("h2", { text: title }), ...head, grow));
      return root;
    }

    // Over the whole window, or back in its place.
    _grow(root, isGrown) {
      root.classList.toggle("tl-grown", isGrown);
      this._label(root, isGrown);
      (isGrown ? root : this.root).append(this.card.root); // over the panel
      // In the top layer it is laid out in the window, and not in the view, which contains its layout.
      if (isGrown) patch(root, { popover: "manual" }).showPopover();
      else {
        root.hidePopover();
        patch(root, { popover: null });
      }
    }

    _label(root, isGrown) {
      teachllm.setIcon(root._grower.firstChild, isGrown ? "close" : "grow");
      const title = isGrown ? "back to the page (escape)" : "enlarge";
      patch(root._grower, { title, "aria-label": `${title}: ${root._title}`, "aria-expanded": String(isGrown) });
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
      return !this.live?.done && this.timeline.isLive(id);
    }

    // The pointer has not moved since something else than it brought what lies under it there: a key, a new trace.
    isStill(event) {
      if (this._stillAt && event.clientX === this._stillAt[0] && event.clientY === this._stillAt[1]) return true;
      this._stillAt = null;
      return false;
    }

    // The pointer rests: what it lies over is not asked about.
    rest() {
      this._stillAt = pointer;
      this.leave();
    }

    // Makes whatever carries `data-request` in a container answer to the pointer and to the keyboard.
    linkRequests(container) {
      const of = (event) => event.target.closest?.("[data-request]");
      container.addEventListener("pointerover", (event) => {
        const node = of(event);
        if (event.target.closest("[data-block-ref]") || this.isStill(event)) return;
        if (!node) return this.leave();
        this.hoverRequest(node.dataset.request, nearPointer(event));
      });
      container.addEventListener("pointerleave", () => this.leave());
      container.addEventListener("click", (event) => {
        const node = of(event);
        if (node && !event.target.closest("[data-block-ref], button")) this.select(node.dataset.request);
      });
      container.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && event.target === of(event)) this.select(event.target.dataset.request);
      });
    }

    // The same for `data-block-ref`.
    linkBlocks(container) {
      const of = (event) => event.target.closest?.("[data-block-ref]");
      container.addEventListener("pointerover", (event) => {
        const node = of(event);
        if (node && !this.isStill(event)) this.hoverBlock(Number(node.dataset.blockRef), nearPointer(event));
      });
      container.addEventListener("click", (event) => {
        const node = of(event);
        if (node) this.pinBlock(Number(node.dataset.blockRef));
      });
    }

    lightChildren(container, ids) {
      container.classList.toggle("tl-has-lit", Boolean(ids));
      for (const child of container.children) {
        child.classList.toggle("tl-lit", Boolean(ids?.includes(child.dataset.request)));
      }
    }

    hoverRequest(id, at, content = null) {
      Object.assign(this, { hovered: id, hoveredBlock: null, _hoverAt: at, _hoverContent: content });
      this._light();
      if (content) this.card.show(content, at);
      else this._drawCard();
    }

    hoverBlock(id, at) {
      Object.assign(this, { hovered: null, hoveredBlock: id, _hoverAt: at });
      this._light();
      this._drawCard();
    }

    // A card about something else than a request or a block; null: the pointer has left it.
    hoverOther(content, at) {
      if (content) this.card.show(content, at);
      else this._drawCard();
    }

    leave() {
      if (this.hovered === null && this.hoveredBlock === null) return;
      this.hovered = this.hoveredBlock = null;
      this._light();
      this._drawCard();
    }

    // A pinned block keeps its ring and its card from step to step.
    pinBlock(id) {
      this.pinnedBlock = id === this.pinnedBlock ? null : id;
      this._light();
      this._drawCard();
    }

    unpin() {
      const grown = this.root.querySelector(".tl-grown");
      if (grown) this._grow(grown, false);
      this.pinned = this.pinnedBlock = this.hovered = this.hoveredBlock = null;
      this._light();
      this._drawCard();
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

    _draw() {
      if (!this.timeline.header) return;
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
      this.ondraw?.();
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

    // What the card says is of the step shown; that of a cell of the timeline is of the cell's.
    _drawCard() {
      const frame = this._frame();
      const { hovered, hoveredBlock, pinnedBlock } = this;
      const block = hoveredBlock ?? pinnedBlock;
      if (hovered !== null) {
        if (!this._hoverContent) this.card.show(teachllm.requestCard(hovered, frame), this._hoverAt);
      } else if (block === null) this.card.hide();
      else {
        const at = hoveredBlock === null ? (this.pool.cellOf(block) ?? this._hoverAt) : this._hoverAt;
        this.card.show(teachllm.blockCard(block, frame), at, block === pinnedBlock);
      }
    }

    _light() {
      const users = this.hoveredBlock === null ? null : this.state.blocks[this.hoveredBlock]?.users;
      const one = this.hovered ?? this.pinned;
      const ids = users?.length ? users : one === null ? null : [one];
      patch(this.root, { "data-lit": ids ? [...new Set(ids)].join(" ") : null, "data-pinned": this.pinned });
      for (const view of this.views) view.light(ids);
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

  function nearPointer(event) {
    return { left: event.clientX - 8, right: event.clientX + 8, top: event.clientY, bottom: event.clientY + 12 };
  }

  teachllm.mount = (element, options) => new View(element, options);
})();
