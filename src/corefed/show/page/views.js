"use strict";
// Views: one is on the screen at a time. Without this script all of them are, one below the other.
(() => {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const panel = (tab) => document.getElementById(tab.getAttribute("aria-controls"));

  function show(chosen) {
    for (const tab of tabs) {
      const own = tab === chosen;
      tab.setAttribute("aria-selected", String(own));
      tab.tabIndex = own ? 0 : -1;
      panel(tab).hidden = !own;
    }
    corefedCharts.later(); // charts that had no width
  }

  // Left and right arrows, Home and End move between tabs, as in other programs.
  const steps = { ArrowLeft: -1, ArrowRight: 1 };
  for (const tab of tabs) {
    panel(tab).setAttribute("role", "tabpanel");
    panel(tab).setAttribute("aria-labelledby", tab.id);
    const open = () => {
      show(tab);
      history.replaceState(null, "", `#${panel(tab).id}`);
    };
    tab.addEventListener("click", open);
    tab.addEventListener("keydown", (event) => {
      const here = tabs.indexOf(tab);
      const next = event.key === "Home" ? 0 : event.key === "End" ? tabs.length - 1
        : event.key in steps ? (here + steps[event.key] + tabs.length) % tabs.length : -1;
      if (next < 0) return;
      event.preventDefault();
      tabs[next].focus();
      tabs[next].click();
    });
  }

  // A link into another view, or into a folded run, opens it.
  const reveal = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const view = target && target.closest(".view");
    show(tabs.find((tab) => panel(tab) === view) || tabs.find((tab) => !panel(tab).hidden) || tabs[0]);
    const run = target && target.closest("details.run");
    if (run) run.open = true;
    if (view && target !== view) target.scrollIntoView();
  };
  if (tabs.length > 1) {
    document.querySelector("[role=tablist]").hidden = false;
    tabs.slice(1).forEach((tab) => (panel(tab).hidden = true));
    addEventListener("hashchange", reveal);
    reveal();
  }
  corefedCharts.drawAll();
})();
