// What the pointer and the keyboard point at in a view: a request or a block, which lights up in all of its panels, and
// has a card. A click pins it.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { patch } = teachllm;

  let pointer = null; // where it was last: [x, y]
  document.addEventListener("pointermove", (event) => (pointer = [event.clientX, event.clientY]), { capture: true, passive: true });

  class Pointed {
    constructor() {
      Object.assign(this, { pinned: null, hovered: null, pinnedBlock: null, hoveredBlock: null, _stillAt: pointer });
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

    // A pinned block keeps its ring and its card from step to step.
    pinBlock(id) {
      this.pinnedBlock = id === this.pinnedBlock ? null : id;
      this._light();
      this._drawCard();
    }

    unpin() {
      this.panels.grow(null);
      this.pinned = this.pinnedBlock = this.hovered = this.hoveredBlock = null;
      this._light();
      this._drawCard();
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
  }

  function nearPointer(event) {
    return { left: event.clientX - 8, right: event.clientX + 8, top: event.clientY, bottom: event.clientY + 12 };
  }

  Object.assign(teachllm, { Pointed });
})();
