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
  // what was said of an earlier one is over
  let ending = 0;
  let end = () => {};
  // for what is put into the page later as well
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const source = document.getElementById(button.dataset.from);
    button.dataset.label ??= button.textContent;
    const done = await copy(source.textContent);
    button.focus();
    if (!done && source.tagName === "PRE") getSelection().selectAllChildren(source);
    clearTimeout(ending);
    end();
    button.textContent = done ? "Copied" : source.tagName === "PRE" ? "Selected: copy it" : "Not copied";
    said.textContent = button.textContent;
    end = () => { button.textContent = button.dataset.label; said.textContent = ""; };
    ending = setTimeout(end, 2500);
  });
})();
