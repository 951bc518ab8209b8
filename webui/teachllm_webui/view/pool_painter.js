// Paints the cells of the block pool on a canvas under their elements. The elements carry what can be asked and pointed
// at and never change their look, so a step costs the painting of the few cells that changed, and no style or layout.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif";
  const STRIPE = 4;

  class PoolPainter {
    constructor(context, canvas) {
      this.context = context;
      this.paper = canvas.getContext("2d");
      this._due = new Map();
    }

    // Paints a cell before the next frame. Setting a canvas's font brings the page's style and layout up to date, which
    // costs most right after a step was drawn and nothing at the beginning of a frame.
    request(id, look) {
      if (!this._due.size) requestAnimationFrame(() => this._paintDue());
      this._due.set(id, look);
    }

    _paintDue() {
      for (const [id, look] of this._due) this.paint(id, look);
      this._due.clear();
    }

    // n cells of a size, a gap apart, so many a row.
    resize({ n, size, gap, columns }) {
      Object.assign(this, { size, columns, pitch: size + gap });
      const ratio = devicePixelRatio || 1;
      const [width, height] = [columns * this.pitch, Math.ceil(n / columns) * this.pitch];
      const { canvas } = this.paper;
      Object.assign(canvas, { width: Math.ceil(width * ratio), height: Math.ceil(height * ratio) });
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
      this.paper.setTransform(ratio, 0, 0, ratio, 0, 0);
      this.paper.textBaseline = "middle";
    }

    // look: { state, owners, ghost, level, event, label, faded }
    paint(id, look) {
      const { paper, size, context } = this;
      const { colors } = context;
      const x = (id % this.columns) * this.pitch;
      const y = Math.floor(id / this.columns) * this.pitch;
      paper.clearRect(x - 1, y - 1, size + 2, size + 2);
      const alpha = look.faded ? 0.3 : 1;
      paper.globalAlpha = alpha;
      if (look.state === "free") this._box(x, y, colors.back, colors.line);
      else if (look.state === "cached") this._ghost(x, y, look.ghost, alpha);
      else this._filled(x, y, look, alpha);
      paper.globalAlpha = alpha;
      if (look.owners.length) this._outline(x, y, teachllm.edgeOf(look.owners[0], colors.panel));
      this._mark(x, y, look.event, colors);
      this._write(x, y, id, look, colors);
    }

    _box(x, y, fill, edge) {
      const { paper, size } = this;
      paper.beginPath();
      paper.roundRect(x + 0.5, y + 0.5, size - 1, size - 1, 3);
      paper.fillStyle = fill;
      paper.fill();
      this._outline(x, y, edge);
    }

    _ghost(x, y, owner, alpha) {
      const { paper } = this;
      paper.globalAlpha = alpha * 0.14;
      this._round(x, y, owner.css);
      paper.globalAlpha = alpha;
      paper.setLineDash([3, 2]);
      this._outline(x, y, teachllm.edgeOf(owner, this.context.colors.panel));
      paper.setLineDash([]);
    }

    _outline(x, y, edge) {
      const { paper, size } = this;
      paper.strokeStyle = edge;
      paper.lineWidth = 1;
      const [left, top] = [Math.round(x), Math.round(y)]; // a line of whole pixels
      paper.beginPath();
      paper.roundRect(left + 0.5, top + 0.5, Math.round(x + size) - left - 1, Math.round(y + size) - top - 1, 3);
      paper.stroke();
    }

    // Pale where slots are empty, full of colour up to the level.
    _filled(x, y, { owners, level }, alpha) {
      const { paper, size } = this;
      paper.globalAlpha = alpha * 0.24;
      this._round(x, y, owners[0].css);
      paper.globalAlpha = alpha;
      const height = size * level;
      if (!height) return;
      paper.save();
      paper.beginPath();
      paper.roundRect(x, y + size - height, size, height, level === 1 ? 3 : [0, 0, 3, 3]);
      paper.clip();
      if (owners.length === 1) {
        paper.fillStyle = owners[0].css;
        paper.fillRect(x, y, size, size);
      } else this._stripes(x, y, owners);
      paper.restore();
    }

    _stripes(x, y, owners) {
      const { paper, size } = this;
      for (let at = 0; at < 2 * size; at += STRIPE) {
        paper.fillStyle = owners[(at / STRIPE) % owners.length].css;
        paper.beginPath();
        paper.moveTo(x + at, y);
        paper.lineTo(x + at + STRIPE, y);
        paper.lineTo(x + at + STRIPE - size, y + size);
        paper.lineTo(x + at - size, y + size);
        paper.fill();
      }
    }

    _round(x, y, fill) {
      this.paper.fillStyle = fill;
      this.paper.beginPath();
      this.paper.roundRect(x, y, this.size, this.size, 3);
      this.paper.fill();
    }

    // What has just been taken is framed: empty ones in ink, prefix hits in their colour.
    _mark(x, y, event, colors) {
      if (event !== "allocate" && event !== "hit") return;
      const { paper, size } = this;
      paper.strokeStyle = event === "hit" ? colors.hit : colors.ink;
      paper.lineWidth = size < 30 ? 1.5 : 2.5;
      const inset = paper.lineWidth / 2;
      paper.beginPath();
      paper.roundRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset, 3);
      paper.stroke();
    }

    _write(x, y, id, { state, owners, level, label }, colors) {
      const { paper, size } = this;
      const large = size >= 40;
      const height = large ? 16 : size * 0.72; // of the label
      const fill = level * size - size / 2;
      const [isOn, crosses] = [owners.length === 1 && fill > -height / 2, Math.abs(fill) < height / 2];
      // Half on the fill and half above it, only one ink can be read on both.
      const isTorn = isOn && crosses && teachllm.isLight(owners[0].ink) !== teachllm.isLight(colors.ink);
      const ink = isOn && !isTorn ? owners[0].ink : colors.ink;
      paper.textAlign = "center";
      if (label) {
        paper.font = `${state === "cached" ? 400 : 650} ${large ? 13 : Math.min(11, size * 0.56)}px ${FONT}`;
        const isOnPlate = owners.length > 1 || isTorn;
        if (isOnPlate) this._plate(x + size / 2, y + size / 2, paper.measureText(label).width + 4, height);
        paper.fillStyle = ink;
        paper.fillText(label, x + size / 2, y + size / 2 + 0.5);
      }
      if (!large) return;
      paper.font = `9px ${FONT}`;
      const width = paper.measureText(String(id)).width;
      const isHalf = level * size > 3 && level * size <= 16;
      const isOnPlate = owners.length > 1 || isHalf;
      if (isOnPlate) this._plate(x + size - 5 - width / 2, y + size - 8, width + 4, 11);
      const isFull = owners.length === 1 && level * size > 16;
      paper.fillStyle = isFull ? owners[0].ink : isOnPlate || state === "free" ? colors.muted : colors.ink;
      paper.fillText(String(id), x + size - 5 - width / 2, y + size - 7.5);
    }

    // Under text that lies on stripes.
    _plate(x, y, width, height) {
      const { paper } = this;
      paper.fillStyle = this.context.colors.panel;
      paper.beginPath();
      paper.roundRect(x - width / 2, y - height / 2, width, height, 3);
      paper.fill();
    }
  }

  Object.assign(teachllm, { PoolPainter });
})();
