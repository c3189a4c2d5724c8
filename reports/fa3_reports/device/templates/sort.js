// Sort a table by the column whose heading is pressed: numbers by value, a dash last, pressed again the other way round.
document.querySelectorAll("thead th").forEach((head) => {
  const value = (row) => {
    const text = row.cells[head.cellIndex].textContent.trim();
    const known = /^[+\-−–]?[\d.]/.test(text);
    const number = parseFloat(text.replace(/(\d)[\s,](?=\d{3})/g, "$1").replace("−", "-"));
    return { text, number, rank: text === "–" || text === "" ? 2 : known ? 0 : 1 };
  };
  const sort = () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const body = head.closest("table").tBodies[0];
    const rows = [...body.rows].map((row) => ({ row, ...value(row) }));
    rows.sort((a, b) =>
      a.rank - b.rank ||
      (up ? 1 : -1) * (a.rank ? a.text.localeCompare(b.text, "en", { numeric: true }) : a.number - b.number));
    head.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...rows.map(({ row }) => row));
  };
  head.tabIndex = 0;
  head.classList.add("sorts");
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      sort();
    }
  });
});
