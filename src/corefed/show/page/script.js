"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const main = document.getElementById("main");
  const state = document.documentElement.dataset;
  const widths = new Map();
  const font = getComputedStyle(document.body).fontFamily;

  // Colours are variables of the style sheet: a change of scheme needs no drawing.
  const config = (width, letters) => ({
    background: "transparent",
    font,
    aria: false,
    padding: 4,
    view: { stroke: "transparent" },
    axis: {
      labelColor: "var(--muted)", titleColor: "var(--ink)", domainColor: "var(--rule)",
      tickColor: "var(--rule)", gridColor: "var(--grid)", labelFontSize: 12, titleFontSize: 12.5,
      titleFontWeight: 500, titlePadding: 8,
    },
    legend: {
      orient: "bottom", direction: "horizontal",
      columns: Math.max(1, Math.floor(width / (40 + 7 * letters))),
      labelColor: "var(--ink)", titleColor: "var(--ink)", labelFontSize: 12.5, labelLimit: width - 60,
      titleFontSize: 12, titleFontWeight: 500, titleLimit: 260, symbolOpacity: 1,
      gradientHorizontalMaxLength: 280,
    },
    text: { fontSize: 12 },
  });

  // A chart in a folded part has no width yet: it gets that of its place once it is opened.
  const widthOf = (element) => {
    if (element.clientWidth) return element.clientWidth;
    const room = main.clientWidth - 40;
    return element.closest(".wide") || room < 720 ? room : (room - 32) / 2;
  };

  async function draw(element) {
    const width = Math.floor(widthOf(element));
    if (widths.get(element) === width) return;
    widths.set(element, width);
    const own = specs[element.dataset.chart];
    const spec = { ...own, width, autosize: { type: "fit-x", contains: "padding" } };
    const options = {
      actions: false, renderer: "svg", config: config(width, own.usermeta.letters),
      defaultStyle: false, ast: true,
    };
    await vegaEmbed(element, spec, options);
  }

  async function drawAll() {
    for (const element of document.querySelectorAll("[data-chart]")) {
      try {
        await draw(element);
      } catch (error) {
        element.textContent = "This chart could not be drawn; its numbers are below.";
        console.error(error);
      }
    }
    state.drawn = document.querySelectorAll("[data-chart] svg").length;
  }

  let waiting;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 150);
  };

  function sort(table, column) {
    const headers = [...table.tHead.rows[0].cells];
    const header = headers[column];
    const descending = header.getAttribute("aria-sort") === "ascending";
    headers.forEach((each) => each.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const sign = descending ? -1 : 1;
    const body = table.tBodies[0];
    const key = (row) => {
      const { value } = row.cells[column].dataset;
      return value === undefined ? row.cells[column].textContent : Number(value);
    };
    const compare = (a, b) => {
      const [left, right] = [key(a), key(b)];
      if (typeof left === "string" || typeof right === "string")
        return sign * String(left).localeCompare(String(right), undefined, { numeric: true });
      if (Number.isNaN(left) || Number.isNaN(right)) return Number.isNaN(left) - Number.isNaN(right);
      return sign * (left - right);
    };
    body.append(...[...body.rows].sort(compare));
  }

  for (const table of document.querySelectorAll("table.sortable"))
    for (const header of table.tHead.rows[0].cells)
      header.querySelector("button").addEventListener("click", () => sort(table, header.cellIndex));

  // A link into a folded run opens it; paper shows all runs.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const run = target && target.closest("details.run");
    if (run) run.open = true;
  };
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details.run:not([open])")];
    folded.forEach((run) => (run.open = true));
  });
  addEventListener("afterprint", () => folded.forEach((run) => (run.open = false)));
  addEventListener("hashchange", reveal);
  addEventListener("resize", later);
  document.addEventListener("toggle", later, true);
  reveal();
  drawAll();
})();
