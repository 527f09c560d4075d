"use strict";
// Tables: sorting by a column, a search for rows, columns that are folded at first, CSV.
window.corefedTables = (() => {
  const { make, save: saveBlob } = corefedCharts;

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

  function filter(table) {
    const rows = [...table.tBodies[0].rows];
    const input = make("input", { type: "search", placeholder: "Search" });
    input.setAttribute("aria-label", `Search rows: ${table.caption.textContent}`);
    const count = make("output");
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = wanted ? `${shown} of ${rows.length} rows` : "";
    });
    return [input, count];
  }

  function columns(table) {
    const all = table.tHead.rows[0].cells.length;
    const button = make("button", { type: "button" });
    const say = (open) => {
      table.classList.toggle("fewer", !open);
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "Fewer columns" : `All ${all} columns`;
    };
    say(false);
    button.addEventListener("click", () => say(table.classList.contains("fewer")));
    return button;
  }

  // Numbers as they are, not as they are shown; a name that a spreadsheet would compute is text.
  function csv(table) {
    const cell = (each) => {
      const { value } = each.dataset;
      let text = value === undefined ? each.textContent.trim() : value === "nan" ? "" : value;
      if (value === undefined && /^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)))
        text = `'${text}`;
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const lines = [...table.rows].map((row) => [...row.cells].map(cell).join(","));
    return `${lines.join("\r\n")}\r\n`;
  }

  const save = (table, file) =>
    saveBlob(new Blob([csv(table)], { type: "text/csv;charset=utf-8" }), `${file}.csv`);

  // Of a file: its section's, with a number from the second table of a section on.
  const named = new Map();
  function name(table) {
    const section = table.closest("section");
    const first = section ? section.id : "table";
    const count = (named.get(first) || 0) + 1;
    named.set(first, count);
    return count > 1 ? `${first}-${count}` : first;
  }

  for (const table of document.querySelectorAll("table.sortable"))
    for (const header of table.tHead.rows[0].cells)
      header.querySelector("button").addEventListener("click", () => sort(table, header.cellIndex));

  for (const table of document.querySelectorAll("table.sortable, table.filtered")) {
    if (table.closest("figure") && !table.classList.contains("filtered")) continue;
    const row = make("div", { className: "tools" });
    if (table.classList.contains("filtered")) row.append(...filter(table));
    if (table.querySelector("th.more")) row.append(columns(table));
    if (!table.closest("figure")) {
      const button = make("button", { type: "button", className: "download" }, "CSV");
      button.setAttribute("aria-label", `Download ${table.caption.textContent} as CSV`);
      const file = name(table);
      button.addEventListener("click", () => save(table, file));
      row.append(button);
    }
    table.closest(".scroll").before(row);
  }
  return { csv, save };
})();
