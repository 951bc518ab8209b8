// The panels of a view: a head with a title, and a button that lays one over the whole window. What lies under it can
// then be reached neither by the pointer nor by the keyboard.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch } = teachllm;

  class Panels {
    constructor(view) {
      this.view = view;
      this.grown = null;
    }

    create(name, title, ...head) {
      const root = h("section", { class: `tl-panel tl-view-${name}`, "data-view": name, "aria-label": title });
      const onclick = () => this.grow(this.grown === root ? null : root);
      const grow = h("button", { class: "tl-grow", "data-action": "grow", onclick }, teachllm.icon("grow"));
      Object.assign(root, { _grower: grow, _title: title });
      label(root, false);
      root.append(h("header", { class: "tl-head" }, h("h2", { text: title }), ...head, grow));
      return root;
    }

    // Lays a panel over the whole window; null: it goes back to its place.
    grow(root) {
      const { view } = this;
      if (this.grown) this._change(this.grown, false);
      this.grown = root;
      (root ?? view.root).append(view.card.root); // over the panel
      if (root) this._change(root, true);
      for (const node of this._outside ?? []) node.inert = false;
      this._outside = root ? [...outside(root)] : [];
      for (const node of this._outside) node.inert = true;
    }

    _change(root, isGrown) {
      root.classList.toggle("tl-grown", isGrown);
      label(root, isGrown);
      // In the top layer it is laid out in the window, and not in the view, which contains its layout.
      if (isGrown) patch(root, { popover: "manual" }).showPopover();
      else {
        root.hidePopover();
        patch(root, { popover: null });
      }
    }
  }

  function label(root, isGrown) {
    teachllm.setIcon(root._grower.firstChild, isGrown ? "close" : "grow");
    const title = isGrown ? "back to the page (escape)" : "enlarge";
    patch(root._grower, { title, "aria-label": `${title}: ${root._title}`, "aria-expanded": String(isGrown) });
  }

  // All elements that neither hold a node nor lie in it, as few as cover them, but those that are inert anyway.
  function* outside(node) {
    for (let at = node; at !== document.body && at.parentElement; at = at.parentElement) {
      for (const other of at.parentElement.children) if (other !== at && !other.inert) yield other;
    }
  }

  Object.assign(teachllm, { Panels });
})();
