"use strict";
// The live page: asks its server for the state of the run every other second, and shows it. Text
// goes into the page as text only.
(() => {
  const { make, specs, drawAll } = corefedCharts;
  const get = (id) => document.getElementById(id);
  const every = 2000;
  let shown = {};

  function say(id, text) {
    const element = get(id);
    if (element.textContent !== text) element.textContent = text;
    if (element.classList.contains("missing")) element.hidden = !text;
  }

  function table(id, columns, rows) {
    const cells = (tag, each) =>
      each.map((text, place) => {
        const cell = make(place || tag === "col" ? (tag === "col" ? "th" : "td") : "th", {}, text);
        if (cell.tagName === "TH") cell.scope = tag === "col" ? "col" : "row";
        return cell;
      });
    get(id).replaceChildren(
      make("thead", {}, make("tr", {}, ...cells("col", columns))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("row", row)))),
    );
  }

  // Only what is new is put into the page, so that nothing flickers or loses the focus.
  const changed = (key, value) => {
    const text = JSON.stringify(value);
    if (shown[key] === text) return false;
    shown[key] = text;
    return true;
  };

  function chart(name, spec) {
    get(name).hidden = !spec;
    if (!spec || !changed(`chart ${name}`, spec)) return;
    specs[name] = spec;
    const values = Object.values(spec.datasets || {})[0] || spec.data?.values || spec.layer[0].data.values;
    const last = new Map(values.map((row) => [row.series, row]));
    const words = [...last].map(([series, row]) => `${series} ${row.y.toPrecision(3)} (round ${row.x})`);
    say(`${name}-words`, `Last: ${words.join(", ")}.`);
    const title = get(name).querySelector("strong").textContent;
    get(name).querySelector(".chart").setAttribute("aria-label", `${title}. Last: ${words.join(", ")}`);
    table(`${name}-numbers`, ["series", "round", "value"],
      values.map((row) => [row.series, String(row.x), String(row.y)]));
  }

  function show(state) {
    document.title = `${state.round}/${state.rounds} ${state.title}`;
    say("about", state.title);
    get("bar").max = Math.max(1, state.rounds);
    get("bar").value = state.round;
    say("left", `round ${state.round} of ${state.rounds}${state.left ? `, ${state.left}` : ""}`);
    say("state", state.state);
    get("state").classList.toggle("old", state.old);
    say("late", state.late.length ? `Late: ${state.late.join("; ")}.` : "");
    if (changed("tiles", state.tiles))
      get("tiles").replaceChildren(...state.tiles.map(([label, value, more]) =>
        make("div", {}, make("dt", {}, label), make("dd", {}, value, make("small", {}, more)))));
    get("stop").hidden = !state.stop.possible || state.stop.asked;
    say("stop-note", state.stop.asked ? `Stopping after this round. ${state.stop.note}` : "");
    chart("curve", state.charts.curve);
    chart("coreset", state.charts.coreset);
    get("no-curves").hidden = Boolean(state.charts.curve || state.charts.coreset);
    if (changed("sites", state.sites)) table("site-table", state.sites.columns, state.sites.rows);
    get("no-sites").hidden = state.sites.rows.length > 0;
    get("events").hidden = !state.events.length;
    if (changed("events", state.events))
      get("event-list").replaceChildren(...state.events.map((text) => make("li", {}, text)));
    drawAll();
  }

  async function look() {
    try {
      const answer = await fetch("state", { cache: "no-store" });
      const state = await answer.json();
      if (state.error) throw new Error(state.error);
      show(state);
      say("trouble", "");
    } catch (error) {
      const gone = error instanceof TypeError;
      say("trouble", gone ? "The server of this page does not answer; was corefed watch ended?" : error.message);
    }
  }

  get("stop").addEventListener("click", async () => {
    get("stop").disabled = true;
    try {
      const answer = await fetch("stop", { method: "POST" });
      const said = await answer.json();
      if (said.error) say("trouble", said.error);
    } catch {
      say("trouble", "The server of this page does not answer.");
    }
    get("stop").disabled = false;
    look();
  });

  const again = async () => {
    await look();
    setTimeout(again, every);
  };
  again();
})();
