"use strict";
// Shows what Python decided: this script searches, sorts and draws. Text goes in as text; the page's policy forbids markup.
(() => {
  const began = performance.now();
  const data = JSON.parse(document.getElementById("data").textContent);
  const {texts, nodes, states} = data;
  const find = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const natural = new Intl.Collator("en", {numeric: true}).compare;
  const number = (n) => n.toLocaleString("en-GB");
  const counted = (n, one) => `${number(n)} ${n === 1 ? one : `${one}s`}`;

  function element(tag, properties, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties || {})) {
      if (value == null || value === false) continue;
      if (name === "onclick" || name === "onchange") made.addEventListener(name.slice(2), value);
      else if (name in made) made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children.flat(Infinity).filter((each) => each != null && each !== ""));
    return made;
  }

  function drawing(tag, properties) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(properties)) made.setAttribute(name, value);
    return made;
  }

  document.documentElement.classList.add("js");

  // ---- rows, as tables ask for them
  const unique = (values) => [...new Set(values)];
  class Service {
    constructor([namespace, name, type, tags, used, total, ports], position) {
      Object.assign(this, {namespace, name, type, tags, used, total, ports, position, text: ""});
      this.key = `${namespace}/${name}`;
      this.plan = data.plan[this.key] || "";
    }
    get outside() { return this.ports.flatMap((port) => port.fr.filter(([, kind]) => kind !== "cluster IP")); }
    get ips() { return unique(this.ports.map((port) => port.fr[0][0].slice(0, port.fr[0][0].lastIndexOf(":")).replace(/[[\]]/g, ""))); }
    get titles() { return unique(this.ports.map((port) => port.t)); }
  }
  const services = data.services.map((each, position) => new Service(each, position));
  const nodeName = (index) => (index < 0 ? "no node" : nodes[index].name);

  // Built with the first search: most readers never search.
  function index() {
    if (!services.length || services[0].text) return;
    for (const row of services) {
      const parts = [row.key, row.type, row.plan && "plan"];
      for (const port of row.ports) {
        parts.push(port.t);
        for (const front of port.fr) parts.push(front[0], front[1]);
        for (const end of port.e) parts.push(end[0], end[2], nodeName(end[1]), end[3]);
      }
      row.text = parts.join(" ").toLowerCase();
    }
  }

  // ---- a table: search, filters, order; above a few hundred rows only those in sight exist
  const WHOLE = 200;
  const MARGIN = 12;

  function table(root, options) {
    const body = find("tbody", root), count = find(".count", root), box = find("input", root);
    const state = {query: "", filters: new Set(), column: options.columns[0], direction: 1};
    let found = options.rows, height = 39, first = -1, last = -1, printing = false;

    const heads = options.columns.map((column) => {
      const button = element("button", {type: "button", onclick: () => {
        state.direction = state.column === column ? -state.direction : column.first || 1;
        state.column = column;
        order();
        draw(true);
      }}, column.label);
      const head = element("th", {scope: "col", className: `${column.number ? "num " : ""}${column.wide ? "w" : ""}`}, button);
      if (column.width) head.style.width = column.width;
      return head;
    });
    find("thead", root).replaceChildren(element("tr", {}, heads));

    const chips = options.filters.map((filter) => {
      const matching = options.rows.reduce((sum, row) => sum + (filter.test(row) ? 1 : 0), 0);
      if (!matching) return null;
      const chip = element("button", {type: "button", className: "chip", "aria-pressed": "false", onclick: () => {
        state.filters.has(filter) ? state.filters.delete(filter) : state.filters.add(filter);
        chip.setAttribute("aria-pressed", String(state.filters.has(filter)));
        select();
      }}, filter.label, element("span", {className: "n"}, number(matching)));
      return chip;
    }).filter(Boolean);
    find(".facets", root).replaceChildren(...(chips.length > 1 || options.rows.length > 1 ? chips : []));

    function select() {
      const started = performance.now();
      const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
      if (words.length) options.index();
      const filters = [...state.filters];
      found = options.rows.filter((row) =>
        filters.every((filter) => filter.test(row)) && words.every((word) => options.text(row).includes(word)));
      order();
      draw(true);
      root.dataset.ms = (performance.now() - started).toFixed(1);
    }

    function order() {
      const by = state.column.by;
      found = found.slice().sort((a, b) => {
        const x = by(a), y = by(b);
        return state.direction * (typeof x === "number" ? x - y : natural(x, y)) || a.position - b.position;
      });
    }

    function row(each, position) {
      const cells = options.columns.map((column) =>
        element("td", {className: `${column.number ? "num " : ""}${column.wide ? "w " : ""}${column.style || ""}`}, column.cell(each, position)));
      return element("tr", {"aria-rowindex": position + 2}, cells);
    }

    function space(rows) {
      const cell = element("td", {colSpan: options.columns.length});
      cell.style.height = `${rows * height}px`;
      return element("tr", {className: "space", "aria-hidden": "true"}, cell);
    }

    // Which rows are in sight; all of them if they are few, or on paper.
    function window_() {
      if (printing) return [0, Math.min(found.length, 1000)];
      if (found.length <= WHOLE) return [0, found.length];
      const top = -body.getBoundingClientRect().top;
      const start = Math.max(0, Math.floor(top / height) - MARGIN);
      return [Math.min(start, found.length - 1), Math.min(found.length, start + Math.ceil(innerHeight / height) + 2 * MARGIN)];
    }

    function draw(anew) {
      const [from, to] = window_();
      if (!anew && from === first && to === last) return;
      const focused = body.contains(document.activeElement) ? document.activeElement.dataset.at : null;
      [first, last] = [from, to];
      const rows = found.slice(from, to).map((each, offset) => row(each, from + offset));
      if (!found.length) rows.push(element("tr", {}, element("td", {colSpan: options.columns.length}, nothing())));
      body.replaceChildren(...(from ? [space(from)] : []), ...rows, ...(to < found.length && !printing ? [space(found.length - to)] : []));
      const measured = found.length && find("tr:not(.space)", body).offsetHeight;
      if (measured) height = measured;
      if (focused != null) focus(+focused);
      heads.forEach((head, i) => options.columns[i] === state.column
        ? head.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending") : head.removeAttribute("aria-sort"));
      find("table", root).setAttribute("aria-rowcount", found.length + 1);
      const of = counted(options.rows.length, options.one);
      count.textContent = found.length === options.rows.length ? of : `${number(found.length)} of ${of}`;
    }

    function nothing() {
      const filtered = state.filters.size ? (state.query ? " with these filters" : "these filters") : "";
      return element("div", {className: "empty"}, element("b", {}, `No ${options.one}`), "Nothing matches ",
        state.query ? element("span", {className: "mono"}, `"${state.query}"`) : "", filtered, ". ",
        element("button", {type: "button", className: "btn", onclick: clear}, "Clear"));
    }

    function clear() {
      state.query = box.value = "";
      state.filters.clear();
      for (const chip of chips) chip.setAttribute("aria-pressed", "false");
      select();
      box.focus();
    }

    const link = (position) => find(`a[data-at="${position}"]`, body);
    function focus(position) {
      const there = link(position);
      if (there) there.focus({preventScroll: true});
    }

    // The arrow keys go from the search to the first row, and from row to row.
    root.addEventListener("keydown", (event) => {
      const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
      if (!step) return;
      const at = document.activeElement.dataset ? document.activeElement.dataset.at : undefined;
      if (at === undefined && !(document.activeElement === box && step > 0)) return;
      event.preventDefault();
      const to = at === undefined ? 0 : +at + step;
      if (to < 0) return box.focus();
      if (to >= found.length) return;
      let there = link(to);
      if (!there) { scrollBy(0, step * height); draw(); there = link(to); }
      if (there) { there.focus({preventScroll: true}); there.scrollIntoView({block: "nearest"}); }
    });
    let waiting = 0;
    box.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { state.query = box.value; select(); }, 60);
    });
    box.addEventListener("keydown", (event) => { if (event.key === "Escape") clear(); });
    let asked = false;
    const moved = () => {
      if (asked || !root.classList.contains("on")) return;
      asked = true;
      requestAnimationFrame(() => { asked = false; draw(); });
    };
    addEventListener("scroll", moved, {passive: true});
    addEventListener("resize", moved);
    addEventListener("beforeprint", () => { printing = true; draw(true); });
    addEventListener("afterprint", () => { printing = false; draw(true); });
    return {
      show() { draw(true); },
      search(query) { state.query = box.value = query; select(); },
    };
  }

  const several = (values) => values.length < 2 ? values[0] || "–" : `${values[0]} +${values.length - 1}`;
  const muted = (text) => element("span", {className: "muted"}, text);
  const planned = {"added": "new in the plan", "removed": "removed by the plan", "changed": "changed by the plan"};

  const serviceTable = find("#services .tbl") && table(find("#services"), {
    rows: services, one: "Service", index, text: (row) => row.text,
    columns: [
      {label: "Service", width: "29%", style: "name", by: (row) => row.position, cell: (row, at) => [
        element("a", {href: `#service/${encodeURIComponent(row.namespace)}/${encodeURIComponent(row.name)}`, title: row.key, "data-at": at},
          element("span", {className: "ns"}, `${row.namespace}/`), row.name),
        row.plan ? [" ", element("span", {className: `tag ${row.plan}`}, planned[row.plan])] : ""]},
      {label: "Type", width: "11%", wide: true, by: (row) => row.type, cell: (row) => row.type},
      {label: "Cluster IP", width: "15%", wide: true, style: "mono", by: (row) => row.ips[0] || "", cell: (row) => element("span", {title: row.ips.join("\n")}, several(row.ips))},
      {label: "From outside", width: "18%", wide: true, first: -1, by: (row) => row.outside.length,
        cell: (row) => row.outside.length ? element("span", {className: "mono", title: row.outside.map(([at, kind]) => `${kind} ${at}`).join("\n")}, several(row.outside.map(([at]) => at))) : muted("–")},
      {label: "Ports", width: "16%", wide: true, by: (row) => row.titles[0], cell: (row) => element("span", {title: row.titles.join("\n")}, several(row.titles))},
      {label: "Endpoints", width: "11%", number: true, by: (row) => row.used, cell: (row) => row.used
        ? [number(row.used), row.total > row.used ? muted(` of ${number(row.total)}`) : ""] : element("span", {className: "st bad"}, "none")},
    ],
    filters: [
      ...data.filters.map((label, tag) => ({label, test: (row) => row.tags.includes(tag)})),  // these texts come first
      {label: "in the plan", test: (row) => row.plan},
    ],
  });

  const nodeTable = find("#nodes .tbl") && table(find("#nodes"), {
    rows: nodes.map((node, position) => ({...node, position})).sort((a, b) => states[b.state].rank - states[a.state].rank || a.position - b.position), one: "node", index: () => {},
    text: (row) => [row.name, row.host, row.zone, row.address, row.generation, row.wanted, states[row.state].word, row.note].join(" ").toLowerCase(),
    columns: [
      {label: "State", by: (row) => -states[row.state].rank, cell: (row) => element("span", {className: `st ${row.state}`}, states[row.state].word)},
      {label: "Node", by: (row) => row.name, cell: (row, at) => [element("b", {}, row.name), row.address || row.host !== row.name ? element("div", {className: "muted small nowrap"}, [row.address, row.host !== row.name ? row.host : ""].filter(Boolean).join(", ")) : "",
        row.note ? element("div", {className: "small narrow"}, row.note) : ""]},
      {label: "Zone", wide: true, style: "nowrap", by: (row) => row.zone, cell: (row) => row.zone || muted("–")},
      {label: "Generation", wide: true, style: "mono nowrap", by: (row) => row.generation || row.wanted, cell: (row) => [row.generation.slice(0, 12) || muted(row.wanted ? "" : "–"),
        row.wanted && row.wanted !== row.generation ? element("div", {className: "small muted nowrap"}, `should be ${row.wanted.slice(0, 12)}`) : ""]},
      {label: "Confirmed", number: true, first: -1, by: (row) => row.seconds, cell: (row) => row.age ? [element("span", {className: "nowrap"}, `${row.age} ago`), element("div", {className: "muted small nowrap"}, row.when)] : muted("–")},
      {label: "Drift", number: true, wide: true, first: -1, by: (row) => row.drift == null ? -1 : row.drift,
        cell: (row) => row.drift == null ? muted("–") : row.drift ? element("span", {className: "tag bad"}, counted(row.drift, "rule")) : muted("0")},
      {label: "What is known", wide: true, by: (row) => row.note, cell: (row) => row.note || muted("the kernel holds what was computed")},
    ],
    filters: Object.keys(states).map((state) => ({label: states[state].word, test: (row) => row.state === state})),
  });

  // ---- one Service as a picture
  const NAMES = [["inside", "internalTrafficPolicy", "From pods and nodes"], ["outside", "externalTrafficPolicy", "From outside"]];
  const MOST_ENDPOINTS = 24;

  // What each node, or one of them, does with an endpoint: Python grouped the nodes, here they are counted.
  function seen(port, at) {
    const groups = port.g.filter(([members]) => at < 0 || !members || members.includes(at));
    return [0, 1].map((which) => {
      const lanes = groups.filter((group) => group[1 + which] >= 0)
        .map((group) => ({size: group[0] ? group[0].length : nodes.length, lane: port.l[group[1 + which]]}));
      if (!lanes.length) return null;
      const users = port.e.map(() => 0), share = port.e.map(() => 0), why = port.e.map(() => "");
      for (const {size, lane} of lanes) {
        for (const end of lane[0]) { users[end] += size; share[end] = lane[1]; }
        for (const [end, reason] of lane[2]) why[end] = why[end] || texts[reason];
      }
      const stopped = lanes.filter(({lane}) => lane[5]);
      const lost = stopped.reduce((sum, {size}) => sum + size, 0);
      const total = lanes.reduce((sum, {size}) => sum + size, 0);
      const serving = lanes.filter(({lane}) => !lane[5]);
      const told = serving.length ? serving : lanes;
      return {users, share, why, total, lost, one: lanes.length === 1 || at >= 0, end: lost === total ? stopped[0].lane[5] : "",
        stopped: stopped.length ? stopped[0].lane[5] : "", words: texts[told[0].lane[3]], source: texts[told[0].lane[4]], various: new Set(told.map(({lane}) => lane[3])).size > 1};
    });
  }

  function policyBox(lane, which, port) {
    const [style, field] = NAMES[which];
    const lines = lane.end ? [element("b", {}, lane.end[0].toUpperCase() + lane.end.slice(1)), element("p", {}, lane.words)] : [
      element("b", {}, `${field} ${port.po[which]}`),
      element("p", {}, lane.various ? "Which endpoints are used depends on the node." : lane.words),
      lane.lost ? element("p", {}, `${number(lane.lost)} of ${counted(lane.total, "node")} can use none: there it is ${lane.stopped}.`) : "",
      element("p", {}, lane.source)];
    return element("div", {className: "cell"}, element("div", {className: `pol ${style}${lane.end ? " stop" : ""}`}, lines));
  }

  function endpointBox(end, position, lanes) {
    const used = lanes.some((lane) => lane && lane.users[position]);
    const both = lanes[0] && lanes[1];
    const line = (lane) => {
      if (!lane.users[position]) return null;
      if (lane.one) return `${lane.share[position]} %`;
      return lane.users[position] === lane.total ? "every node" : counted(lane.users[position], "node");
    };
    const told = lanes.map((lane) => lane && line(lane));
    const same = !both || told[0] === told[1];
    const shares = same ? [told[0] || told[1] || ""] : told.map((text, which) => text && element("div", {}, element("i", {}, `${NAMES[which][0]} `), text)).filter(Boolean);
    const reasons = lanes.map((lane) => lane && !lane.users[position] ? lane.why[position] : "");
    const why = !both || reasons[0] === reasons[1] ? [reasons[0] || reasons[1]].filter(Boolean)
      : reasons.map((reason, which) => reason && `${NAMES[which][0]}: ${reason}`).filter(Boolean);
    return element("div", {className: "cell"}, element("div", {className: `ep${used ? "" : " out"}`},
      element("b", {}, end[0]), element("span", {className: "sh"}, shares),
      end[2] || end[3] ? element("span", {className: "who"}, [end[2], used && end[3]].filter(Boolean).join(", ")) : "", end[2] || end[3] ? element("span") : "",
      why.map((reason) => element("span", {className: "why"}, reason))));
  }

  function wires(paths) {
    const made = drawing("svg", {class: "wires", viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true"});
    for (const {from, to, style, width} of paths) {
      const d = style === "dead" ? `M0,${from} H60` : `M0,${from} C55,${from} 45,${to} 100,${to}`;
      const path = drawing("path", {d, class: style});
      path.setAttribute("stroke-width", width);
      made.append(path);
    }
    return made;
  }

  const middle = (position, count) => (100 * (position + 0.5)) / count;

  function picture(port, at, whole) {
    const lanes = seen(port, at);
    const shown = [0, 1].filter((which) => lanes[which]);
    const fronts = port.fr.map((front) => ({front, lane: front[1] === "cluster IP" ? 0 : 1}));
    const order = port.e.map((_end, position) => position).sort((a, b) => natural(place(port.e[a]), place(port.e[b])) || natural(port.e[a][0], port.e[b][0]));
    const ends = whole ? order : order.slice(0, MOST_ENDPOINTS);
    const first = fronts.map(({lane}, position) => ({from: middle(position, fronts.length), to: middle(shown.indexOf(lane), shown.length), style: NAMES[lane][0], width: 2}));
    const second = shown.flatMap((which, row) => lanes[which].end ? [{from: middle(row, shown.length), style: "dead", width: 2}]
      : ends.map((end, position) => lanes[which].users[end] && {from: middle(row, shown.length), to: middle(position, ends.length), style: NAMES[which][0],
        width: lanes[which].one ? 1 + lanes[which].share[end] / 25 : 1.5}).filter(Boolean));
    const hosts = [];
    ends.forEach((end, position) => {
      const host = port.e[end][1], last = hosts[hosts.length - 1];
      if (last && last.host === host) last.size += 1;
      else hosts.push({host, position, size: 1});
    });
    const column = element("div", {className: "ends"}, ends.map((end) => endpointBox(port.e[end], end, lanes)), hosts.map(({host, position, size}) => {
      const box = element("div", {className: `host${host >= 0 && host === at ? " here" : ""}`}, element("b", {}, nodeName(host)), host >= 0 && nodes[host].zone ? element("span", {}, nodes[host].zone) : "");
      box.style.gridRow = `${position + 1} / span ${size}`;
      return box;
    }));
    [...column.children].slice(0, ends.length).forEach((cell, position) => { cell.style.gridRow = String(position + 1); });
    const right = ends.length ? column : element("div", {className: "ends muted"}, "No endpoints: the EndpointSlices of the Service name none.");
    const heading = (text) => element("h3", {}, text);
    return element("div", {className: "card flow"},
      heading("Frontends"), element("span"), heading("Policy"), element("span"), heading("Endpoints, on nodes"),
      element("div", {className: "stack fronts"}, fronts.map(({front}) => element("div", {className: "cell"}, element("div", {className: "box"}, element("b", {}, front[0]), element("span", {}, [front[1], front[2]].filter(Boolean).join(", ")))))),
      wires(first), element("div", {className: "stack pols"}, shown.map((which) => policyBox(lanes[which], which, port))),
      wires(second), right);
  }

  const place = (end) => (end[1] < 0 ? "~" : `${nodes[end[1]].zone} ${nodes[end[1]].name}`);

  function showService(namespace, name) {
    const box = find("#service"), row = services.find((each) => each.namespace === namespace && each.name === name);
    if (!row) {
      box.replaceChildren(element("div", {className: "card empty"}, element("b", {}, `No Service ${namespace}/${name}`), "The cluster of this report does not have it. ", element("a", {href: "#services"}, "All Services")));
      return;
    }
    let at = -1, chosen = 0, whole = false;
    const families = new Set(row.ports.map((port) => port.f)).size > 1;
    const draw = (focus) => {
      const port = row.ports[chosen];
      const from = element("select", {id: "from", onchange: (event) => { at = +event.target.value; draw("#from"); }},
        element("option", {value: -1}, `every node (${number(nodes.length)})`), nodes.map((node, position) => element("option", {value: position, selected: position === at}, node.name)));
      const tabs = row.ports.length > 1 ? element("div", {className: "facets", role: "group", "aria-label": "Port"}, row.ports.map((each, position) =>
        element("button", {type: "button", className: "chip", id: `port-${position}`, "aria-pressed": String(position === chosen), onclick: () => { chosen = position; whole = false; draw(`#port-${position}`); }}, each.t + (families ? ` ${each.f}` : "")))) : "";
      box.replaceChildren(
        element("p", {className: "small no-print back"}, element("a", {href: "#services"}, "← All Services")),
        element("div", {className: "head"}, element("h1", {}, element("span", {className: "muted"}, `${row.namespace}/`), row.name), element("span", {className: "tag"}, row.type),
          row.plan ? element("a", {href: "#plan", className: `tag ${row.plan}`}, planned[row.plan]) : ""),
        element("div", {className: "tools"}, tabs || element("span", {className: "muted"}, port.t), nodes.length > 1 ? element("div", {className: "seen"}, element("label", {htmlFor: "from", className: "muted"}, "Seen from"), from) : ""),
        picture(port, at, whole),
        port.e.length > MOST_ENDPOINTS && !whole ? element("p", {className: "more"},
          element("button", {type: "button", className: "btn", onclick: () => { whole = true; draw(); }}, `Show all ${number(port.e.length)} endpoints`)) : "",
        ...port.no.map((note) => element("p", {className: "muted small more"}, note)),
        element("p", {className: "muted small more"}, "Rule by rule: ", element("code", {}, `akp explain${data.directory ? ` --dir ${data.directory}` : ""} --node ${at < 0 ? nodeName(0) : nodeName(at)} --from POD --to ${port.fr[0][0]}/${port.t.split("/").pop()}`)));
      if (focus) find(focus).focus();
    };
    draw();
  }

  // ---- which view
  const views = all("section.view"), tabs = all("nav.tabs a");
  function route() {
    const [view, first, second] = (location.hash.slice(1) || "overview").split("/").map(decoded);
    const id = views.some((each) => each.id === view) ? view : "overview";
    if (id === "service") showService(first || "", second || "");
    for (const each of views) each.classList.toggle("on", each.id === id);
    for (const tab of tabs) {
      if (tab.hash === `#${id === "service" ? "services" : id}`) {
        tab.setAttribute("aria-current", "page");
        tab.parentNode.scrollLeft = tab.offsetLeft - 60;
      } else tab.removeAttribute("aria-current");
    }
    scrollTo(0, 0);
    if (id === "services" && serviceTable) first ? serviceTable.search(first) : serviceTable.show();
    if (id === "nodes" && nodeTable) first ? nodeTable.search(first) : nodeTable.show();
  }

  function decoded(text) {
    try { return decodeURIComponent(text); } catch { return text; }
  }

  const below = () => document.documentElement.style.setProperty("--top", `${find("header.top").offsetHeight}px`);
  addEventListener("resize", below);
  below();
  addEventListener("hashchange", route);
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || /INPUT|SELECT/.test(document.activeElement.tagName)) return;
    event.preventDefault();
    const here = find("#nodes").classList.contains("on") ? "#nodes" : "#services";
    if (!find(here).classList.contains("on")) location.hash = here;
    setTimeout(() => find(`${here} input`)?.focus(), 0);
  });
  const box = find("#services input");
  if (box && innerWidth > 700) box.placeholder += "     press /";  // a phone has no such key
  route();
  const old = Date.now() / 1000 - data.made;
  if (old > 3600) {
    find("#stale").textContent = `This report was made ${old > 172800 ? `${Math.round(old / 86400)} days` : counted(Math.round(old / 3600), "hour")} ago. Nodes may have changed since.`;
    find("#stale").hidden = false;
  }
  document.documentElement.dataset.ms = (performance.now() - began).toFixed(0);
})();
