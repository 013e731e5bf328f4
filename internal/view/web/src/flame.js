import { select } from "d3-selection";
import flamegraph from "d3-flame-graph";
import { Profile, base, faults, major } from "./profile.js";
import { changeColour, languageColour, matchColour } from "./palette.js";
import { bytes, change, count, share, time } from "./format.js";
import "./flame.css";

// All text comes from the traced processes and is hostile: it is only ever put into text
// nodes and attributes that hold text.

const element = (id) => document.getElementById(id);
const profile = new Profile(JSON.parse(element("data").textContent));
const differential = profile.samples.length > 1;
const totals = profile.samples.map((samples) => profile.totals(samples));
const formats = [count, time, bytes];
const valueNames = ["faults", "time", "bytes"];

const state = {
  wanted: { value: 0, kinds: new Set(profile.kindTotals().keys()), major: false, lines: true, widths: 0, stackless: profile.runs.every((run) => run.stacked === 0) },
  inverted: true,
  byChange: differential,
  term: "",
};
let tree; // what is drawn: the outermost object of Profile.tree
let root; // the same as a node of the library, whose data it is
let zoomed = null;
let current = null; // the frame with the keyboard's focus

function make(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ---- what is fixed

function describe() {
  const [run, other] = profile.runs;
  element("command").textContent = run.command || "all processes";
  const facts = element("facts");
  const add = (term, text) => {
    if (!text) return;
    const pair = make("div");
    pair.append(make("dt", term), make("dd", text));
    facts.append(pair);
  };
  const withStack = (r) => `${count(r.stacked)} (${share(r.stacked, r.faults)})${r.estimated ? ", the others estimated from these" : ""}`;
  add("faults", count(run.faults));
  add("with a stack", withStack(run));
  add("lost", count(run.lost));
  add("host", run.host);
  add("kernel", run.kernel);
  add("hook", run.hook);
  add("began", run.begin);
  add("ran for", run.duration ? time(run.duration) : "");
  if (other) {
    add("compared with", other.command || "all processes");
    add("its faults", `${count(other.faults)}, with a stack ${withStack(other)}, ${count(other.lost)} lost`);
    add("it began", other.begin);
  }
}

function offerChoices() {
  for (const radio of document.querySelectorAll('input[name="value"]')) {
    radio.disabled = totals.every((sums) => sums[Number(radio.value)] === 0) && radio.value !== "0";
    radio.addEventListener("change", () => redraw({ value: Number(radio.value) }));
  }
  for (const radio of document.querySelectorAll('input[name="layout"]')) {
    radio.addEventListener("change", () => {
      state.inverted = radio.value === "icicle";
      redraw({});
      reveal((d) => d === root);
    });
  }
  element("widths").hidden = element("colours").hidden = !differential;
  for (const radio of document.querySelectorAll('input[name="widths"]')) {
    radio.addEventListener("change", () => redraw({ widths: Number(radio.value) }));
  }
  for (const radio of document.querySelectorAll('input[name="colours"]')) {
    radio.addEventListener("change", () => {
      state.byChange = radio.value === "change";
      drawLegend();
      update();
    });
  }
  const kinds = [...profile.kindTotals()].sort((a, b) => b[1] - a[1]);
  for (const [kind, n] of kinds) {
    const label = make("label");
    const box = make("input");
    box.type = "checkbox";
    box.checked = true;
    box.name = "kind";
    box.value = profile.kinds[kind];
    box.addEventListener("change", () => {
      const wanted = new Set(state.wanted.kinds);
      if (box.checked) wanted.add(kind);
      else wanted.delete(kind);
      redraw({ kinds: wanted });
    });
    const text = make("span", profile.kinds[kind]);
    text.append(" ", make("small", count(n)));
    label.append(box, text);
    element("kinds").append(label);
  }
  element("major").addEventListener("change", (event) => redraw({ major: event.target.checked }));
  // Of a share chosen by chance the others have nothing to show but their number.
  element("stackless-choice").hidden = profile.stackless < 0 || state.wanted.stackless;
  element("stackless").addEventListener("change", (event) => redraw({ stackless: event.target.checked }));
  element("lines").addEventListener("change", (event) => redraw({ lines: event.target.checked }));
  element("reset").addEventListener("click", resetZoom);
  element("search").addEventListener("input", (event) => {
    state.term = event.target.value.toLowerCase();
    search();
    update();
    reveal((d) => d.highlight);
  });
  element("controls").addEventListener("submit", (event) => event.preventDefault());
}

function drawLegend() {
  const legend = element("legend");
  legend.replaceChildren();
  const add = (colour, text) => {
    const item = make("li");
    const swatch = make("i");
    swatch.style.backgroundColor = colour;
    item.append(swatch, text);
    legend.append(item);
  };
  if (state.byChange) {
    add(changeColour(-0.1), "share fell by 10 % of all or more");
    add(changeColour(-0.01), "by 1 %");
    add(changeColour(0), "the same");
    add(changeColour(0.01), "rose by 1 %");
    add(changeColour(0.1), "by 10 % or more");
    return;
  }
  for (const language of profile.usedLanguages()) {
    add(languageColour(profile.colour(language)), language === "unknown" ? "other" : language);
  }
}

// ---- the graph

const chart = flamegraph()
  .cellHeight(20)
  .minFrameSize(1.5)
  .resetHeightOnZoom(true)
  .setLabelHandler((d) => label(d.data))
  .setDetailsHandler(() => {})
  .setColorMapper((d) => {
    if (d.highlight) return matchColour;
    if (state.byChange) return changeColour(changeOf(d.data));
    return languageColour(profile.colour(d.data.frame.language), d.data.frame.name);
  })
  .onClick((d) => {
    zoomed = d === root ? null : d;
    decorate();
    focus(d, false);
    // The graph's new height moves the root of a flame.
    if (!state.inverted) setTimeout(() => reveal((other) => other === d), 2 * chart.transitionDuration());
  });

// changeOf is by how much the share of the whole has grown since the other run.
function changeOf(object) {
  if (!differential) return 0;
  const { value } = state.wanted;
  const part = (run) => object.runs[run].sums[value] / (tree.runs[run].sums[value] || 1);
  return part(0) - part(1);
}

function label(object) {
  const { value, widths } = state.wanted;
  const whole = tree.runs[widths].sums[value];
  return `${object.name}, ${formats[value](object.value)}${value === 0 ? " faults" : ""}, ${share(object.value, whole)}`;
}

function redraw(change) {
  Object.assign(state.wanted, change);
  tree = profile.tree(state.wanted);
  zoomed = current = null;
  const holder = select(element("chart"));
  holder.selectAll("g").remove();
  element("empty").hidden = tree.value > 0;
  chart.width(width()).inverted(state.inverted);
  chart.transitionDuration(0);
  if (holder.select("svg").empty()) holder.datum(tree).call(chart);
  else chart.update(tree);
  root = holder.datum();
  animate();
  search();
  if (state.term === "") decorate();
  else update();
  showDetails(tree);
}

// animate makes zooming move frames, where people have not asked for less motion.
function animate() {
  chart.transitionDuration(matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 200);
}

function update() {
  chart.update();
  decorate();
}

// decorate adds to the frames what the library does not: names for those who cannot see
// them, the place of the keyboard and colours of text.
function decorate() {
  element("reset").disabled = zoomed === null;
  if (!current || current.x1 === current.x0) current = zoomed ?? root;
  select(element("chart")).select("svg")
    .attr("role", "group")
    .attr("aria-label", `Flame graph of ${valueNames[state.wanted.value]}`)
    .selectAll("g")
    .attr("role", "button")
    .attr("tabindex", (d) => (d === current ? 0 : -1))
    .attr("aria-label", (d) => label(d.data))
    .classed("match", (d) => d.highlight === true);
}

const width = () => Math.max(element("chart").clientWidth, 200);

function resetZoom() {
  if (zoomed === null) return;
  chart.resetZoom();
}

// search marks what matches and says how much of the whole that is. A frame below one that
// matches is part of it.
function search() {
  let matched = 0;
  let frames = 0;
  const { value, widths } = state.wanted;
  root.eachBefore((d) => {
    d.within = d.parent ? d.parent.within || d.parent.highlight : false;
    d.highlight = state.term !== "" && d !== root && matches(d.data.frame);
    if (!d.highlight) return;
    frames++;
    if (!d.within) matched += d.data.value;
  });
  const whole = tree.runs[widths].sums[value];
  element("matched").textContent = state.term === ""
    ? ""
    : `${share(matched, whole)} of ${valueNames[value]} in ${count(frames)} ${frames === 1 ? "frame" : "frames"}`;
}

function matches(frame) {
  const place = frame.line ? `${frame.file}:${frame.line}` : frame.file;
  return [frame.name, place, frame.module].some((text) => text.toLowerCase().includes(state.term));
}

// reveal scrolls to the nearest of the frames that are wanted, unless one is in sight.
function reveal(wanted) {
  const top = element("search-row").offsetHeight;
  const bottom = innerHeight - element("details").offsetHeight;
  let nearest = Infinity;
  let by = 0;
  for (const g of element("chart").querySelectorAll("g")) {
    if (!wanted(select(g).datum())) continue;
    const box = g.getBoundingClientRect();
    const above = top - box.top;
    const below = box.bottom - bottom;
    const distance = Math.max(above, below, 0);
    if (distance >= nearest) continue;
    nearest = distance;
    by = distance === 0 ? 0 : above > 0 ? -above : below;
  }
  if (by !== 0) scrollBy(0, by);
}

// ---- one frame

function showDetails(object) {
  const { frame } = object;
  const details = element("details");
  details.replaceChildren();
  const head = make("p", undefined, "name");
  head.append(make("bdi", frame.name));
  if (frame.language && frame.language !== "unknown") head.append(" ", make("small", frame.language));
  if (frame.inlined) head.append(" ", make("small", "inlined"));
  details.append(head);
  const place = make("p", undefined, "place");
  if (object === tree) place.append("Point at a frame, or use the arrow keys. Enter zooms, Escape zooms out, / searches.");
  if (frame.file) place.append(make("bdi", frame.line ? `${frame.file}:${frame.line}` : frame.file));
  if (frame.file && frame.module) place.append(" · ");
  if (frame.module) place.append(make("bdi", frame.module));
  details.append(place);
  const list = make("ul");
  const add = (text) => list.append(make("li", text));
  const [run, other] = object.runs;
  const [all, otherAll] = tree.runs;
  for (let v = 0; v < 3; v++) {
    if (all.sums[v] === 0 && !otherAll?.sums[v]) continue;
    let text = `${formats[v](run.sums[v])}${v === faults ? " faults" : ""} (${share(run.sums[v], all.sums[v])})`;
    if (v === 2) text += " mapped";
    if (other) text += `, ${change(run.sums[v] / (all.sums[v] || 1) - other.sums[v] / (otherAll.sums[v] || 1))}`;
    add(text);
  }
  if (run.sums[major] > 0) add(`${count(run.sums[major])} major`);
  if (run.own[faults] > 0 && run.own[faults] < run.sums[faults]) add(`${count(run.own[faults])} in the frame itself`);
  details.append(list);
}

function focus(d, move) {
  current = d;
  decorate();
  showDetails(d.data);
  if (!move) return;
  for (const g of element("chart").querySelectorAll("g")) {
    if (select(g).datum() === d) g.focus();
  }
}

// visible tells frames that are drawn: others are too narrow, or beside what is zoomed.
function visible(d) {
  for (const g of element("chart").querySelectorAll("g")) {
    if (select(g).datum() === d) return true;
  }
  return false;
}

function neighbour(d, step) {
  const siblings = d.parent?.children ?? [];
  for (let i = siblings.indexOf(d) + step; i >= 0 && i < siblings.length; i += step) {
    if (visible(siblings[i])) return siblings[i];
  }
  return null;
}

function widestChild(d) {
  const children = (d.children ?? []).filter(visible);
  return children.reduce((best, c) => (best && best.value >= c.value ? best : c), null);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.tagName === "INPUT";
  if (event.key === "/" && event.target.id !== "search") {
    event.preventDefault();
    element("search").focus();
    return;
  }
  if (event.key === "Escape") {
    if (event.target.id === "search" && state.term !== "") return; // the field clears itself
    resetZoom();
    return;
  }
  if (typing || !event.target.closest?.("#chart g")) return;
  const d = select(event.target.closest("g")).datum();
  const deeper = state.inverted ? "ArrowDown" : "ArrowUp";
  const outer = state.inverted ? "ArrowUp" : "ArrowDown";
  const moves = {
    [deeper]: () => widestChild(d),
    [outer]: () => d.parent,
    ArrowLeft: () => neighbour(d, -1),
    ArrowRight: () => neighbour(d, 1),
    Home: () => root,
  };
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    chart.zoomTo(d);
    focus(d, true);
  } else if (moves[event.key]) {
    event.preventDefault();
    const next = moves[event.key]();
    if (next && visible(next)) focus(next, true);
  }
}

function onPoint(event) {
  const g = event.target.closest?.("#chart g");
  if (g) showDetails(select(g).datum().data);
}

let resizing;
function onResize() {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    chart.width(width()).transitionDuration(0);
    update();
    animate();
  }, 100);
}

describe();
offerChoices();
drawLegend();
redraw({});
document.addEventListener("keydown", onKey);
element("chart").addEventListener("pointerover", onPoint);
element("chart").addEventListener("focusin", onPoint);
addEventListener("resize", onResize);
