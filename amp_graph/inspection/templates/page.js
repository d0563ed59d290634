// The page: which graph is shown, and which of its nodes pass the filters.

const data = JSON.parse(document.getElementById("data").textContent);
const GROUPS = ["allow", "infer", "clear", "deny", "keep", "cast", "input"];
const NAMES = { input: "inputs", cast: "casts" };
const get = (id) => document.getElementById(id);

const view = {
  index: 0, side: "after", graph: null, labels: new Map(), byName: new Map(), text: new Map(),
  module: "", hidden: new Set(["input"]), operator: "", words: [], node: null, open: new Map(),
};
const list = new NodeList((node) => choose(node, true));

function load(index, side) {
  view.index = index;
  view.side = side;
  view.graph = data.graphs[index][side];
  const nodes = view.graph.nodes;
  view.labels = new Map(nodes.map((n) => [n.name, n.label]));
  view.byName = new Map(nodes.map((n) => [n.name, n]));
  view.text = new Map(nodes.map((n) => [n, [
    n.name, n.label, n.op, n.module, n.source, n.code, n.why, n.storage, n.shape,
  ].join("\n").toLowerCase()]));
  view.module = "";
  view.root = moduleTree(nodes);
  get("graph").value = String(index);
  for (const button of document.querySelectorAll("[data-side]")) {
    button.setAttribute("aria-pressed", button.dataset.side === side);
  }
  drawColors();
  drawOperators();
  view.drawTree();
  choose(view.node && view.byName.get(view.node.name), false);
  filter();
}

view.drawTree = () => showTree(get("tree"), view.root, data.model, view, (path) => {
  view.module = path;
  view.drawTree();
  filter();
});

function passes(node) {
  if (view.hidden.has(groupOf(node))) return false;
  if (view.operator && node.op !== view.operator) return false;
  const module = node.module || "";
  if (view.module && module !== view.module && !module.startsWith(`${view.module}.`)) return false;
  return view.words.every((word) => view.text.get(node).includes(word));
}

function filter() {
  const nodes = view.graph.nodes.filter(passes);
  const all = view.graph.nodes.length;
  list.show(nodes);
  get("count").textContent = nodes.length === all
    ? `${all.toLocaleString("en")} nodes and casts`
    : `${nodes.length.toLocaleString("en")} of ${all.toLocaleString("en")} nodes and casts`;
  get("reset").hidden = nodes.length === all;
}

function choose(node, reveal) {
  view.node = node || null;
  if (node && !passes(node)) reset();
  list.mark(view.node, reveal);
  showDetail(get("detail"), view.node, view, go);
  const place = node ? `#${encodeURIComponent(view.graph.name)}/${encodeURIComponent(node.name)}` : "";
  if (node) history.replaceState(null, "", place);
}

function go(name, graph) {
  if (graph) {
    const index = data.graphs.findIndex((g) => g[view.side].name === graph);
    if (index >= 0) load(index, view.side);
    return;
  }
  choose(name && view.byName.get(name), true);
}

function reset() {
  view.module = view.operator = "";
  view.words = [];
  view.hidden.clear();
  get("search").value = "";
  drawColors();
  drawOperators();
  view.drawTree();
  filter();
}

function drawColors() {
  const counts = new Map();
  for (const node of view.graph.nodes) {
    counts.set(groupOf(node), (counts.get(groupOf(node)) || 0) + 1);
  }
  get("colors").replaceChildren(...GROUPS.filter((c) => counts.get(c)).map((color) => {
    const chip = make("button");
    chip.type = "button";
    chip.setAttribute("aria-pressed", !view.hidden.has(color));
    chip.title = `Show or hide ${NAMES[color] || color}; double-click for it alone`;
    chip.append(make("span", `swatch ${color}`), NAMES[color] || color, make("small", "", counts.get(color)));
    chip.addEventListener("click", () => {
      if (!view.hidden.delete(color)) view.hidden.add(color);
      drawColors();
      filter();
    });
    chip.addEventListener("dblclick", () => {
      view.hidden = new Set(GROUPS.filter((c) => c !== color));
      drawColors();
      filter();
    });
    return chip;
  }));
}

function drawOperators() {
  const counts = new Map();
  for (const node of view.graph.nodes) counts.set(node.op, (counts.get(node.op) || 0) + 1);
  const options = [...counts].sort(([a], [b]) => a.localeCompare(b)).map(([op, n]) => {
    const option = make("option", "", `${op} (${n})`);
    option.value = op;
    return option;
  });
  const all = make("option", "", "All operators");
  all.value = "";
  get("operator").replaceChildren(all, ...options);
  get("operator").value = view.operator;
}

get("graph").append(...data.graphs.map((graph, i) => {
  const count = graph.after.nodes.length.toLocaleString("en");
  const option = make("option", "", `${graph.after.name} (${count})`);
  option.value = String(i);
  return option;
}));
get("graph").addEventListener("change", (event) => load(Number(event.target.value), view.side));
get("operator").addEventListener("change", (event) => { view.operator = event.target.value; filter(); });
get("search").addEventListener("input", (event) => {
  view.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  filter();
});
get("reset").addEventListener("click", reset);
for (const button of document.querySelectorAll("[data-side]")) {
  button.addEventListener("click", () => load(view.index, button.dataset.side));
}
document.addEventListener("keydown", (event) => {
  const typing = ["INPUT", "SELECT"].includes(document.activeElement.tagName);
  if (event.key === "/" && !typing) { event.preventDefault(); get("search").focus(); }
  if (event.key === "Escape") { reset(); get("scroll").focus(); }
});

const [wanted, node] = location.hash.slice(1).split("/").map(decodeURIComponent);
const named = data.graphs.findIndex((graph) => graph.after.name === wanted);
const filled = data.graphs.findIndex((graph) => graph.after.nodes.length);
load(Math.max(0, named >= 0 ? named : filled), "after");
if (node && view.byName.has(node)) choose(view.byName.get(node), true);
