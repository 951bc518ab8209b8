// A whole trace, and the state of the engine after any of its steps. Snapshots are taken on the way; a step between
// two is reached forward from the one before it, so going back costs no more than some dozens of lines.
//
// "Step k" is the k-th step line, counted from 0. Its state includes the lines up to the next step, so that a request
// that has just arrived, or was aborted between steps, shows at once. k = -1 is before the first step.
//
// It also keeps, for each request, what each step did with it (rows of the batch timeline), for each block what happened
// to it (its history), and the seconds of work: time in which no step is under way is left out, and of two steps that
// overlap the time that they share counts once.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const SNAPSHOT_STEPS = 50;
  const TRACE_VERSION = 1;
  const MAX_BLOCKS = 1e7;

  // What each step did with a request: `cells[k - first]` is a scheduled request, a wait, or undefined.
  class Row {
    constructor(arrival, index, first) {
      Object.assign(this, { id: arrival.request_id, arrival, index, first, last: Infinity, ended: null, cells: [] });
    }

    at(k) {
      return this.cells[k - this.first];
    }

    put(k, cell) {
      this.cells[k - this.first] = cell;
    }
  }

  function isRank({ stage, begin, end, sent }) {
    return [stage, begin, end].every(Number.isFinite) && sent instanceof Object;
  }

  class Timeline {
    // Of a fork: the step after which it begins, and the original's seconds of work up to there.
    constructor(lines = [], { forkedAt = null, workBefore = 0 } = {}) {
      Object.assign(this, { forkedAt, workBefore });
      this.header = null;
      this.lines = [];
      this.steps = []; // step lines
      this.rows = new Map(); // request id -> Row, in the order of arrival
      this.history = []; // by block id: [k, kind, request id]
      this.rootHash = null; // the parent of every first block: that of the first commit, which can have no other
      this.problem = null; // what is wrong with the trace, in words; what came before it is shown
      this.notice = null; // what is odd but can be shown
      this.told = []; // [{ k, line }]: lines that say what each rank did, and the newest step then
      this.forked = []; // of a fork: how far each request had come when it began
      this.work = []; // seconds of work up to the end of each step
      this.given = []; // tokens of each step: [{ id, n, before }], with the time of the request's token before them or null
      this.waste = []; // after each step, the share of the slots in used blocks that are empty; null without any
      this._busyUntil = -Infinity; // the latest end of a step
      this._outside = new Map(); // k -> [[request id, reason]]: ended by an abort or a stop string
      this._lineOfStep = [];
      this._snapshots = []; // [{ numLines, replay }]
      this._head = null; // the newest state
      this._cursor = null; // the state shown last, if it is not the newest
      this.push(lines);
    }

    get last() {
      return this.steps.length - 1;
    }

    // The number of the first step, also before there is one.
    get first() {
      return this.steps[0]?.step ?? (this.forkedAt ?? -1) + 1;
    }

    // The least k that is shown: of a fork there is something to see before its first step.
    get lowest() {
      return this.forkedAt === null ? Math.min(this.last, 0) : -1;
    }

    // The last of the steps at which most blocks are in use.
    get best() {
      let best = Math.min(this.last, 0);
      this.steps.forEach(({ blocks }, k) => (best = blocks.used >= this.steps[best].blocks.used ? k : best));
      return best;
    }

    // Requests under way at the newest step.
    get numLive() {
      return this._head?.live.size ?? 0;
    }

    // Whether a request is one of them.
    isLive(id) {
      return Boolean(this._head?.live.has(id));
    }

    // Appends lines, objects or JSON texts. After a line that makes no sense the rest is left out.
    push(lines) {
      for (const given of lines) {
        if (this.problem) return;
        if (typeof given === "string" && !given.trim()) continue;
        try {
          this._append(typeof given === "string" ? JSON.parse(given) : given);
        } catch (error) {
          this.problem = `line ${this.lines.length + 1} of the trace: ${error.message}`;
        }
      }
    }

    // The state after step k. Read it before the next call: it moves on.
    stateAt(k) {
      return this.stateAfterLine(k >= this.last ? this.lines.length - 1 : this._lineOfStep[k + 1] - 1);
    }

    // The state after the i-th line, the header being line 0.
    stateAfterLine(i) {
      const numLines = i + 1;
      if (numLines >= this.lines.length) return this._head;
      let from = this._snapshots.findLast((snapshot) => snapshot.numLines <= numLines);
      if (this._cursor && this._cursor.numLines <= numLines && this._cursor.numLines >= from.numLines) {
        from = this._cursor;
      } else {
        from = { numLines: from.numLines, replay: from.replay.clone() };
      }
      while (from.numLines < numLines) from.replay.apply(this.lines[from.numLines++]);
      this._cursor = from;
      return from.replay;
    }

    // The index of step k's own line: `stateAfterLine` of it leaves out what came between it and the next step.
    lineOfStep(k) {
      return this._lineOfStep[k];
    }

    // Block events of step k: those since the step before, aborts included.
    eventsOf(k) {
      const first = k > 0 ? this._lineOfStep[k - 1] + 1 : 1;
      const lines = k < 0 ? [] : this.lines.slice(first, this._lineOfStep[k] + 1);
      return lines.flatMap((line) => line.block_events ?? []);
    }

    // Requests that were ended from outside between step k and the next: [[request id, reason]].
    endedOutside(k) {
      return this._outside.get(k) ?? [];
    }

    // Step k's seconds of work: [begin, end].
    spanOf(k) {
      return [k > 0 ? this.work[k - 1] : this.workBefore, this.work[k]];
    }

    // The newest step that had begun after so many seconds of work.
    stepAtWork(seconds) {
      let [low, high] = [0, this.last];
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (this.work[middle - 1] <= seconds) low = middle;
        else high = middle - 1;
      }
      return Math.max(low, 0);
    }

    _append(line) {
      teachllm.checkLine(line);
      if (!this.header) {
        if (line.event !== "header") throw new Error(`a trace begins with a header, this is '${line.event}'`);
        this._begin(line);
      }
      if (!(line.ranks ?? []).every(isRank)) throw new Error("a rank without 'stage', 'begin', 'end' or 'sent'");
      this._head.apply(line);
      this.lines.push(line);
      const k = line.event === "step" ? this.steps.length : this.last;
      if (line.event === "arrival") this._arrive(line);
      for (const [kind, block, name, , parent] of line.block_events ?? []) {
        (this.history[block] ??= []).push([k, kind, name]);
        if (kind === "commit" && !this.header.is_partial) this.rootHash ??= parent;
      }
      if (line.event === "abort" || line.event === "stop") {
        this._close(line.request_id, line.event, k);
        if (!this._outside.has(k)) this._outside.set(k, []);
        this._outside.get(k).push([line.request_id, line.event]);
      }
      if (line.event === "fork") {
        this.forked = line.requests;
        this.forkedAt ??= line.step;
      }
      if (line.event === "error") this.notice = `A step failed: ${line.message}`;
      if (line.event === "step") this._step(line, k);
      if (line.ranks?.length) this.told.push({ k, line });
    }

    _begin(header) {
      const { num_blocks: numBlocks } = header;
      if (!(numBlocks >= 0 && numBlocks <= MAX_BLOCKS)) throw new Error(`a pool of ${numBlocks} blocks is not believed`);
      this.header = header;
      this._head = new teachllm.Replay(header);
      this._snapshots = [{ numLines: 0, replay: this._head.clone() }];
      this._interval = SNAPSHOT_STEPS * Math.ceil(header.num_blocks / 4096); // a large pool is dear to copy
      if (header.version > TRACE_VERSION) {
        const known = `this page knows ${TRACE_VERSION}: some may be missing.`;
        this.notice = `The trace is of version ${header.version}, ${known}`;
      }
    }

    _arrive(line) {
      const known = this.rows.get(line.request_id);
      if (known) Object.assign(known, { last: Infinity, ended: null, arrival: line });
      else this.rows.set(line.request_id, new Row(line, this.rows.size, this.steps.length));
    }

    _close(id, reason, k) {
      Object.assign(this.rows.get(id), { last: Math.max(k, 0), ended: reason });
    }

    // The state knows them already. A late result is of a request that had the id before.
    _given({ scheduled, time }) {
      const given = scheduled.filter(({ request_id: id, num_sampled: n }) => n && this.rows.get(id).arrival.time <= time);
      return given.map(({ request_id: id, num_sampled: n }) => {
        return { id, n, before: this._head.requests.get(id).token_times.at(-1 - n) ?? null };
      });
    }

    // Shared blocks are full, so only the last blocks of requests have empty slots.
    _wasted(numUsed) {
      const { live, requests, block_size: size } = this._head;
      let empty = 0;
      for (const id of live) {
        const { table, num_computed_tokens: computed } = requests.get(id);
        empty += Math.max(table.length * size - computed, 0);
      }
      return numUsed ? empty / (numUsed * size) : null;
    }

    _step(line, k) {
      this.steps.push(line);
      this._lineOfStep.push(this.lines.length - 1);
      const worked = Math.max(line.end - Math.max(line.time, this._busyUntil), 0);
      this.work.push((this.work.at(-1) ?? this.workBefore) + worked);
      this._busyUntil = Math.max(this._busyUntil, line.end);
      this.given.push(this._given(line));
      this.waste.push(this._wasted(line.blocks.used));
      const preempted = new Set(line.preempted);
      for (const [id, [reason, words]] of Object.entries(line.waiting)) {
        const kind = preempted.has(id) ? "preempted" : "waiting";
        this.rows.get(id).put(k, { kind, reason, words });
      }
      for (const [id, [reason, words]] of Object.entries(line.held ?? {})) {
        this.rows.get(id)?.put(k, { kind: "running", reason, words });
      }
      for (const scheduled of line.scheduled) {
        const id = scheduled.request_id;
        this.rows.get(id).put(k, { kind: scheduled.phase, scheduled, preempted: preempted.has(id) });
      }
      for (const [id, reason] of Object.entries(line.finished)) this._close(id, reason, k);
      if (this.steps.length % this._interval === 0) {
        this._snapshots.push({ numLines: this.lines.length, replay: this._head.clone() });
      }
    }
  }

  Object.assign(teachllm, { Timeline });
})();
