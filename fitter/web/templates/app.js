"use strict";
(() => {
  const contexts = document.body.dataset.contexts.split(",").map(Number);
  const said = document.getElementById("said");
  const PAUSE = 90;
  const NAMES = ["model", "type", "n_ctx", "type_k", "type_v", "n_seq_max", "margin", "host_memory", "program"];
  const random = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (n) => n.toString(16).padStart(2, "0")).join("");

  // the step of the slider that is nearest
  const step = (tokens) => contexts.reduce((best, each, i) => (Math.abs(Math.log(each / tokens)) < Math.abs(Math.log(contexts[best] / tokens)) ? i : best), 0);

  class Side {
    constructor(name) {
      this.name = name;
      this.section = document.getElementById(name);
      this.form = this.section.querySelector("form");
      this.panel = this.section.querySelector(".panel");
      this.failed = this.section.querySelector(".failed");
      this.rows = this.section.querySelector(".rows");
      this.steps = this.section.querySelector(".steps");
      this.largest = this.section.querySelector(".largest");
      this.session = `${random()}-${name}`;
      this.asking = null;
      this.shown = "";
      this.form.addEventListener("submit", (event) => event.preventDefault());
      this.form.addEventListener("input", (event) => this.changed(event.target, true));
      this.form.addEventListener("change", (event) => this.changed(event.target, false));
      this.section.querySelector(".add").addEventListener("click", () => {
        this.card("1", "").querySelector(".gpu").focus();
      });
      this.rows.addEventListener("click", (event) => {
        if (!event.target.matches(".remove")) return;
        event.target.closest(".card").remove();
        if (!this.rows.children.length) this.card("1", "");
        this.section.querySelector(".add").focus();
        changed();
      });
    }

    field(name) {
      return this.form.elements[name];
    }

    card(count, name) {
      const row = document.getElementById("card").content.firstElementChild.cloneNode(true);
      row.querySelector(".count").value = count;
      row.querySelector(".gpu").value = name;
      this.rows.append(row);
      return row;
    }

    changed(field, isInput) {
      // a name is whole once it has been left or chosen
      const isText = field.matches("input:not([type])");
      if (isText && isInput) return;
      if (field === this.steps) {
        this.largest.checked = false;
        this.field("n_ctx").value = contexts[this.steps.value];
      } else if (field === this.largest) {
        this.field("n_ctx").value = this.largest.checked ? "" : contexts[this.steps.value];
      } else if (field.name === "n_ctx") {
        this.largest.checked = field.value === "";
      }
      this.label();
      changed();
    }

    // what sliders mean
    label() {
      const tokens = Number(this.field("n_ctx").value);
      if (tokens > 0) this.steps.value = step(tokens);
      this.steps.setAttribute("aria-valuetext", this.largest.checked ? "the largest that fits" : `${tokens} tokens`);
      for (const range of this.form.querySelectorAll("input[type=range][name]")) {
        const text = range.value === range.defaultValue ? range.dataset.usual : `${range.value} ${range.dataset.unit}`.trim();
        this.form.querySelector(`label[for="${range.id}"] output`).textContent = text;
        range.setAttribute("aria-valuetext", text);
      }
      this.section.querySelector(".typed").hidden = !this.field("model").value.trim().startsWith("shape:");
    }

    // what was chosen, as the page's address has it
    get state() {
      const found = [["model", this.field("model").value.trim()]];
      const type = this.field("type").value.trim();
      if (type && !this.section.querySelector(".typed").hidden) found.push(["type", type]);
      for (const row of this.rows.children) {
        const name = row.querySelector(".gpu").value.trim();
        const count = Number(row.querySelector(".count").value) || 1;
        if (name) found.push(["gpus", count > 1 ? `${count}x ${name}` : name]);
      }
      for (const name of NAMES.slice(2)) {
        const field = this.field(name);
        const value = field.value.trim();
        if (value !== "" && value !== this.usual(field)) found.push([name, value]);
      }
      return found;
    }

    usual(field) {
      if (field.matches("select")) return [...field.options].find((each) => each.defaultSelected)?.value ?? field.options[0].value;
      return field.defaultValue;
    }

    set state(pairs) {
      const of = (name) => pairs.filter(([key]) => key === name).map(([, value]) => value);
      this.form.reset();
      this.rows.replaceChildren();
      for (const gpu of of("gpus")) {
        const match = /^(\d{1,2})\s*[x×*]\s*(.*)$/is.exec(gpu);
        this.card(match ? match[1] : "1", match ? match[2] : gpu);
      }
      if (!this.rows.children.length) this.card("1", "");
      for (const [name, value] of pairs) {
        if (NAMES.includes(name)) this.field(name).value = value;
      }
      this.largest.checked = this.field("n_ctx").value === "";
      if (this.largest.checked) this.steps.value = step(16384);
      this.label();
    }

    get question() {
      const asked = { gpus: [], session: this.session };
      let type = "";
      for (const [name, value] of this.state) {
        if (name === "gpus") asked.gpus.push(value);
        else if (name === "type") type = value;
        else if (name === "n_ctx" || name === "n_seq_max") asked[name] = Number(value);
        else if (name === "margin") asked[name] = `${value}MiB`;
        else asked[name] = value;
      }
      if (type) asked.model = `${asked.model}:${type}`;
      return asked;
    }

    async ask() {
      const question = this.question;
      const key = JSON.stringify(question);
      if (key === this.shown) return this.settle();
      this.asking?.abort();
      this.asking = null;
      this.shown = "";
      if (!question.model || !question.gpus.length) return this.settle();
      this.shown = key;
      const asking = (this.asking = new AbortController());
      this.settle();
      try {
        const answer = await fetch(`/panel/${this.name}`, {
          method: "POST", body: key, headers: { "Content-Type": "application/json" }, signal: asking.signal,
        });
        const { html, error } = await answer.json();
        if (asking !== this.asking) return;
        if (html) this.show(html);
        else if (error) this.fail(error);
      } catch (error) {
        if (asking === this.asking && error.name !== "AbortError") this.fail("the server does not answer: start it again, and try again");
      } finally {
        if (asking === this.asking) {
          this.asking = null;
          this.settle();
        }
      }
    }

    // whether it waits for an answer; from a change on it does, though it asks a little later
    settle(isChanged = false) {
      this.panel.setAttribute("aria-busy", String(isChanged || this.asking !== null));
    }

    show(html) {
      const open = new Set([...this.panel.querySelectorAll("details[open]")].map((each) => each.dataset.kept));
      this.failed.hidden = true;
      // the server has escaped every name in it
      this.panel.innerHTML = html;
      for (const each of this.panel.querySelectorAll("details")) each.open = open.has(each.dataset.kept);
      said.textContent = `${this.panel.querySelector(".verdict").textContent}: ${this.panel.querySelector(".facts").innerText.replace(/\s+/g, " ")}`;
      compared();
    }

    fail(message) {
      this.shown = "";
      this.panel.replaceChildren();
      this.failed.textContent = message;
      this.failed.hidden = false;
      compared();
    }
  }

  const sides = { a: new Side("a"), b: new Side("b") };
  const compare = document.getElementById("compare");
  const isCompared = () => !sides.b.section.hidden;
  const address = document.getElementById("address");
  let waiting = 0;

  const changed = () => {
    const pairs = Object.values(sides).flatMap((side) => (side.section.hidden ? [] : side.state.map(([name, value]) => [`${side.name}.${name}`, value])));
    history.replaceState(null, "", `#${new URLSearchParams(pairs)}`);
    address.textContent = location.href;
    for (const side of Object.values(sides)) side.settle(true);
    clearTimeout(waiting);
    waiting = setTimeout(ask, PAUSE);
  };

  const ask = () => {
    for (const side of Object.values(sides)) side.section.hidden ? side.settle() : side.ask();
  };

  const setCompared = (is) => {
    sides.b.section.hidden = !is;
    document.body.classList.toggle("compared", is);
    compare.setAttribute("aria-pressed", String(is));
  };

  // the figures of both, side by side
  const compared = () => {
    const place = document.getElementById("differences");
    const of = (side) => new Map([...side.panel.querySelectorAll(".facts > div")].map((each) => [each.querySelector("dt").textContent.replace(/^on \d+ devices?$/, "on devices"), each.querySelector("dd").textContent.trim()]));
    const verdict = (side) => side.panel.querySelector(".verdict")?.textContent;
    const [first, second] = [of(sides.a), of(sides.b)];
    place.hidden = !isCompared() || !first.size || !second.size;
    if (place.hidden) return;
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    for (const text of ["", "first", "second"]) {
      const cell = document.createElement(text ? "th" : "td");
      if (text) cell.scope = "col";
      cell.textContent = text;
      head.append(cell);
    }
    const body = table.createTBody();
    const row = (name, one, other) => {
      const line = body.insertRow();
      const heading = document.createElement("th");
      heading.scope = "row";
      heading.textContent = name;
      line.append(heading);
      for (const text of [one, other]) line.insertCell().textContent = text ?? "–";
      line.classList.toggle("chosen", one !== other);
    };
    row("verdict", verdict(sides.a), verdict(sides.b));
    for (const name of new Set([...first.keys(), ...second.keys()])) row(name, first.get(name), second.get(name));
    place.replaceChildren(table);
  };

  const read = () => {
    const every = [...new URLSearchParams(location.hash.slice(1))];
    const of = (name) => every.filter(([key]) => key.startsWith(`${name}.`)).map(([key, value]) => [key.slice(2), value]);
    const first = of("a");
    sides.a.state = first.length ? first : [["model", "shape://qwen3-30b-a3b"], ["gpus", "rtx-4090"]];
    sides.b.state = of("b");
    setCompared(of("b").length > 0);
    address.textContent = location.href;
    ask();
  };

  compare.addEventListener("click", () => {
    if (!isCompared()) sides.b.state = sides.a.state;
    setCompared(!isCompared());
    compared();
    changed();
  });

  window.addEventListener("hashchange", read);
  read();
})();
