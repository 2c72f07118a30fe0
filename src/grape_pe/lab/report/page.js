"use strict";
// Draws the figures of the page: colours come from the style sheet, so that they follow light and dark.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const hidden = new Set();
  const chosen = new Map();
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)");

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // "var(--arm-3)@0.2" is that colour with an opacity.
  function color(text) {
    const [, name, opacity] = text.match(/^var\((--[\w-]+)\)(?:@([\d.]+))?$/);
    const hex = variable(name);
    if (opacity === undefined) return hex;
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${opacity})`;
  }

  function resolved(value) {
    if (typeof value === "string") return value.startsWith("var(--") ? color(value) : value;
    if (Array.isArray(value)) return value.map(resolved);
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolved(v)]));
    return value;
  }

  function themed(layout) {
    const ink = variable("--ink"), muted = variable("--muted"), grid = variable("--grid");
    const axis = {
      gridcolor: grid, linecolor: variable("--rule"), tickcolor: grid, dividercolor: grid, zeroline: false, automargin: true,
      tickfont: { color: muted, size: 11 }, fixedrange: coarse.matches,
    };
    const title = { font: { color: muted, size: 12 }, standoff: 8 };
    const out = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 },
      margin: { l: 10, r: 14, t: 8, b: 10 }, dragmode: coarse.matches ? false : "zoom",
      hoverlabel: { bgcolor: variable("--raised"), bordercolor: variable("--rule"), font: { color: ink } },
      legend: { orientation: "h", y: -0.22, x: 0, font: { color: muted, size: 11 } }, ...layout,
    };
    for (const name of ["xaxis", "yaxis"]) {
      const own = layout[name] || {};
      out[name] = { ...axis, ...own, tickfont: { ...axis.tickfont, ...own.tickfont } };
      if (own.title) out[name].title = { ...title, ...own.title };
    }
    return out;
  }

  function draw(plot) {
    const figure = figures[plot.dataset.figure];
    const view = figure.views[chosen.get(plot) || 0];
    const data = resolved(view.data).map((trace) =>
      ({ ...trace, visible: !(trace.meta && hidden.has(trace.meta.arm)) }));
    for (const trace of data) {
      if (trace.colorbar) trace.colorbar.tickfont = { color: variable("--muted"), size: 10 };
      const columns = trace.texttemplate && trace.z && trace.z.length ? trace.z[0].length : 1;
      if (columns * 22 > plot.clientWidth - 110) trace.texttemplate = "";  // would not fit the cells
    }
    const layout = themed(resolved(figure.layout)), across = layout.xaxis;
    if (across.tickangle === -90 && across.ticktext) {
      const step = Math.ceil((11 * across.ticktext.length) / (plot.clientWidth - 130));  // labels that do not overlap
      for (const key of ["tickvals", "ticktext"]) across[key] = across[key].filter((_, i) => i % step === 0);
    }
    plot.dataset.drawn = "yes";
    return Plotly.react(plot, data, layout, { displayModeBar: false, responsive: true });
  }

  const redraw = () => plots.filter((plot) => plot.dataset.drawn).forEach(draw);
  const drawAll = () => plots.filter((plot) => !plot.dataset.drawn && plot.offsetParent).forEach(draw);

  // Figures are drawn when they come near the screen: a page of a hundred opens at once.
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      draw(target);
    }
  }, { rootMargin: "300px" });
  plots.forEach((plot) => watcher.observe(plot));
  window.addEventListener("beforeprint", drawAll);
  dark.addEventListener("change", redraw);

  document.querySelectorAll(".choose select").forEach((select) =>
    select.addEventListener("change", () => {
      const plot = select.closest("figure").querySelector(".plot");
      chosen.set(plot, Number(select.value));
      draw(plot);
    }));

  const chips = [...document.querySelectorAll(".chip")];

  function hide(arms) {
    hidden.clear();
    arms.forEach((arm) => hidden.add(arm));
    chips.forEach((chip) => chip.setAttribute("aria-pressed", String(!hidden.has(chip.dataset.arm))));
    redraw();
  }

  for (const chip of chips) {
    const arm = chip.dataset.arm;
    chip.addEventListener("click", () => {
      hide(hidden.has(arm) ? [...hidden].filter((other) => other !== arm) : [...hidden, arm]);
    });
    chip.addEventListener("dblclick", () => {
      const others = chips.map((each) => each.dataset.arm).filter((other) => other !== arm);
      hide(others.every((other) => hidden.has(other)) ? [] : others);
    });
  }

  document.querySelectorAll("thead button").forEach((button) =>
    button.addEventListener("click", () => sortBy(button)));

  // Rows and sections with data-words are shown if they have every word of the field and of the pressed buttons.
  const field = document.querySelector("input.filter"), picks = [...document.querySelectorAll(".pick")];

  function filter() {
    const pressed = picks.filter((pick) => pick.getAttribute("aria-pressed") === "true");
    const wanted = [...field.value.toLowerCase().split(/\s+/), ...pressed.map((pick) => pick.dataset.word)];
    for (const item of document.querySelectorAll("[data-words]"))
      item.hidden = !wanted.every((word) => item.dataset.words.includes(word));
    const rows = [...document.querySelectorAll("tr[data-words]")];
    document.querySelector(".count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
  }

  if (field) {
    field.addEventListener("input", filter);
    picks.forEach((pick) => pick.addEventListener("click", () => {
      pick.setAttribute("aria-pressed", String(pick.getAttribute("aria-pressed") !== "true"));
      filter();
    }));
  }

  function sortBy(button) {
    const head = button.closest("th"), table = button.closest("table"), body = table.tBodies[0];
    const column = [...head.parentNode.children].indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending";
    const value = (row) => {
      const text = row.children[column].dataset.value;
      return text === "" ? Infinity * (up ? 1 : -1) : Number.isNaN(Number(text)) ? text : Number(text);
    };
    const order = (a, b) => (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0) * (up ? 1 : -1);
    body.append(...[...body.rows].sort(order));
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
  }
})();
