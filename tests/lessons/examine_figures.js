// Return the faults of all figures on the page, as strings.
(pageWidth) => {
  const rgba = (text) => {
    const parts = text.match(/[\d.]+/g)?.map(Number) ?? [0, 0, 0, 0];
    return { rgb: parts.slice(0, 3), alpha: text === "none" ? 0 : (parts[3] ?? 1) };
  };
  const painted = (element, which) => {
    const style = getComputedStyle(element);
    const { rgb, alpha } = rgba(style[which]);
    return { rgb, alpha: alpha * Number(style[`${which}Opacity`]) * Number(style.opacity) };
  };
  const over = (under, { rgb, alpha }) => under.map((part, i) => part * (1 - alpha) + rgb[i] * alpha);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((part) => part / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const rounded = (number) => Math.round(100 * number) / 100;
  const boxOf = (element) => element.getBoundingClientRect();
  // The box of a text after the page was turned so that the text is upright.
  const upright = (text) => {
    const matrix = text.getScreenCTM();
    const angle = Math.atan2(matrix.b, matrix.a);
    const turned = new DOMMatrix().rotate((-angle * 180) / Math.PI).multiply(matrix);
    const { x, y, width, height } = text.getBBox();
    const [from, to] = [new DOMPoint(x, y), new DOMPoint(x + width, y + height)].map((p) => p.matrixTransform(turned));
    return { angle, left: from.x, top: from.y, right: to.x, bottom: to.y };
  };
  const contains = (outer, inner) =>
    outer.left - 2 <= inner.left && outer.right + 2 >= inner.right && outer.top - 2 <= inner.top && outer.bottom + 2 >= inner.bottom;
  const faults = [];
  document.querySelectorAll("svg").forEach((svg, number) => {
    const say = (kind, what) => faults.push(`${kind}: ${what} (figure ${number})`);
    const width = parseFloat(svg.getAttribute("width"));
    if (width > pageWidth) say("too wide", `${width} points`);
    const frame = boxOf(svg);
    const toScreen = svg.getScreenCTM();
    const drawn = [...svg.querySelectorAll("path, use, text")].filter((each) => !each.closest("defs, clipPath"));
    const paper = painted(svg.querySelector("path"), "fill").rgb;
    const isAt = (path, x, y) => {
      const point = new DOMPoint(x, y).matrixTransform(path.getScreenCTM().inverse());
      return path.isPointInFill(point);
    };
    const under = (order, x, y) =>
      drawn
        .slice(0, order)
        .filter((each) => each.tagName === "path" && painted(each, "fill").alpha > 0 && isAt(each, x, y))
        .reduce((below, each) => over(below, painted(each, "fill")), paper);
    const boxes = [];
    drawn.forEach((text, order) => {
      if (text.tagName !== "text" || !text.textContent.trim()) return;
      const box = boxOf(text);
      const said = text.textContent.trim();
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        say("text cut off", said);
      const ink = painted(text, "fill");
      const places = [0.15, 0.5, 0.85].flatMap((u) => [0.4, 0.6].map((v) => [box.left + u * box.width, box.top + v * box.height]));
      const least = Math.min(
        ...places.map(([x, y]) => {
          const below = under(order, x, y);
          return contrast(over(below, ink), below);
        }),
      );
      if (least < 4.5) say("pale text", `${said}, ${rounded(least)}`);
      const above = drawn.slice(order + 1).filter((each) => each.tagName === "path" && painted(each, "fill").alpha > 0.2);
      if (places.some(([x, y]) => above.some((each) => isAt(each, x, y)))) say("covered text", said);
      const placed = upright(text);
      for (const other of boxes) {
        if (Math.abs(other.angle - placed.angle) > 0.01) continue; // an axis's label beside the ticks' labels
        const wide = Math.min(placed.right, other.right) - Math.max(placed.left, other.left);
        const high = Math.min(placed.bottom, other.bottom) - Math.max(placed.top, other.top);
        const area = (each) => (each.right - each.left) * (each.bottom - each.top);
        if (wide > 0 && high > 0 && wide * high > 0.15 * Math.min(area(placed), area(other)))
          say("overlapping texts", `${other.said} | ${said}`);
      }
      boxes.push({ ...placed, said });
    });
    for (const path of svg.querySelectorAll('g[id^="axes"] > g[id^="line2d"] > path')) {
      const found = contrast(over(paper, painted(path, "stroke")), paper);
      if (painted(path, "stroke").alpha > 0 && found < 3) say("pale line", rounded(found));
    }
    const patches = [...svg.querySelectorAll('g[id^="axes"] > g[id^="patch"] > path')].map((path) => {
      const [fill, stroke] = ["fill", "stroke"].map((which) => contrast(over(paper, painted(path, which)), paper));
      const isSeen = painted(path, "fill").alpha > 0 || painted(path, "stroke").alpha > 0;
      return { box: boxOf(path), found: Math.max(fill, stroke), isSeen };
    });
    for (const patch of patches) {
      const isBordered = patches.some((other) => other.found >= 3 && contains(other.box, patch.box));
      if (patch.isSeen && patch.found < 3 && !isBordered && patch.box.width > 1 && patch.box.height > 1)
        say("pale patch", `${rounded(patch.found)}, ${Math.round(patch.box.width)} x ${Math.round(patch.box.height)}`);
    }
  });
  return faults;
};
