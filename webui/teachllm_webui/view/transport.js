// Play, pause, one step, speed, and the scrub bar, over whose length the use of KV memory is drawn so that the eye
// finds the busy places. Of a recorded trace it is a player; with a live engine the buttons drive that engine.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, format, icon, setIcon } = teachllm;
  const SPEEDS = [1, 2, 5, 10, 30, 60]; // steps per second

  class Transport {
    constructor(context) {
      this.context = context;
      this.speed = 10;
      this.playing = false;
      this._playings = 0;
      const button = (action, label, onclick) =>
        h("button", { "data-action": action, "aria-label": label, title: label, onclick }, icon(action));
      this.play = button("play", "play (space)", () => this.toggle());
      const buttons = h(
        "div",
        { class: "tl-buttons" },
        button("home", "first step (home)", () => this.goTo(0)),
        button("back", "one step back (left arrow)", () => this.by(-1)),
        this.play,
        button("forward", "one step on (right arrow)", () => this.by(1)),
        button("end", context.live || context.follows ? "follow the newest step (end)" : "last step (end)", () => context.follow()),
      );
      const setSpeed = () => this.setSpeed(this.speeds.value === "max" ? null : Number(this.speeds.value));
      this.speeds = h("select", { "data-action": "speed", "aria-label": "speed", onchange: setSpeed });
      for (const speed of SPEEDS) this.speeds.append(h("option", { value: speed, text: `${format.count(speed, "step")}/s` }));
      if (context.live) this.speeds.append(h("option", { value: "max", text: "as fast as it goes" }));
      this.speeds.value = "10";
      const scrub = () => this.goTo(Number(this.scrub.value));
      this.scrub = h("input", { type: "range", min: 0, max: 0, step: 1, value: 0, oninput: scrub });
      patch(this.scrub, { "data-action": "scrub", "aria-label": "step" });
      this.overview = h("canvas", { "aria-hidden": "true" });
      this.where = h("span", { class: "tl-where", "data-where": "" });
      this.state = h("span", { class: "tl-state" });
      this.mark = h("i");
      const bar = h("div", { class: "tl-scrub" }, this.overview, this.mark, this.scrub);
      this.root = h("div", { class: "tl-transport", role: "toolbar", "aria-label": "Transport" });
      this.root.append(buttons, this.speeds, bar, this.where, this.state);
      new ResizeObserver(([entry]) => {
        this._size = [entry.contentRect.width, entry.contentRect.height];
        this._overviewOf = null;
        this._paintOverview(true);
      }).observe(bar);
    }

    draw({ k, line, state, timeline }) {
      patch(this.scrub, { max: Math.max(this._end, 0) });
      patch(this.mark, { "--at": Math.max(this.context.position, 0) / Math.max(this._end, 1) });
      patch(steady(this.where, this._whereText(line, k, timeline)), { "data-step-index": String(k) });
      let [running, waiting] = [0, 0];
      for (const id of state.live) state.requests.get(id).status === "running" ? running++ : waiting++;
      const used = 1 - state.free.size / state.blocks.length;
      steady(this.state, `${running} running · ${waiting} waiting · KV ${format.percent(used)}`);
      const { live, follows, following } = this.context;
      patch(this.root, { "data-following": live || follows ? String(following) : null });
      this._drawPlay();
      this._paintOverview();
    }

    // The last place that the buttons go to: beside a longer side it is after the end of this one.
    get _end() {
      return this.context.place.last - this.context.timeline.first;
    }

    _whereText(line, k, timeline) {
      const { isBeforeFork, position, live } = this.context;
      if (isBeforeFork) return `not forked yet: it begins after step ${timeline.forkedAt}`;
      const since = timeline.workBefore ? ` · ${format.seconds(timeline.workBefore)}` : "";
      if (!line) return timeline.forkedAt === null ? "before the first step" : `step ${timeline.forkedAt}${since} · the fork`;
      const hasEnded = position > timeline.last && (!live || live.sideDone);
      return `step ${line.step} of ${timeline.steps.at(-1).step} · ${format.seconds(timeline.work[k])}${hasEnded ? " · ended" : ""}`;
    }

    // The slider itself, whose mark is ours: moving its own at every step would lay out the page twice.
    settle() {
      const position = Math.max(this.context.position, 0);
      if (this.scrub.value !== String(position)) this.scrub.value = position;
      patch(this.scrub, { "aria-valuetext": this.where.textContent });
      this._paintOverview(true);
    }

    toggle() {
      const { follows, position, place } = this.context;
      if (this._drives) return this.context.drive(this.isPlaying ? "pause" : "play");
      const plays = !this.isPlaying;
      if (plays && position >= this._end) {
        if (follows) return this.context.follow();
        place.visit(place.first);
      }
      if (!plays) place.following = false; // the picture stands still, whatever comes
      this.playing = plays;
      this._drawPlay();
      this._playings += 1;
      if (this.playing) this._run(this._playings);
    }

    // Live and at the newest step, one step on is a step of the engine.
    by(n) {
      const { position, place } = this.context;
      if (n > 0 && this._drives && place.step >= place.newest) return this.context.drive("step");
      this.goTo(position + n);
    }

    goTo(k) {
      this.stop();
      this.context.goTo(k);
    }

    stop() {
      this.playing = false;
      this._drawPlay();
    }

    setSpeed(speed) {
      this.speed = speed;
      if (this.context.live) this.context.drive("setSpeed", speed);
    }

    // The buttons drive an engine. Of a run that has ended, and of a recorded one, they play it again.
    get _drives() {
      const { live } = this.context;
      return Boolean(live) && !live.done;
    }

    // With a live engine another page may have set it: steps per second, null as fast as it goes.
    showSpeed(speed) {
      this.speed = speed;
      const value = speed === null ? "max" : String(speed);
      if (this.speeds.value !== value) this.speeds.value = value;
    }

    get isPlaying() {
      const { live, follows, following } = this.context;
      return this._drives ? Boolean(live.playing) : this.playing || (follows && following);
    }

    // Ends with this playing, also if the next one begins before the next frame.
    _run(playing) {
      let then = performance.now();
      let owed = 0;
      const tick = (now) => {
        if (!this.playing || this._playings !== playing) return;
        owed += ((now - then) / 1000) * (this.speed ?? SPEEDS.at(-1));
        then = now;
        const steps = Math.min(Math.floor(owed), 60);
        owed -= Math.floor(owed);
        if (steps) this.context.goTo(this.context.position + steps);
        if (this.context.position >= this._end) return this.stop();
        requestAnimationFrame(tick);
      };
      requestAnimationFrame(tick);
    }

    _drawPlay() {
      const label = this.isPlaying ? "pause (space)" : "play (space)";
      patch(this.play, { "aria-label": label, title: label, "data-playing": String(this.isPlaying) });
      setIcon(this.play.firstChild, this.isPlaying ? "pause" : "play");
    }

    // Share of KV blocks in use as an area, preemptions as ticks. Of a growing trace at most some times per second, or now.
    _paintOverview(now = false) {
      const { timeline, colors } = this.context;
      const key = `${timeline.last} ${this._end} ${colors.key}`;
      if (key === this._overviewOf || (!now && performance.now() - (this._overviewAt ?? -1e9) < 300)) return;
      const [width, height] = this._size ?? [0, 0];
      if (!width || !timeline.header) return;
      [this._overviewOf, this._overviewAt] = [key, performance.now()];
      const ratio = devicePixelRatio || 1;
      this.overview.width = width * ratio;
      this.overview.height = height * ratio;
      const canvas = this.overview.getContext("2d");
      canvas.scale(ratio, ratio);
      const { steps } = timeline;
      const each = width / Math.max(this._end + 1, 1);
      const stride = Math.max(1, Math.floor(1 / each));
      canvas.fillStyle = colors.wait;
      for (let k = 0; k < steps.length; k += stride) {
        const h = (height * steps[k].blocks.used) / timeline.header.num_blocks;
        canvas.globalAlpha = 0.4;
        canvas.fillRect(k * each, height - h, each * stride + 0.5, h);
        canvas.globalAlpha = 1;
        canvas.fillRect(k * each, height - h, each * stride + 0.5, Math.min(h, 1.5));
      }
      canvas.fillStyle = colors.alarm;
      steps.forEach((step, k) => {
        if (step.preempted.length) canvas.fillRect(k * each, 0, Math.max(each, 1.5), 4);
      });
    }
  }

  // A text whose node never gets narrower, so that what stands beside it stands still.
  function steady(node, text) {
    node._longest = Math.max(node._longest ?? 0, text.length);
    return patch(node, { text, "--longest": `${0.88 * node._longest}ch` }); // letters are narrower than digits
  }

  Object.assign(teachllm, { Transport });
})();
