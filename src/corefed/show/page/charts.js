"use strict";
// Charts: they are drawn into a part that screen readers skip, since Vega would take the label and
// the role of the element that it draws into. Below each: a legend whose entries hide and show
// series, and downloads of the numbers and of the picture.
window.corefedCharts = (() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const main = document.getElementById("main");
  const state = document.documentElement.dataset;
  const drawn = new Map(); // chart -> {width, spec, view, hidden}
  const font = getComputedStyle(document.body).fontFamily;
  const scalable = "http://www.w3.org/2000/svg";
  const shapes = {
    circle: "M8 3a5 5 0 1 0 .01 0Z", square: "M3 3h10v10h-10Z", "triangle-up": "M8 2 14 13H2Z",
    diamond: "M8 1 14 8 8 15 2 8Z", cross: "M6 2h4v4h4v4h-4v4H6v-4H2V6h4Z",
    "triangle-down": "M8 14 2 3h12Z", stroke: "M1 7h14v2H1Z",
  };

  // Colours are variables of the style sheet: a change of scheme needs no drawing.
  const config = () => ({
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
      orient: "bottom", direction: "horizontal", labelColor: "var(--ink)",
      titleColor: "var(--ink)", labelFontSize: 12.5, titleFontSize: 12, titleFontWeight: 500,
      titleLimit: 260, symbolOpacity: 1, gradientHorizontalMaxLength: 280,
    },
    text: { fontSize: 12 },
  });

  const make = (tag, about = {}, ...inside) => {
    const element = Object.assign(document.createElement(tag), about);
    element.append(...inside);
    return element;
  };

  // A chart in a folded part has no width yet: it gets that of its place once it is opened.
  const widthOf = (element) => {
    if (element.clientWidth) return element.clientWidth;
    const room = main.clientWidth - 40;
    return element.closest(".wide") || room < 720 ? room : (room - 32) / 2;
  };

  async function draw(element, own) {
    const width = Math.floor(widthOf(element));
    const before = drawn.get(element);
    if (before && before.width === width && before.spec === own) return;
    const now = { width, spec: own, hidden: before ? before.hidden : new Set() };
    drawn.set(element, now);
    let paper = element.querySelector(".paper");
    if (!paper) {
      paper = make("div", { className: "paper", ariaHidden: "true" });
      element.replaceChildren(paper);
    }
    const spec = { ...own, width, autosize: { type: "fit-x", contains: "padding" } };
    const options = {
      actions: false, renderer: "svg", config: config(), defaultStyle: false, ast: true,
    };
    now.view = (await vegaEmbed(paper, spec, options)).view;
    if (!element.nextElementSibling) element.after(tools(element));
    await hide(element);
  }

  const hide = async (element) => {
    const { view, hidden, spec } = drawn.get(element);
    if (spec.params) await view.signal("hidden", [...hidden]).runAsync();
  };

  function swatch({ colour, shape }) {
    const path = document.createElementNS(scalable, "path");
    path.setAttribute("d", shapes[shape] || shapes.circle);
    path.style.fill = colour;
    const picture = document.createElementNS(scalable, "svg");
    picture.setAttribute("viewBox", "0 0 16 16");
    picture.setAttribute("aria-hidden", "true");
    picture.append(path);
    return picture;
  }

  function tools(element) {
    const title = titleOf(element);
    const entries = drawn.get(element).spec.usermeta.legend.map((entry) => {
      const button = make("button", { type: "button", className: "entry" }, swatch(entry), entry.name);
      button.setAttribute("aria-pressed", "true");
      button.title = `Hide or show ${entry.name}`;
      button.addEventListener("click", () => {
        const { hidden } = drawn.get(element);
        const shown = hidden.delete(entry.name);
        if (!shown) hidden.add(entry.name);
        button.setAttribute("aria-pressed", String(shown));
        hide(element);
      });
      return make("li", {}, button);
    });
    const download = (kind, make_) => {
      const button = make("button", { type: "button", className: "download" }, kind);
      button.setAttribute("aria-label", `Download ${title} as ${kind}`);
      button.addEventListener("click", make_);
      return button;
    };
    const name = element.dataset.chart;
    const table = element.closest("figure").querySelector("table");
    return make("div", { className: "tools" },
      make("ul", { className: "legend", ariaLabel: "Series; click to hide or show" }, ...entries),
      download("CSV", () => corefedTables.save(table, name)),
      download("PNG", async () => save(await picture(element), `${name}.png`)));
  }

  const titleOf = (element) =>
    element.closest("figure").querySelector("figcaption strong").textContent;

  // The chart with its title and legend, at twice its size, in the colours of the screen.
  async function picture(element) {
    const style = getComputedStyle(document.documentElement);
    const colour = (text) =>
      text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    const svg = element.querySelector("svg");
    const { width, height } = svg.viewBox.baseVal;
    const copy = svg.cloneNode(true);
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    const image = new Image();
    const text = colour(new XMLSerializer().serializeToString(copy));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
    await image.decode();
    const { spec, hidden } = drawn.get(element);
    const legend = spec.usermeta.legend.filter((entry) => !hidden.has(entry.name));
    const [head, line, scale] = [34, 22, 2];
    const canvas = make("canvas", {
      width: scale * width, height: scale * (head + height + line * legend.length + 8),
    });
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = colour("var(--paper)");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = colour("var(--ink)");
    context.font = `600 15px ${font}`;
    context.fillText(titleOf(element), 8, 22, width - 16);
    context.drawImage(image, 0, head, width, height);
    context.font = `13px ${font}`;
    legend.forEach((entry, place) => {
      const top = head + height + line * place;
      context.save();
      context.translate(8, top);
      context.fillStyle = colour(entry.colour);
      context.fill(new Path2D(shapes[entry.shape] || shapes.circle));
      context.restore();
      context.fillText(entry.name, 30, top + 12, width - 38);
    });
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }

  function save(blob, name) {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function drawAll() {
    for (const element of document.querySelectorAll("[data-chart]")) {
      const own = specs[element.dataset.chart];
      if (!own) continue;
      try {
        await draw(element, own);
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

  addEventListener("resize", later);
  document.addEventListener("toggle", later, true);
  return { specs, make, save, drawAll, later };
})();
