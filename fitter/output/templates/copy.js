"use strict";
(() => {
  const said = document.getElementById("said");
  // where there is no clipboard to write to, the browser's own copying of a selection
  const select = (text) => {
    const field = document.createElement("textarea");
    field.value = text;
    field.setAttribute("aria-hidden", "true");
    field.className = "unseen";
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  };
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return select(text);
    }
  };
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.from);
      const done = await copy(source.textContent);
      button.focus();
      if (!done && source.tagName === "PRE") getSelection().selectAllChildren(source);
      button.textContent = done ? "Copied" : source.tagName === "PRE" ? "Selected: copy it" : "Not copied";
      said.textContent = button.textContent;
      setTimeout(() => { button.textContent = "Copy"; said.textContent = ""; }, 2500);
    });
  }
})();
