// The queue: who waits, in the order in which they will be examined, each with its one reason in words.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;
  const MOST = 100; // rows: thousands would take longer than a step, and are not read

  class Queue {
    constructor(context) {
      this.context = context;
      this.summary = h("span", { class: "tl-summary", "data-summary": "queue" });
      this.rows = h("ol", { class: "tl-queue", "aria-label": "Waiting requests" });
      this.empty = h("p", { class: "tl-empty", text: "No request waits." });
      this.root = context.panel("queue", "Queue", this.summary);
      this.more = h("p", { class: "tl-empty", "data-more": "" });
      this.root.append(h("div", { class: "tl-scroll" }, this.empty, this.rows, this.more));
      context.linkRequests(this.rows);
    }

    draw({ state, timeline }) {
      const policy = timeline.header.config.scheduling_policy;
      const counts = policy === "priority"; // else priorities change nothing
      const waiting = inOrder(state, policy);
      patch(this.summary, { text: waiting.length ? `${waiting.length} waiting` : "" });
      patch(this.empty, { hidden: waiting.length > 0 });
      const numHidden = waiting.length - MOST;
      patch(this.more, { text: `and ${format.count(numHidden, "request")} after these`, hidden: numHidden <= 0 });
      list(this.rows, waiting.slice(0, MOST), {
        key: (request) => request.arrival.request_id,
        create: (request) => this._row(request.arrival.request_id),
        update: (row, request) => {
          const [reason, words] = request.wait ?? ["arrived", "has just arrived"];
          patch(row, { "data-reason": reason, "data-status": request.status });
          const { priority = 0 } = request.arrival;
          patch(row._words, { text: words + (counts ? ` (priority ${priority})` : "") });
          if (row._abort) patch(row._abort, { hidden: !this.context.canAbort(request.arrival.request_id) });
          patch(row._tag, { hidden: request.status !== "preempted" || reason === "preempted" });
        },
      });
    }

    light(ids) {
      this.context.lightChildren(this.rows, ids);
    }

    _row(id) {
      const words = h("span", { class: "tl-words" });
      const tag = h("span", { class: "tl-tag", text: "preempted" });
      const row = h("li", { "data-request": id, tabindex: "0" });
      row.append(this.context.chip(id), h("span", { class: "tl-id", text: id }), tag, words);
      const abort = this.context.abortButton(id);
      if (abort) row.append(abort);
      return Object.assign(row, { _words: words, _tag: tag, _abort: abort });
    }
  }

  // JSON objects lose the order of keys that are numbers, so it is the policy that is asked.
  function inOrder(state, policy) {
    const waiting = [...state.live].map((id) => state.requests.get(id)).filter((r) => r.status !== "running");
    const place = new Map([...state.requests.keys()].map((id, i) => [id, i]));
    const key = (request) => (policy === "priority" ? request.arrival.priority : 0);
    return waiting.sort((a, b) => key(a) - key(b) || place.get(a.arrival.request_id) - place.get(b.arrival.request_id));
  }

  Object.assign(teachllm, { Queue });
})();
