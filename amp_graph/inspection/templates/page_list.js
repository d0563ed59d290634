"use strict";
// The list of nodes: only the rows that can be seen exist, so that its length does not matter.

const ROW = 26, SPARE = 12;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// What a chip stands for: a colour, or a kind of node that has none of its own.
function groupOf(node) {
  return ["operator", "cast", "output"].includes(node.kind) ? colorOf(node) : "input";
}

function colorOf(node) { return node.kind === "cast" ? "cast" : node.color || "keep"; }

class NodeList {
  constructor(choose) {
    this.scroll = document.getElementById("scroll");
    this.space = document.getElementById("space");
    this.rows = document.getElementById("rows");
    this.nodes = [];
    this.chosen = null;
    this.choose = choose;
    this.waiting = false;
    this.scroll.addEventListener("scroll", () => this.soon());
    window.addEventListener("resize", () => this.soon());
    this.rows.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) choose(this.nodes[Number(row.dataset.index)]);
    });
    this.scroll.addEventListener("keydown", (event) => this.key(event));
  }

  show(nodes) {
    this.nodes = nodes;
    this.space.style.height = `${nodes.length * ROW}px`;
    this.draw();
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  draw() {
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW) - SPARE);
    const last = Math.ceil((this.scroll.scrollTop + this.scroll.clientHeight) / ROW) + SPARE;
    const seen = this.nodes.slice(first, last);
    this.rows.style.transform = `translateY(${first * ROW}px)`;
    this.rows.replaceChildren(...seen.map((node, i) => this.row(node, first + i)));
  }

  row(node, index) {
    const computes = node.kind === "operator" || node.kind === "cast" || node.kind === "output";
    const row = make("div", computes ? "row" : "row input");
    row.dataset.index = index;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", node === this.chosen);
    const color = colorOf(node);
    const name = node.kind === "output" ? "return" : node.label;
    const code = make("span", "node");
    code.append(make("b", "", name), node.call.slice(name.length));
    code.title = node.call;
    const badge = make("span");
    if (node.color || node.kind === "cast") badge.append(make("span", `badge ${color}`, color));
    badge.title = node.why || "";
    row.append(
      badge,
      make("span", "quiet", node.math || ""),
      make("span", "", node.storage || ""),
      code,
      make("span", "quiet", node.shape || ""),
      this.tail(node.module || ""),
      this.tail(node.line),
    );
    row.children[5].title = node.module || "";
    return row;
  }

  // A cell whose end matters most: it is cut at its start.
  tail(text) {
    const cell = make("span", "quiet tail");
    cell.append(make("bdi", "", text));
    return cell;
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (!step || !this.nodes.length) return;
    event.preventDefault();
    const at = this.nodes.indexOf(this.chosen);
    const next = Math.min(this.nodes.length - 1, Math.max(0, at < 0 ? 0 : at + step));
    this.choose(this.nodes[next]);
  }

  mark(node, reveal) {
    this.chosen = node;
    const index = this.nodes.indexOf(node);
    if (reveal && index >= 0) {
      const top = index * ROW, height = this.scroll.clientHeight;
      if (top < this.scroll.scrollTop || top + ROW > this.scroll.scrollTop + height) {
        this.scroll.scrollTop = top - height / 2;
      }
    }
    this.draw();
  }
}
