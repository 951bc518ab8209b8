// The block pool: every physical block of KV memory. A block in use has its request's colour (stripes where several
// share it), up to the level of its filled slots; one that is free but still findable is a ghost; an empty one is bare.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, format } = teachllm;
  const MAX_CELLS = 4096; // of a larger pool the first blocks are shown: they are handed out first
  const FEW_CELLS = 512; // of a larger pool those are left out that were never used
  const GAP = 2;
  const [SMALLEST, LARGEST] = [13, 72]; // sides of a cell in pixels

  class Pool {
    constructor(context) {
      this.context = context;
      this.summary = h("span", { class: "tl-summary", "data-summary": "pool" });
      this.next = h("span", { class: "tl-next", "data-free-list": "" });
      this.grid = h("div", { class: "tl-pool-grid", role: "group", "aria-label": "Physical blocks" });
      const legend = teachllm.legend([
        ["used", "in use"],
        ["shared", "shared"],
        ["cached", "free, cached"],
        ["free", "free"],
        ["taken", "just taken"],
        ["found", "just found in the cache"],
      ]);
      this.root = context.panel("pool", "Block pool", this.summary);
      const canvas = h("canvas", { "aria-hidden": "true" });
      this.painter = new teachllm.PoolPainter(context, canvas);
      this.body = h("div", { class: "tl-pool-body" }, canvas, this.grid);
      this.root.append(this.body, h("footer", {}, this.next, legend));
      this.cells = [];
      this._size = 0;
      this.scale = new teachllm.PoolScale();
      this.scale.add(this);
      new ResizeObserver(() => this.fit()).observe(this.body);
      this._listen();
    }

    draw({ state, events, timeline }) {
      this._build(numShown(state.blocks.length, timeline.history.length), state.blocks.length);
      this.slotsPerBlock = state.block_size;
      if (this._colors !== this.context.colors.key) this._forget();
      const happened = new Map(events.map(([kind, block]) => [block, kind]));
      const level = levels(state);
      let cached = 0;
      state.blocks.forEach((block, id) => {
        cached += !block.users.length && block.block_hash !== null;
        const cell = this.cells[id];
        if (!cell) return;
        const slots = block.users.length ? (level.get(id) ?? 0) : block.block_hash === null ? 0 : state.block_size;
        const key = `${block.users}|${block.block_hash === null}|${slots}|${happened.get(id)}|${block.writer}`;
        if (cell._key === key) return;
        cell._key = key;
        this._drawCell(cell, id, block, slots / state.block_size, happened.get(id), timeline.palette);
      });
      const used = state.blocks.length - state.free.size;
      const shared = state.blocks.reduce((n, block) => n + (block.users.length > 1), 0);
      this._summarize(used, cached, state.free.size - cached, shared, state);
      this._ring();
    }

    light(ids) {
      const lit = ids && new Set(ids);
      for (const cell of this.cells) {
        const is = Boolean(lit && cell._look?.users.some((id) => lit.has(id)));
        const faded = Boolean(lit && !is);
        if (!cell._look || (cell._look.faded === faded && cell._lit === is)) continue;
        cell._lit = is;
        cell._look.faded = faded;
        patch(cell, { "data-lit": is });
        this.painter.request(cell._id, cell._look);
      }
      this._ring();
    }

    // The node of a block, to hang a card on.
    cellOf(block) {
      return this.cells[block] ?? null;
    }

    _drawCell(cell, id, block, level, event, palette) {
      const users = [...new Set(block.users)];
      const state = users.length > 1 ? "shared" : users.length ? "used" : idle(block);
      const owners = users.map((user) => palette.of(user));
      const ghost = palette.of(block.writer);
      patch(cell, {
        "data-state": state,
        "data-users": users.join(" "),
        "data-level": level.toFixed(2),
        "data-event": event ?? null,
        "aria-label": `block ${id}: ${state}${users.length ? ` by ${users.join(", ")}` : ""}`,
      });
      let [label = state === "cached" ? ghost.label : ""] = owners.map((owner) => owner.label);
      if (owners.length > 1) label = this._size < 30 ? String(owners.length) : `${label}+${owners.length - 1}`;
      cell._look = { state, users, owners, ghost, level, event, label, faded: cell._look?.faded ?? false };
      this.painter.request(id, cell._look);
    }

    _summarize(used, cached, free, shared, state) {
      const text = `${used} used${shared ? ` (${shared} shared)` : ""} · ${cached} cached · ${free} free`;
      patch(this.summary, { text, "data-used": used, "data-cached": cached, "data-free": free });
      const first = [];
      for (const id of state.free) if (first.push(id) === 8) break;
      const more = state.free.size > first.length ? " …" : "";
      const numHidden = state.blocks.length - this.cells.length;
      const hidden = numHidden ? ` · ${format.count(numHidden, "further block")} not shown` : "";
      patch(this.next, {
        text: (first.length ? `next free: ${first.join(" ")}${more}` : "no block is free") + hidden,
        "data-free-list": first.join(" "),
      });
    }

    // It only grows: a trace that grows uses further blocks.
    _build(numShown, numBlocks) {
      if (this.numBlocks === numBlocks && this.cells.length >= numShown) return;
      this.numBlocks = numBlocks;
      this.cells = Array.from({ length: numShown }, (_, id) =>
        h("button", { class: "tl-block", "data-block": String(id), tabindex: "-1" }),
      );
      this.cells.forEach((cell, id) => (cell._id = id));
      if (numBlocks) patch(this.cells[0], { tabindex: "0" });
      this.grid.replaceChildren(...this.cells);
      this.fit();
    }

    // The side of the largest square cells with which all blocks are seen at once; null before there are any.
    largestSize(limit) {
      const { clientWidth: width, clientHeight: height } = this.body;
      const n = this.cells.length;
      if (!n || !width) return null;
      const fits = (size) => {
        const columns = Math.floor((width + GAP) / (size + GAP));
        return columns && Math.ceil(n / columns) * (size + GAP) - GAP <= height;
      };
      let size = limit;
      while (size > SMALLEST && !fits(size)) size -= 0.25;
      return Math.max(size, SMALLEST);
    }

    // Also after another pool of the same scale has changed.
    fit() {
      const size = this.context.isOnPaper ? null : this.scale.sizeOf(this);
      if (size === null) return;
      const { clientWidth: width } = this.body;
      const n = this.cells.length;
      const columns = Math.max(Math.floor((width + GAP) / (size + GAP)), 1);
      if (size === this._size && columns === this._columns && n === this._n) return;
      Object.assign(this, { _size: size, _columns: columns, _n: n });
      patch(this.grid, { "--cell": `${size}px`, "--columns": columns });
      this.painter.resize({ n, size, gap: GAP, columns });
      this._forget();
      this.context.redraw(this);
      this.scale.changed(this);
    }

    _forget() {
      this._colors = this.context.colors.key;
      for (const cell of this.cells) cell._key = null;
    }

    _listen() {
      const blockOf = (event) => event.target.closest?.("[data-block]");
      this.grid.addEventListener("pointerover", (event) => {
        const cell = blockOf(event);
        if (cell && !this.context.isStill(event)) this.context.hoverBlock(Number(cell.dataset.block), cell);
      });
      this.grid.addEventListener("pointerleave", () => this.context.leave());
      this.grid.addEventListener("focusin", ({ target }) => {
        if (target.matches(":focus-visible")) this.context.hoverBlock(target._id, target);
      });
      this.grid.addEventListener("focusout", () => this.context.leave());
      this.grid.addEventListener("keydown", (event) => this._walk(event));
      this.grid.addEventListener("click", (event) => {
        const cell = blockOf(event);
        if (cell) this.context.pinBlock(Number(cell.dataset.block));
      });
    }

    // Tab comes to one block, arrows go on from there, enter follows it, escape leaves the keys to the steps again.
    _walk(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this._columns, ArrowDown: this._columns }[event.key];
      if (event.key === "Escape") event.target.blur();
      const next = by && this.cells[event.target._id + by];
      if (!by) return;
      event.preventDefault();
      if (!next) return;
      patch(event.target, { tabindex: "-1" });
      patch(next, { tabindex: "0" });
      next.focus({ focusVisible: true });
    }

    _ring() {
      const { pinnedBlock, hoveredBlock } = this.context;
      const ringed = new Set([pinnedBlock, hoveredBlock]);
      for (const cell of this._ringed ?? []) {
        cell.classList.remove("tl-pinned", "tl-ring");
        patch(cell, { "aria-pressed": null });
      }
      this._ringed = [...ringed].map((id) => this.cells[id]).filter(Boolean);
      for (const cell of this._ringed) cell.classList.add("tl-ring");
      const pinned = this.cells[pinnedBlock];
      pinned?.classList.add("tl-pinned");
      if (pinned) patch(pinned, { "aria-pressed": "true" });
    }
  }

  // How much memory an area stands for: the same in all pools that are compared, so that equal bytes have equal areas.
  class PoolScale {
    constructor() {
      this.pools = [];
    }

    add(pool) {
      this.pools.push(pool);
      pool.scale = this;
    }

    // The side of a pool's cells in pixels: as large as all pools can have it.
    sizeOf(pool) {
      const isGrown = pool.root.classList.contains("tl-grown");
      if (this.pools.length < 2 || isGrown) return pool.largestSize(isGrown ? 400 : LARGEST);
      const smallest = Math.min(...this.pools.map((each) => each.slotsPerBlock ?? Infinity));
      const perSlot = this.pools.map((each) => {
        const side = each.largestSize(LARGEST * Math.sqrt((each.slotsPerBlock ?? smallest) / smallest));
        return side === null ? Infinity : side / Math.sqrt(each.slotsPerBlock ?? smallest);
      });
      const least = Math.min(...perSlot);
      return Number.isFinite(least) ? least * Math.sqrt(pool.slotsPerBlock ?? smallest) : null;
    }

    changed(pool) {
      for (const other of this.pools) if (other !== pool) other.fit();
    }
  }

  // Of a large pool those blocks are left out that were never used, all but the next ones.
  function numShown(numBlocks, numUsed) {
    const few = numBlocks > FEW_CELLS ? Math.max(64, 32 * Math.ceil((1.1 * numUsed) / 32)) : numBlocks;
    return Math.min(numBlocks, few, MAX_CELLS);
  }

  // A free block's content may still be found, or not.
  function idle(block) {
    return block.block_hash === null ? "free" : "cached";
  }

  // Filled slots of each block in use: those of the user that has filled the most.
  function levels(state) {
    const filled = new Map();
    for (const request of state.requests.values()) {
      const computed = request.isLive ? request.num_computed_tokens : Infinity;
      request.table.forEach((id, i) => {
        const slots = Math.min(Math.max(computed - i * state.block_size, 0), state.block_size);
        if (slots > (filled.get(id) ?? -1)) filled.set(id, slots);
      });
    }
    return filled;
  }

  Object.assign(teachllm, { Pool, PoolScale });
})();
