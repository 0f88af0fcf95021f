"use strict";
(() => {
  const said = document.getElementById("said");
  const next = { none: "ascending", ascending: "descending", descending: "none" };
  // numbers by their value, text as people sort it, and what is not known always last
  const compared = (one, other, sign) => {
    if (one === "" || other === "") return (one === "") - (other === "");
    const difference = Number(one) - Number(other);
    return sign * (Number.isNaN(difference) ? one.localeCompare(other, "en", { numeric: true }) : difference);
  };
  const sorts = (table) => {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const rows = [...body.rows];
    const value = (row, index) => row.cells[index].dataset.value;
    const sort = (index) => {
      const head = heads[index];
      const order = next[head.getAttribute("aria-sort") ?? "none"];
      for (const each of heads) each.removeAttribute("aria-sort");
      const sign = order === "descending" ? -1 : 1;
      const sorted = [...rows];
      if (order !== "none") {
        head.setAttribute("aria-sort", order);
        sorted.sort((one, other) => compared(value(one, index), value(other, index), sign));
      }
      body.append(...sorted);
      if (said) said.textContent = order === "none" ? "in the order of the grid" : `${head.textContent}, ${order}`;
    };
    heads.forEach((head, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(index));
      head.append(button);
    });
  };
  for (const table of document.querySelectorAll("table.fitter-grid:not([data-sorts])")) {
    table.dataset.sorts = "";
    sorts(table);
  }
})();
