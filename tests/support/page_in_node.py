"""Runs the script of a page under node, with as much of a document as it uses.

There is no browser: this shows that the script runs on real data, shows every event and follows the
keys, not how it looks.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

DOCUMENT = r"""
"use strict";
const assert = require("node:assert");
const fs = require("node:fs");
const made = [];
class Element {
  constructor(name) {
    Object.assign(this, {name, children: [], style: {}, dataset: {}, className: "", text: "", handlers: {}});
    Object.assign(this, {parentElement: {getBoundingClientRect: () => ({left: 0}), clientWidth: 0, scrollLeft: 0}});
    made.push(this);
  }
  set textContent(text) { this.text = String(text); this.children = []; }
  get textContent() {
    return this.text + this.children.map((c) => typeof c === "string" ? c : c.textContent).join(" ");
  }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.text = ""; this.children = more; }
  addEventListener(kind, act) { this.handlers[kind] = act; }
  getBoundingClientRect() { return {left: 0}; }
  focus() { document.focused = this; }
  scrollIntoView() {}
}
const page = fs.readFileSync(0, "utf8");
const ids = new Map();
for (const [, id] of page.matchAll(/ id="([\w-]+)"/g)) ids.set(id, new Element(id));
const [, json] = page.match(/<script type="application\/json" id="data">(.*)<\/script>/);
ids.get("data").text = json;
const document = {
  handlers: {},
  documentElement: {dataset: {}},
  createElement: (name) => new Element(name),
  getElementById: (id) => { assert(ids.has(id), `no element ${id}`); return ids.get(id); },
  addEventListener: (kind, act) => { document.handlers[kind] = act; },
};
const [, script] = page.match(/<script>([\s\S]*)<\/script>/);
new Function("document", script)(document);

const data = JSON.parse(json);
const press = (key) => document.handlers.keydown({key, preventDefault() {}});
const shown = () => ids.get("h-event").textContent;
const tracks = ids.get("lanes").children.map((row) => row.children[1].children);
assert.deepEqual(tracks.map((track) => track.length), data.lanes.map((lane) => lane.events.length));
for (const [i, lane] of data.lanes.entries()) {
  press("Home");
  for (const [j, event] of lane.events.entries()) {
    assert.equal(shown(), `${j + 1}. ${event.tensor}`);
    assert(ids.get("why").textContent.includes(event.why));
    const details = ids.get("details").textContent;
    assert(details.includes(event.cause) && details.includes(event.place.line));
    assert.equal(tracks[i][j].className.includes("current"), true);
    // On each rank of the group, the event that is the same communication
    const rows = ids.get("values").children.length - 1;
    if (data.real) assert.equal(rows, event.ranks.length, `event ${j + 1} of lane ${i}`);
    press("ArrowRight");
  }
  press("ArrowRight");
  assert.equal(shown(), `${lane.events.length}. ${lane.events.at(-1).tensor}`);
  press("ArrowLeft");
  press("End");
  press("ArrowDown");
}
ids.get("first").handlers.click();
assert(ids.get("position").textContent.includes(` 1 of ${data.lanes.at(-1).events.length}: `));
tracks[0][2].handlers.click();
assert.equal(shown(), `3. ${data.lanes[0].events[2].tensor}`);
assert.equal(document.focused, tracks[0][2]);
for (const parameter of data.parameters) {
  assert(ids.get("parameters").textContent.includes(parameter.name));
}
console.log(data.lanes.length);
"""


def run_page(page: str, num_lanes: int) -> None:
    """Steps through every event of every lane; fails if the script does."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    assert not re.search(r"(?:src|href)=\"(?!data:)", page), "requests something"
    done = subprocess.run(
        [node, "-e", DOCUMENT], input=page, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(num_lanes)
