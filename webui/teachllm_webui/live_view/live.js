// teachllm.mountLive(element, server, told): the live page. A slim bar, and under it one view or two side by side, whose
// buttons act on the engines of all. A tab asks the server for news in a long poll: the lines that it has not seen, and
// what the bar says. When the timelines are replaced the generation rises and the views are mounted anew.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, Popover, Comparison } = teachllm;
  const HIDDEN_MS = 1000; // a tab out of sight asks so often, and leaves its connection to those that are seen
  const RETRY_MS = 1000;
  const POLICIES = [["fcfs", "first come, first served"], ["priority", "priority"], ["static", "static batch"]];

  const SIMULATED = "A simulation has no tokens, so it cannot be forked.";
  const INCOMPLETE = "Without its beginning or its tokens, a trace gives nothing to go on from.";
  const STACKED = { Left: "Above", left: "above", Right: "Below", right: "below" };

  class LivePage {
    constructor(element, server, told) {
      Object.assign(this, { server, told, generation: -1, status: -1, now: {}, views: [], cursors: [] });
      this.tab = Math.random().toString(36).slice(2);
      this.root = h("div", { class: "teachllm tl-live", "data-live": "" });
      this.bar = h("div", { class: "tl-top" });
      this.sentence = h("p", { class: "tl-look", hidden: true });
      const close = h("button", { "aria-label": "close", onclick: () => this._closeProblem() }, teachllm.icon("close"));
      this.problemText = h("span");
      this.problem = h("div", { class: "tl-banner", role: "alert", "data-problem": "", hidden: true }, this.problemText, close);
      this.sides = h("div", { class: "tl-sides" });
      this.nothing = h("p", { class: "tl-nothing", "data-nothing": "" });
      this.compare = new Comparison();
      this.question = h("div", { class: "tl-banner", role: "alertdialog", "data-question": "", hidden: true });
      this.root.append(this.bar, this.problem, this.question, this.sentence, this.compare.root, this.nothing, this.sides);
      element.append(this.root);
      this._fillBar();
      const sized = new ResizeObserver(() => this._measure());
      const above = [this.bar, this.problem, this.sentence, this.compare.root, this.nothing];
      for (const node of [this.root, ...above]) sized.observe(node);
      document.addEventListener("keydown", (event) => event.key === "Escape" && this._escape(event), true);
      this.isWide = matchMedia("(min-width: 1200px)"); // as in live.css
      this.isWide.addEventListener("change", () => this._drawSentence());
      this._poll();
    }

    // -- the bar

    _fillBar() {
      this.presets = new Popover({ name: "preset", title: "Presets", note: "Small runs that show one thing each." });
      const home = this.told.home ? [{ name: null, title: this.told.home, look_at: "What this page began with." }] : [];
      for (const { name, title, look_at } of [...home, ...this.told.presets]) {
        const onclick = () => {
          this.presets.close();
          this._drive(name === null ? "home" : "preset", { value: name });
        };
        const button = h("button", { type: "button", class: "tl-preset", "data-preset": name, onclick });
        button.append(h("b", { text: title }), h("span", { text: look_at }));
        this.presets.body.append(button);
      }
      patch(this.presets.panel, { class: "tl-popover tl-popover-list" });
      const prompt = new Popover({
        name: "submit",
        title: "Prompt",
        submit: "send",
        note: "Joins what is running. Control and enter sends.",
        fields: [
          { name: "prompt", label: "prompt", kind: "text", value: "What is paged attention?" },
          { name: "max_tokens", label: "most tokens", value: 64, min: 1 },
          { name: "temperature", label: "temperature", value: 0, min: 0, step: 0.1 },
          { name: "top_p", label: "top p", value: 1, min: 0, max: 1, step: 0.05 },
          { name: "seed", label: "seed", placeholder: "any" },
          { name: "n", label: "completions", value: 1, min: 1, max: 8 },
          { name: "priority", label: "priority (lower first)", value: 0 },
          { name: "chat", label: "as a chat message", kind: "check", value: true },
        ],
        send: (form) => this._ask("submit", { form }),
      });
      const same = { placeholder: "as it is", min: 1 };
      this.fork = new Popover({
        name: "fork",
        title: "Fork",
        submit: "fork here",
        fields: [
          { name: "max_num_batched_tokens", label: "token budget", ...same },
          { name: "block_size", label: "block size", ...same },
          { name: "num_gpu_blocks_override", label: "blocks", ...same },
          { name: "max_num_seqs", label: "requests at once", ...same },
          { name: "scheduling_policy", label: "policy", kind: "select", options: [["", "as it is"], ...POLICIES] },
          {
            name: "enable_chunked_prefill",
            label: "chunked prefill",
            kind: "select",
            options: [["", "as it is"], ["on", "on"], ["off", "off"]],
          },
        ],
        send: (form) => this._sendFork(form),
      });
      this.fork.onopen = () => this._describeFork();
      this.fork.onlost = (error) => this._say(error);
      this.whatIf = this._whatIfForm();
      this.title = h("span", { class: "tl-title", "data-title": "" });
      this.state = h("span", { class: "tl-busy", role: "status", "data-status": "" });
      const drop = () => this._drive("drop");
      this.drop = h("button", { text: "close the fork", "data-action": "drop", onclick: drop, hidden: true });
      const brand = h("strong", { class: "tl-brand", text: "teachllm" });
      const forms = [this.presets, prompt, this.fork, this.whatIf].map((form) => form.root);
      this.bar.append(brand, ...forms, this.drop, this.title, this.state);
    }

    _whatIfForm() {
      const { defaults, models } = this.told.what_if;
      const number = (name, label) => ({ name, label, value: defaults[name], min: 0, step: "any" });
      return new Popover({
        name: "what_if",
        title: "What if",
        submit: "simulate",
        note: "The real scheduler on a pretended H200: no model, no tokens, hundreds of requests. Every fourth request is urgent, which counts with the policy priority.",
        fields: [
          number("requests", "requests"),
          number("rate", "arrive per second"),
          number("prompt_min", "shortest prompt"),
          number("prompt_max", "longest prompt"),
          number("output_min", "shortest output"),
          number("output_max", "longest output"),
          number("shared", "shared prefix"),
          { name: "model", label: "model", kind: "select", options: models.map((m) => [m, m]), value: defaults.model },
          number("block_size", "block size"),
          number("blocks", "blocks"),
          number("budget", "token budget"),
          number("seqs", "requests at once"),
          { name: "policy", label: "policy", kind: "select", options: POLICIES, value: defaults.policy },
          { name: "chunked", label: "chunked prefill", kind: "check", value: true },
        ],
        send: (form) => this._ask("what_if", { form }),
      });
    }

    // A fork is made after the step that the first view shows.
    get _forkStep() {
      const view = this.views[0];
      return view?.timeline.steps[view.k]?.step ?? null;
    }

    _describeFork() {
      const step = (this._forkAt = this._forkStep);
      this.fork.panel.reset(); // what an earlier fork was told
      const config = this.views[0]?.timeline.header?.config ?? {};
      const blocks = this.views[0]?.timeline.header?.num_blocks;
      const known = { ...config, num_gpu_blocks_override: blocks };
      for (const input of this.fork.panel.querySelectorAll("input")) {
        patch(input, { placeholder: known[input.name] === undefined ? "as it is" : String(known[input.name]) });
      }
      const lost = "Cached blocks that no request uses are lost.";
      const left = this.views.length > 1 ? "The left side alone is forked. " : "";
      const where = `After step ${step}, which is shown, a second engine goes on with other settings. ${left}${lost}`;
      const text = step === null ? "Nothing has run yet: play or step first." : where;
      patch(this.fork.note, { text });
      this.fork.enable(step !== null && this.now.can_fork);
      if (!this.now.can_fork) patch(this.fork.note, { text: this.now.is_simulation ? SIMULATED : INCOMPLETE });
    }

    _sendFork(form) {
      const given = Object.entries(form).filter(([, value]) => value !== null && value !== "");
      const chunked = (value) => (value === "on" || value === "off" ? value === "on" : value);
      const values = Object.fromEntries(given.map(([name, value]) => [name, chunked(value)]));
      return this._ask("fork", { step: this._forkAt, form: values });
    }

    // -- the server

    // What is wrong, in words, if anything is.
    async _ask(action, more = {}) {
      const order = { action, generation: this.generation, tab: this.tab, ...more };
      const answer = await Promise.resolve(this.server.drive(order)).catch(() => null);
      if (answer?.question) return (await this._confirm(answer.question)) ? this._ask(action, { ...more, sure: true }) : "";
      return answer ? answer.error : "teachllm does not answer";
    }

    // Whether the user wants what is asked.
    _confirm(question) {
      return new Promise((resolve) => {
        const choose = (text, choice) => {
          return h("button", { text, "data-choice": String(choice), onclick: () => this._answer(choice) });
        };
        this._answer = (choice) => {
          this._answer = null;
          patch(this.question, { hidden: true });
          resolve(choice);
        };
        this.question.replaceChildren(h("span", { text: question }), choose("replace it", true), choose("keep it", false));
        patch(this.question, { hidden: false });
        this.question.querySelector("button").focus();
      });
    }

    // Keeps what another tab watches, or else closes the banner.
    _escape(event) {
      if (event.defaultPrevented || this.views.some(({ panels }) => panels.grown)) return;
      if (this._answer) this._answer(false);
      else if (!this.problem.hidden) this._closeProblem();
      else return;
      event.preventDefault();
    }

    async _drive(action, more) {
      const error = await this._ask(action, more);
      if (error) this._say(error);
    }

    async _poll() {
      for (;;) {
        const { generation, status, cursors } = this;
        const asked = { generation, status, cursors, tab: this.tab, wait: !document.hidden };
        const answer = await Promise.resolve(this.server.news(asked)).catch(() => null);
        if (answer) this._take(answer);
        else this._lose();
        if (!answer) await pause(RETRY_MS);
        else if (document.hidden) await pause(HIDDEN_MS);
      }
    }

    _lose() {
      this.status = -1; // whatever comes next is shown
      patch(this.state, { text: "no connection to teachllm" });
      patch(this.root, { "data-lost": true });
    }

    _take({ generation, status, lines, now }) {
      patch(this.root, { "data-lost": null });
      if (generation !== this.generation) this._mount(generation, lines.length, now);
      lines.forEach((news, i) => {
        if (!news.length) return;
        this.cursors[i] += news.length;
        this.views[i].take(news);
      });
      if (lines.some((news) => news.length)) this.views[0].place.advance();
      if (status !== this.status) this._show(status, now);
    }

    _mount(generation, count, now) {
      for (const view of this.views) view.destroy();
      this.sides.replaceChildren();
      this.generation = generation;
      this.cursors = Array(count).fill(0);
      patch(this.root, { "data-generation": String(generation), "data-sides": String(count) });
      const place = placeOf(now);
      this.views = Array.from({ length: count }, (_, i) => {
        const title = h("h2", { class: "tl-side-title", text: now.titles[i] ?? "", hidden: count < 2 });
        const box = h("section", { class: "tl-side", "data-side": String(i) }, title);
        this.sides.append(box);
        const live = now.is_live ? this._controls(i, now) : null;
        const follows = now.follows && i === 0;
        const fork = now.is_fork && i > 0 ? { forkedAt: now.since, workBefore: now.work_before } : null;
        return teachllm.mount(box, { live, grows: true, follows, axis: now.axis, fork, place });
      });
      const [pools, batches] = [new teachllm.PoolScale(), new teachllm.BatchScale(now.axis)];
      for (const view of this.views) {
        pools.add(view.pool);
        batches.add(view.batch);
      }
      this.compare.watch(count > 1 ? this.views : [], now);
      this._measure();
    }

    _controls(side, now) {
      const drive = (action, value) => this._ask(action, { side, value }).then((error) => error && this._say(error));
      return {
        playing: now.playing,
        done: now.is_done,
        sideDone: now.sides_done[side],
        play: () => drive("play"),
        pause: () => drive("pause"),
        step: () => drive("step"),
        abort: (id) => drive("abort", id),
        setSpeed: (speed) => drive("speed", speed),
      };
    }

    _show(status, now) {
      Object.assign(this, { status, now });
      const hasSteps = this.views.some((view) => view.timeline.last >= 0);
      const done = hasSteps ? "all done" : "nothing to do: send a prompt";
      const numLive = this.views[0]?.timeline.numLive ?? 0;
      const paused = numLive ? `paused, ${numLive} under way: play or step` : "paused";
      const ended = now.has_ended ? "the engine has ended" : done;
      const idle = now.is_done ? ended : now.is_live && !now.playing ? paused : now.connection;
      const begin = now.error ? "" : "Choose a preset, or ask what if.";
      patch(this.nothing, { text: now.loading ? `${now.loading} …` : begin, hidden: this.views.length > 0 });
      patch(this.state, { text: now.loading ? `${now.loading} …` : idle, "data-loading": now.loading ? "" : null });
      patch(this.title, { text: now.title });
      this._drawSentence();
      patch(this.drop, { hidden: !now.is_fork });
      this._tell(now.error ?? now.notice ?? "");
      this.views.forEach((view, i) => {
        if (!view.live) return;
        view.setLive({ playing: now.playing, done: now.is_done, sideDone: now.sides_done[i] });
        view.transport.showSpeed(now.speed);
      });
    }

    // The sides of a narrow window are one above the other.
    _drawSentence() {
      const text = this.now.look_at ?? "";
      const isStacked = this.views.length > 1 && !this.isWide.matches;
      const told = isStacked ? text.replace(/\b(left|right)\b/gi, (word) => STACKED[word]) : text;
      patch(this.sentence, { text: told, hidden: !told });
    }

    _say(error) {
      this._closed = null;
      this._tell(error);
    }

    // Until it is closed: the server goes on telling what it has told.
    _tell(problem) {
      if (problem !== this._closed) this._closed = null;
      patch(this.problemText, { text: problem });
      patch(this.problem, { hidden: !problem || problem === this._closed });
    }

    _closeProblem() {
      this._closed = this.problemText.textContent;
      this._tell(this._closed);
    }

    // The views' heights follow from what is left under the bar.
    _measure() {
      const above = this.sides.getBoundingClientRect().top - this.root.getBoundingClientRect().top;
      patch(this.root, { "--tl-above": `${Math.round(above)}px` });
    }
  }

  // A run under way is followed, one that has ended opens at the step that shows its point, a fork where it was forked.
  function placeOf({ is_fork: isFork, is_live: isLive, is_done: isDone, follows, since, show_at: showAt }) {
    const whenDone = isFork ? since : (showAt ?? "best");
    return new teachllm.Place({ following: (isLive && !isDone) || follows, opensAt: isLive && isDone ? whenDone : null });
  }

  function pause(milliseconds) {
    return new Promise((resolve) => setTimeout(resolve, milliseconds));
  }

  teachllm.mountLive = (element, server, told) => (globalThis.livePage = new LivePage(element, server, told));
})();
