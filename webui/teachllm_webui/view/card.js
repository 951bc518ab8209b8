// The card that explains what is under the pointer: a block, a request, or a cell of the batch timeline. A pinned block
// keeps its card, which follows it through time.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;

  class Card {
    constructor(container, onclose) {
      this.title = h("strong");
      this.facts = h("dl");
      const close = h("button", { class: "tl-card-close", text: "×", "aria-label": "close", onclick: onclose });
      this.root = h("div", { class: "tl-card", "data-card": "", hidden: true }, close, this.title, this.facts);
      container.append(this.root);
    }

    // content: { title, facts: [[name, text], ...], data: { attribute: value } }; at: the rectangle it belongs to.
    show(content, at, pinned = false) {
      patch(this.title, { text: content.title });
      list(this.facts, content.facts, {
        key: ([name]) => name,
        create: () => h("div", {}, h("dt"), h("dd")),
        update: (row, [name, text]) => {
          patch(row.firstChild, { text: name });
          patch(row.lastChild, { text });
        },
      });
      for (const name of Object.keys(this._data ?? {})) patch(this.root, { [name]: null });
      this._data = content.data;
      patch(this.root, { ...content.data, hidden: null });
      this.root.classList.toggle("tl-pinned", pinned);
      this._place(at);
    }

    hide() {
      patch(this.root, { hidden: true });
    }

    // What it belongs to has moved.
    follow() {
      if (!this.root.hidden && this._at instanceof Element) this._place(this._at);
    }

    // Beside its rectangle or element, inside the window. Sizes are asked for in the frame, when layout is due anyway.
    _place(at) {
      this._at = at;
      cancelAnimationFrame(this._placing);
      const rectangle = () => (at instanceof Element ? at.getBoundingClientRect() : at);
      this._placing = requestAnimationFrame(() => this._placeNow(rectangle()));
    }

    _placeNow(at) {
      const { offsetWidth: width, offsetHeight: height } = this.root;
      const right = at.right + 8 + width <= innerWidth;
      const left = right ? at.right + 8 : at.left - 8 - width;
      const x = Math.max(4, Math.min(left >= 4 ? left : at.left, innerWidth - width - 4));
      const below = left < 4 ? at.bottom + 8 : at.top - 4;
      const y = Math.max(4, Math.min(below, innerHeight - height - 4));
      this.root.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
    }
  }

  function blockCard(id, { state, timeline, k }) {
    const block = state.blocks[id];
    const users = [...new Set(block.users)];
    const name = (user) => `${timeline.palette.of(user).label} = ${user}`;
    const places = users.map((user) => `${name(user)}, its block ${state.requests.get(user).table.indexOf(id)}`);
    const owners = places.slice(0, 6).join("; ") + (places.length > 6 ? " …" : "");
    const facts = [["owner", owners || "none"]];
    facts.push(["ref count", String(block.users.length)]);
    if (users.length) facts.push(["filled", filled(id, users, state)]);
    const text = users.length ? teachllm.blockText(state.requests.get(users[0]), id, state.block_size) : "";
    if (text) facts.push(["text", format.oneLine(text)]);
    if (!users.length) facts.push(["free list", freePlace(id, block, state)]);
    if (block.block_hash !== null) {
      const parent = parentOf(block, state, timeline.rootHash);
      facts.push(["hash", format.hash(block.block_hash)]);
      if (block.parent_hash) facts.push(["parent", `${format.hash(block.parent_hash)}${parent}`]);
    } else facts.push(["hash", "none: not findable"]);
    if (block.writer !== null && !users.includes(block.writer)) facts.push(["written by", name(block.writer)]);
    const lastUse = Math.max(block.last_step, ...users.map((user) => lastStepOf(user, timeline, k)));
    facts.push(["last use", lastUse < 0 ? "never" : `step ${lastUse}`]);
    const history = (timeline.history[id] ?? []).filter(([at]) => at <= k).slice(-5);
    const told = history.map(([at, kind, user]) => {
      return `${Math.max(at, 0)} ${format.event[kind]}${user ? " " + timeline.palette.of(user).label : ""}`;
    });
    if (told.length) facts.push(["history", told.join(" · ")]);
    return { title: `Block ${id}`, facts, data: { "data-card": "block", "data-card-id": String(id) } };
  }

  // The number of the last step up to k that computed tokens of a request, for which it read all of its blocks.
  function lastStepOf(id, timeline, k) {
    const row = timeline.rows.get(id);
    for (let at = Math.min(k, timeline.last); at >= row.first; at--) {
      if (row.at(at)?.scheduled) return timeline.steps[at].step;
    }
    return -1;
  }

  function filled(id, users, state) {
    const slots = users.map((user) => {
      const request = state.requests.get(user);
      if (!request.isLive) return state.block_size;
      const first = request.table.indexOf(id) * state.block_size;
      return Math.min(Math.max(request.num_computed_tokens - first, 0), state.block_size);
    });
    return `${Math.max(...slots)} of ${state.block_size} slots`;
  }

  function freePlace(id, block, state) {
    let place = 1;
    for (const other of state.free) {
      if (other === id) break;
      place++;
    }
    return `${place} of ${state.free.size}` + (block.block_hash === null ? "" : ", its content still findable");
  }

  function parentOf(block, state, rootHash) {
    if (block.parent_hash === rootHash) return " (root: it begins a sequence)";
    const parent = state.blocks.findIndex((other) => other.block_hash === block.parent_hash);
    return parent < 0 ? " (evicted)" : ` (block ${parent})`;
  }

  function requestCard(id, { state, timeline }) {
    const request = state.requests.get(id);
    const { label } = timeline.palette.of(id);
    const data = { "data-card": "request", "data-card-id": id };
    if (!request) return { title: `${label} · ${id}`, facts: [["status", "has not arrived yet"]], data };
    const { arrival } = request;
    const facts = [["status", format.ended[request.finish_reason] ?? request.status]];
    if (request.wait) facts.push(["waits", request.wait[1]]);
    const cached = request.num_cached_tokens ? `, ${request.num_cached_tokens} found in the cache` : "";
    facts.push(["prompt", `${format.count(arrival.num_prompt_tokens, "token")}${cached}`]);
    const most = arrival.max_len === undefined ? "" : ` of at most ${arrival.max_len - arrival.num_prompt_tokens}`;
    facts.push(["output", `${request.num_output_tokens}${most}`]);
    facts.push(["computed", `${request.num_computed_tokens} of ${request.numKnownTokens} known`]);
    facts.push(["blocks", request.table.length ? `${request.table.length}: ${shorten(request.table)}` : "none"]);
    const [first] = request.token_times;
    if (first !== undefined) facts.push(["TTFT", format.seconds(first - arrival.time)]);
    if (request.token_times.length > 1) {
      const itl = (request.token_times.at(-1) - first) / (request.token_times.length - 1);
      facts.push(["mean ITL", format.seconds(itl)]);
    }
    if (timeline.header.config.scheduling_policy === "priority") facts.push(["priority", String(arrival.priority ?? 0)]);
    if (request.num_preemptions) facts.push(["preempted", format.count(request.num_preemptions, "time")]);
    return { title: `${label} · ${id}`, facts, data };
  }

  function shorten(table) {
    return table.length <= 8 ? table.join(" ") : `${table.slice(0, 7).join(" ")} … ${table.at(-1)}`;
  }

  Object.assign(teachllm, { Card, blockCard, requestCard });
})();
