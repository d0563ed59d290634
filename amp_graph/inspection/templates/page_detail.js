// The panel of one node, or of the whole model, and the tree of modules.

function showDetail(panel, node, view, go) {
  panel.replaceChildren();
  if (view.graph.fallback) {
    panel.append(make("p", "fallback", `This graph ${view.graph.fallback}`));
  }
  if (!node) {
    overview(panel, go);
    return;
  }
  const back = make("button", "link back", "Overview");
  back.type = "button";
  back.addEventListener("click", () => go(null));
  panel.append(back);
  const color = colorOf(node);
  if (node.color || node.kind === "cast") panel.append(make("span", `badge ${color}`, color));
  panel.append(make("h2", "", node.label));
  panel.append(make("p", "quiet", node.call));
  panel.append(factsOf(node));
  section(panel, "Why", reasons(node, view, go));
  section(panel, "Casts", casts(node, view, go));
  if (node.code || node.source) {
    const where = make("p", "quiet", node.source || "");
    section(panel, "Your code", node.code ? [where, make("pre", "", node.code)] : [where]);
  }
  section(panel, "Reads", links(node.operands, view, go));
  section(panel, "Read by", links(node.readers, view, go));
  section(panel, "Graph inside", inside(node, view, go));
  if (node.kind === "operator" && node.is_float && node.color !== "keep") {
    const other = node.low ? "deny" : "allow";
    section(panel, "To decide otherwise", [make("pre", "", `Override("${other}", name="${node.name}")`)]);
  }
}

function overview(panel, go) {
  panel.append(make("p", "empty", "Choose a node to see why it runs in its precision."));
  section(panel, "Graph breaks", data.breaks.map((told) => make("p", "told", told)));
  const others = data.graphs.map((graph) => graph.after).filter((graph) => graph.fallback);
  section(panel, "Fallbacks", others.map((graph) => {
    const told = make("p", "told");
    told.append(graphLink(graph.name, go), ` ${graph.fallback}`);
    return told;
  }));
  section(panel, "Colours", [get("legend").content.cloneNode(true)]);
}

function graphLink(name, go) {
  const button = make("button", "link", name);
  button.type = "button";
  button.addEventListener("click", () => go(null, name));
  return button;
}

function section(panel, title, parts) {
  if (!parts.length) return;
  panel.append(make("h3", "", title), ...parts);
}

function factsOf(node) {
  const list = make("dl", "facts");
  const facts = [
    ["math", node.math], ["storage", node.storage], ["shape", node.shape], ["module", node.module],
    ["operator", node.op],
    [node.kind === "cast" ? "moves" : "stores", node.bytes],
    ["computes", node.flops],
  ];
  for (const [key, value] of facts) {
    if (value) list.append(make("dt", "", key), make("dd", "", value));
  }
  return list;
}

function link(name, view, go) {
  const button = make("button", "link", view.labels.get(name) || name);
  button.type = "button";
  button.addEventListener("click", () => go(name));
  return button;
}

function links(names, view, go) {
  if (!names || !names.length) return [];
  const list = make("ul");
  for (const name of names) {
    const item = make("li");
    const node = view.byName.get(name);
    item.append(link(name, view, go));
    if (node && node.storage) item.append(make("span", "quiet", node.storage));
    list.append(item);
  }
  return [list];
}

function reasons(node, view, go) {
  if (!node.chain || !node.chain.length) return node.why ? [make("p", "", node.why)] : [];
  const list = make("ol");
  for (const reason of node.chain) {
    const item = make("li");
    if (reason.node !== node.name && view.byName.has(reason.node)) {
      item.append(link(reason.node, view, go), " ");
    }
    item.append(reason.text);
    list.append(item);
  }
  return [list];
}

function casts(node, view, go) {
  if (node.kind === "cast") return [];
  const names = [...(node.operands || []), ...(node.readers || [])];
  const found = names.filter((name) => (view.byName.get(name) || {}).kind === "cast");
  if (!found.length) return [];
  const list = make("ul");
  for (const name of found) {
    const cast = view.byName.get(name);
    const item = make("li");
    item.append(link(name, view, go), make("span", "quiet", cast.bytes));
    list.append(item);
  }
  return [list];
}

function inside(node, view, go) {
  const names = view.graph.bodies.filter((body) => {
    const attribute = body.slice(view.graph.name.length + 1);
    return (node.operands || []).includes(attribute) || node.name === attribute;
  });
  return names.map((name) => graphLink(name, go));
}

// The tree of modules with the share of their operators that is in low precision.
function moduleTree(nodes) {
  const root = { path: "", name: "", low: 0, total: 0, children: new Map() };
  for (const node of nodes) {
    if (!node.is_float) continue;
    let at = root;
    const parts = node.module ? node.module.split(".") : [];
    const passed = [root];
    for (const part of parts) {
      if (!at.children.has(part)) {
        const path = at.path ? `${at.path}.${part}` : part;
        at.children.set(part, { path, name: part, low: 0, total: 0, children: new Map() });
      }
      at = at.children.get(part);
      passed.push(at);
    }
    for (const module of passed) { module.total++; module.low += node.low ? 1 : 0; }
  }
  return root;
}

function showTree(nav, root, title, view, choose) {
  const level = (module, depth) => {
    const item = make("li");
    const line = make("div", module.path === view.module ? "module chosen" : "module");
    const open = view.open.get(module.path) ?? depth < 3;
    const fold = make("button", "fold", module.children.size ? (open ? "▾" : "▸") : "");
    fold.type = "button";
    fold.setAttribute("aria-label", "fold");
    fold.disabled = !module.children.size;
    fold.addEventListener("click", () => { view.open.set(module.path, !open); view.drawTree(); });
    const name = make("button", "name", module.name || title);
    name.type = "button";
    name.title = module.path || title;
    name.addEventListener("click", () => choose(module.path));
    const share = make("span", "share"), part = make("i");
    share.title = `${module.low} of ${module.total} operators on low-precision tensors`;
    part.style.width = `${(100 * module.low) / module.total}%`;
    if (!module.low) part.style.border = "0";
    share.append(part);
    line.append(fold, name);
    if (module.total) line.append(share);
    item.append(line);
    if (open && module.children.size) {
      const below = make("ul");
      for (const child of module.children.values()) below.append(level(child, depth + 1));
      item.append(below);
    }
    return item;
  };
  const list = make("ul");
  list.append(level(root, 0));
  nav.replaceChildren(list);
}
