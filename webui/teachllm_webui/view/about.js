// What a trace is of: its title, the model, and the settings that decide what can be seen; all others unfold.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch, list, format } = teachllm;

  class About {
    constructor(title) {
      this.line = h("p", { "data-about": "" });
      this.settings = h("dl");
      const all = h("details", {}, h("summary", { text: "all settings" }), this.settings);
      this.root = h("header", { class: "tl-about" }, h("h1", { text: title }), this.line, all);
    }

    draw({ config, model = {}, num_blocks: numBlocks, machine }) {
      patch(this.line, { text: told(config, model, numBlocks, machine).join(" · ") });
      const given = Object.entries(config).filter(([, value]) => value !== null && value !== undefined);
      list(this.settings, given, {
        key: ([name]) => name,
        create: ([name]) => h("div", {}, h("dt", { text: name }), h("dd")),
        update: (row, [, value]) => patch(row.lastChild, { text: typeof value === "object" ? JSON.stringify(value) : String(value) }),
      });
    }
  }

  function told(config, model, numBlocks, machine) {
    const found = [`model ${config.model ?? model.path ?? "unknown"}`];
    if (model.architecture) found.push(model.architecture);
    if (model.dtype) found.push(String(model.dtype).replace("torch.", ""));
    if (machine?.device) found.push(machine.device);
    found.push(`${format.count(numBlocks, "block")} of ${format.count(config.block_size, "token")}`);
    if (config.max_num_batched_tokens) found.push(`token budget ${config.max_num_batched_tokens}`);
    if (config.max_num_seqs) found.push(`at most ${format.count(config.max_num_seqs, "request")} at once`);
    if (config.scheduling_policy) found.push(`policy ${config.scheduling_policy}`);
    if (config.enable_chunked_prefill === false) found.push("no chunked prefill");
    if (config.enable_prefix_caching === false) found.push("no prefix caching");
    return found;
  }

  Object.assign(teachllm, { About });
})();
