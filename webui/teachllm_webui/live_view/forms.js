// Small forms that drop from the bar: a button, a panel under it, fields in it. One is open at a time; escape or a click
// elsewhere closes it. While a user types in one, the keys of the view are left alone (keyboard.js).
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const { h, patch } = teachllm;

  // One field: { name, label, kind: "number" | "text" | "check" | "select", value, options, placeholder, min, step }
  function field({ name, label, kind = "number", value = "", options = [], ...more }) {
    const id = `tl-field-${name}-${Math.random().toString(36).slice(2, 7)}`;
    let input;
    if (kind === "select") {
      input = h("select", { id, name });
      for (const [key, text] of options) input.append(h("option", { value: key, text }));
    } else if (kind === "text") input = h("textarea", { id, name, rows: 3 });
    else input = h("input", { id, name, type: kind === "check" ? "checkbox" : "number", autocomplete: "off" });
    for (const key in more) patch(input, { [key]: more[key] });
    if (kind === "check") input.checked = Boolean(value);
    else input.value = value ?? "";
    return h("div", { class: `tl-field tl-field-${kind}` }, h("label", { for: id, text: label }), input);
  }

  function valueOf(input) {
    if (input.type === "checkbox") return input.checked;
    if (input.type === "number") return input.value === "" ? null : Number(input.value);
    return input.value;
  }

  const all = [];

  class Popover {
    // send(values) may be async; what it gives is an error in words, or nothing.
    constructor({ name, title, note, fields = [], submit, send }) {
      const onclick = () => (this.panel.hidden ? this.open() : this.close());
      this.button = h("button", { "data-open": name, text: title, onclick, "aria-expanded": "false" });
      this.note = h("p", { class: "tl-note", text: note ?? "" });
      this.body = h("div", { class: "tl-fields" }, ...fields.map(field));
      this.error = h("p", { class: "tl-form-error", role: "alert", hidden: true });
      this.submit = h("button", { type: "submit", class: "tl-primary", text: submit ?? "", "data-submit": name });
      const onsubmit = (event) => {
        event.preventDefault();
        this._send(send);
      };
      this.panel = h("form", { class: "tl-popover", "data-form": name, "data-keeps-keys": "", "aria-label": title, onsubmit, hidden: true });
      this.panel.append(this.note, this.body, this.error);
      if (submit) this.panel.append(this.submit);
      this.panel.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.panel.requestSubmit();
        const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
        if (by && event.target.tagName === "BUTTON") this._move(event, by);
      });
      this.isEnabled = true;
      this.root = h("div", { class: "tl-drop" }, this.button, this.panel);
      all.push(this);
    }

    get values() {
      const inputs = [...this.panel.querySelectorAll("input, select, textarea")];
      return Object.fromEntries(inputs.map((input) => [input.name, valueOf(input)]));
    }

    open() {
      for (const other of all) if (other !== this) other.close();
      this.onopen?.();
      patch(this.button, { "aria-expanded": "true" });
      patch(this.panel, { hidden: false });
      this.panel.hidden = false;
      const box = this.panel.getBoundingClientRect();
      const excess = Math.max(0, box.right - document.documentElement.clientWidth + 8);
      patch(this.panel, { "--shift": `${Math.round(-excess)}px` });
      this.panel.querySelector("textarea, input, select, button")?.focus();
    }

    // From one button of a list to the next.
    _move(event, by) {
      const buttons = [...this.panel.querySelectorAll("button")];
      event.preventDefault();
      buttons[buttons.indexOf(event.target) + by]?.focus({ focusVisible: true });
    }

    // A user who goes back by keyboard sees where the focus is.
    close({ ring = false } = {}) {
      if (this.panel.hidden) return;
      const hadFocus = this.panel.contains(document.activeElement);
      patch(this.button, { "aria-expanded": "false" });
      patch(this.panel, { hidden: true, "--shift": "0px" });
      this.say("");
      if (hadFocus) this.button.focus({ focusVisible: ring });
    }

    // Whether it can be sent at all.
    enable(isEnabled) {
      this.isEnabled = isEnabled;
      patch(this.submit, { disabled: !isEnabled });
    }

    say(error) {
      patch(this.error, { text: error, hidden: !error });
    }

    // Closed meanwhile, it has no place for an error.
    _end(error) {
      if (error && this.panel.hidden) this.onlost?.(error);
      else this.say(error);
      if (!error) this.close();
    }

    async _send(send) {
      if (!this.isEnabled || this.isSending) return;
      this.isSending = true;
      patch(this.submit, { disabled: true });
      try {
        const error = await send(this.values);
        this._end(error ?? "");
      } catch (error) {
        this._end(String(error.message ?? error));
      } finally {
        this.isSending = false;
        this.enable(this.isEnabled);
      }
    }
  }

  document.addEventListener("pointerdown", (event) => {
    for (const each of all) if (!each.root.contains(event.target)) each.close();
  });
  document.addEventListener(
    "keydown",
    (event) => {
      const open = event.key === "Escape" && all.find((each) => !each.panel.hidden);
      if (!open) return;
      event.preventDefault();
      open.close({ ring: true });
    },
    true,
  );

  Object.assign(teachllm, { Popover });
})();
