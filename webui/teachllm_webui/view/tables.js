// Block tables: for each running request, which physical block holds each of its logical ones, and the text in it.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;

  class Tables {
    constructor(context) {
      this.context = context;
      this.rows = h("div", { class: "tl-tables" });
      this.empty = h("p", { class: "tl-empty", text: "No request holds blocks." });
      const note = h("span", { class: "tl-summary", text: "logical → physical, and the tokens in it" });
      this.root = context.panel("tables", "Block tables", note);
      this.root.append(h("div", { class: "tl-scroll" }, this.empty, this.rows));
      context.linkRequests(this.rows);
      context.linkBlocks(this.rows);
    }

    draw({ state }) {
      const holders = [...state.requests.values()].filter((request) => request.table.length);
      patch(this.empty, { hidden: holders.length > 0 });
      list(this.rows, holders, {
        key: (request) => request.arrival.request_id,
        create: (request) => this._row(request.arrival.request_id),
        update: (row, request) => this._update(row, request, state),
      });
    }

    light(ids) {
      this.context.lightChildren(this.rows, ids);
    }

    _row(id) {
      const blocks = h("ol");
      const { css } = this.context.timeline.palette.of(id);
      const row = h("div", { class: "tl-table", "data-request": id, "--fill": css }, this.context.chip(id), blocks);
      return Object.assign(row, { _blocks: blocks });
    }

    _update(row, request, state) {
      patch(row, { "data-table": request.table.join(" ") });
      list(row._blocks, request.table, {
        key: (_, i) => i,
        create: () => h("li", {}, h("small"), h("span")),
        update: (item, id, i) => {
          const shared = state.blocks[id].users.length;
          const filled = Math.min(Math.max(request.num_computed_tokens - i * state.block_size, 0), state.block_size);
          const known = Math.min(request.numKnownTokens, (i + 1) * state.block_size);
          const key = `${id} ${shared} ${filled} ${known} ${request.status}`;
          if (item._key === key) return;
          item._key = key;
          patch(item, { "data-block-ref": String(id), "data-shared": shared > 1, "--level": filled / state.block_size });
          patch(item.firstChild, { text: `${i} → ${id}${shared > 1 ? ` ×${shared}` : ""}` });
          patch(item.lastChild, { text: format.oneLine(teachllm.textAt(request, i, state.block_size)) });
        },
      });
    }
  }

  Object.assign(teachllm, { Tables });
})();
