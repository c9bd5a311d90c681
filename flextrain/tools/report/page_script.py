"""The script of a report: a pointer over a chart shows the values there."""

SCRIPT = """\
for (const data of document.querySelectorAll("script.points")) {
  const figure = data.closest("figure"), svg = figure.querySelector("svg"), { box, curves, unit, xTitle } = JSON.parse(data.textContent);
  const shown = document.createElement("div");
  shown.className = "shown"; shown.hidden = true; figure.append(shown);
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor"); cursor.setAttribute("y1", box.top); cursor.setAttribute("y2", box.top + box.height);
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
    return x - xs[low] < xs[high] - x ? low : high;
  };
  const hide = () => { shown.hidden = true; cursor.remove(); };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const seen = svg.getBoundingClientRect(), wide = svg.viewBox.baseVal.width / seen.width;
    const share = ((event.clientX - seen.left) * wide - box.left) / box.width;
    if (share < 0 || share > 1) return hide();
    const wanted = box.x[0] + share * (box.x[1] - box.x[0]);
    const found = curves.filter((curve) => document.getElementById("show-" + curve.run)?.checked ?? true)
      .map((curve) => [curve, nearest(curve.x, wanted)]);
    if (!found.length) return hide();
    const at = found.map(([curve, i]) => curve.x[i]).reduce((a, b) => Math.abs(a - wanted) < Math.abs(b - wanted) ? a : b);
    shown.replaceChildren();
    const head = document.createElement("b");
    head.textContent = xTitle + " " + at.toLocaleString("en"); shown.append(head);
    for (const [curve, i] of found) {
      const row = document.createElement("div"), badge = document.createElement("i");
      badge.className = "badge"; badge.style.background = "var(--run-" + curve.run % 8 + ")";
      const elsewhere = curve.x[i] === at ? "" : " (at " + curve.x[i].toLocaleString("en") + ")";
      row.append(badge, [curve.name, curve.y[i], unit].filter((text) => text !== "").join(" ") + elsewhere); shown.append(row);
    }
    const x = box.left + box.width * (at - box.x[0]) / (box.x[1] - box.x[0]);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); svg.append(cursor);
    shown.hidden = false;
    const room = figure.getBoundingClientRect(), left = seen.left - room.left + x / wide;
    shown.style.top = (seen.top - room.top + 4) + "px";
    shown.style.left = (left + shown.offsetWidth + 12 > room.width ? Math.max(0, left - shown.offsetWidth - 10) : left + 10) + "px";
  });
}
"""
