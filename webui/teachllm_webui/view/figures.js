// What a run has come to at any of its steps, in figures: for two timelines, what the same requests cost under two settings.
// Sums are kept for each step, so that a look back costs nothing and the figures are those of the step shown.
//
// Of a fork and its original only what comes after the fork counts (`since`): the first tokens that come then, each from
// when its request really arrived, and the pauses that end then, each from the token before it. A request that waits for
// its first token counts with what it has waited so far, so a mean is then a least value.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});

  class Figures {
    // since: the number of a step line; original: of a fork, the figures of the other side
    constructor(since = -1, original = null) {
      Object.assign(this, { since, original });
      this._sums = []; // for each step
      this._arrived = new Map(); // id -> { time, step } of those without a token
      this._arrivedAt = new Map(); // id -> step, up to `since`, for those of the fork
      this._counts = false;
      this._numLines = 0;
      this._sum = { requests: 0, finished: 0, firsts: 0, ttft: 0, ttftSteps: 0, longest: null };
      Object.assign(this._sum, { wasted: 0, withBlocks: 0, preemptions: 0, mostTokens: 0 });
      this._waiting = { time: 0, step: 0 }; // sums over those without a token
    }

    // Takes the lines that it has not seen; a fork's when the original's are known up to it.
    extend(timeline) {
      if (this.original && !(this.original._stepNumber >= this.since)) return;
      while (this._numLines < timeline.lines.length) {
        const line = timeline.lines[this._numLines++];
        if (line.event === "arrival") this._arrive(line);
        if (line.event === "fork") this._fork(line);
        if (line.event === "abort" || line.event === "stop") this._end(line.request_id);
        if (line.event === "step") this._step(line, timeline);
      }
    }

    // After step k; null before the first.
    at(k) {
      const sum = this._sums[k];
      if (!sum) return null;
      const { waiting, waited, waitedSteps, ...rest } = sum;
      const count = sum.firsts + waiting;
      return {
        ...rest,
        steps: sum.step + 1,
        ttft: count ? (sum.ttft + waited) / count : null,
        ttftSteps: count ? (sum.ttftSteps + waitedSteps) / count : null,
        isLeast: waiting > 0,
        waste: sum.withBlocks ? sum.wasted / sum.withBlocks : null,
      };
    }

    _arrive({ request_id: id, time }) {
      this._sum.requests += 1;
      this._leave(id);
      const step = this._stepNumber ?? this.original?._arrivedAt.get(id) ?? -1;
      if (step <= this.since) this._arrivedAt.set(id, step);
      this._arrived.set(id, { time, step });
      this._waiting.time += time;
      this._waiting.step += step;
    }

    // It waits for its first token no more.
    _leave(id) {
      const arrived = this._arrived.get(id);
      if (!arrived) return;
      this._arrived.delete(id);
      this._waiting.time -= arrived.time;
      this._waiting.step -= arrived.step;
    }

    // Those that had ended before are not in the fork's trace.
    _fork({ step, requests }) {
      this._stepNumber = step;
      const before = this.original?._atFork;
      if (before) {
        this._sum.finished += before.finished;
        this._sum.requests = before.requests;
      }
      for (const { request_id: id, token_times: times } of requests) {
        if (times.length) this._leave(id);
      }
    }

    _end(id) {
      this._sum.finished += 1;
      this._leave(id);
    }

    _step(line, timeline) {
      const sum = this._sum;
      const [given, waste] = [timeline.given[this._sums.length], timeline.waste[this._sums.length]];
      this._counts = line.step > this.since;
      this._stepNumber = line.step;
      for (const { id, before } of given) this._give(id, before, line);
      for (const id of Object.keys(line.finished)) this._end(id);
      if (this._counts) {
        if (waste !== null) {
          sum.wasted += waste;
          sum.withBlocks += 1;
        }
        sum.preemptions += line.preempted.length;
        sum.mostTokens = Math.max(sum.mostTokens, line.scheduled.reduce((all, each) => all + each.num_tokens, 0));
      }
      const waiting = this._counts ? this._arrived.size : 0;
      const waited = waiting * line.end - this._waiting.time;
      const waitedSteps = waiting * line.step - this._waiting.step;
      this._sums.push({ ...sum, step: line.step, waiting, waited, waitedSteps });
      if (line.step === this.since) this._atFork = { ...sum };
    }

    // A request gets tokens; `before` is when it got its last one, null if these are its first.
    _give(id, before, line) {
      const [sum, arrived] = [this._sum, this._arrived.get(id)];
      if (this._counts && arrived) {
        sum.firsts += 1;
        sum.ttft += line.end - arrived.time;
        sum.ttftSteps += line.step - arrived.step;
      } else if (this._counts && before !== null) {
        sum.longest = Math.max(sum.longest ?? 0, line.end - before);
      }
      this._leave(id);
    }
  }

  Object.assign(teachllm, { Figures });
})();
