// Paints what the ranks did: computing solid, in the colour of its plan, exchanges pale, bubbles hatched. Where no rank
// is in a step the ground is bare; a pause that is long beside the steps is cut, and a dotted line stands for it.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif";
  const LONGEST_PAUSE = 0.04; // of all time in steps: as much of a pause is shown
  const PALE = 0.3;
  const AXIS = 18; // pixels below the rows

  class RanksPainter {
    constructor(context, canvas) {
      Object.assign(this, { context, canvas });
      this.plot = canvas.getContext("2d");
    }

    // tops: of each row, in pixels; `height` is a row's.
    paint(window, tops, height, width) {
      Object.assign(this, { window, tops, rowHeight: height, width });
      this._scale(window, width);
      const ratio = devicePixelRatio || 1;
      const whole = tops.at(-1) + height + AXIS;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(whole * ratio);
      this.canvas.style.height = `${whole}px`;
      this.plot.setTransform(ratio, 0, 0, ratio, 0, 0);
      const hatch = this._hatch(ratio);
      window.rows.forEach((row, rank) => {
        this._bubbles(window, tops[rank], hatch);
        for (const plan of row.plans) this._plan(plan, tops[rank]);
      });
      this._pauses(whole - AXIS);
      this._ruler(whole);
    }

    // What lies at a place: { rank, plan } or null.
    at(x, y) {
      if (!this.window) return null;
      const rank = this.tops.findIndex((top) => y >= top && y < top + this.rowHeight);
      const hit = ({ begin, end }) => this._x(begin) <= x && x < Math.max(this._x(end), this._x(begin) + 2);
      const plan = rank < 0 ? null : this.window.rows[rank].plans.find(hit);
      return plan ? { rank, plan } : null;
    }

    // Time to pixels: as it is within steps, cut in the pauses between them.
    _scale({ busy, seconds }, width) {
      const longest = LONGEST_PAUSE * seconds;
      this._stretches = []; // [begin, end, pixels from, whether a pause before it is cut], pixels first as seconds
      let at = 0;
      busy.forEach(([begin, end], i) => {
        const pause = i ? begin - busy[i - 1][1] : 0;
        at += Math.min(pause, longest);
        this._stretches.push({ begin, end, at, isCut: pause > longest });
        at += end - begin;
      });
      this._perSecond = (width - 2) / (at || 1);
    }

    _x(time) {
      const stretch = this._stretches.findLast(({ begin }) => begin <= time) ?? this._stretches[0];
      const within = Math.max(Math.min(time, stretch.end) - stretch.begin, 0);
      return 1 + (stretch.at + within) * this._perSecond;
    }

    _bubbles({ busy, until }, top, hatch) {
      const { plot } = this;
      plot.fillStyle = hatch;
      for (const [begin, end] of busy) {
        const [x, right] = [this._x(begin), this._x(Math.min(end, until))];
        if (begin < until) plot.fillRect(x, top + 3, right - x, this.rowHeight - 6);
      }
    }

    _plan({ parts, line }, top) {
      const { plot, rowHeight: height } = this;
      const { from, to } = this.window;
      const { css, ink } = teachllm.planColor(line.step ?? 0);
      const { colors } = this.context;
      let [widest, run] = [[0, 0], [0, 0]]; // of what no wait for another stage divides
      for (const part of parts) {
        if (part.begin >= to || part.end <= from) continue;
        const [x, right] = [this._x(Math.max(part.begin, from)), this._x(Math.min(part.end, to))];
        plot.globalAlpha = 1;
        plot.fillStyle = colors.panel;
        plot.fillRect(x, top + 1, right - x, height - 2);
        plot.fillStyle = css;
        plot.globalAlpha = part.operation === null ? 1 : PALE;
        plot.fillRect(x, top + 1, right - x, height - 2);
        run = x - run[1] < 0.01 ? [run[0], right] : [x, right];
        if (run[1] - run[0] > widest[1] - widest[0]) widest = run;
      }
      plot.globalAlpha = 1;
      if (line.step !== undefined) this._number(String(line.step), widest, top + height / 2, css, ink);
    }

    // In the middle of its plan, on a plate in its colour.
    _number(text, [left, right], y, css, ink) {
      const { plot } = this;
      plot.font = `600 10px ${FONT}`;
      plot.textAlign = "center";
      plot.textBaseline = "middle";
      const width = plot.measureText(text).width + 4;
      if (right - left < width) return;
      const x = (left + right) / 2;
      plot.fillStyle = css;
      plot.fillRect(x - width / 2, y - 6, width, 12);
      plot.fillStyle = ink;
      plot.fillText(text, x, y + 0.5);
    }

    _pauses(bottom) {
      const { plot } = this;
      plot.strokeStyle = this.context.colors.muted;
      plot.setLineDash([2, 3]);
      plot.beginPath();
      for (const { at, isCut } of this._stretches) {
        if (!isCut) continue;
        const x = Math.round(1 + at * this._perSecond - (LONGEST_PAUSE * this.window.seconds * this._perSecond) / 2) + 0.5;
        plot.moveTo(x, 0);
        plot.lineTo(x, bottom);
      }
      plot.stroke();
      plot.setLineDash([]);
    }

    // A round number of seconds, as long as it is in the picture.
    _ruler(bottom) {
      const { plot } = this;
      const { muted } = this.context.colors;
      const power = 10 ** Math.floor(Math.log10(this.width / 4 / this._perSecond));
      const seconds = power * ([5, 2].find((n) => n * power * this._perSecond <= this.width / 4) ?? 1);
      const [y, right] = [bottom - AXIS + 7, 1.5 + seconds * this._perSecond];
      plot.strokeStyle = muted;
      plot.beginPath();
      plot.moveTo(1.5, y - 3);
      plot.lineTo(1.5, y + 3);
      plot.moveTo(1.5, y);
      plot.lineTo(right, y);
      plot.moveTo(right, y - 3);
      plot.lineTo(right, y + 3);
      plot.stroke();
      plot.fillStyle = muted;
      plot.font = `10px ${FONT}`;
      plot.textAlign = "left";
      plot.textBaseline = "middle";
      plot.fillText(teachllm.format.seconds(seconds), right + 5, y + 0.5);
    }

    _hatch(ratio) {
      const size = 6 * ratio;
      const tile = Object.assign(document.createElement("canvas"), { width: size, height: size });
      const pen = tile.getContext("2d");
      pen.strokeStyle = this.context.colors.wait;
      pen.lineWidth = ratio;
      pen.globalAlpha = 0.75;
      pen.beginPath();
      for (const shift of [-size, 0, size]) {
        pen.moveTo(shift, size);
        pen.lineTo(shift + size, 0);
      }
      pen.stroke();
      const pattern = this.plot.createPattern(tile, "repeat");
      pattern.setTransform(new DOMMatrix().scale(1 / ratio));
      return pattern;
    }
  }

  Object.assign(teachllm, { RanksPainter });
})();
