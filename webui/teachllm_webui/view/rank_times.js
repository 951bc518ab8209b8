// What the ranks did around a step, and which share of their time it was: teachllm/trace/ranks.py again, for a part of
// a trace.
//
//   computes    in a step, and in no exchange
//   exchanges   in one, waiting included
//   bubble      no plan, or waiting for another stage (send, recv), while some rank is in a step
//
// "Told" are lines with `ranks`, of steps and of empty ones, each with the step that was shown when it came.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const BETWEEN_STAGES = ["send", "recv"];
  const NEIGHBOURS = 8; // that may reach into the window from outside: more than there are plans in flight

  // The last `count` of told up to step k, as
  //   { from, to, until, busy: [[begin, end]], rows: [{ stage, replica, plans, computes, exchanges, bubble }], seconds }
  // What lies behind `until` may be incomplete, since a rank has not told yet what it did then; it counts for nothing.
  // A plan is { k, line, told, begin, end, parts: [{ begin, end, operation }] }, without the waits between stages.
  function rankWindow(told, k, count) {
    const last = told.findLastIndex((entry) => entry.k <= k);
    if (last < 0) return null;
    const first = Math.max(last - count + 1, 0);
    const near = told.slice(Math.max(first - NEIGHBOURS, 0), last + 1 + NEIGHBOURS);
    const numRanks = Math.min(...near.map(({ line }) => line.ranks.length));
    const ranks = [...Array(numRanks).keys()];
    const from = Math.min(...told[first].line.ranks.map(({ begin }) => begin));
    const to = Math.max(...told[last].line.ranks.map(({ end }) => end));
    const until = Math.min(to, ...ranks.map((rank) => Math.max(...near.map(({ line }) => line.ranks[rank].end))));
    const inside = near.filter(({ line }) => line.ranks.some(({ begin, end }) => end > from && begin < to));
    const busy = union(inside.flatMap(({ line }) => line.ranks.map(({ begin, end }) => [begin, end])), from, to);
    const seconds = total(clipped(busy, from, until)) || 1;
    const rows = ranks.map((rank) => rankRow(inside.map((entry) => planOf(entry, rank)), from, until, seconds));
    return { from, to, until, busy, rows, seconds };
  }

  function planOf({ k, line }, rank) {
    const told = line.ranks[rank];
    const parts = [];
    let at = told.begin;
    for (const [operation, after, seconds] of told.exchanges ?? []) {
      const begin = told.begin + after;
      parts.push({ begin: at, end: begin, operation: null });
      at = begin + seconds;
      if (!BETWEEN_STAGES.includes(operation)) parts.push({ begin, end: at, operation });
    }
    parts.push({ begin: at, end: told.end, operation: null });
    return { k, line, told, begin: told.begin, end: told.end, parts };
  }

  function rankRow(plans, from, until, seconds) {
    const parts = plans.flatMap((plan) => plan.parts);
    const spans = (isWanted) => parts.filter(isWanted).map(({ begin, end }) => [begin, end]);
    const share = (isWanted) => total(clipped(spans(isWanted), from, until)) / seconds;
    const computes = share(({ operation }) => operation === null);
    const exchanges = share(({ operation }) => operation !== null);
    const { stage, replica } = plans[0].told;
    return { stage, replica, plans, computes, exchanges, bubble: Math.max(1 - computes - exchanges, 0) };
  }

  // Spans as few as they can be, in order.
  function union(spans, from, to) {
    const found = [];
    for (const [begin, end] of clipped(spans, from, to).sort(([a], [b]) => a - b)) {
      const before = found.at(-1);
      if (before && begin <= before[1]) before[1] = Math.max(before[1], end);
      else found.push([begin, end]);
    }
    return found;
  }

  function clipped(spans, from, to) {
    const inside = spans.map(([begin, end]) => [Math.max(begin, from), Math.min(end, to)]);
    return inside.filter(([begin, end]) => end > begin);
  }

  function total(spans) {
    return spans.reduce((sum, [begin, end]) => sum + end - begin, 0);
  }

  // What all ranks sent in a step: [{ operation, calls, bytes, seconds, expected }], the most bytes first. `seconds` is
  // the slowest rank's, null where it was not timed; `expected` is in bytes, null where unknown.
  function sentInStep(ranks) {
    const found = new Map();
    for (const told of ranks) {
      for (const [operation, [calls, bytes]] of Object.entries(told.sent)) {
        const entry = found.get(operation) ?? { operation, calls: 0, bytes: 0, seconds: null, expected: null };
        found.set(operation, entry);
        entry.calls += calls;
        entry.bytes += bytes;
        const expected = told.expected?.[operation];
        if (expected) entry.expected = (entry.expected ?? 0) + expected[1];
        if (!told.exchanges) continue;
        const took = told.exchanges.filter(([other]) => other === operation);
        entry.seconds = Math.max(entry.seconds ?? 0, took.reduce((sum, [, , seconds]) => sum + seconds, 0));
      }
    }
    return [...found.values()].sort((a, b) => b.bytes - a.bytes);
  }

  // Of each layer's experts: [layers][experts] tokens as shares of the busiest, and that one's tokens beside the mean.
  function loadOf(layers) {
    const counts = layers.flat();
    const most = counts.reduce((a, b) => Math.max(a, b), 1);
    const mean = counts.reduce((sum, count) => sum + count, 0) / counts.length || 1;
    return { shares: layers.map((layer) => layer.map((count) => count / most)), skew: most / mean };
  }

  Object.assign(teachllm, { rankWindow, sentInStep, loadOf });
})();
