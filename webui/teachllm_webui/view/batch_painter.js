// Paints the visible window of the batch timeline. A cell tells its kind by form, not by colour alone:
// prefill is solid, decode a tint, drafts have a hatched rest, waiting is a thin line, running without getting anything
// a dot, a preemption a crossed box.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { format } = teachllm;
  const FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif";

  class BatchPainter {
    constructor(batch, plot, gutter, { GUTTER, HEADER }) {
      Object.assign(this, { batch, GUTTER, HEADER });
      this.plot = plot.getContext("2d");
      this.gutter = gutter.getContext("2d");
    }

    resize(width, height) {
      [this.width, this.height] = [width, height];
      const ratio = devicePixelRatio || 1;
      for (const [context, w] of [[this.plot, width], [this.gutter, this.GUTTER]]) {
        const { canvas } = context;
        canvas.width = Math.round(w * ratio);
        canvas.height = Math.round(height * ratio);
        canvas.style.width = `${w}px`;
        canvas.style.height = `${height}px`;
        context.setTransform(ratio, 0, 0, ratio, 0, 0);
      }
      this._painted = null;
    }

    // Paints before the next frame, and only if something in the window has changed.
    request() {
      if (this._asked) return;
      this._asked = requestAnimationFrame(() => {
        this._asked = 0;
        this.batch.moveBars();
        this.paint();
      });
    }

    paint() {
      const { batch } = this;
      const { timeline, colors } = batch.context;
      if (!this.width || !timeline.header) return;
      const { left, top } = batch._scroll;
      const [k0, k1] = batch.between(left, left + this.width - this.GUTTER);
      this._words = [];
      const r0 = Math.floor(top / batch.rowHeight);
      const rows = batch.rows.slice(r0, r0 + Math.ceil((this.height - this.HEADER) / batch.rowHeight) + 1);
      const shown = Math.min(k1, timeline.last);
      const lit = batch.lit ? [...batch.lit].join() : "";
      const ids = rows.map((row) => row.index).join();
      const look = [left, top, k0, shown, r0, ids, batch.axis, batch.cellWidth, batch.rowHeight, lit, colors.key];
      const what = look.join("|");
      if (what === this._painted && shown < timeline.last) return;
      const whole = `${what}|${timeline.last}|${timeline.lines.length}`;
      if (whole === this._whole && this._painted === what) return;
      [this._painted, this._whole] = [what, whole];
      this._clear();
      rows.forEach((row, i) => this._paintRow(row, this.HEADER + (r0 + i) * batch.rowHeight - top, k0, shown, left));
      this._paintWords();
      this._paintHeader(k0, shown, left);
      this._paintGutter(rows, r0, top);
    }

    // Puts the labels of the rows into the picture itself, which is scaled to the paper.
    join() {
      if (this.width) this.plot.drawImage(this.gutter.canvas, 0, 0, this.GUTTER, this.height);
    }

    _clear() {
      const { plot, batch } = this;
      plot.globalAlpha = 1;
      plot.fillStyle = batch.context.colors.panel;
      plot.fillRect(0, 0, this.width, this.height);
      plot.textBaseline = "middle";
    }

    // Over the rows, which may be scrolled beneath it.
    _paintHeader(k0, k1, left) {
      const { plot, batch, GUTTER, HEADER } = this;
      const { colors, timeline } = batch.context;
      plot.globalAlpha = 1;
      plot.fillStyle = colors.panel;
      plot.fillRect(0, 0, this.width, HEADER);
      plot.fillStyle = colors.muted;
      plot.font = `10px ${FONT}`;
      plot.textAlign = "left";
      let free = left; // nothing begins under the labels of the rows
      for (let k = k0; k <= k1; k++) {
        const step = timeline.steps[k];
        const round = batch.axis === "ms" || step.step % 5 === 0 || batch.cellWidth > 30;
        const [x] = batch.span(k);
        if (!round || x < free) continue;
        const text = batch.axis === "ms" ? format.seconds(timeline.spanOf(k)[0]) : String(step.step);
        plot.fillText(text, GUTTER + x - left + 1, HEADER / 2);
        free = x + plot.measureText(text).width + 14;
      }
      plot.fillStyle = colors.line;
      plot.fillRect(0, HEADER - 1, this.width, 1);
    }

    _paintRow(row, y, k0, k1, left) {
      const { plot, batch, GUTTER } = this;
      const { colors } = batch.context;
      const color = batch.context.timeline.palette.of(row.id);
      const height = batch.rowHeight;
      const faded = batch.lit && !batch.lit.has(row.id) ? 0.2 : 1;
      plot.globalAlpha = 1;
      plot.fillStyle = colors.line;
      plot.fillRect(0, Math.round(y + height) - 1, this.width, 0.5);
      plot.font = `${Math.min(10, height - 4)}px ${FONT}`;
      const end = Math.min(k1, row.last);
      for (let k = Math.max(k0, row.first); k <= end; k++) {
        const cell = row.at(k);
        if (!cell) continue;
        const [x, w] = batch.span(k);
        const box = { x: GUTTER + x - left, y, w, h: height - 1, faded };
        if (cell.scheduled) this._paintScheduled(cell, color, box);
        else if (cell.kind === "preempted") this._paintPreempted(box);
        else this._paintWait(row, cell, k, k0, end, box);
        if (k === row.last) {
          plot.globalAlpha = faded;
          plot.fillStyle = colors.ink;
          plot.fillRect(box.x + w - 2.5, y + 2, 2, height - 5);
        }
      }
    }

    _paintScheduled(cell, color, { x, y, w, h, faded }) {
      const { plot, batch } = this;
      const { scheduled } = cell;
      const { ink } = batch.context.colors;
      const solid = scheduled.phase === "prefill";
      plot.fillStyle = color.css;
      plot.globalAlpha = faded * (solid ? 1 : 0.38);
      plot.fillRect(x + 0.5, y + 1, Math.max(w - 1, 0.7), h - 2);
      if (scheduled.num_draft) this._paintDrafts(scheduled, color, { x, y, w, h, faded });
      plot.globalAlpha = faded;
      plot.fillStyle = teachllm.edgeOf(color, batch.context.colors.panel);
      plot.fillRect(x + 0.5, y + h - 2, Math.max(w - 1, 0.7), 1);
      if (cell.preempted) this._paintPreempted({ x, y, w: 3, h, faded });
      const drafts = `${scheduled.num_accepted}/${scheduled.num_draft}`;
      const texts = scheduled.num_draft ? [`+${drafts}`, drafts] : [String(scheduled.num_tokens)];
      const text = texts.find((longest) => w >= 5 + 5 * longest.length);
      if (h < 9 || !text) return;
      plot.globalAlpha = faded;
      plot.textAlign = "center";
      const isHatched = scheduled.num_draft > scheduled.num_accepted;
      if (isHatched) this._paintGround(x + w / 2, y + h / 2, plot.measureText(text).width + 2);
      plot.fillStyle = !isHatched && (solid || scheduled.num_draft) ? color.ink : ink;
      plot.fillText(text, x + w / 2, y + h / 2 + 0.5);
    }

    // So that no hatching strikes a text through.
    _paintGround(x, y, width) {
      this.plot.fillStyle = this.batch.context.colors.panel;
      this.plot.fillRect(x - width / 2, y - 5, width, 10);
    }

    // From the bottom: the accepted ones solid, above them the rejected ones hatched.
    _paintDrafts(scheduled, color, { x, y, w, h, faded }) {
      const { plot } = this;
      const part = (h - 2) / (scheduled.num_draft + 1);
      const accepted = part * scheduled.num_accepted;
      plot.globalAlpha = faded;
      plot.fillStyle = color.css;
      plot.fillRect(x + 0.5, y + h - 1 - accepted, w - 1, accepted);
      plot.strokeStyle = color.css;
      plot.beginPath();
      const top = y + 1 + part;
      for (let at = top; at < y + h - 1 - accepted; at += 3) {
        plot.moveTo(x + 1, at + 2);
        plot.lineTo(x + w - 1, at);
      }
      plot.stroke();
    }

    _paintPreempted({ x, y, w, h, faded }) {
      const { plot, batch } = this;
      plot.globalAlpha = faded;
      plot.strokeStyle = plot.fillStyle = batch.context.colors.alarm;
      if (w < 9) {
        plot.fillRect(x + 0.5, y + 1, Math.max(w - 1, 1), h - 2);
        return;
      }
      const [cx, cy, r] = [x + w / 2, y + h / 2, Math.min(w, h) / 2 - 4];
      plot.lineWidth = 1.4;
      plot.strokeRect(x + 1.5, y + 2, w - 3, h - 4);
      plot.beginPath();
      plot.moveTo(cx - r, cy - r);
      plot.lineTo(cx + r, cy + r);
      plot.moveTo(cx + r, cy - r);
      plot.lineTo(cx - r, cy + r);
      plot.stroke();
      plot.lineWidth = 1;
    }

    // A line as long as it waits; where the reason begins and there is room, its word.
    _paintWait(row, cell, k, k0, end, { x, y, w, h, faded }) {
      const { plot, batch } = this;
      const { colors } = batch.context;
      plot.globalAlpha = faded;
      plot.fillStyle = colors.wait;
      if (cell.kind === "running") plot.fillRect(x + w / 2 - 1, Math.round(y + h / 2) - 1, 2, 2); // a dot: it runs
      else plot.fillRect(x, Math.round(y + h / 2), Math.max(w * 0.55, 1), 1.5);
      if (k > k0 && row.at(k - 1)?.reason === cell.reason) return;
      let room = w;
      for (let next = k + 1; next <= end && row.at(next)?.reason === cell.reason && room < 60; next++) {
        room += batch.span(next)[1];
      }
      const word = format.wait[cell.reason] ?? cell.reason;
      const width = plot.measureText(word).width;
      if (h < 9 || room < width + 6) return;
      this._words.push({ word, x: Math.max(x, this.GUTTER), y, width, h, faded });
    }

    // They lie over the lines of the cells after theirs, so they are painted when those are.
    _paintWords() {
      const { plot } = this;
      const { colors } = this.batch.context;
      plot.textAlign = "left";
      for (const { word, x, y, width, h, faded } of this._words) {
        plot.globalAlpha = 1;
        plot.fillStyle = colors.panel;
        plot.fillRect(x, y + 1, width + 5, h - 2);
        plot.globalAlpha = faded;
        plot.fillStyle = colors.muted;
        plot.fillText(word, x + 1, y + h / 2 + 0.5);
      }
    }

    _paintGutter(rows, r0, top) {
      const { gutter, batch, GUTTER, HEADER } = this;
      const { colors, timeline } = batch.context;
      gutter.globalAlpha = 1;
      gutter.fillStyle = colors.panel;
      gutter.fillRect(0, 0, GUTTER, this.height);
      gutter.textBaseline = "middle";
      rows.forEach((row, i) => {
        const y = HEADER + (r0 + i) * batch.rowHeight - top;
        const color = timeline.palette.of(row.id);
        const height = batch.rowHeight;
        gutter.globalAlpha = batch.lit && !batch.lit.has(row.id) ? 0.35 : 1;
        gutter.fillStyle = color.css;
        gutter.fillRect(2, y + 1, 22, height - 3);
        gutter.fillStyle = color.ink;
        gutter.font = `600 ${Math.min(10, height - 4)}px ${FONT}`;
        gutter.textAlign = "center";
        gutter.fillText(color.label, 13, y + height / 2);
        gutter.fillStyle = colors.muted;
        gutter.font = `${Math.min(10, height - 3)}px ${FONT}`;
        gutter.textAlign = "left";
        gutter.fillText(fitted(gutter, row.id, GUTTER - 32), 28, y + height / 2);
      });
      gutter.globalAlpha = 1;
      gutter.fillStyle = colors.panel;
      gutter.fillRect(0, 0, GUTTER, HEADER);
      gutter.fillStyle = colors.line;
      gutter.fillRect(GUTTER - 1, 0, 1, this.height);
      gutter.fillRect(0, HEADER - 1, GUTTER, 1);
    }
  }

  // An id that is too long keeps its end, in which ids differ: after its last separator, if that fits.
  function fitted(context, text, width) {
    const fits = (shorter) => context.measureText(shorter).width <= width;
    if (fits(text)) return text;
    const tail = "…" + (text.match(/[-_/.:][^-_/.:]*$/)?.[0] ?? "");
    if (tail.length > 1 && fits(tail)) return tail;
    let n = text.length;
    while (n > 1 && !fits("…" + text.slice(-n))) n--;
    return "…" + text.slice(-n);
  }

  // What a cell says when asked.
  function cellCard(row, cell, k, timeline) {
    const { label } = timeline.palette.of(row.id);
    const title = `${label} · ${row.id} in step ${timeline.steps[k].step}`;
    const data = { "data-card": "cell", "data-card-id": row.id, "data-card-step": String(k) };
    if (!cell.scheduled) return { title, data, facts: [["status", cell.kind], [cell.kind === "running" ? "got nothing" : "waits", cell.words]] };
    const { start, num_tokens: n, num_draft: planned, num_accepted: accepted, text } = cell.scheduled;
    const { num_proposed: drafts = planned, next_draft: next } = cell.scheduled;
    const at = n > 1 ? `at positions ${start} to ${start + n - 1}` : `at position ${start}`;
    const computes = `${format.count(n, "token")}, ${at}`;
    const facts = [["phase", cell.scheduled.phase], ["computes", computes]];
    if (drafts) facts.push(["drafts", `${accepted} of ${drafts} accepted`]);
    if (next) facts.push(["drafts next", `${next[0]}: ${next[1]}`]);
    if (text) facts.push(["samples", format.oneLine(text.join("")) || "part of a character"]);
    if (cell.preempted) facts.push(["preempted", "since the step before, and admitted again"]);
    if (k === row.last) facts.push(["ends", row.ended]);
    return { title, facts, data };
  }

  Object.assign(teachllm, { BatchPainter, cellCard });
})();
