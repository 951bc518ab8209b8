// Keys: space plays and pauses, arrows go one step, home and end to the first and the newest, escape unpins. They go to
// the view that was touched last, and to none while a user types.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});
  const views = [];
  let listening = false;
  let byKeyboard = false; // how the focus came to where it is; a key press makes everything :focus-visible

  function isTyping(node) {
    if (!node || node === document.body) return false;
    if (node.isContentEditable || node.tagName === "TEXTAREA" || node.tagName === "SELECT") return true;
    return node.tagName === "INPUT" && node.type !== "range";
  }

  function onKey(event) {
    const view = views[0];
    const target = event.composedPath()[0];
    if (!view || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping(target)) return;
    if (target.closest?.("[data-keeps-keys]")) return; // an open form or menu
    const { transport } = view;
    const run = {
      " ": () => transport.toggle(),
      ArrowLeft: () => transport.by(-1),
      ArrowRight: () => transport.by(1),
      Home: () => transport.goTo(0),
      End: () => view.follow(),
      Escape: () => view.unpin(),
    }[event.key];
    // A button reached by the keyboard keeps its own space.
    if (!run || (event.key === " " && byKeyboard && target.matches?.("button, [role=button]"))) return;
    event.preventDefault();
    view.rest();
    run();
  }

  // Gives a view the keys, from when it is touched until another one is.
  function takeKeys(view) {
    if (!listening) {
      listening = true;
      document.addEventListener("keydown", onKey);
      document.addEventListener("focusin", (event) => (byKeyboard = event.target.matches(":focus-visible")));
    }
    views.push(view);
    const touched = () => views.sort((a, b) => (b === view) - (a === view));
    view.root.addEventListener("pointerdown", touched);
    view.root.addEventListener("focusin", touched);
    return () => views.includes(view) && views.splice(views.indexOf(view), 1);
  }

  Object.assign(teachllm, { takeKeys });
})();
