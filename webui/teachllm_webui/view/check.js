// What each line of a trace must have, as in teachllm/trace/reader.py: all that shows a line takes it for granted.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const events = { time: "number", request_id: "string", block_events: "array" };
  const FIELDS = {
    header: { version: "number", time: "number", config: "object", model: "object", num_blocks: "number" },
    arrival: { time: "number", request_id: "string", num_prompt_tokens: "number" },
    step: {
      ...{ time: "number", schedule: "number", execute: "number", wait: "number", update: "number", end: "number" },
      ...{ scheduled: "array", preempted: "array", block_events: "array" },
      ...{ finished: "object", waiting: "object", blocks: "object", step: "number" },
    },
    abort: events,
    stop: events,
    error: { time: "number", message: "string", block_events: "array" },
    fork: { time: "number", step: "number", requests: "array", waiting: "object", block_events: "array" },
  };
  const SCHEDULED = { request_id: "string", start: "number", num_tokens: "number", phase: "string" };
  const BLOCKS = { used: "number", cached: "number", free: "number" };

  function kindOf(value) {
    return Array.isArray(value) ? "array" : value === null ? "null" : typeof value;
  }

  // Throws where a part of a line lacks a field, or has an odd one.
  function check(what, part, fields) {
    for (const [name, kind] of Object.entries(fields)) {
      if (!(name in part)) throw new Error(`${what} without '${name}'`);
      if (kindOf(part[name]) !== kind) throw new Error(`'${name}' of ${what} is ${JSON.stringify(part[name])}`);
    }
  }

  function checkLine(line) {
    if (kindOf(line) !== "object" || typeof line.event !== "string") throw new Error("not an object with an 'event'");
    check(line.event, line, FIELDS[line.event] ?? {});
    if (line.event === "header") check("the header's config", line.config, { block_size: "number" });
    if (line.event !== "step") return;
    check("blocks", line.blocks, BLOCKS);
    for (const scheduled of line.scheduled) check("a scheduled request", scheduled, SCHEDULED);
  }

  Object.assign(teachllm, { checkLine });
})();
