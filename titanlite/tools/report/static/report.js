// Builds the report from the JSON in the page: tables as text, charts with uPlot. Nothing is requested. All text from
// files is set with `textContent`.
(() => {
  "use strict";

  const errors = [];
  addEventListener("error", (event) => errors.push(event.message));
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);

  const SYMBOLS = {
    diverged: "✕", rollback: "◁", restart: "◆", spike: "▲", skip: "⊘", signal: "!", resume: "↻", save: "▪", start: "▷",
    end: "■",
  }; // in the order of importance: where two are at one place, the first is drawn
  const BAD = ["diverged", "rollback", "restart", "spike", "skip"];
  const AXES = { step: "Steps", tokens: "Tokens", time: "Time" };
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 2], [5, 5], [1, 6], [14, 3, 5, 3]];
  const wish = new URLSearchParams(location.hash.slice(1)); // such as #x=tokens&theme=dark&log=1
  const state = {
    x: wish.get("x") in AXES ? wish.get("x") : "step",
    theme: wish.get("theme") || stored("theme") || "auto",
    log: wish.get("log") === "1",
    smooth: Number(wish.get("smooth") || 20),
    zoom: null, // on the x axis, of all charts
    quiet: new Set(["start", "end"]), // kinds of events that are not drawn
    off: new Set(), // runs that are not drawn
    hidden: new Set(), // lines that are not drawn
  };
  let plots = [];

  function stored(key, value) {
    try {
      if (value !== undefined) localStorage.setItem(`titanlite-${key}`, value);
      return localStorage.getItem(`titanlite-${key}`);
    } catch {
      return null; // a browser may refuse storage to a file
    }
  }

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  // ---- numbers ----

  function short(value, digits = 3) {
    const size = Math.abs(value);
    if (size === 0) return "0";
    for (const [unit, name] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit) {
        const scale = name === "k" ? 1e3 : unit;
        return trim((value / scale).toPrecision(Math.max(digits, Math.ceil(Math.log10(size / scale + 1))))) + name;
      }
    }
    if (size < 1e-3) return value.toExponential(digits - 1).replace(/\.?0+e/, "e");
    return trim(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size + 1)))));
  }

  const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

  // ---- the horizontal axis ----

  function timeUnit() {
    const longest = Math.max(0, ...data.runs.map((run) => run.axis.hours.at(-1) || 0));
    return longest < 0.1 ? ["s", 3600] : longest < 3 ? ["min", 60] : ["h", 1];
  }

  function toX(run, steps) {
    const axis = data.runs[run].axis;
    if (state.x === "step") return steps;
    const to = state.x === "tokens" ? axis.tokens : axis.hours;
    const factor = state.x === "tokens" ? 1 : timeUnit()[1];
    if (!to.length) return [];
    let i = 0;
    return steps.map((step) => {
      if (step < axis.step[i]) i = 0;
      while (i < axis.step.length - 2 && axis.step[i + 1] < step) i++;
      if (axis.step.length < 2) return to[0] * factor;
      const part = (step - axis.step[i]) / (axis.step[i + 1] - axis.step[i] || 1);
      return (to[i] + part * (to[i + 1] - to[i])) * factor;
    });
  }

  // The range of all charts, so that an event is at the same place in each
  function extent() {
    const ends = data.charts.flatMap((chart) => chart.series.filter((one) => !state.off.has(one.run))
      .flatMap((one) => toX(one.run, [one.x[0], one.x[one.x.length - 1]])));
    const min = Math.min(...ends), max = Math.max(...ends);
    return min < max ? [min, max] : [min - 1, min + 1];
  }

  // The mean over both sides with weights that fall exponentially with the distance, so a curve does not lag behind.
  function smoothed(x, y) {
    if (!state.smooth || x.length < 3) return y;
    const width = (state.smooth / 100) ** 2 * 0.25 * (x[x.length - 1] - x[0]);
    const sums = new Float64Array(x.length);
    const weights = new Float64Array(x.length);
    for (const forward of [true, false]) {
      let sum = 0, weight = 0, last = 0;
      for (let k = 0; k < x.length; k++) {
        const i = forward ? k : x.length - 1 - k;
        const keep = k ? Math.exp(-Math.abs(x[i] - x[last]) / width) : 0;
        sum = sum * keep + y[i];
        weight = weight * keep + 1;
        sums[i] += sum - (forward ? 0 : y[i]); // its own value once
        weights[i] += weight - (forward ? 0 : 1);
        last = i;
      }
    }
    return Array.from(sums, (sum, i) => sum / weights[i]);
  }

  // ---- charts ----

  const style = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function colour(one, index) {
    return style(`--c${(data.runs.length > 1 ? one.run : index) % 8}`);
  }

  // Another one for each column, and others for runs beyond the eight colours
  const dashes = (one, index) => DASHES[index % 4 + (one.run > 7 ? 4 : 0)];

  // Each series of the data as one or two of uPlot: tables of x and y, and options
  function lines(chart) {
    const tables = [], options = [];
    const shown = chart.series.filter((one) => !state.off.has(one.run));
    const several = data.runs.length > 1;
    const columns = [...new Set(chart.series.map((one) => one.label))];
    shown.forEach((one) => {
      const x = toX(one.run, one.x);
      if (!x.length) return;
      const index = several ? columns.indexOf(one.label) : chart.series.indexOf(one);
      const label = several ? `${data.runs[one.run].name}${columns.length > 1 ? `, ${one.label}` : ""}` : one.label;
      const key = `${chart.title}|${one.run}|${one.label}`;
      const show = !state.hidden.has(key);
      const stroke = colour(one, index);
      const line = { key, label, show, stroke, width: 2, spanGaps: true, points: { show: false } };
      if (one.style === "smooth") {
        const has = state.smooth > 0 && one.x.length > 2;
        if (has) {
          tables.push([x, one.y]);
          options.push({ ...line, class: "raw", width: 1, alpha: 0.3 });
        }
        const means = has && one.mx;
        tables.push(has ? [means ? toX(one.run, one.mx) : x, smoothed(one.mx || one.x, one.my || one.y)] : [x, one.y]);
        options.push({ ...line, raw: has, dash: several ? dashes(one, index) : [] });
      } else {
        tables.push([x, one.y]);
        const point = one.style === "points" || one.x.length === 1;
        options.push({
          ...line, dash: several ? dashes(one, index) : [],
          points: { show: point, size: 7, fill: style("--paper"), stroke, width: 2 },
        });
      }
    });
    return [tables, options];
  }

  // Areas on top of each other: the sums are drawn, the largest first, and the legend shows the parts
  function areas(chart) {
    const shown = chart.series.filter((one) => !state.off.has(one.run));
    const tables = [], options = [];
    const sum = shown.length ? shown[0].y.map(() => 0) : [];
    shown.forEach((one, index) => {
      const key = `${chart.title}|${one.run}|${one.label}`;
      if (!state.hidden.has(key)) one.y.forEach((value, i) => (sum[i] += value));
      const fill = style(`--c${index % 8}`);
      const parts = one.y;
      tables.unshift([toX(one.run, one.x), sum.slice()]);
      options.unshift({
        key, label: one.label, show: !state.hidden.has(key), stroke: fill, fill, width: 1, points: { show: false },
        value: (u, v, s, i) => (i === null || i === undefined ? "–" : short(parts[i])),
      });
    });
    return tables.length && tables[0][0].length ? [tables, options] : [[], []];
  }

  function logSplits(u, axis, min, max) {
    if (max / min < 8) {
      const step = 10 ** Math.floor(Math.log10((max - min) / 3));
      const by = step * ([1, 2, 5].find((n) => (max - min) / (n * step) < 6) || 10);
      const found = [];
      for (let v = Math.ceil(min / by) * by; v <= max; v += by) found.push(Number(v.toPrecision(12)));
      return found;
    }
    const found = [];
    const decades = Math.log10(max / min);
    for (let e = Math.floor(Math.log10(min)); e <= Math.log10(max); e++) {
      for (const n of decades > 4 ? [1] : decades > 2 ? [1, 3] : [1, 2, 5]) {
        const v = Number((n * 10 ** e).toPrecision(3));
        if (v >= min && v <= max) found.push(v);
      }
    }
    return found;
  }

  function nearest(u, series, at) {
    const values = u.data[series];
    if (!values || values[at] !== undefined && values[at] !== null) return at;
    for (let d = 1; d < values.length; d++) {
      for (const i of [at - d, at + d]) if (values[i] !== undefined && values[i] !== null) return i;
    }
    return at;
  }

  function axisSize(u, values, index, cycle) {
    const axis = u.axes[index];
    if (cycle > 1) return axis._size;
    const longest = (values || []).reduce((a, b) => (String(b).length > a.length ? String(b) : a), "");
    u.ctx.font = axis.font[0];
    return Math.ceil((axis.ticks.size || 0) + axis.gap + u.ctx.measureText(longest).width / devicePixelRatio) + 6;
  }

  function build(chart, box) {
    const [tables, options] = chart.kind === "stack" ? areas(chart) : lines(chart);
    box.replaceChildren();
    if (!tables.length) {
      box.append(make("p", { class: "empty" }, "Not drawn: no run that is selected has these values."));
      return null;
    }
    const log = state.log && chart.log;
    const whole = extent();
    const grid = { stroke: style("--grid"), width: 1 };
    const font = `12px ${style("--font")}`;
    const ticks = { ...grid, size: 4 };
    const axis = { stroke: style("--muted"), grid, ticks, font, gap: 4 };
    const unit = state.x === "time" ? ` ${timeUnit()[0]}` : "";
    const value = (u, v) => (v === null || v === undefined ? "–" : short(v, 5));
    const number = (u, v, s, i) => {
      const raw = u.series[s].raw && i !== null && i !== undefined ? u.data[s - 1][nearest(u, s - 1, i)] : null;
      return raw === null || raw === undefined ? value(u, v) : `${short(v, 5)} (${short(raw, 5)})`;
    };
    const plot = new uPlot(
      {
        width: Math.max(200, box.clientWidth),
        height: chart.section === "Loss" && chart.title === "Loss" ? 340 : 210,
        padding: [20, 22, 0, 0],
        cursor: {
          sync: { key: "report", setSeries: false },
          drag: { x: true, y: false, setScale: false, dist: 8 },
          dataIdx: nearest,
          points: { size: 7, fill: (u, i) => options[i - 1].stroke, stroke: (u, i) => options[i - 1].stroke },
        },
        legend: { markers: { width: 0, fill: (u, i) => options[i - 1]?.stroke } },
        scales: {
          x: { time: false, range: () => state.zoom || whole },
          y: log
            ? { distr: 3, range: (u, min, max) => (min === max ? [min / 2, max * 2] : [min / 1.05, max * 1.05]) }
            : chart.kind === "stack"
              ? { range: (u, min, max) => [0, (max || 1) * 1.05] }
              : { range: (u, min, max) => spread(min, max) },
        },
        axes: [
          { ...axis, size: 28, space: 70, values: (u, at) => at.map((v) => short(v) + unit) },
          {
            ...axis, space: 34, size: axisSize, values: (u, at) => at.map((v) => (v === null ? "" : short(v))),
            ...(log ? { splits: logSplits, filter: (u, at) => at } : {}),
          },
        ],
        series: [{ label: AXES[state.x], value: (u, v) => (v === null ? "–" : short(v, 5) + unit) },
          ...options.map((option) => ({ value: number, ...option }))],
        hooks: {
          draw: [drawEvents],
          setSelect: [zoomTo],
          setCursor: [(u) => showEvents(u, box)],
          setSeries: [(u, i, changed) => toggled(u, i, changed, chart)],
        },
      },
      uPlot.join(tables),
      box,
    );
    accessible(plot, chart, options);
    return plot;
  }

  function spread(min, max) {
    if (min === null || max === null) return [0, 1];
    const flat = max - min < 1e-6 * Math.abs(max); // a smoothed constant differs from itself in the last digits
    const room = flat ? Math.abs(max) * 0.1 || 1 : (max - min) * 0.06;
    return [min >= 0 && min - room < 0 ? 0 : min - room, max + room];
  }

  // A legend whose entries are buttons, and a cursor that the arrow keys move
  function accessible(plot, chart, options) {
    const names = options.filter((option) => option.class !== "raw").map((option) => option.label);
    const wrap = plot.root.querySelector(".u-wrap");
    wrap.tabIndex = 0;
    wrap.setAttribute("role", "img");
    wrap.setAttribute("aria-label", `${chart.title}: ${names.join("; ")}. Arrow keys move the cursor.`);
    wrap.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (event.key === "Escape") zoomAll(null);
      if (!step) return;
      event.preventDefault();
      const visible = plot.data[0].length;
      const at = Math.min(visible - 1, Math.max(0, (plot.cursor.idx ?? (step > 0 ? -1 : visible)) + step));
      plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: plot.over.clientHeight / 2 });
    });
    plot.root.querySelectorAll(".u-legend .u-series").forEach((row, i) => {
      const head = row.querySelector("th");
      if (i === 0 || row.classList.contains("raw") || !head) return;
      head.tabIndex = 0;
      head.setAttribute("role", "button");
      head.setAttribute("aria-pressed", String(plot.series[i].show));
      head.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        head.click();
      });
    });
  }

  function toggled(u, i, changed, chart) {
    if (i === null || !("show" in changed)) return;
    const one = u.series[i];
    state.hidden[changed.show ? "delete" : "add"](one.key);
    u.root.querySelectorAll(".u-legend .u-series")[i]?.querySelector("th")
      ?.setAttribute("aria-pressed", String(changed.show));
    if (chart.kind === "stack") requestAnimationFrame(draw); // the sums change
    else if (one.raw && u.series[i - 1].show !== changed.show) u.setSeries(i - 1, { show: changed.show });
  }

  // ---- zoom, of all charts together ----

  function zoomTo(u) {
    const { left, width } = u.select;
    if (width < 8) return;
    const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    zoomAll(range);
  }

  function zoomAll(range) {
    state.zoom = range;
    $("reset").hidden = !range;
    const [min, max] = range || extent();
    for (const plot of plots) plot.setScale("x", { min, max });
  }

  // ---- events on the charts ----

  const kinds = () => Object.keys(SYMBOLS).filter((kind) => data.runs.some((run) => run.events.some((e) => e.name === kind)));

  function drawnEvents() {
    const found = [];
    data.runs.forEach((run, number) => {
      if (state.off.has(number)) return;
      const x = toX(number, run.events.map((event) => event.step));
      run.events.forEach((event, i) => {
        if (x.length && event.name in SYMBOLS && !state.quiet.has(event.name)) found.push({ ...event, x: x[i], run: number });
      });
    });
    const order = Object.keys(SYMBOLS);
    return found.sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name));
  }

  function drawEvents(u) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    const taken = [];
    ctx.save();
    ctx.textAlign = "center";
    ctx.textBaseline = "bottom";
    ctx.font = `${11 * ratio}px ${style("--font")}`;
    for (const event of drawnEvents()) {
      const x = Math.round(u.valToPos(event.x, "x", true));
      if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
      ctx.strokeStyle = ctx.fillStyle = style(BAD.includes(event.name) ? "--bad" : event.name === "save" ? "--quiet" : "--event");
      const crowded = taken.some((other) => Math.abs(other - x) < 11 * ratio);
      if (crowded && taken.includes(x)) continue;
      ctx.lineWidth = ratio;
      ctx.setLineDash(event.name === "save" ? [2 * ratio, 4 * ratio] : [5 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (!crowded) ctx.fillText(SYMBOLS[event.name], x, bbox.top - 1 * ratio);
      taken.push(x);
    }
    ctx.restore();
  }

  function showEvents(u, box) {
    const hint = box.parentElement.querySelector(".hint");
    if (!hint || !u.root.matches(":hover, :focus-within")) return;
    const near = drawnEvents().filter((event) => Math.abs(u.valToPos(event.x, "x") - u.cursor.left) < 7).slice(0, 3);
    hint.textContent = near.map((event) => `${SYMBOLS[event.name]} ${event.name}, step ${event.step}: ${event.text}`).join("  ");
  }

  // ---- the parts of the page ----

  function choice(box, options, current, chosen) {
    box.append(...Object.entries(options).map(([value, label]) =>
      make("label", {}, make("input", {
        type: "radio", name: box.id, value, checked: value === current, onchange: () => chosen(value),
      }), make("span", {}, label))));
  }

  function chip(label, symbol, colourName, pressed, toggle) {
    const button = make("button", { type: "button", class: "chip", "aria-pressed": String(pressed), onclick: () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(now));
      toggle(now);
      draw();
    } }, make("span", { class: `mark ${colourName}`, "aria-hidden": "true" }, symbol), label);
    return button;
  }

  function head() {
    document.title = `${data.title} – training report`;
    $("title").textContent = data.title;
    $("sub").replaceChildren(
      make("span", {}, `written ${data.made}`),
      ...data.runs.map((run) => make("span", { class: "path" }, run.folder)),
    );
    $("runs").replaceChildren(...(data.runs.length < 2 ? [] : data.runs.map((run, number) =>
      chip(run.name, "■", `c${number % 8}`, !state.off.has(number), (on) => state.off[on ? "delete" : "add"](number)))));
    $("legend").replaceChildren(...kinds().map((kind) => {
      const count = data.runs.reduce((sum, run) => sum + run.events.filter((event) => event.name === kind).length, 0);
      const paint = BAD.includes(kind) ? "bad" : kind === "save" ? "quiet" : "event";
      return chip(`${kind} ${count}`, SYMBOLS[kind], paint, !state.quiet.has(kind),
        (on) => state.quiet[on ? "delete" : "add"](kind));
    }));
  }

  function rows(table, head, body) {
    table.replaceChildren(
      ...(head ? [make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text))))] : []),
      make("tbody", {}, ...body.map(([name, ...cells]) => make("tr", {}, make("th", { scope: "row" }, name),
        ...cells.map((text) => make("td", {}, text))))),
    );
  }

  function tables() {
    $("table").classList.toggle("single", data.runs.length === 1);
    rows($("table"), data.runs.length > 1 ? ["", ...data.runs.map((run) => run.name)] : null, data.table);
    const several = data.runs.length > 1;
    $("findings").replaceChildren(...data.runs.flatMap((run) => [
      several ? make("h3", {}, run.name) : null,
      make("ul", {}, ...run.findings.map((text) => make("li", {}, text))),
    ]).filter(Boolean));
    $("h-settings").textContent = data.differences.title;
    $("s-settings").hidden = !data.differences.rows.length;
    rows($("settings"), data.differences.head, data.differences.rows);
    $("s-events").hidden = !data.runs.some((run) => run.events.length);
    $("events").replaceChildren(...data.runs.filter((run) => run.events.length).flatMap((run) => {
      const more = run.all_events - run.events.length;
      const table = make("table", { class: "log" });
      table.replaceChildren(
        make("thead", {}, make("tr", {}, ...["Step", "Event", "Message", "Time (UTC)"].map((text) => make("th", { scope: "col" }, text)))),
        make("tbody", {}, ...run.events.map((event) => make("tr", {}, make("td", { class: "number" }, event.step.toLocaleString("en")),
          make("td", { class: BAD.includes(event.name) ? "is-bad" : "" }, `${SYMBOLS[event.name] || "·"} ${event.name}`),
          make("td", {}, event.text), make("td", { class: "when" }, event.time)))),
      );
      return [
        several ? make("h3", {}, run.name) : null,
        make("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": `Events of ${run.name}` }, table),
        more ? make("p", { class: "note" }, `${more} more events are in events.jsonl.`) : null,
      ];
    }).filter(Boolean));
    samples(several);
    $("footer").textContent = "One file without external parts. It makes no request. Charts: uPlot (MIT licence).";
  }

  function samples(several) {
    const text = (sample) => make("figure", { class: "sample" }, make("figcaption", {}, `step ${sample.step.toLocaleString("en")}`), make("pre", {}, sample.text));
    $("s-samples").hidden = !data.runs.some((run) => run.samples.length);
    $("samples").replaceChildren(...data.runs.filter((run) => run.samples.length).flatMap((run) => [
      several ? make("h3", {}, run.name) : null,
      ...[...new Set(run.samples.map((sample) => sample.prompt))].flatMap((prompt) => {
        const all = run.samples.filter((sample) => sample.prompt === prompt);
        const older = all.slice(0, -1).reverse();
        return [
          make("h4", {}, "Prompt: ", make("code", {}, prompt)), text(all[all.length - 1]),
          older.length ? make("details", {}, make("summary", {}, `${older.length} earlier`), ...older.map(text)) : null,
        ];
      }),
    ]).filter(Boolean));
  }

  // A chart that would be alone in its row of two takes the whole row
  function chartBox(chart, index, all) {
    const alone = index === all.length - 1 && all.filter((one) => one.title !== "Loss").length % 2;
    return make("article", { class: chart.title === "Loss" || alone ? "chart wide" : "chart" },
      make("h3", {}, chart.title, chart.unit ? make("small", {}, chart.unit) : null),
      chart.help ? make("p", { class: "help" }, chart.help) : null,
      make("div", { id: chart.id, class: "plot" }),
      make("p", { class: "hint", "aria-live": "polite" }));
  }

  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const plot = plots.find((one) => one.root.parentElement === target);
      if (plot && target.clientWidth && plot.width !== target.clientWidth) {
        plot.setSize({ width: target.clientWidth, height: plot.height });
      }
    }
  });

  function boxes() {
    const sections = [...new Set(data.charts.map((chart) => chart.section))];
    $("charts").replaceChildren(...sections.map((name) => make("section", { "aria-label": name },
      make("h2", {}, name),
      make("div", { class: "grid" }, ...data.charts.filter((chart) => chart.section === name).map(chartBox)))));
    document.querySelectorAll(".plot").forEach((box) => observer.observe(box));
  }

  // ---- drawing ----

  function draw() {
    plots.forEach((plot) => plot.destroy());
    plots = data.charts.map((chart) => build(chart, $(chart.id))).filter(Boolean);
    check();
  }

  // What tests read: the number of charts, those of which a line has no value, errors, and a horizontal scroll bar
  function check() {
    const empty = plots.filter((plot) => plot.data.slice(1).some((y) => !y.some((v) => v !== null && v !== undefined)));
    Object.assign(root.dataset, {
      charts: plots.length, expected: data.charts.length, empty: empty.length, errors: errors.join("; "),
      overflow: Math.max(0, root.scrollWidth - root.clientWidth), ready: "yes",
    });
  }

  function paint(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  // Tokens and time can be chosen if a run has them
  function axes() {
    const there = Object.entries(AXES).filter(([name]) => name === "step" || data.runs.some((run) => run.axis.tokens.length));
    choice($("x"), Object.fromEntries(there), state.x, (value) => { state.x = value; state.zoom = null; $("reset").hidden = true; draw(); });
  }

  function controls() {
    choice($("theme"), { auto: "Auto", light: "Light", dark: "Dark" }, state.theme, (value) => {
      state.theme = value;
      stored("theme", value);
      paint(value);
      draw();
    });
    $("smooth").value = state.smooth;
    $("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); draw(); });
    $("log").checked = state.log;
    $("log").addEventListener("change", () => { state.log = $("log").checked; draw(); });
    $("reset").addEventListener("click", () => zoomAll(null));
    document.addEventListener("dblclick", (event) => { if (event.target.closest(".u-wrap")) zoomAll(null); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    addEventListener("beforeprint", () => { paint("light"); draw(); });
    addEventListener("afterprint", () => { paint(state.theme); draw(); });
  }

  paint(state.theme);
  controls();
  head();
  axes();
  tables();
  boxes();
  draw();
})();
