// Colours and short labels of requests. Colours are Okabe and Ito's and Paul Tol's, which the colour-blind can tell
// apart, then the same lighter and darker; since a hundred requests cannot all differ, the label is always there too.
//
// Labels are A, B, ... Z, AA, ... in the order of arrival; the children of one prompt share a letter: E0, E1.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const BASE = [
    [86, 180, 233], [230, 159, 0], [0, 158, 115], [204, 121, 167], [0, 114, 178], [213, 94, 0],
    [240, 228, 66], [122, 111, 208], [68, 170, 153], [162, 57, 107], [153, 153, 51], [201, 166, 107],
  ];
  const [DARK, LIGHT] = ["rgb(11, 13, 16)", "rgb(255, 255, 255)"]; // of letters
  const SHADES = [null, [255, 255, 255], [0, 0, 0]];

  function mix([r, g, b], [x, y, z], share) {
    const of = (a, c) => Math.round(a + (c - a) * share);
    return [of(r, x), of(g, y), of(b, z)];
  }

  function luminance(rgb) {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }

  // Red, green and blue of "rgb(1, 2, 3)", as a computed style has it.
  function components(css) {
    return css.match(/\d+/g).slice(0, 3).map(Number);
  }

  function color(index) {
    const shade = SHADES[Math.floor(index / BASE.length) % SHADES.length];
    const rgb = shade ? mix(BASE[index % BASE.length], shade, 0.35) : BASE[index % BASE.length];
    return { css: `rgb(${rgb})`, ink: luminance(rgb) > 0.2 ? DARK : LIGHT, rgb };
  }

  function letters(index) {
    const rest = Math.floor(index / 26) - 1;
    return (rest >= 0 ? letters(rest) : "") + String.fromCharCode(65 + (index % 26));
  }

  // Plans take turns with a few calm colours: which is which, their numbers say.
  const PLANS = [[112, 140, 178], [178, 146, 92], [104, 156, 134], [164, 122, 150]];

  function planColor(step) {
    const rgb = PLANS[step % PLANS.length];
    return { css: `rgb(${rgb})`, ink: luminance(rgb) > 0.2 ? DARK : LIGHT };
  }

  const isLight = (css) => luminance(components(css)) > 0.2;

  const EDGE = 3; // WCAG's least contrast of what is no text
  const edges = new Map();

  // A request's colour as a line on a surface, darker or lighter as far as that needs it to be seen.
  function edgeOf({ rgb }, surface) {
    const key = `${rgb}|${surface}`;
    if (!edges.has(key)) {
      const under = luminance(components(surface));
      const end = under > 0.2 ? [0, 0, 0] : [255, 255, 255];
      const contrast = (line) => (Math.max(line, under) + 0.05) / (Math.min(line, under) + 0.05);
      let share = 0;
      while (contrast(luminance(mix(rgb, end, share))) < EDGE) share += 0.05;
      edges.set(key, `rgb(${mix(rgb, end, share)})`);
    }
    return edges.get(key);
  }

  class Palette {
    constructor() {
      this._entries = new Map(); // request id -> { label, css, ink, rgb }
      this._groups = new Map(); // group -> letters
      this._numLabels = 0;
    }

    // Takes requests in the order of arrival.
    add(arrival) {
      if (this._entries.has(arrival.request_id)) return;
      const group = arrival.group ?? null;
      let letter = group === null ? null : this._groups.get(group);
      if (!letter) letter = letters(this._numLabels++);
      if (group !== null) this._groups.set(group, letter);
      const label = group === null ? letter : letter + (arrival.child_index ?? 0);
      this._entries.set(arrival.request_id, { label, ...color(this._entries.size) });
    }

    of(id) {
      return this._entries.get(id) ?? { label: "?", css: "#888888", ink: DARK, rgb: [136, 136, 136] };
    }
  }

  Object.assign(teachllm, { Palette, planColor, edgeOf, isLight });
})();
