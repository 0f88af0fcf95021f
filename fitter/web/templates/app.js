"use strict";
(() => {
  const contexts = document.body.dataset.contexts.split(",").map(Number);
  const said = document.getElementById("said");
  const PAUSE = 90;
  const GONE = "the server does not answer: start it again, then try again";
  const OWN = "this machine";
  const NAMES = ["model", "type", "n_ctx", "type_k", "type_v", "n_seq_max", "workload", "users", "margin", "host_memory", "program"];
  const random = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (n) => n.toString(16).padStart(2, "0")).join("");

  const shapes = new Set(Array.from(document.querySelectorAll("#models option[data-shape]"), (each) => each.value));
  const isShape = (model) => /^shape:/i.test(model) || shapes.has(model.toLowerCase().split(":")[0]);

  // a number of tokens: 32768 or 32k
  const tokens = (text) => {
    const [, number, unit] = /^\s*([\d.]+)\s*([km]?)\s*$/i.exec(text) ?? [];
    return Math.round(Number(number) * { "": 1, k: 1024, m: 1024 ** 2 }[unit?.toLowerCase()]);
  };

  // the step of the slider that is nearest
  const step = (tokens) => contexts.reduce((best, each, i) => (Math.abs(Math.log(each / tokens)) < Math.abs(Math.log(contexts[best] / tokens)) ? i : best), 0);

  class Side {
    constructor(name) {
      this.name = name;
      this.section = document.getElementById(name);
      this.form = this.section.querySelector("form");
      this.panel = this.section.querySelector(".panel");
      this.failed = this.section.querySelector(".failed");
      this.again = this.section.querySelector(".again");
      this.empty = this.panel.firstElementChild;
      this.own = this.section.querySelector(".own");
      this.rows = this.section.querySelector(".rows");
      this.steps = this.section.querySelector(".steps");
      this.usualContext = this.section.querySelector(".usual");
      this.back = this.section.querySelector(".back");
      this.session = `${random()}-${name}`;
      this.asking = null;
      this.isChanged = this.isOpened = false;
      this.shown = "";
      this.form.addEventListener("submit", (event) => event.preventDefault());
      this.form.addEventListener("input", (event) => this.changed(event.target, true));
      this.form.addEventListener("change", (event) => this.changed(event.target, false));
      this.again.addEventListener("click", () => this.ask());
      this.panel.addEventListener("click", (event) => {
        const button = event.target.closest("button.open");
        if (button) this.open(button.dataset.model, this.field("model").value);
      });
      this.back.addEventListener("click", () => this.open(this.repository, ""));
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

    // plan another model: one of a repository, or the repository again
    open(model, repository) {
      this.field("model").value = model;
      this.from(repository);
      this.label();
      this.isOpened = true;
      changed();
    }

    // the repository of the model, if it was opened from there
    from(repository) {
      this.repository = repository;
      this.back.hidden = !repository;
      this.back.firstElementChild.textContent = `All models of ${repository}`;
    }

    changed(field, isInput) {
      // a name is whole once it has been left or chosen
      const isText = field.matches("input:not([type]):not([name=n_ctx])");
      if (isText && isInput) return;
      if (field === this.steps) {
        this.usualContext.checked = false;
        this.field("n_ctx").value = contexts[this.steps.value];
      } else if (field === this.usualContext) {
        this.field("n_ctx").value = this.usualContext.checked ? "" : contexts[this.steps.value];
      } else if (field.name === "n_ctx") {
        this.usualContext.checked = field.value === "";
      } else if (field.name === "model") {
        this.from("");
      }
      this.label();
      changed();
    }

    // what the fields mean
    label() {
      const context = tokens(this.field("n_ctx").value);
      if (context > 0) this.steps.value = step(context);
      this.steps.setAttribute("aria-valuetext", this.usualContext.checked ? this.usualContext.labels[0].textContent.trim() : `${context} tokens`);
      this.section.querySelector(".typed").hidden = !isShape(this.field("model").value.trim());
      for (const each of [this.rows, this.section.querySelector(".add")]) each.hidden = Boolean(this.own?.checked);
      this.field("host_memory").placeholder = this.own?.checked ? "what is available" : "no limit";
    }

    // what was chosen, as the page's address has it
    get state() {
      const found = [["model", this.field("model").value.trim()]];
      const type = this.field("type").value.trim();
      if (type && !this.section.querySelector(".typed").hidden) found.push(["type", type]);
      found.push(...this.gpus.map((gpu) => ["gpus", gpu]));
      for (const name of NAMES.slice(2)) {
        const field = this.field(name);
        const value = field.value.trim();
        if (value !== "" && value !== this.usual(field)) found.push([name, value]);
      }
      return found;
    }

    // the file type of a shape; nothing else has a choice of it
    get type() {
      const field = this.field("type");
      return field.closest("[hidden]") ? undefined : field.value.trim() || field.placeholder;
    }

    get gpus() {
      if (this.own?.checked) return [OWN];
      const rows = [...this.rows.children].map((row) => [row.querySelector(".count").value || "1", row.querySelector(".gpu").value.trim()]);
      return rows.filter(([, name]) => name).map(([count, name]) => (count === "1" ? name : `${count}x ${name}`));
    }

    usual(field) {
      if (field.matches("select")) return [...field.options].find((each) => each.defaultSelected)?.value ?? field.options[0].value;
      return field.defaultValue;
    }

    // have the fields say what an address does; what they cannot say is returned
    take(pairs) {
      const ignored = [];
      this.form.reset();
      this.rows.replaceChildren();
      this.from("");
      for (const [name, value] of pairs) {
        if (name === "gpus" && value === OWN && this.own) {
          this.own.checked = true;
        } else if (name === "gpus") {
          const match = /^(\d{1,2})\s*[x×*]\s*(.*)$/is.exec(value);
          this.card(match ? match[1] : "1", match ? match[2] : value);
        } else if (NAMES.includes(name)) {
          const field = this.field(name);
          if (field.type !== "number" || /^\d+$/.test(value)) field.value = value;
          if (field.value === value && !field.validity.patternMismatch) continue;
          field.value = this.usual(field);
          ignored.push(`${name}=${value}`);
        } else {
          ignored.push(`${name}=${value}`);
        }
      }
      if (!this.rows.children.length) this.card("1", "");
      this.usualContext.checked = this.field("n_ctx").value === "";
      if (this.usualContext.checked) this.steps.value = step(16384);
      this.label();
      return ignored;
    }

    get question() {
      const asked = { gpus: [], session: this.session };
      let type = "";
      for (const [name, value] of this.state) {
        if (name === "gpus" && this.own?.checked) asked.gpus = null;
        else if (name === "gpus") asked.gpus.push(value);
        else if (name === "type") type = value;
        else if (name === "n_ctx") asked[name] = tokens(value);
        else if (["n_seq_max", "users"].includes(name)) asked[name] = Number(value);
        else if (name === "margin") asked[name] = `${value}MiB`;
        else asked[name] = value;
      }
      if (type) asked.model = `${asked.model}:${type}`;
      return asked;
    }

    // what a field says that no number is, where that is so
    get wrong() {
      const field = [...this.form.elements].find((each) => !each.closest("[hidden]") && !each.validity.valid && !each.validity.valueMissing);
      if (field?.title) return `${field.labels[0].textContent}: give ${field.title}`;
      return field && `${field.labels[0]?.textContent ?? field.ariaLabel}: give a whole number${field.max ? ` from ${field.min} to ${field.max}` : ` of ${field.min} or more`}`;
    }

    async ask() {
      const wrong = this.wrong;
      const question = this.question;
      const key = wrong ?? JSON.stringify(question);
      this.isChanged = false;
      if (key === this.shown) return this.settle();
      this.asking?.abort();
      this.asking = null;
      this.shown = key;
      if (wrong) return this.fail(wrong);
      if (!question.model || question.gpus?.length === 0) return this.fail("");
      const asking = (this.asking = new AbortController());
      this.settle();
      this.follow(asking, question.model);
      try {
        const answer = await fetch(`/panel/${this.name}`, {
          method: "POST", body: key, headers: { "Content-Type": "application/json" }, signal: asking.signal,
        });
        const { html, error } = await answer.json();
        if (asking !== this.asking) return;
        if (html) this.show(html);
        else this.fail(error ?? GONE);
      } catch {
        if (asking === this.asking) this.fail(GONE);
      } finally {
        if (asking === this.asking) {
          this.asking = null;
          this.settle();
        }
      }
    }

    // say how far the models of a repository are, which takes a while
    async follow(asking, model) {
      this.panel.dataset.said = "planning …";
      if (!/^hf:.*(?<!\.gguf)$|\/$/is.test(model)) return;
      for (;;) {
        await new Promise((done) => setTimeout(done, 1000));
        if (asking !== this.asking) return;
        const { said } = await fetch(`/progress/${this.session}`).then((answer) => answer.json(), () => ({}));
        if (said && asking === this.asking) this.panel.dataset.said = said;
      }
    }

    // whether it waits for an answer; from a change on it does, though it asks a little later
    settle() {
      this.panel.setAttribute("aria-busy", String(this.isChanged || this.asking !== null));
    }

    show(html) {
      const open = new Set([...this.panel.querySelectorAll("details[open]")].map((each) => each.dataset.kept));
      this.told("");
      // the server has escaped every name in it
      this.panel.innerHTML = html;
      for (const each of this.panel.querySelectorAll("details")) each.open = open.has(each.dataset.kept);
      // the row that was clicked may be far below
      if (this.isOpened) this.section.scrollIntoView();
      this.isOpened = false;
      said.textContent = `${this.panel.querySelector(".verdict").textContent}: ${this.panel.querySelector(".facts").innerText.replace(/\s+/g, " ")}`;
      compared();
    }

    // no plan: what is wrong, or nothing where nothing was chosen yet
    fail(message) {
      this.shown = "";
      this.panel.replaceChildren(...(message ? [] : [this.empty]));
      this.told(message);
      compared();
    }

    told(message) {
      this.settle();
      this.failed.textContent = message;
      this.failed.hidden = !message;
      this.again.hidden = message !== GONE;
    }
  }

  const sides = { a: new Side("a"), b: new Side("b") };
  const compare = document.getElementById("compare");
  const isCompared = () => !sides.b.section.hidden;
  const address = document.getElementById("address");
  const ignored = document.getElementById("ignored");
  let waiting = 0;

  const changed = () => {
    ignored.hidden = true;
    const pairs = Object.values(sides).flatMap((side) => (side.section.hidden ? [] : side.state.map(([name, value]) => [`${side.name}.${name}`, value])));
    history.replaceState(null, "", `#${new URLSearchParams(pairs)}`);
    address.textContent = location.href;
    for (const side of Object.values(sides)) {
      side.isChanged = !side.section.hidden;
      side.settle();
    }
    clearTimeout(waiting);
    waiting = setTimeout(ask, PAUSE);
  };

  const ask = () => {
    for (const side of Object.values(sides)) {
      if (!side.section.hidden) side.ask();
    }
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
    const both = (of) => Object.values(sides).map(of);
    row("model", ...both((side) => side.field("model").value.trim()));
    const types = both((side) => side.type);
    if (types.some(Boolean)) row("quantization", ...types);
    row("cards", ...both((side) => side.gpus.join(", ")));
    row("verdict", verdict(sides.a), verdict(sides.b));
    for (const name of new Set([...first.keys(), ...second.keys()])) row(name, first.get(name), second.get(name));
    place.replaceChildren(table);
  };

  const read = () => {
    const every = [...new URLSearchParams(location.hash.slice(1))];
    const of = (name) => every.filter(([key]) => key.startsWith(`${name}.`)).map(([key, value]) => [key.slice(2), value]);
    const first = of("a");
    const strange = every.filter(([key]) => !/^[ab]\./.test(key)).map(([key, value]) => `${key}=${value}`);
    strange.push(...sides.a.take(first.length ? first : [["model", "qwen3-30b-a3b"], ["gpus", "rtx-4090"]]).map((each) => `a.${each}`));
    strange.push(...sides.b.take(of("b")).map((each) => `b.${each}`));
    ignored.textContent = `The address says what cannot be chosen here, which is ignored: ${strange.join(", ").slice(0, 300)}`;
    ignored.hidden = !strange.length;
    setCompared(of("b").length > 0);
    address.textContent = location.href;
    ask();
  };

  compare.addEventListener("click", () => {
    if (!isCompared()) sides.b.take(sides.a.state);
    setCompared(!isCompared());
    compared();
    changed();
  });

  window.addEventListener("hashchange", read);
  read();
})();
