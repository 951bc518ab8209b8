// Contrast as WCAG 2 counts it, of the text and the controls of a page and of what it writes on canvases: runs before the
// page's own scripts, and keeps a record of each text on a canvas with what lies under it.
"use strict";
(() => {
  const read = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      read.clearRect(0, 0, 1, 1);
      read.fillStyle = color;
      read.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = read.getImageData(0, 0, 1, 1).data;
      known.set(color, [r, g, b, a / 255]);
    }
    return known.get(color);
  };
  const mix = ([r, g, b, a = 1], under, share = 1) =>
    [r, g, b].map((c, i) => c * a * share + under[i] * (1 - a * share));
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const needed = (size, weight) => (size >= 24 || (size >= 18.66 && weight >= 700) ? 3 : 4.5);

  // What is seen of a node: [background, text], each over what lies behind, with the opacity of all around it.
  const chain = (node) => (node ? [...chain(node.parentElement), node] : []);
  const seen = (node, color = getComputedStyle(node).color) => {
    const paint = ([first, ...rest], behind) => {
      const { backgroundColor, opacity } = getComputedStyle(first);
      const ground = mix(rgba(backgroundColor), behind);
      const [inner, text] = rest.length ? paint(rest, ground) : [ground, mix(rgba(color), ground)];
      return [inner, text].map((each) => mix(each, behind, Number(opacity)));
    };
    return paint(chain(node), rgba(getComputedStyle(document.documentElement).colorScheme === "dark" ? "#121212" : "#fff"));
  };
  const nameOf = (node) => {
    const place = node.closest("[data-view], [data-form], [data-card], .tl-transport, .tl-top, .tl-about");
    const kind = [...(place?.classList ?? [])].at(-1) ?? "page";
    return `${kind} ${node.localName}.${[...node.classList].join(".")}`;
  };
  const isSeen = (node) =>
    node.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && !node.closest(".tl-sr, :disabled");

  const { getContext } = HTMLCanvasElement.prototype;
  HTMLCanvasElement.prototype.getContext = function (kind, options) {
    return getContext.call(this, kind, { ...options, willReadFrequently: true });
  };
  const texts = [];
  const { fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
    if (globalThis.contrast.isWatching && this.canvas.isConnected) note(this, String(text), x, y);
    return fillText.call(this, text, x, y, ...more);
  };
  const note = (paper, text, x, y) => {
    const box = paper.measureText(text);
    const [left, right] = [x - box.actualBoundingBoxLeft, x + box.actualBoundingBoxRight];
    const [top, bottom] = [y - box.actualBoundingBoxAscent, y + box.actualBoundingBoxDescent];
    const matrix = paper.getTransform();
    const corner = matrix.transformPoint({ x: left, y: top });
    const [width, height] = [(right - left) * matrix.a, (bottom - top) * matrix.d].map((n) => Math.max(Math.floor(n), 1));
    const [x0, y0] = [Math.round(corner.x), Math.round(corner.y)];
    const { data } = paper.getImageData(x0, y0, width, height);
    const [behind] = seen(paper.canvas);
    const ratios = [];
    for (const across of [0.02, 0.25, 0.5, 0.75, 0.98]) {
      for (const down of [0.02, 0.5, 0.98]) {
        const [dx, dy] = [Math.floor(across * width), Math.floor(down * height)];
        const [inX, inY] = [x0 + dx, y0 + dy];
        if (inX < 0 || inY < 0 || inX >= paper.canvas.width || inY >= paper.canvas.height) continue; // not to be seen
        const at = 4 * (dx + width * dy);
        const [r, g, b, a] = data.slice(at, at + 4);
        const ground = mix([r, g, b, a / 255], behind);
        ratios.push(ratio(mix(rgba(paper.fillStyle), ground, paper.globalAlpha), ground));
      }
    }
    // The worst of the fifteen may lie on a letter beside it.
    const [, weight = "400", size] = paper.font.match(/^(?:(\d+) )?([\d.]+)px/) ?? [];
    texts.push({ what: `${nameOf(paper.canvas)} “${text}” ${paper.fillStyle}`, ratio: ratios.sort((a, b) => a - b)[1] ?? 21, needed: needed(Number(size), Number(weight)) });
  };

  const domTexts = (root) => {
    const found = [];
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    const add = (node, text, color) => {
      const { fontSize, fontWeight, color: own } = getComputedStyle(node);
      const [ground, ink] = seen(node, color ?? own);
      found.push({ what: `${nameOf(node)} “${text.trim().slice(0, 30)}”`, ratio: ratio(ink, ground), needed: needed(parseFloat(fontSize), Number(fontWeight)) });
    };
    while (walker.nextNode()) {
      const { parentElement: node, data } = walker.currentNode;
      if (data.trim() && isSeen(node) && !node.closest("option, script, style") && node.getClientRects().length) add(node, data);
    }
    for (const node of root.querySelectorAll("select, input, textarea")) {
      if (!isSeen(node) || ["checkbox", "range"].includes(node.type)) continue;
      add(node, node.value || "(a value)");
      if (!node.placeholder) continue;
      const { color, opacity } = getComputedStyle(node, "::placeholder");
      const [r, g, b, a] = rgba(color);
      add(node, node.placeholder, `rgb(${r} ${g} ${b} / ${a * Number(opacity)})`);
    }
    return found;
  };

  // The outline of a control, or its surface, against what is around it; the picture on a button against the button.
  const controls = (root) => {
    const found = [];
    for (const node of root.querySelectorAll("button, select, input, textarea")) {
      if (!isSeen(node) || ["checkbox", "range"].includes(node.type) || node.matches(".tl-block")) continue;
      const { borderTopColor, borderTopWidth } = getComputedStyle(node);
      const [around] = seen(node.parentElement);
      const [surface, ink] = seen(node);
      const what = `${nameOf(node)} ${node.dataset.action ?? node.name ?? ""}`;
      const hasEdge = parseFloat(borderTopWidth) > 0 && rgba(borderTopColor)[3] > 0;
      const edge = hasEdge ? ratio(mix(rgba(borderTopColor), around), around) : 1;
      if (hasEdge || node.localName !== "button") found.push({ what: `the edge of ${what}`, ratio: Math.max(edge, ratio(surface, around)), needed: 3 });
      if (node.querySelector("svg")) found.push({ what: `the picture of ${what}`, ratio: ratio(ink, surface), needed: 3 });
    }
    return found;
  };

  // Colors of lines and marks on the panels, and the edge of each block in use.
  const graphics = (view) => {
    const { colors, pool } = view;
    const panel = rgba(colors.panel);
    const found = ["ink", "muted", "wait", "alarm", "accent", "hit"].map((name) => {
      return { what: `lines of ${name}`, ratio: ratio(rgba(colors[name]), panel), needed: 3 };
    });
    const back = rgba(colors.back);
    found.push({ what: "the line over the scrub bar", ratio: ratio(rgba(colors.wait), back), needed: 3 });
    const { paper } = pool.painter;
    for (const cell of pool.cells) {
      if (!["used", "shared"].includes(cell.dataset.state)) continue;
      const [x, y] = [(cell._id % pool._columns) * pool.painter.pitch, Math.floor(cell._id / pool._columns) * pool.painter.pitch];
      const { e, f, a: scale } = paper.getTransform();
      const [r, g, b, a] = paper.getImageData(e + scale * (Math.round(x) + 0.5), f + scale * (y + pool._size / 2), 1, 1).data;
      found.push({ what: `the edge of block ${cell._id}`, ratio: ratio(mix([r, g, b, a / 255], panel), panel), needed: 3 });
    }
    const palette = new teachllm.Palette();
    for (let i = 0; i < 40; i++) {
      palette.add({ request_id: String(i) });
      const color = palette.of(String(i));
      found.push({ what: `the letter on ${color.css}`, ratio: ratio(rgba(color.ink), rgba(color.css)), needed: 4.5 });
      const edge = rgba(teachllm.edgeOf(color, colors.panel));
      found.push({ what: `the edge of ${color.css}`, ratio: ratio(edge, panel), needed: 3 });
    }
    for (let step = 0; step < 4; step++) {
      const { css, ink } = teachllm.planColor(step);
      found.push({ what: `the number on ${css}`, ratio: ratio(rgba(ink), rgba(css)), needed: 4.5 });
    }
    return found;
  };

  const take = () => texts.splice(0);
  globalThis.contrast = { isWatching: true, take, domTexts, controls, graphics };
})();
