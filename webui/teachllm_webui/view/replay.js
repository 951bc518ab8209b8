// What an engine looked like after any line of its trace, from the lines up to it: teachllm/trace/replay.py again, for
// the browser. Fields have the trace's own names (docs/trace.md).
//
//   allocate   the head of the free list goes to the end of a request's table
//   hit        a block of the wanted content does; it leaves the list if it was there
//   commit     the content gets its hash, by which others can find it
//   evict      it loses it
//   free       a request lets go; with the last one the block goes to the end of the list
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});

  class ReplayError extends Error {}

  class BlockState {
    users = []; // the request of each use, in the order in which they came
    block_hash = null;
    parent_hash = null;
    last_step = -1; // the last step whose line named it
    writer = null; // whose tokens its content is: shown while no request uses it

    clone() {
      const copy = Object.assign(new BlockState(), this);
      copy.users = this.users.slice();
      return copy;
    }
  }

  class RequestState {
    constructor(arrival) {
      this.arrival = arrival;
      this.output_ids = [];
      this.output_text = []; // of each token; empty in a trace without text
      this.num_output_tokens = 0;
      this.table = []; // block ids
      this.num_computed_tokens = 0; // whose KV is in the cache
      this.num_cached_tokens = null; // found in the cache when first admitted; null before
      this.num_preemptions = 0;
      this.status = "waiting"; // or running, preempted, finished, aborted
      this.wait = null; // [reason, the same in words]
      this.finish_reason = null;
      this.token_times = []; // when each output token was known
      this.end_time = null;
    }

    get isLive() {
      return this.finish_reason === null;
    }

    get numKnownTokens() {
      return this.arrival.num_prompt_tokens + this.num_output_tokens;
    }

    clone() {
      const copy = Object.assign(new RequestState(this.arrival), this);
      for (const name of ["output_ids", "output_text", "table", "token_times"]) copy[name] = this[name].slice();
      return copy;
    }
  }

  class Replay {
    constructor(header) {
      this.block_size = header.config.block_size;
      this.is_partial = Boolean(header.is_partial); // its beginning is missing, so the free list's order is not known
      this.blocks = Array.from({ length: header.num_blocks }, () => new BlockState());
      this.free = new Set(this.blocks.keys()); // a set keeps the order of insertion: the order of reuse
      this.requests = new Map(); // by id, in the order of arrival, ended ones included
      this.live = new Set(); // ids of those that have not ended
      this.step = -1;
    }

    clone() {
      const { block_size, is_partial } = this;
      const copy = new Replay({ config: { block_size }, num_blocks: 0, is_partial });
      copy.blocks = this.blocks.map((block) => block.clone());
      copy.free = new Set(this.free);
      copy.live = new Set(this.live);
      // One that has ended and holds no blocks does not change any more.
      const cloned = ([id, request]) => [id, request.isLive || request.table.length ? request.clone() : request];
      copy.requests = new Map(Array.from(this.requests, cloned));
      copy.step = this.step;
      return copy;
    }

    // Moves on by one line. Kinds that it does not know change nothing. Throws ReplayError where a line cannot follow
    // those before it; the state is then of no use.
    apply(line) {
      if (line.event === "arrival") this.#arrive(line);
      if (line.event === "step" || line.event === "fork") this.step = line.step;
      for (const event of line.block_events ?? []) this.#applyBlockEvent(...event);
      if (line.event === "step") this.#applyStep(line);
      if (line.event === "fork") this.#applyFork(line);
      if (line.event === "error") {
        for (const id of this.live) {
          const request = this.requests.get(id);
          if (request.status !== "running") continue;
          request.status = "preempted";
          request.num_computed_tokens = 0;
        }
      }
      if (line.event === "abort" || line.event === "stop") {
        this.#end(this.#request(line.request_id), line.event, line.time);
      }
    }

    // Pool and tables as one text, the same as Python's `Replay.state_text()`.
    canonical() {
      const blocks = this.blocks.map((block) => [block.users.length, block.block_hash]);
      const tables = Array.from(this.requests).filter(([, request]) => request.table.length);
      tables.sort(([a], [b]) => byCodePoint(a, b));
      const entries = tables.map(([id, request]) => `${asciiJson(id)}:${JSON.stringify(request.table)}`);
      return `{"blocks":${JSON.stringify(blocks)},"free":${JSON.stringify([...this.free])},"tables":{${entries}}}`;
    }

    // -- requests

    #arrive(line) {
      const id = line.request_id;
      if (this.live.has(id)) throw new ReplayError(`request '${id}' arrives a second time`);
      const before = this.requests.get(id); // an id may be used again: in the order of arrival
      this.requests.delete(id);
      const request = new RequestState(line);
      if (before) request.table = before.table; // which a plan in flight may still pin
      this.requests.set(id, request);
      this.live.add(id);
    }

    #request(id) {
      const request = this.requests.get(id);
      if (!request) throw new ReplayError(`request '${id}' has never arrived`);
      return request;
    }

    #applyStep(line) {
      for (const id of line.preempted) this.#request(id).num_preemptions += 1;
      for (const scheduled of line.scheduled) {
        const request = this.#request(scheduled.request_id);
        // Else it is of one that had the id before, and too late.
        if (request.arrival.time <= line.time) this.#applyScheduled(request, scheduled, line.end);
      }
      for (const [id, reason] of Object.entries(line.finished)) this.#end(this.#request(id), reason, line.end);
      for (const id of this.live) this.#place(this.requests.get(id), line.waiting[id]);
    }

    #applyFork(line) {
      for (const known of line.requests) {
        const request = this.#request(known.request_id);
        request.output_ids = known.token_ids.slice();
        request.output_text = known.text.slice();
        request.token_times = known.token_times.slice();
        request.num_output_tokens = known.token_ids.length;
        request.num_computed_tokens = known.num_computed_tokens;
        request.num_cached_tokens = known.num_cached_tokens;
        request.num_preemptions = known.num_preemptions;
        this.#place(request, line.waiting[known.request_id]);
      }
    }

    #applyScheduled(request, scheduled, time) {
      const numRejected = (scheduled.num_draft ?? 0) - (scheduled.num_accepted ?? 0);
      request.num_computed_tokens = scheduled.start + scheduled.num_tokens - numRejected;
      request.num_cached_tokens ??= scheduled.start;
      request.output_ids.push(...(scheduled.token_ids ?? []));
      request.output_text.push(...(scheduled.text ?? []));
      const numSampled = scheduled.num_sampled ?? 0;
      request.num_output_tokens += numSampled;
      for (let i = 0; i < numSampled; i++) request.token_times.push(time);
    }

    #place(request, wait) {
      request.wait = wait ?? null;
      if (!wait) {
        request.status = "running";
        return;
      }
      const hasRun = request.num_cached_tokens !== null || wait[0] === "preempted";
      request.status = hasRun ? "preempted" : "waiting";
      request.num_computed_tokens = 0;
    }

    #end(request, reason, time) {
      request.finish_reason = reason;
      request.end_time = time;
      request.wait = null;
      request.status = reason === "abort" ? "aborted" : "finished";
      this.live.delete(request.arrival.request_id);
    }

    // -- blocks

    #applyBlockEvent(kind, id, name, hash, parent) {
      const block = this.blocks[id];
      if (!block) throw new ReplayError(`block ${id} is not one of the ${this.blocks.length}`);
      block.last_step = this.step;
      if (kind === "allocate" || kind === "hit") {
        if (kind === "allocate" && this.free.values().next().value !== id && !this.is_partial) {
          throw new ReplayError(`block ${id} is allocated and was not the next free one`);
        }
        if (kind === "allocate") block.writer = name;
        this.free.delete(id);
        block.users.push(name);
        this.#request(name).table.push(id);
      } else if (kind === "free") {
        const table = this.#request(name).table;
        const use = block.users.indexOf(name);
        const place = table.indexOf(id); // the oldest: it may have the block anew while a plan pins its old table
        if (use < 0 || place < 0) throw new ReplayError(`request '${name}' frees block ${id} and does not use it`);
        block.users.splice(use, 1);
        table.splice(place, 1);
        if (!block.users.length) this.free.add(id);
      } else if (kind === "commit") {
        block.block_hash = hash;
        block.parent_hash = parent;
      } else if (kind === "evict") {
        block.block_hash = block.parent_hash = null;
      } else {
        throw new ReplayError(`'${kind}' is no block event`);
      }
    }
  }

  // Python sorts strings by code point, JavaScript by UTF-16 unit.
  function byCodePoint(a, b) {
    const [x, y] = [Array.from(a), Array.from(b)];
    for (let i = 0; i < Math.min(x.length, y.length); i++) {
      if (x[i] !== y[i]) return x[i].codePointAt(0) - y[i].codePointAt(0);
    }
    return x.length - y.length;
  }

  // As Python's json.dumps writes a string.
  function asciiJson(text) {
    const escape = (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0");
    return JSON.stringify(text).replace(/[\u007f-\uffff]/g, escape);
  }

  Object.assign(teachllm, { Replay, ReplayError });
})();
