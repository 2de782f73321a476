"use strict";

const element = (id) => document.getElementById(id);
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed"];
const ALTERNATIVES = 5;

let running = null; // the AbortController of the request under way
let tokens = []; // the spans of the text, in order
let numTokens = 0; // a span may have several: parts of one character

// ---- asking ----------------------------------------------------------------------------------

function headers() {
  const key = element("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function body() {
  const fields = { prompt: element("prompt").value, stream: true, logprobs: ALTERNATIVES };
  for (const name of NUMBERS) {
    const input = element(name);
    if (input.validity.badInput || (input.required && input.value === "")) {
      throw fault(`${labelOf(input)}: give a number`, name);
    }
    // The text as it stands is a number of JSON too; digits of a long seed are not lost.
    if (input.value !== "") fields[name] = JSON.rawJSON?.(plain(input.value)) ?? input.valueAsNumber;
  }
  const stops = element("stop").value.split("\n").filter((line) => line !== "");
  if (stops.length) fields.stop = stops;
  return JSON.stringify(fields);
}

// HTML allows 01 and .5 where JSON does not.
const plain = (text) => (/^(0|[1-9]\d*)$/.test(text) ? text : String(Number(text)));
const labelOf = (input) => input.labels[0].firstChild.textContent.trim();
const fault = (message, param) => Object.assign(new Error(message), { param });

async function faultOf(response) {
  try {
    const { error } = await response.json();
    return fault(error.message, error.param);
  } catch {
    return fault(`the server answered ${response.status}`);
  }
}

async function* eventsOf(response) {
  let rest = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + piece).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw fault("the connection ended before the text did");
}

async function generate() {
  if (running) return;
  const request = new AbortController();
  try {
    clear();
    const asked = body();
    running = request;
    show({ busy: true, status: "waiting" });
    await read(asked, request.signal);
  } catch (error) {
    if (error.name === "AbortError") element("status").textContent = `stopped after ${count()}`;
    else complain(error);
  } finally {
    running = null;
    show({ busy: false });
  }
}

async function read(asked, signal) {
  const response = await fetch("v1/completions", {
    method: "POST", headers: headers(), body: asked, signal,
  });
  if (response.status === 401) {
    element("key_field").hidden = false;
    element("key").focus();
  }
  if (!response.ok) throw await faultOf(response);
  const began = performance.now();
  let reason = null;
  for await (const event of eventsOf(response)) {
    if (event.error) throw fault(event.error.message, event.error.param);
    const [choice] = event.choices;
    append(choice);
    reason = choice.finish_reason ?? reason;
    element("status").textContent = count();
  }
  const seconds = (performance.now() - began) / 1000;
  const why = reason === "length" ? "limit reached" : "ended by itself";
  element("status").textContent = `${count()}, ${why}, ${seconds.toFixed(1)} s`;
}

function stop() {
  running?.abort();
}

// ---- the text --------------------------------------------------------------------------------

let pending = []; // tokens whose text has not come yet: parts of one character

function clear() {
  tokens = [];
  numTokens = 0;
  pending = [];
  hideDetails();
  element("error").hidden = true;
  for (const input of document.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
  }
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = element("prompt").value;
  element("output").replaceChildren(prompt);
}

function append(choice) {
  const told = choice.logprobs;
  numTokens += told?.tokens.length ?? 0;
  told?.tokens.forEach((token, i) => {
    pending.push({ token, logprob: told.token_logprobs[i], top: told.top_logprobs[i] ?? {} });
  });
  if (choice.text === "" && choice.finish_reason === null) return;
  if (choice.text === "" || pending.length === 0) {
    if (choice.text) element("output").append(choice.text);
    return;
  }
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = choice.text;
  span.details = pending;
  span.tabIndex = tokens.length === 0 ? 0 : -1; // one stop of the Tab key; arrows walk on
  const probability = Math.exp(pending.reduce((sum, { logprob }) => sum + logprob, 0));
  span.style.setProperty("--surprise", `${Math.round(45 * (1 - probability))}%`);
  pending = [];
  tokens.push(span);
  element("output").append(span);
}

const count = () => (numTokens === 1 ? "1 token" : `${numTokens} tokens`);

function percent(probability) {
  if (probability > 0 && probability < 0.0005) return "< 0.1 %";
  return `${(100 * probability).toFixed(1)} %`;
}

// ---- probabilities ---------------------------------------------------------------------------

function row(token, probability, chosen) {
  const line = document.createElement("tr");
  line.className = chosen ? "chosen" : "";
  const name = document.createElement("th");
  name.scope = "row";
  name.textContent = visible(token);
  const number = document.createElement("td");
  number.className = "number";
  number.textContent = percent(probability);
  const bar = document.createElement("td");
  const meter = document.createElement("meter");
  meter.value = probability;
  meter.setAttribute("aria-hidden", "true");
  bar.append(meter);
  line.append(name, bar, number);
  return line;
}

const visible = (token) => token.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

function tableOf({ token, logprob, top }) {
  const table = document.createElement("table");
  const body = table.createTBody();
  const others = Object.entries(top).filter(([other]) => other !== token);
  const all = [[token, logprob], ...others].sort((a, b) => b[1] - a[1]);
  for (const [other, value] of all) body.append(row(other, Math.exp(value), other === token));
  return table;
}

function showDetails(span) {
  const details = element("details");
  details.replaceChildren(...span.details.map(tableOf));
  details.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const size = details.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - size.width - 8));
  const below = box.bottom + 8;
  const fits = below + size.height < window.innerHeight || box.top < size.height + 8;
  const top = fits ? below : box.top - size.height - 8;
  details.style.left = `${left + window.scrollX}px`;
  details.style.top = `${top + window.scrollY}px`;
  span.setAttribute("aria-describedby", "details");
}

function hideDetails() {
  element("details").hidden = true;
}

function walk(event) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  const at = tokens.indexOf(event.target);
  if (at < 0 || !(event.key in steps)) return;
  event.preventDefault();
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, at + steps[event.key]))];
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// ---- the rest of the page --------------------------------------------------------------------

function show({ busy, status }) {
  element("generate").disabled = busy;
  element("stop_button").disabled = !busy;
  element("output").setAttribute("aria-busy", busy);
  if (status !== undefined) element("status").textContent = status;
}

function complain(error) {
  const message = error instanceof TypeError ? "the server cannot be reached" : error.message;
  element("error").textContent = message;
  element("error").hidden = false;
  element("status").textContent = "";
  const input = error.param && element(error.param);
  if (input) {
    input.setAttribute("aria-invalid", "true");
    input.focus();
  }
}

async function introduce() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) element("key_field").hidden = false;
  if (!response.ok) return;
  const [model] = (await response.json()).data;
  const context = model.max_model_len === null ? "" : `, context of ${model.max_model_len} tokens`;
  element("model").textContent = `${model.id}${context}`;
  document.title = `${model.id} · scalerun`;
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
element("stop_button").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generate();
  } else if (event.key === "Escape") {
    stop();
    hideDetails();
  }
});

const output = element("output");
const tokenOf = (event) => event.target.closest?.(".token");
output.addEventListener("mouseover", (event) => {
  const span = tokenOf(event);
  if (span) showDetails(span);
});
output.addEventListener("mouseout", hideDetails);
output.addEventListener("focusin", (event) => {
  const span = tokenOf(event);
  if (span) showDetails(span);
});
output.addEventListener("focusout", hideDetails);
output.addEventListener("keydown", walk);

introduce().catch(() => complain(new TypeError()));
