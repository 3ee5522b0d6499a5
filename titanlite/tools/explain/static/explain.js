// Steps through an explanation. Reads the data of the page; requests nothing.
"use strict";

const SHORT = {all_gather: "AG", reduce_scatter: "RS", all_reduce: "AR", all_to_all: "AA", broadcast: "B", send: "S", recv: "R"};
const MESSAGES = ["send", "recv"];
const PIECES = 3;  // numbers that are shown of each rank's part of a tensor
// Whose tensor has a part for each rank, before and after
const PARTS_BEFORE = ["reduce_scatter", "all_to_all"];
const PARTS_AFTER = ["all_gather", "all_to_all"];

// 4096 -> 4.096 kB
function bytesText(number) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (number < 1000) return `${+number.toPrecision(4)} ${unit}`;
    number /= 1000;
  }
  return `${+number.toPrecision(4)} TB`;
}

function axisClass(axis) {
  if (axis.startsWith("dp") || axis === "expert_shard") return "dp";
  return ["tp", "cp", "pp", "ep"].includes(axis) ? axis : "world";
}

// Events of different ranks that are one communication: for each lane and event, its name.
// Ranks call the collectives of a group in the same order, so the n-th of one is the n-th of all.
function communications(lanes) {
  return lanes.map((lane) => {
    const counts = new Map();
    return lane.events.map((event) => {
      const kind = MESSAGES.includes(event.kind) ? "message" : event.kind;
      const group = `${event.axis} ${kind} ${event.ranks.join(",")}`;
      const number = counts.get(group) || 0;
      counts.set(group, number + 1);
      return `${group} ${number}`;
    });
  });
}

// Where a key leads from a lane and an event
function moved(lanes, at, key) {
  let lane = at.lane;
  let event = at.event;
  if (key === "ArrowRight") event += 1;
  else if (key === "ArrowLeft") event -= 1;
  else if (key === "Home") event = 0;
  else if (key === "End") event = Infinity;
  else if (key === "ArrowDown") lane += 1;
  else if (key === "ArrowUp") lane -= 1;
  else return null;
  lane = Math.max(0, Math.min(lanes.length - 1, lane));
  event = Math.max(0, Math.min(lanes[lane].events.length - 1, event));
  return {lane, event};
}

function sum(object) {
  return Object.values(object).reduce((total, value) => total + value, 0);
}

function numberText(value) {
  if (value === null) return "not finite";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

function ranksText(ranks) {
  if (ranks.length <= 16) return ranks.join(", ");
  return `${ranks.slice(0, 3).join(", ")}, ..., ${ranks.at(-1)}: ${ranks.length} ranks`;
}

// The first numbers of a tensor; of one that has a part for each rank, some of each part
function numbersText(values, ofParts) {
  const texts = values.map(numberText);
  if (!ofParts) return texts.join(", ");
  const parts = [];
  for (let i = 0; i < texts.length; i += PIECES) parts.push(texts.slice(i, i + PIECES).join(", "));
  return parts.join(" | ");
}

function partText(holding, shape) {
  if (holding.rows[1] < 0) return "none";
  let text = `${holding.rows[0]}-${holding.rows[1]}`;
  if (shape.length > 1 && (holding.columns[0] > 0 || holding.columns[1] < shape[1] - 1)) {
    text += `, columns ${holding.columns[0]}-${holding.columns[1]}`;
  }
  return text;
}

// What the bytes of an event are of
const WHOLE = {all_gather: "Gathered tensor", reduce_scatter: "Summed tensor", all_reduce: "Summed tensor", send: "Message", recv: "Message"};

// Label and text of each row of an event
function detailRows(event) {
  const place = event.place;
  const batch = event.local_batch >= 0 ? `, local batch ${event.local_batch}` : "";
  return [
    ["Part of the step", place.phase + batch + (place.recomputed ? ", recomputed" : "")],
    ["Collective", event.kind + (event.operation ? `, ${event.operation}` : "")],
    ["Axis", event.axis],
    ["Ranks", MESSAGES.includes(event.kind) ? event.ranks.join(" to ") : ranksText(event.ranks)],
    [event.kind === "recv" ? "This rank receives" : "This rank gives", `${event.shape.join(" x ") || "scalar"} ${event.dtype}`],
    [WHOLE[event.kind] || "Tensor", bytesText(event.whole_bytes)],
    ["Stands for", event.times > 1 ? `${event.times.toLocaleString("en")} equal ones` : "itself only"],
    ["Module", place.module || "none"],
    ["Parameters", place.parameters.join(", ") || "none"],
    ["Asked for in", event.cause],
    ["Called in", place.line],
    ["In the step", event.loop_line],
    ["Could overlap with", event.behind],
  ];
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function fillTable(table, rows, heads) {
  table.replaceChildren();
  if (heads) {
    const line = element("tr");
    line.append(...heads.map((text) => element("th", text)));
    table.append(line);
  }
  for (const row of rows) {
    const line = element("tr");
    row.forEach((text, i) => line.append(element(i || heads ? "td" : "th", text)));
    table.append(line);
  }
}

// Scrolls a lane, and not the page
function centre(button) {
  const track = button.parentElement;
  const shift = button.getBoundingClientRect().left - track.getBoundingClientRect().left;
  track.scrollLeft += shift - track.clientWidth / 2;
}

function start(data) {
  const byId = (id) => document.getElementById(id);
  const lanes = data.lanes;
  const together = communications(lanes);
  const buttons = [];
  const layout = Object.entries(data.degrees).filter(([, n]) => n > 1).map(([axis, n]) => `${axis} ${n}`);
  let at = {lane: 0, event: 0};

  byId("title").textContent = `One step of ${data.title} on ` + (layout.length ? `${data.processes} processes: ${layout.join(", ")}` : "one process");
  let facts = `${data.tokens.toLocaleString("en")} tokens, local batches of each rank: ${data.local_batches}. `;
  facts += data.real ? "Run on gloo." : "Run on pretended ranks, one of each pipeline stage: tensors have shapes and no numbers.";
  if (data.shown_blocks < data.blocks) {
    facts += ` ${data.shown_blocks} of ${data.blocks} blocks are shown; the others do the same as layers.1, and are counted with it.`;
  }
  byId("facts").textContent = facts;

  const used = [...new Set(lanes.flatMap((lane) => lane.events.map((event) => event.axis)))];
  for (const axis of used) {
    const key = element("span", undefined, "key");
    key.append(element("span", "", `event ${axisClass(axis)}`), axis);
    byId("legend").append(key);
  }
  const kinds = [...new Set(lanes.flatMap((lane) => lane.events.map((event) => event.kind)))];
  byId("legend").append(element("span", kinds.map((kind) => `${SHORT[kind]} ${kind}`).join(", "), "key"));

  lanes.forEach((lane, i) => {
    const row = element("div", undefined, "lane");
    const place = Object.entries(lane.coordinates).filter(([axis]) => data.degrees[axis] > 1);
    row.append(element("div", `rank ${lane.rank} (${place.map(([axis, n]) => `${axis} ${n}`).join(", ")})`, "name"));
    const track = element("div", undefined, "track");
    buttons.push(lane.events.map((event, j) => {
      const button = element("button", SHORT[event.kind]);
      button.type = "button";
      button.tabIndex = -1;
      button.dataset.begins = j > 0 && event.place.phase !== lane.events[j - 1].place.phase ? "begins" : "";
      button.title = `${event.number} ${event.place.phase}: ${event.kind}, ${event.tensor}`;
      button.addEventListener("click", () => show({lane: i, event: j}));
      track.append(button);
      return button;
    }));
    row.append(track);
    byId("lanes").append(row);
  });

  function showMemory(lane) {
    const most = Math.max(1, ...lane.events.map((event) => event.peak));
    byId("memory").replaceChildren(...lane.events.map((event, i) => {
      const bar = element("div", undefined, i === at.event ? "current" : "");
      bar.style.height = `${100 * event.peak / most}%`;
      bar.title = `up to event ${event.number}: ${bytesText(event.peak)}`;
      return bar;
    }));
    byId("memory-note").textContent = `Memory of rank ${lane.rank}, a bar for each collective: at most ${bytesText(lane.events[at.event].peak)} `
      + `since the one before; in the whole step ${bytesText(most)}`
      + (data.shown_blocks < data.blocks ? ", of the blocks that are shown." : ".");
    const held = lane.events[at.event].held;
    const rows = Object.entries(held).map(([name, n]) => [name.replaceAll("_", " "), bytesText(n)]);
    fillTable(byId("held"), [...rows, ["together", bytesText(sum(held))]]);
  }

  function showValues(name) {
    const rows = [];
    lanes.forEach((lane, i) => lane.events.forEach((event, j) => {
      if (together[i][j] === name) {
        const before = numbersText(event.before, PARTS_BEFORE.includes(event.kind));
        const after = numbersText(event.after, PARTS_AFTER.includes(event.kind));
        const unread = event.kind === "send" ? "" : "not read in this step";
        rows.push([String(lane.rank), before, after || unread]);
      }
    }));
    byId("values-note").textContent = data.real
      ? "The first numbers of it. If it has a part for each rank: the first three numbers of each part, with | between parts."
      : "Pretended ranks have no numbers.";
    if (data.real) fillTable(byId("values"), rows, ["rank", "before", "after"]);
  }

  function show(to, focus = true) {
    at = to;
    const lane = lanes[at.lane];
    const event = lane.events[at.event];
    if (!event) return;
    const name = together[at.lane][at.event];
    buttons.forEach((row, i) => row.forEach((button, j) => {
      const current = i === at.lane && j === at.event;
      const classes = ["event", axisClass(lanes[i].events[j].axis), button.dataset.begins];
      if (current) classes.push("current");
      else if (together[i][j] === name) classes.push("together");
      button.className = classes.filter(Boolean).join(" ");
      button.tabIndex = current ? 0 : -1;
    }));
    [...byId("lanes").children].forEach((row, i) => { row.className = i === at.lane ? "lane chosen" : "lane"; });
    byId("position").textContent = `rank ${lane.rank}, ${event.number} of ${lane.events.length}: ${event.place.phase}`;
    byId("h-event").textContent = `${event.number}. ${event.tensor}`;
    byId("why").textContent = `Why: ${event.why}.`;
    fillTable(byId("details"), detailRows(event));
    showValues(name);
    showMemory(lane);
    buttons.forEach((row, i) => {
      // A lane without a part in it follows by number
      const j = i === at.lane ? at.event : together[i].indexOf(name);
      if (row.length) centre(row[j >= 0 ? j : Math.min(at.event, row.length - 1)]);
    });
    if (focus) {
      const button = buttons[at.lane][at.event];
      button.focus({preventScroll: true});
      button.scrollIntoView({block: "nearest", inline: "nearest"});
    }
  }

  const keys = {first: "Home", previous: "ArrowLeft", next: "ArrowRight", last: "End"};
  for (const [id, key] of Object.entries(keys)) {
    byId(id).addEventListener("click", () => show(moved(lanes, at, key), false));
  }
  document.addEventListener("keydown", (press) => {
    if (press.altKey || press.ctrlKey || press.metaKey || press.shiftKey) return;
    const to = moved(lanes, at, press.key);
    if (to) {
      press.preventDefault();
      show(to);
    }
  });

  const ranks = [...new Set(data.parameters.flatMap((parameter) => Object.keys(parameter.holdings)))].map(Number)
    .sort((a, b) => a - b).slice(0, 16);
  fillTable(
    byId("parameters"),
    data.parameters.map((parameter) => [
      parameter.name, parameter.shape.join(" x "), parameter.placements,
      ...ranks.map((rank) => parameter.holdings[rank] ? partText(parameter.holdings[rank], parameter.shape) : ""),
    ]),
    ["parameter", "shape", "placements", ...ranks.map((rank) => `rank ${rank}: rows`)],
  );
  for (const one of data.doubled) {
    const batch = one.same_batch || one.problem ? "the same global batch" : "twice the global batch";
    byId("doubled").append(element("h3", `${one.axis} = ${2 * one.degree} instead of ${one.degree}, and ${batch}`));
    if (one.problem) byId("doubled").append(element("p", `Not possible: ${one.problem}`));
    else {
      const scroll = element("div", undefined, "scroll");
      const table = element("table");
      fillTable(table, one.changes.map((change) => [
        change.axis, change.kind, `${change.calls} to ${change.calls_doubled}`,
        `${bytesText(change.whole_bytes)} to ${bytesText(change.whole_bytes_doubled)}`,
        `${bytesText(change.sent_bytes)} to ${bytesText(change.sent_bytes_doubled)}`,
      ]), ["axis", "collective", "calls", "whole tensors", "a rank sends"]);
      scroll.append(table);
      byId("doubled").append(scroll);
    }
  }
  if (lanes[0].events.length) show(at, false);
  else byId("h-event").textContent = "No collectives: one process has everything";
  document.documentElement.dataset.ready = "yes";
}

start(JSON.parse(document.getElementById("data").textContent));
