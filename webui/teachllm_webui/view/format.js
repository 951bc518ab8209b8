// Numbers and states as people read them.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});

  function significant(x, digits = 3) {
    return x === 0 ? "0" : String(Number(x.toPrecision(digits)));
  }

  function scaled(x, unit, steps) {
    const [factor, prefix] = x === 0 ? [1, ""] : (steps.find(([f]) => Math.abs(x) >= f) ?? steps.at(-1));
    return `${significant(x / factor)} ${prefix}${unit}`;
  }

  // A number alone, its thousands set apart.
  function plain(x) {
    return Math.abs(x) >= 10000 ? Number(significant(x)).toLocaleString("en-US") : significant(x);
  }

  // A number and its noun; a mean is rounded, a count is not.
  function count(n, one, many = one + "s") {
    const text = Number.isInteger(n) ? String(n) : plain(n);
    return `${text} ${text === "1" ? one : many}`;
  }

  const LARGE = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const SMALL = [[1, ""], [1e-3, "m"], [1e-6, "µ"]];

  const format = {
    plain,
    seconds: (x) => scaled(x, "s", SMALL),
    bytes: (x) => scaled(x, "B", LARGE),
    flops: (x) => scaled(x, "FLOP", LARGE),
    percent: (x) => `${Math.round(100 * x)} %`,
    count,
    hash: (hash) => hash.slice(0, 8),
    // One line of text: what would break it is shown.
    oneLine: (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥"),
    ended: { stop: "finished: stop", length: "finished: length", abort: "aborted" },
    wait: {
      behind_head: "behind",
      token_budget: "budget",
      sequence_limit: "limit",
      no_free_blocks: "blocks",
      static_batch: "batch",
      preempted: "preempted",
      in_flight: "in flight",
      next_plan: "next plan",
    },
    event: { allocate: "allocated", hit: "hit", commit: "committed", evict: "evicted", free: "freed" },
  };

  Object.assign(teachllm, { format });
})();
