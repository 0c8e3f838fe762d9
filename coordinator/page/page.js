// The status page: asks for status.json once a second and shows it; sends a prompt and shows the
// answer as it comes. What the service says is shown as text only, never as markup.

const POLL_MS = 1000;
const HISTORY = 300; // samples kept: five minutes
const SHORTEST = 60; // samples that a chart is wide at least
const MiB = 1024 * 1024;
const PARTS = ["compute", "disk", "coordination"];
const BUDGET_PARTS = ["pool", "dense", "kv", "scratch", "processes", "page_tables"];
const PART_NAMES = {
  pool: "experts (pool)", dense: "dense weights", kv: "keys and values", scratch: "scratch",
  processes: "processes", page_tables: "page tables",
};
const PHASES = { queued: "waits", prompt: "reads its prompt", decode: "answers" };

const at = (id) => document.getElementById(id);
const history = { speed: [], hits: [], read: [], memory: [], time: [] };
const heat = { experts: null, cursor: null, box: null };
let lastCpu = null; // cpu_seconds by process, and when
let key = sessionStorage.getItem("key");

// Words

const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

function bytes(value) {
  if (value >= 1024 * MiB) return `${number(value / (1024 * MiB), 2)} GiB`;
  if (value >= MiB) return `${number(value / MiB, value >= 100 * MiB ? 0 : 1)} MiB`;
  return `${number(value / 1024)} KiB`;
}

function seconds(value) {
  if (value >= 1) return `${number(value, 2)} s`;
  return value >= 0.01 ? `${number(value * 1e3)} ms` : `${number(value * 1e3, 1)} ms`;
}

function span(value) {
  const s = Math.floor(value);
  if (s < 60) return `${s} s`;
  if (s < 3600) return s % 60 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${s / 60} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function ranges(values) { // 0, 1, 2, 5 -> "0–2, 5"
  const parts = [];
  for (let i = 0; i < values.length; i++) {
    let end = i;
    while (values[end + 1] === values[end] + 1) end++;
    parts.push(end > i ? `${values[i]}–${values[end]}` : `${values[i]}`);
    i = end;
  }
  return parts.join(", ");
}

const counted = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Colours and canvases

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function mix(low, high, share) {
  const part = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  const mixed = [0, 1, 2].map((i) => Math.round(part(low, i) + share * (part(high, i) - part(low, i))));
  return `rgb(${mixed.join(",")})`;
}

function canvas(id, height) { // a context in CSS pixels, cleared
  const found = at(id);
  if (height) found.style.height = `${height}px`;
  const scale = window.devicePixelRatio || 1;
  const width = found.clientWidth;
  const tall = found.clientHeight;
  found.width = Math.round(width * scale);
  found.height = Math.round(tall * scale);
  const context = found.getContext("2d");
  context.scale(scale, scale);
  return { context, width, height: tall };
}

const shown = (values) => Math.max(SHORTEST, values.length); // samples from edge to edge

function drawLine(id, values, top) {
  const { context, width, height } = canvas(id);
  const highest = top || Math.max(1e-9, ...values.filter((value) => value !== null));
  const x = (i) => width - ((values.length - 1 - i) / (shown(values) - 1)) * width;
  const y = (value) => height - 2 - (value / highest) * (height - 4);
  context.strokeStyle = colour("edge");
  context.beginPath();
  context.moveTo(0, height - 1);
  context.lineTo(width, height - 1);
  context.stroke();
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.5;
  context.beginPath();
  let isDown = false;
  values.forEach((value, i) => {
    if (value === null) { isDown = false; return; }
    if (isDown) context.lineTo(x(i), y(value)); else context.moveTo(x(i), y(value));
    isDown = true;
  });
  context.stroke();
}

function drawTime() {
  const { context, width, height } = canvas("time");
  const samples = history.time;
  const sum = (sample) => PARTS.reduce((total, part) => total + sample[part], 0);
  const highest = Math.max(1e-6, ...samples.filter(Boolean).map(sum)) * 1.05;
  const left = 52, bottom = height - 18;
  const step = (width - left) / shown(samples);
  samples.forEach((sample, i) => {
    if (!sample) return;
    // whole pixels, or neighbours would show a seam
    const x = Math.round(width - (samples.length - i) * step);
    const wide = Math.round(width - (samples.length - i - 1) * step) - x;
    let y = bottom;
    for (const part of PARTS) {
      const tall = (sample[part] / highest) * (bottom - 4);
      context.fillStyle = colour(part);
      context.fillRect(x, y - tall, wide, tall);
      y -= tall;
    }
  });
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = colour("quiet");
  context.strokeStyle = colour("edge");
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const share of samples.some(Boolean) ? [0, 0.5, 1] : [0]) {
    const y = bottom - share * (bottom - 8);
    context.beginPath();
    context.moveTo(left, y + 0.5);
    context.lineTo(width, y + 0.5);
    context.stroke();
    context.fillText(share ? seconds(share * highest) : "0", left - 6, y);
  }
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  context.fillText(`${span((shown(samples) * POLL_MS) / 1000)} ago`, left, height - 3);
  context.textAlign = "right";
  context.fillText("now", width, height - 3);
}

// The heat map: a row per layer, a column per expert

function drawHeat() {
  const experts = heat.experts;
  if (!experts) return;
  const nRows = experts.layers.length, nColumns = experts.states[0].length;
  const left = 30, top = 4, bottom = 16; // room for the numbers
  const wide = (at("heat").clientWidth - left) / nColumns;
  const tall = Math.max(5, Math.min(22, wide, 520 / nRows));
  const { context } = canvas("heat", top + nRows * tall + bottom);
  const most = Math.max(1, ...experts.uses.map((row) => Math.max(...row)));
  const ramps = Object.fromEntries(["resident", "disk"].map((name) => [
    name,
    Array.from({ length: 33 }, (_, i) => mix(colour(`${name}-low`), colour(`${name}-high`), i / 32)),
  ]));
  const loading = colour("loading");
  const gap = wide > 5 && tall > 5 ? 1 : 0;
  heat.box = { left, top, wide, tall, nRows, nColumns };
  experts.states.forEach((row, layer) => {
    for (let expert = 0; expert < nColumns; expert++) {
      // the root: uses differ by orders of magnitude, and the rare ones should differ too
      const strength = Math.round(32 * Math.sqrt(experts.uses[layer][expert] / most));
      context.fillStyle = row[expert] === "l" ? loading
        : ramps[row[expert] === "r" ? "resident" : "disk"][strength];
      context.fillRect(left + expert * wide, top + layer * tall, wide - gap, tall - gap);
    }
  });
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("quiet");
  context.textBaseline = "middle";
  context.textAlign = "right";
  const every = Math.ceil(14 / tall);
  for (let layer = 0; layer < nRows; layer += every) {
    context.fillText(experts.layers[layer], left - 6, top + (layer + 0.5) * tall);
  }
  context.textAlign = "center";
  const each = [1, 2, 4, 8, 16, 32, 64].find((n) => n * wide >= 26) || 128;
  for (let expert = 0; expert < nColumns; expert += each) {
    context.fillText(expert, left + (expert + 0.5) * wide, top + nRows * tall + 9);
  }
  if (heat.cursor) {
    context.strokeStyle = colour("cursor");
    context.lineWidth = 2;
    const { layer, expert } = heat.cursor;
    context.strokeRect(left + expert * wide - 1, top + layer * tall - 1, wide + 1, tall + 1);
  }
}

function readHeat() {
  const experts = heat.experts;
  if (!experts) return;
  let text = "Point at a square, or use the arrow keys, to read it.";
  if (heat.cursor) {
    const { layer, expert } = heat.cursor;
    const place = { r: "resident", l: "loading", ".": "on the disk" }[experts.states[layer][expert]];
    const uses = counted(experts.uses[layer][expert], "token");
    text = `Layer ${experts.layers[layer]}, expert ${expert}: ${place}, used by ${uses}`;
  }
  if (at("heat-reading").textContent !== text) at("heat-reading").textContent = text;
}

function moveCursor(layer, expert) {
  const { nRows, nColumns } = heat.box;
  const within = (value, n) => Math.max(0, Math.min(n - 1, value));
  heat.cursor = { layer: within(layer, nRows), expert: within(expert, nColumns) };
  drawHeat();
  readHeat();
}

at("heat").addEventListener("keydown", (event) => {
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const step = steps[event.key];
  if (!heat.box || (!step && event.key !== "Escape")) return;
  event.preventDefault();
  if (!step) { heat.cursor = null; drawHeat(); readHeat(); return; }
  const from = heat.cursor || { layer: -step[0], expert: -step[1] };
  moveCursor(from.layer + step[0], from.expert + step[1]);
});
at("heat").addEventListener("pointermove", (event) => {
  if (!heat.box) return;
  const { left, top, wide, tall, nRows } = heat.box;
  const layer = Math.floor((event.offsetY - top) / tall);
  if (event.offsetX >= left && layer >= 0 && layer < nRows) {
    moveCursor(layer, Math.floor((event.offsetX - left) / wide));
  }
});
at("heat").addEventListener("pointerleave", () => {
  if (document.activeElement === at("heat")) return;
  heat.cursor = null;
  drawHeat();
  readHeat();
});

function showExperts(experts) {
  heat.experts = experts;
  if (!experts) {
    at("experts-summary").textContent = "The page cache holds the experts: the kernel decides which.";
    for (const id of ["heat", "heat-reading"]) at(id).hidden = true;
    return;
  }
  const all = experts.states.join("");
  const count = (letter) => all.split(letter).length - 1;
  at("experts-summary").textContent =
    `${counted(experts.layers.length, "layer")} (rows) × ${counted(experts.states[0].length, "expert")}: ` +
    `${number(count("r"))} of ${number(all.length)} resident, ${number(count("l"))} loading`;
  drawHeat();
  readHeat();
}

// The panels

function stack(parts) { // [class or colour variable, amount] -> a bar's children
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0) || 1;
  return parts.filter(([, amount]) => amount > 0).map(([name, amount]) => {
    const part = element("i", undefined, name);
    part.style.width = `${(100 * amount) / total}%`;
    return part;
  });
}

function showFigures({ recent, totals, memory }) {
  at("speed").textContent = number(recent.tokens_per_second, 1);
  at("speed-more").textContent = `prompts: ${number(recent.prompt_tokens_per_second, 1)} tokens/s`;
  at("hits").textContent = recent.hit_rate === null ? "–" : number(100 * recent.hit_rate, 1);
  at("hits-more").textContent = totals.expert_hits === null ? "the page cache does not tell"
    : totals.expert_requests ? `since the start: ${number((100 * totals.expert_hits) / totals.expert_requests, 1)} %`
      : "no expert was asked for yet";
  at("read").textContent = recent.mib_per_token === null ? "–" : number(recent.mib_per_token, 2);
  at("read-more").textContent = `since the start: ${bytes(totals.bytes_read)}`;
  const [amount, unit] = bytes(memory.accounted_bytes).split(" ");
  at("memory").textContent = amount;
  at("memory-unit").textContent = unit;
  at("memory-more").textContent = `of ${bytes(memory.budget_bytes)}; highest ${bytes(memory.peak_bytes)}`;
}

function showTime(parts) {
  at("time-legend").replaceChildren(...PARTS.map((name) => {
    const row = element("div");
    const term = element("dt");
    const swatch = element("i");
    swatch.style.background = `var(--${name})`;
    term.append(swatch, name === "disk" ? "waiting for the disk" : name);
    row.append(term, element("dd", parts ? seconds(parts[name]) : "–"));
    return row;
  }));
}

function showRequests(requests) {
  at("requests-summary").textContent =
    `${number(requests.running)} of ${number(requests.parallel)} running, ${number(requests.queued)} waiting`;
  at("requests").replaceChildren(...requests.list.map((request) => {
    const progress = request.phase === "prompt"
      ? `${number(request.done_tokens)} of ${counted(request.prompt_tokens, "token")}`
      : `${counted(request.tokens, "token")} to a prompt of ${number(request.prompt_tokens)}`;
    return element("li", `${PHASES[request.phase] || request.phase}: ${progress}, since ${span(request.seconds)}`);
  }));
}

function showSlots(slots) {
  at("slots").replaceChildren(...slots.map((found) => {
    const item = element("li");
    const n = found.free + found.loading + found.ready + found.condemned + found.retired;
    const line = element("div");
    line.append(element("b", `${counted(n, "slot")} of ${bytes(found.slot_bytes)}`),
      element("span", ` for layers ${ranges(found.layers)}`, "quiet"));
    const bar = element("div", undefined, "bar");
    bar.append(...stack([["ready", found.ready], ["loading", found.loading + found.condemned],
      ["free", found.free], ["retired", found.retired]]));
    const parts = [`${number(found.ready)} ready`, `${number(found.loading + found.condemned)} loading`,
      `${number(found.free)} free`];
    if (found.retired) parts.push(`${number(found.retired)} given back`);
    item.append(line, bar, element("div", parts.join(", "), "quiet"));
    return item;
  }));
  if (!slots.length) at("slots").replaceChildren(element("li", "No pool: the page cache holds the experts."));
}

function showProcesses(processes) {
  const now = performance.now() / 1000;
  const cpu = Object.fromEntries(processes.map((process) => [process.name, process.cpu_seconds]));
  at("processes").replaceChildren(...processes.map((process) => {
    const row = element("tr");
    const name = element("th", process.name);
    name.scope = "row";
    const before = lastCpu && lastCpu.cpu[process.name];
    const isKnown = typeof before === "number" && process.cpu_seconds !== null && process.cpu_seconds >= before;
    const busy = isKnown ? `${number((100 * (process.cpu_seconds - before)) / (now - lastCpu.now))} %` : "–";
    row.append(name, element("td", ranges(process.cores)));
    if (process.is_up) {
      row.append(element("td", busy), element("td", bytes(process.resident_bytes || 0)));
    } else {
      const down = element("td", process.pid === null ? "down" : "starts", "down");
      down.colSpan = 2;
      row.append(down);
    }
    row.append(element("td", number(process.restarts)));
    return row;
  }));
  lastCpu = { cpu, now };
}

function showBudget(memory) {
  at("budget-summary").textContent =
    `${bytes(memory.accounted_bytes)} in use of ${bytes(memory.budget_bytes)}; planned for:`;
  const shades = { pool: "accent", dense: "disk", kv: "coordination", scratch: "good", processes: "quiet",
    page_tables: "retired" };
  const planned = BUDGET_PARTS.map((name) => [name, memory.parts[name]]);
  at("budget-bar").replaceChildren(...stack(planned));
  for (const part of at("budget-bar").children) part.style.background = `var(--${shades[part.className]})`;
  at("budget").replaceChildren(...planned.flatMap(([name, amount]) => {
    const term = element("dt", PART_NAMES[name]);
    term.style.setProperty("--part", `var(--${shades[name]})`);
    return [term, element("dd", bytes(amount))];
  }));
}

function showAbout({ model, settings, version, state, uptime_seconds: uptime }) {
  at("model").textContent = model.name;
  document.title = `${model.name} – moe-coord`;
  at("state").textContent = state;
  at("state").className = `badge ${state}`;
  at("uptime").textContent = `for ${span(uptime)}`;
  const reads = settings.io_workers ? counted(settings.io_workers, "I/O worker")
    : settings.io_threads ? counted(settings.io_threads, "I/O thread") : "inline reads";
  at("settings").textContent = [
    `moe-coord ${version}`, model.architecture,
    `${counted(model.n_layers, "layer")}, ${counted(model.n_experts, "expert")} each, ${model.n_active} used per token`,
    `context ${counted(model.n_context, "token")}`, reads, `reader ${settings.reader}`, `policy ${settings.policy}`,
    `prefetch ${settings.prefetch}`, `numerics ${settings.numerics}`, `kernels ${settings.kernels || "–"}`,
    `keys and values ${settings.kv_type}`,
  ].join(" · ");
}

function remember(status) {
  const { recent, memory } = status;
  const fresh = { speed: recent.tokens_per_second, hits: recent.hit_rate, read: recent.mib_per_token,
    memory: memory.accounted_bytes / memory.budget_bytes, time: recent.token_seconds };
  for (const [name, value] of Object.entries(fresh)) {
    history[name].push(value);
    if (history[name].length > HISTORY) history[name].shift();
  }
}

function drawAll() {
  drawLine("speed-line", history.speed);
  drawLine("hits-line", history.hits, 1);
  drawLine("read-line", history.read);
  drawLine("memory-line", history.memory, 1);
  drawTime();
  drawHeat();
}

function show(status) {
  remember(status);
  showAbout(status);
  showFigures(status);
  showTime(status.recent.token_seconds);
  showExperts(status.experts);
  showRequests(status.requests);
  showSlots(status.slots);
  showProcesses(status.processes);
  showBudget(status.memory);
  drawAll();
}

// Asking

const headers = (more = {}) => (key ? { ...more, Authorization: `Bearer ${key}` } : more);

function trouble(text) {
  at("trouble").hidden = !text;
  if (at("trouble").textContent !== text) at("trouble").textContent = text;
}

let nextPoll = 0;

function pollAfter(milliseconds) {
  clearTimeout(nextPoll); // one turn at a time, also where a key came in the middle of it
  nextPoll = setTimeout(poll, milliseconds);
}

async function poll() {
  if (document.hidden) { pollAfter(POLL_MS); return; }
  try {
    const answer = await fetch("status.json", { headers: headers(), signal: AbortSignal.timeout(10_000) });
    at("key-form").hidden = answer.status !== 401;
    if (answer.status === 401) {
      trouble(key ? "The service does not know this key." : "");
    } else if (answer.ok) {
      show(await answer.json());
      trouble("");
    } else {
      trouble(`The service answered with ${answer.status}; asking again.`);
    }
  } catch (error) {
    at("state").textContent = "no answer";
    at("state").className = "badge lost";
    trouble(`The service does not answer (${error.message}); asking again.`);
  }
  pollAfter(at("key-form").hidden ? POLL_MS : 10 * POLL_MS);
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  sessionStorage.setItem("key", key);
  at("key").value = "";
  at("key-form").hidden = true;
  pollAfter(0);
});

// Trying a prompt

let running = null;

async function* events(answer) { // the objects of a stream of server-sent events
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function sumUp(timings) {
  const parts = [counted(timings.predicted_n, "token"), `${number(timings.predicted_per_second, 1)} tokens/s`,
    `prompt of ${counted(timings.prompt_n, "token")} in ${seconds(timings.prompt_ms / 1000)}`];
  if (typeof timings.hit_rate === "number") parts.push(`hit rate ${number(100 * timings.hit_rate, 1)} %`);
  if (typeof timings.mib_per_token === "number") parts.push(`${number(timings.mib_per_token, 2)} MiB/token read`);
  return parts.join(", ");
}

async function send() {
  const prompt = at("prompt").value;
  const isChat = at("mode").value === "chat";
  const wanted = { stream: true, max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value) };
  Object.assign(wanted, isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt });
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("answer-figures").textContent = "waiting for the first token";
  at("answer").setAttribute("aria-busy", "true");
  at("answer").replaceChildren(...(isChat ? [] : [element("span", prompt, "given")]));
  const text = document.createTextNode("");
  at("answer").append(text);
  try {
    const answer = await fetch(isChat ? "v1/chat/completions" : "v1/completions", {
      method: "POST", headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify(wanted), signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const piece = choice ? choice.text ?? choice.delta.content ?? "" : "";
      if (piece) {
        at("answer-figures").textContent = "";
        text.data += piece;
        at("answer").scrollTop = at("answer").scrollHeight;
      }
      if (event.timings) at("answer-figures").textContent = sumUp(event.timings);
    }
  } catch (error) {
    if (error.name === "AbortError") at("answer-figures").textContent = "stopped";
    else { at("answer-figures").textContent = ""; at("answer").append(element("span", ` ${error.message}`, "failed")); }
  } finally {
    running = null;
    at("answer").setAttribute("aria-busy", "false");
    at("send").disabled = false;
    at("stop").disabled = true;
  }
}

at("try").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) send();
});
at("stop").addEventListener("click", () => running && running.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("try").requestSubmit();
});
window.addEventListener("resize", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
readHeat();
poll();
