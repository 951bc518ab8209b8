// The figures over time that people judge a server by, from the steps of a trace. Time is the engine's: seconds of work.
//
//   TTFT      time to first token: from a request's arrival to the end of the step that gave it its first
//   ITL       inter-token latency: between two tokens of one request (here the mean of a step's)
//   tokens/s  output tokens of the last second
//   KV use    blocks in use of all
//   hit rate  prompt tokens found in the prefix cache, of all prompt tokens admitted so far
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const WINDOW = 1; // second

  class Series {
    constructor() {
      this.time = []; // of each step's end
      this.itl = [];
      this.throughput = [];
      this.kv = [];
      this.hitRate = [];
      this.ttft = []; // [{ time, value, id }]
      this._seen = new Set(); // admitted before
      this._sampled = []; // of each step
      this._window = { first: 0, sum: 0 };
      this._begin = 0; // seconds of work before the first step, of a fork
      this._cached = 0;
      this._prompt = 0;
    }

    get length() {
      return this.time.length;
    }

    // What is to be drawn: [{ time, value, id? }], without the steps that have no such figure.
    points(name) {
      if (name === "ttft") return this.ttft;
      const points = this.time.map((time, i) => ({ time, value: this[name][i] }));
      return points.filter(({ value }) => value !== null);
    }

    most(name) {
      return this.points(name).reduce((most, { value }) => Math.max(most, value), 0);
    }

    // Takes the steps that it has not seen. A fork's requests were admitted before its first.
    extend(timeline) {
      if (!this.length && timeline.steps.length) {
        for (const known of timeline.forked) {
          if (known.num_cached_tokens !== undefined) this._seen.add(timeline.rows.get(known.request_id).arrival);
        }
      }
      while (this.length < timeline.steps.length) this._step(this.length, timeline);
    }

    _step(k, timeline) {
      const line = timeline.steps[k];
      const time = timeline.work[k];
      this._begin = timeline.workBefore;
      const gaps = [];
      let sampled = 0;
      for (const { request_id: id, start } of line.scheduled) {
        const { arrival } = timeline.rows.get(id);
        if (this._seen.has(arrival)) continue;
        this._seen.add(arrival);
        this._cached += Math.min(start, arrival.num_prompt_tokens);
        this._prompt += arrival.num_prompt_tokens;
      }
      for (const { id, n, before } of timeline.given[k]) {
        sampled += n;
        if (before !== null) gaps.push((line.end - before) / n);
        else this.ttft.push({ time, value: 1000 * (line.end - timeline.rows.get(id).arrival.time), id });
      }
      this.time.push(time);
      this.itl.push(gaps.length ? (1000 * gaps.reduce((a, b) => a + b, 0)) / gaps.length : null);
      this.kv.push((100 * line.blocks.used) / timeline.header.num_blocks);
      this.hitRate.push(this._prompt ? (100 * this._cached) / this._prompt : 0);
      this.throughput.push(this._rate(time, sampled));
    }

    _rate(time, sampled) {
      this._sampled.push(sampled);
      const window = this._window;
      window.sum += sampled;
      while (this.time[window.first] < time - WINDOW) window.sum -= this._sampled[window.first++];
      return window.sum / Math.min(WINDOW, Math.max(time - this._begin, 1e-3));
    }
  }

  Object.assign(teachllm, { Series });
})();
