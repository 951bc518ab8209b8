// The DOM, created once and patched: an attribute or a text is written only when it has changed, and the children of a
// list keep their nodes as long as their keys live. Text goes in as text, never as markup.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});

  // h("div", { class: "x", onclick: f, text: "..." }, child, ...)
  function h(tag, props = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else set(node, name, value);
    }
    node.append(...children);
    return node;
  }

  // Sets an attribute, "text", or a CSS variable ("--x"), if it differs; null and false remove it.
  function set(node, name, value) {
    const now = (node._set ??= {});
    if (now[name] === value) return;
    now[name] = value;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }

  function patch(node, values) {
    for (const name in values) set(node, name, values[name]);
    return node;
  }

  // Makes a parent's children be one for each item, by key: creates, updates, moves and removes as few as needed.
  function list(parent, items, { key, create, update }) {
    const nodes = (parent._nodes ??= new Map());
    const keys = new Set(items.map(key));
    for (const [k, node] of nodes) {
      if (keys.has(k)) continue;
      node.remove();
      nodes.delete(k);
    }
    let next = parent.firstChild;
    items.forEach((item, i) => {
      const k = key(item, i);
      let node = nodes.get(k);
      if (!node) nodes.set(k, (node = create(item, i)));
      update(node, item, i);
      if (node === next) next = next.nextSibling;
      else parent.insertBefore(node, next);
    });
  }

  // The legend of a view: [kind, text] pairs, a swatch for each kind.
  function legend(entries) {
    const entry = ([kind, text]) => h("span", {}, h("i", { class: `tl-swatch tl-${kind}` }), text);
    return h("div", { class: "tl-legend" }, ...entries.map(entry));
  }

  // Drawn, since not every system has glyphs for them. Paths lie in a box of 16 x 16.
  const ICONS = {
    play: "M4 2.5v11l9-5.5z",
    pause: "M4 3h3v10H4zM9 3h3v10H9z",
    back: "M11.5 3v10L5 8z",
    forward: "M4.5 3v10L11 8z",
    home: "M3 3h2v10H3zM13 3v10L6 8z",
    end: "M11 3h2v10h-2zM3 3v10l7-5z",
    close: "M3.4 2.3 8 6.9l4.6-4.6 1.1 1.1L9.1 8l4.6 4.6-1.1 1.1L8 9.1l-4.6 4.6-1.1-1.1L6.9 8 2.3 3.4z",
    grow: "M9.5 2H14v4.5h-1.5V4.6L9.6 7.5 8.5 6.4l2.9-2.9H9.5zM6.5 14H2V9.5h1.5v1.9l2.9-2.9 1.1 1.1-2.9 2.9h1.9z",
  };

  function icon(name) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    set(svg, "viewBox", "0 0 16 16");
    set(svg, "aria-hidden", "true");
    set(path, "d", ICONS[name]);
    svg.append(path);
    return svg;
  }

  // Gives an icon another shape.
  function setIcon(svg, name) {
    set(svg.firstChild, "d", ICONS[name]);
  }

  Object.assign(teachllm, { h, set, patch, list, legend, icon, setIcon });
})();
