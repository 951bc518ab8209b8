// Each request's text as it grows, cut and tinted by block: what of its prompt was found in the cache, what is
// computed, what is known but not computed yet.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;
  const NUM_ENDED = 12; // requests that have ended and still show, the newest first
  const PAGE = 12; // rows that come at a time when the end of those there are is scrolled to

  class Tokens {
    constructor(context) {
      this.context = context;
      this.summary = h("span", { class: "tl-summary" });
      this.rows = h("div", { class: "tl-tokens" });
      const legend = teachllm.legend([
        ["hit", "prefix hit"],
        ["pending", "not computed yet"],
      ]);
      this.root = context.panel("tokens", "Tokens", this.summary, legend);
      this.end = h("div", { class: "tl-end" });
      this.scroll = h("div", { class: "tl-scroll" }, this.rows, this.end);
      this.limit = PAGE;
      this.root.append(this.scroll);
      context.linkRequests(this.rows);
      context.linkBlocks(this.rows);
      const see = (entries) => {
        for (const { target, isIntersecting } of entries) target._visible = isIntersecting;
        context.redraw(this);
      };
      this.observer = new IntersectionObserver(see, { root: this.scroll, rootMargin: "60px" });
      const more = (entries) => entries.at(-1).isIntersecting && this._more();
      this.ending = new IntersectionObserver(more, { root: this.scroll, rootMargin: "200px" });
      this.ending.observe(this.end);
    }

    // Rows out of sight keep their old text until `whole` is asked for, when the step has not changed for a moment.
    draw({ state, whole = false }) {
      const all = this._shown(state);
      this.order = all.map((request) => request.arrival.request_id);
      const shown = all.slice(0, this.limit);
      if (all.length > shown.length && !this.hasMore) this._lookAgain();
      this.hasMore = all.length > shown.length;
      const hidden = state.requests.size - all.length;
      patch(this.summary, { text: hidden ? `${hidden} that ended earlier are not shown` : "" });
      list(this.rows, shown, {
        key: (request) => request.arrival.request_id,
        create: (request) => this._row(request.arrival.request_id),
        update: (row, request) => (whole || row._visible) && this._update(row, request, state.block_size),
      });
    }

    light(ids) {
      this.context.lightChildren(this.rows, ids);
    }

    reveal(id) {
      this.limit = Math.max(this.limit, this.order.indexOf(id) + 1);
      this.context.redraw(this);
      const row = [...this.rows.children].find((child) => child.dataset.request === id);
      if (row) this.scroll.scrollTop = row.offsetTop - this.scroll.offsetTop - 4;
    }

    _more() {
      if (!this.hasMore) return;
      this.limit += PAGE;
      this.context.redraw(this);
      this._lookAgain();
    }

    // Has the observer tell again whether the end is in sight.
    _lookAgain() {
      this.ending.unobserve(this.end);
      this.ending.observe(this.end);
    }

    destroy() {
      this.observer.disconnect();
      this.ending.disconnect();
    }

    _shown(state) {
      const live = [...state.live].map((id) => state.requests.get(id));
      const ended = [...state.requests.values()].filter((request) => !request.isLive);
      ended.sort((a, b) => b.end_time - a.end_time);
      const pinned = state.requests.get(this.context.pinned);
      const shown = [...live, ...ended.slice(0, NUM_ENDED)];
      return !pinned || shown.includes(pinned) ? shown : [pinned, ...shown];
    }

    _row(id) {
      const head = h("span", { class: "tl-facts" });
      const text = h("p", { class: "tl-text" });
      const title = h("header", {}, this.context.chip(id), h("span", { class: "tl-id", text: id }), head);
      const abort = this.context.abortButton(id);
      if (abort) title.append(abort);
      const { css } = this.context.timeline.palette.of(id);
      const row = h("article", { "data-request": id, "--fill": css }, title, text);
      this.observer.observe(row);
      return Object.assign(row, { _head: head, _text: text, _abort: abort });
    }

    _update(row, request, blockSize) {
      const { status, num_output_tokens: numOutput, num_computed_tokens: computed, table } = request;
      if (row._abort) patch(row._abort, { hidden: !this.context.canAbort(request.arrival.request_id) });
      const key = `${status} ${numOutput} ${computed} ${table.length}`;
      if (row._key === key) return;
      row._key = key;
      const cached = request.num_cached_tokens ? ` (${request.num_cached_tokens} cached)` : "";
      const tokens = `${request.arrival.num_prompt_tokens}${cached} + ${numOutput} tokens`;
      const facts = `${tokens} · ${format.ended[request.finish_reason] ?? status}`;
      patch(row, { "data-status": status });
      patch(row._head, { text: facts });
      list(row._text, teachllm.pieces(request, blockSize), {
        key: (piece) => piece.from,
        create: () => h("span"),
        update: (span, piece) => drawPiece(span, piece, request),
      });
    }
  }

  function drawPiece(span, piece, request) {
    const block = piece.block === null ? null : String(piece.block);
    patch(span, {
      "data-logical": String(piece.index),
      "data-block-ref": block,
      "data-odd": piece.index % 2 === 1,
      "data-part": piece.prompt ? "prompt" : "output",
      "data-cached": piece.cached,
      "data-pending": !piece.computed,
    });
    if (span._to === piece.to && span._request === request.arrival) return;
    Object.assign(span, { _to: piece.to, _request: request.arrival });
    patch(span, { text: teachllm.tokenText(request, piece.from, piece.to) });
  }

  Object.assign(teachllm, { Tokens });
})();
