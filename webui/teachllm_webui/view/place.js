// Which step is shown: by a view alone, or by several side by side that go to the same one. Steps are counted by their
// numbers, since a fork's first one is not its original's. The place may lie where a view has no step: after the end of
// the shorter side, which then shows its last, and before a fork, which then shows how it begins.
"use strict";
(() => {
  const teachllm = (globalThis.teachllm ??= {});

  class Place {
    // following: the newest step is shown, until the user goes elsewhere
    // opensAt: the number of the step that is shown until then, or "best": that at which most blocks are in use
    constructor({ following = false, opensAt = null } = {}) {
      Object.assign(this, { following, opensAt, step: -1, views: [] });
    }

    add(view) {
      this.views.push(view);
      view.place = this;
    }

    // The numbers of the first and of the last step that any view can show.
    get first() {
      return Math.min(...this.views.map(({ timeline }) => timeline.first + timeline.lowest));
    }

    get last() {
      return Math.max(...this.views.map(({ timeline }) => timeline.first + timeline.last));
    }

    // The step that is followed: of a fork and its original the fork's newest, until it has ended and the other side goes
    // on, or the user has gone past it.
    get newest() {
      const fork = this.views.at(-1);
      const isFork = this.views.length > 1 && fork.timeline.forkedAt !== null;
      const goesOn = ({ live, follows }) => follows || (live && !live.sideDone);
      const end = fork.timeline.first + fork.timeline.last;
      const leads = isFork && (goesOn(fork) || (this.step <= end && !this.views.some(goesOn)));
      return leads ? end : this.last;
    }

    goTo(step) {
      this.step = Math.max(this.first, Math.min(step, this.last));
      for (const view of this.views) view.draw();
      this.ondraw?.();
    }

    // The user has gone to a step.
    visit(step) {
      this.opensAt = null;
      const follows = ({ follows, live }) => follows || (live && !live.done);
      this.following = step >= this.newest && this.views.some(follows);
      this.goTo(step);
    }

    follow() {
      this.opensAt = null;
      this.following = this.views.some((view) => view.live || view.grows);
      const isOver = this.views.some(({ live }) => live?.done);
      this.goTo(this.following && !isOver ? this.newest : this.last);
    }

    // After new lines.
    advance() {
      const [{ timeline }] = this.views;
      if (this.following) this.goTo(this.newest);
      else if (this.opensAt === "best") this.goTo(timeline.first + timeline.best);
      else this.goTo(this.opensAt ?? this.step);
    }
  }

  Object.assign(teachllm, { Place });
})();
