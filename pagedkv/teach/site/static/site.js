"use strict";
// What moves on a page: the theme, predictions, and the players. Without it everything can be read.

document.documentElement.classList.add("js"); // before the text is drawn, so that no answer flashes up

// ---- light and dark

const THEMES = ["auto", "light", "dark"];

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* not remembered, then */ }
}

function themeButton() {
  const button = document.querySelector("button.theme");
  const show = () => { button.textContent = `Theme: ${document.documentElement.dataset.theme}`; };
  button.hidden = false;
  button.addEventListener("click", () => {
    chooseTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
    show();
  });
  show();
}

try {
  const kept = localStorage.getItem("theme");
  document.documentElement.dataset.theme = THEMES.includes(kept) ? kept : "auto";
} catch { document.documentElement.dataset.theme = "auto"; }

// ---- small help

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true || value === false) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const SCROLLS = ".out > pre, .text > pre, .out.drawing, .wide, .cell > .highlight pre, .picture, figure.out";

// What is wider than the page scrolls; then the keyboard must be able to reach it.
function letKeysScroll(inside) {
  for (const box of inside.querySelectorAll(SCROLLS)) {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

// A link to something folded opens the fold.
function unfold() {
  const there = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!there) return;
  for (let fold = there.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  const solution = there.matches("a, h3") && there.closest("[data-cell]")?.nextElementSibling;
  if (solution && solution.matches("details.solution")) solution.open = true;
  there.scrollIntoView();
}

// ---- predictions

const score = { asked: 0, predicted: 0 };

function count(predicted) {
  if (predicted) score.predicted += 1;
  const line = document.querySelector(".score");
  line.hidden = false;
  line.textContent = `Predicted: ${score.predicted} of ${score.asked} on this page.`;
}

function gate(form) {
  const covered = form.closest(".covered"), said = covered.querySelector(".guess");
  const [guess, predict, show] = form.querySelectorAll("input, button");
  const open = (text, predicted) => {
    covered.classList.add("open");
    form.remove();
    said.textContent = text;
    letKeysScroll(covered);
    count(predicted);
    const first = covered.querySelector(".out"); // where the button was there is nothing to stand on
    first.tabIndex = Math.max(first.tabIndex, -1);
    first.focus({ preventScroll: true });
  };
  score.asked += 1;
  form.hidden = false;
  guess.addEventListener("input", () => { predict.disabled = !guess.value.trim(); });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (guess.value.trim()) open(`You said: ${guess.value.trim()}`, true);
  });
  show.addEventListener("click", () => open("Shown without a guess.", false));
}

function showAllButton() {
  const button = document.querySelector("button.all");
  if (!button || !score.asked) return;
  button.hidden = false;
  button.addEventListener("click", () => {
    for (const show of document.querySelectorAll(".gate button[type=button]")) show.click();
    button.disabled = true;
    document.querySelector("h1").scrollIntoView();
  });
}

// ---- players

class Player {
  constructor(place, number) {
    Object.assign(this, JSON.parse(place.querySelector("script").textContent));
    this.place = place;
    this.number = number;
    this.isOpen = false;
    this.at = [...this.covered_start];
    this.prefix = "";
    this.timer = null;
    score.asked += 1;
    this.picture = make("div", { class: "picture drawing", role: "group", "aria-label": "The drawing" });
    this.verdict = make("p", { class: "verdict", role: "status" });
    this.live = make("div", { class: "live", role: "group", "aria-label": this.question },
      this.makeQuestion(), this.makeControls(), this.picture, this.verdict);
    this.live.addEventListener("keydown", (event) => this.key(event));
    place.append(this.live);
    place.classList.add("plays");
    this.draw();
  }

  // -- the question

  makeQuestion() {
    const predict = make("button", { type: "submit", disabled: true }, "Predict");
    const show = make("button", { type: "button", onclick: () => this.open(null) }, "Show me");
    let entry, value;
    if (this.choices.length) {
      const boxes = this.choices.map((choice) => make("input", {
        type: "radio", name: `choice-${this.number}`, value: choice, onchange: () => { predict.disabled = false; },
      }));
      entry = make("fieldset", {}, make("legend", {}, "Your guess"),
        ...boxes.map((box, i) => make("label", { class: "pick" }, box, this.choices[i])));
      value = () => boxes.find((box) => box.checked)?.value ?? "";
    } else {
      const text = make("input", { type: "text", autocomplete: "off" });
      text.addEventListener("input", () => { predict.disabled = !text.value.trim(); });
      entry = make("label", {}, "Your guess ", text);
      value = () => text.value.trim();
    }
    const form = make("form", { class: "gate" }, entry, predict, show);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (value()) this.open(value());
    });
    this.form = form;
    return make("div", {}, make("p", { class: "question" }, make("b", {}, "Predict: "), this.question), form);
  }

  open(guess) {
    const place = this.choices.indexOf(guess);
    const right = place < 0 ? null : this.right[place];
    this.prefix = guess === null ? "Not predicted."
      : right === null ? `You said ${guess}.` : right ? `Right: you said ${guess}.` : `Not so: you said ${guess}.`;
    this.isOpen = true;
    this.at = [...this.start];
    this.form.remove();
    count(guess !== null);
    this.draw();
    this.inputs[this.main].focus({ preventScroll: true });
  }

  // -- the controls

  makeControls() {
    this.inputs = this.controls.map((control, i) => this[control.kind](control, i));
    this.back = make("button", { type: "button", onclick: () => this.move(-1) }, "◀ Back");
    this.forward = make("button", { type: "button", onclick: () => this.move(1) }, "Forward ▶");
    this.play = make("button", { type: "button", class: "play", onclick: () => this.toggle() }, "Play");
    this.play.hidden = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const parts = this.inputs.map((input) => input.whole);
    parts[this.main] = make("span", { class: "steps" }, this.back, this.forward, this.play, parts[this.main]);
    return make("div", { class: "controls" }, ...parts);
  }

  slider(control, i) {
    const input = make("input", { type: "range", min: 0, max: control.labels.length - 1, step: 1 });
    const shown = make("output", {}, "");
    input.addEventListener("input", () => { this.stop(); this.go(i, Number(input.value)); });
    input.whole = make("label", {}, `${control.name} `, input, shown);
    input.show = () => {
      input.max = this.end(i);
      input.value = this.at[i];
      shown.textContent = control.labels[this.at[i]];
    };
    return input;
  }

  choice(control, i) {
    const input = make("select", {}, ...control.labels.map((label, n) => make("option", { value: n }, label)));
    input.addEventListener("change", () => { this.stop(); this.go(i, Number(input.value)); });
    input.whole = make("label", {}, `${control.name} `, input);
    input.show = () => { input.value = this.at[i]; };
    return input;
  }

  check(control, i) {
    const input = make("input", { type: "checkbox" });
    input.addEventListener("change", () => { this.stop(); this.go(i, Number(input.checked)); });
    input.whole = make("label", {}, input, ` ${control.name}`);
    input.show = () => { input.checked = this.at[i] === 1; };
    return input;
  }

  // -- where it is

  index(at) {
    return at.reduce((sum, n, i) => sum * this.controls[i].labels.length + n, 0);
  }

  reaches(i, n) {
    const at = this.at.with ? this.at.with(i, n) : this.at.map((old, j) => (j === i ? n : old));
    return (this.isOpen ? this.opened : this.covered)[this.index(at)] >= 0;
  }

  // The last position that control i can take while the others stay.
  end(i) {
    let n = this.controls[i].labels.length - 1;
    while (n > 0 && !this.reaches(i, n)) n -= 1;
    return n;
  }

  go(i, n) {
    const wasAtEnd = this.at[this.main] === this.end(this.main);
    if (i === this.main) n = Math.max(0, Math.min(n, this.end(i)));
    this.at[i] = n;
    if (i !== this.main && (wasAtEnd || !this.reaches(this.main, this.at[this.main]))) {
      this.at[this.main] = this.end(this.main); // who looks at the end wants to compare ends
    }
    this.draw();
  }

  move(by) { this.stop(); this.go(this.main, this.at[this.main] + by); }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.target.matches("input, select")) return; // these use the arrows themselves
    event.preventDefault();
    this.move(by);
  }

  // -- play and pause

  toggle() {
    if (this.timer) { this.stop(); return; }
    if (this.at[this.main] === this.end(this.main)) this.go(this.main, 0);
    this.play.textContent = "Pause";
    this.timer = setInterval(() => {
      this.go(this.main, this.at[this.main] + 1);
      if (this.at[this.main] === this.end(this.main)) this.stop();
    }, 1200);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
  }

  // -- what is seen

  draw() {
    const place = this.index(this.at);
    const frame = (this.isOpen ? this.opened : this.covered)[place];
    const says = (this.isOpen ? this.opened_says : this.covered_says)[place];
    this.picture.innerHTML = this.frames[frame].map((piece) => this.pieces[piece]).join("");
    this.place.dataset.frame = frame;
    const caption = this.picture.querySelector("caption")?.textContent.trim() ?? "";
    this.verdict.innerHTML = this.sentences[says];
    if (this.isOpen && !this.isWaiting(says)) this.verdict.prepend(`${this.prefix} `);
    this.inputs.forEach((input, i) => {
      input.show();
      input.disabled = !this.isOpen && this.end(i) === 0;
      if (i === this.main) input.setAttribute("aria-valuetext", `${this.controls[i].labels[this.at[i]]}. ${caption}`);
    });
    this.back.disabled = this.at[this.main] === 0;
    this.forward.disabled = this.at[this.main] === this.end(this.main);
    this.play.disabled = !this.isOpen;
    letKeysScroll(this.live);
  }

  // Whether the sentence is not the verdict: the answer is still to come, or the reader is elsewhere.
  isWaiting(says) { return !this.judged[says]; }
}

// ---- when the page is there

addEventListener("DOMContentLoaded", () => {
  themeButton();
  document.querySelectorAll(".player").forEach((place, number) => new Player(place, number));
  document.querySelectorAll("form.gate[hidden]").forEach(gate);
  showAllButton();
  letKeysScroll(document);
  addEventListener("resize", () => letKeysScroll(document));
  addEventListener("hashchange", unfold);
  if (location.hash) unfold();
});
