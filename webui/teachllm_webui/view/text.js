// A request's text, cut where something about it changes: at the borders of blocks, where the prompt ends, and where
// the computed tokens end. A trace without text gives the same pieces with dots in them.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});

  function tokenText(request, from, to) {
    const { prompt_text: prompt, num_prompt_tokens: numPrompt } = request.arrival;
    let text = "";
    for (let i = from; i < to; i++) text += (i < numPrompt ? prompt?.[i] : request.output_text[i - numPrompt]) ?? "·";
    return text;
  }

  // The text in the block at the request's logical index i.
  function textAt(request, i, blockSize) {
    return tokenText(request, i * blockSize, Math.min((i + 1) * blockSize, request.numKnownTokens));
  }

  function blockText(request, id, blockSize) {
    return textAt(request, request.table.indexOf(id), blockSize);
  }

  // Pieces [{ from, to, index, block, prompt, cached, computed }] of all tokens it knows.
  function pieces(request, blockSize) {
    const known = request.numKnownTokens;
    const { num_prompt_tokens: numPrompt } = request.arrival;
    const computed = request.isLive ? request.num_computed_tokens : known;
    const found = [];
    for (let from = 0; from < known; ) {
      const index = Math.floor(from / blockSize);
      let to = Math.min((index + 1) * blockSize, known);
      for (const border of [numPrompt, computed]) if (from < border && border < to) to = border;
      found.push({
        from,
        to,
        index,
        block: request.table[index] ?? null,
        prompt: from < numPrompt,
        cached: to <= Math.min(request.num_cached_tokens ?? 0, numPrompt),
        computed: to <= computed,
      });
      from = to;
    }
    return found;
  }

  Object.assign(teachllm, { tokenText, textAt, blockText, pieces });
})();
