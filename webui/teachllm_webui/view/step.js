// One step: who got how much of the token budget, where the host's time went, and what the device could not do without
// beside what it took (the roofline).
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;
  const BOUND = {
    bandwidth: "bound by bandwidth: it waits for memory",
    compute: "bound by compute: it waits for arithmetic",
    overhead: "bound by overhead: far from both ceilings",
  };

  const RAISED = "(a ceiling rose: steps were faster than it was measured, or the model fits a cache)";

  class Step {
    constructor(context) {
      this.context = context;
      this.summary = h("span", { class: "tl-summary", "data-summary": "step" });
      this.root = context.panel("step", "Step", this.summary);
      this.budget = h("div", { class: "tl-bar tl-budget", role: "img" });
      this.budgetText = h("span", { class: "tl-value", "data-budget": "" });
      this.times = h("div", { class: "tl-bar tl-times" });
      this.timesText = h("span", { class: "tl-value tl-parts" });
      this.roofline = h("div", { class: "tl-roofline" });
      this.bound = h("span", { class: "tl-value", "data-bound": "" });
      this.blocks = h("span", { class: "tl-value", "data-block-events": "" });
      this.ends = h("ul", { class: "tl-ends" });
      const row = (name, value, ...more) => h("section", {}, h("h3", { text: name }), value, ...more);
      this.work = row("roofline", this.bound, this.roofline);
      const body = h("div", { class: "tl-scroll tl-step" });
      body.append(row("token budget", this.budgetText, this.budget), row("host time", this.timesText, this.times));
      body.append(this.work, row("blocks", this.blocks), this.ends);
      this.root.append(body);
      context.linkRequests(this.budget);
      context.linkRequests(this.ends);
    }

    draw({ line, events, timeline, aborted }) {
      const { config, machine } = timeline.header;
      this._drawBudget(line ? line.scheduled : [], config.max_num_batched_tokens, timeline.palette);
      this._drawTimes(line);
      this._drawRoofline(line?.roofline, machine?.ceilings);
      const graph = line?.graph_mode ? ` · graph: ${line.graph_mode}` : "";
      patch(this.summary, { text: line ? `${format.seconds(line.end - line.time)}${graph}` : "" });
      patch(this.root, { "data-step": line ? String(line.step) : null });
      const counts = Object.keys(format.event).map((kind) => [kind, events.filter(([other]) => other === kind).length]);
      const told = counts.filter(([, n]) => n).map(([kind, n]) => `${n} ${format.event[kind]}`);
      patch(this.blocks, { text: told.join(" · ") || "nothing changed" });
      this._drawEnds(line, aborted, timeline.palette);
    }

    light(ids) {
      this.context.lightChildren(this.budget, ids);
    }

    _drawBudget(scheduled, budget, palette) {
      const used = scheduled.reduce((sum, request) => sum + request.num_tokens, 0);
      const of = (phase) => scheduled.filter((request) => request.phase === phase);
      const tokens = (requests) => requests.reduce((sum, request) => sum + request.num_tokens, 0);
      const parts = ["prefill", "decode"].map((phase) => `${tokens(of(phase))} ${phase}`);
      const ofAll = budget ? `${used} of ${budget} tokens` : format.count(used, "token");
      const text = `${ofAll} · ${parts.join(", ")}`;
      patch(this.budgetText, { text, "data-used": String(used), "data-budget": String(budget ?? "") });
      patch(this.budget, { "aria-label": text });
      list(this.budget, scheduled, {
        key: (request) => request.request_id,
        create: (request) => {
          const { css, ink } = palette.of(request.request_id);
          return h("span", { "data-request": request.request_id, "--fill": css, "--ink": ink });
        },
        update: (part, request) => {
          const width = request.num_tokens / (budget || Math.max(used, 1));
          const { label } = palette.of(request.request_id);
          const text = width > 0.1 ? `${label} ${request.num_tokens}` : width > 0.045 ? label : "";
          const numTokens = String(request.num_tokens);
          patch(part, { "--share": width, text, "data-thin": width < 0.012 });
          patch(part, { "data-phase": request.phase, "data-num-tokens": numTokens });
        },
      });
    }

    _drawTimes(line) {
      const known = line ? ["schedule", "execute", "wait", "update"].map((name) => [name, line[name]]) : [];
      const all = known.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
      const parts = known.filter(([name, seconds]) => name !== "wait" || seconds > 0.001 * all); // none on a CPU
      list(this.timesText, parts, {
        key: ([name]) => name,
        create: ([name]) => h("span", { "data-part": name }, h("i"), h("span")),
        update: (part, [name, seconds]) => patch(part.lastChild, { text: `${name} ${format.seconds(seconds)}` }),
      });
      list(this.times, parts, {
        key: ([name]) => name,
        create: ([name]) => h("span", { "data-part": name, title: name }),
        update: (part, [, seconds]) => patch(part, { "--share": Math.max(seconds / all, 0.004) }),
      });
    }

    _drawRoofline(work, ceilings) {
      patch(this.work, { hidden: !work });
      if (!work) return;
      const amounts = `${format.bytes(work.num_bytes)} · ${format.flops(work.num_flops)}`;
      const said = BOUND[work.bound] ?? amounts;
      patch(this.bound, { text: work.raised ? `${said} ${RAISED}` : said, "data-bound": work.bound ?? "" });
      const bars = [];
      if (ceilings && work.floor) {
        ceilings = { ...ceilings, ...work.raised };
        // A step cannot be faster than its ceilings: one that seems to be shows that they are higher.
        const seconds = [work.num_bytes / ceilings.read_bandwidth, work.num_flops / ceilings.gemm_flops];
        const [bytes, flops] = seconds.map((each) => Math.min(each, work.seconds));
        bars.push(["bytes", format.bytes(work.num_bytes), bytes]);
        bars.push(["FLOPs", format.flops(work.num_flops), flops]);
        const share = Math.min(work.floor / work.seconds, 1);
        bars.push(["took", share < 0.01 ? "floor below 1 %" : `floor ${format.percent(share)}`, work.seconds]);
      }
      const longest = Math.max(...bars.map(([, , seconds]) => seconds));
      list(this.roofline, bars, {
        key: ([name]) => name,
        create: ([name]) => h("div", { "data-ceiling": name }, h("small", { text: name }), h("i"), h("span")),
        update: (bar, [, what, seconds]) => {
          patch(bar.children[1], { "--share": Math.max(seconds / longest, 0.003) });
          patch(bar.children[2], { text: `${format.seconds(seconds)} · ${what}` });
        },
      });
    }

    _drawEnds(line, aborted, palette) {
      const ends = line ? line.preempted.map((id) => [id, "preempted"]) : [];
      for (const [id, reason] of Object.entries(line?.finished ?? {})) ends.push([id, format.ended[reason]]);
      for (const [id, reason] of aborted) ends.push([id, format.ended[reason]]);
      list(this.ends, ends, {
        key: ([id, what]) => `${id} ${what}`,
        create: ([id]) => h("li", { "data-request": id }, this.context.chip(id), h("span")),
        update: (item, [, what]) => patch(item.lastChild, { text: what }),
      });
    }
  }

  Object.assign(teachllm, { Step });
})();
