"use strict";

const at = (id) => document.getElementById(id);
const messages = [];
let running = null;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/* Text with its fenced code set apart. Everything is text: nothing that a model says becomes markup. */
function show(body, text) {
  const parts = text.split(/\n*^```[^\n]*(?:\n|$)/m);
  body.replaceChildren(...parts.map((part, i) => (
    i % 2 ? element("pre", "", part) : document.createTextNode(i ? part.replace(/^\n+/, "") : part)
  )));
}

function addMessage(role, text) {
  at("messages").querySelector(".hint")?.remove();
  const message = element("article", `message ${role}`);
  const body = element("div", "body");
  show(body, text);
  message.append(body);
  at("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return message;
}

function welcome() {
  messages.length = 0;
  at("messages").replaceChildren(element("p", "hint", "Enter sends, Shift and Enter begin a new line."));
  at("input").focus();
}

function request() {
  const body = {
    model: at("model").value,
    stream: true,
    stream_options: { include_usage: true },
    messages: [...(at("system").value ? [{ role: "system", content: at("system").value }] : []), ...messages],
  };
  for (const [field, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"], ["seed", "seed"]]) {
    if (at(id).value !== "") body[field] = Number(at(id).value);
  }
  return body;
}

/* The objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function fault(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${text.slice(0, 300)}`;
  }
}

function facts(usage, began, first, last) {
  const tokens = usage?.completion_tokens ?? 0;
  const parts = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (first) parts.push(`first after ${Math.round(first - began)} ms`);
  if (tokens > 1 && last > first) parts.push(`${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt ${usage.prompt_tokens} tokens${cached ? `, ${cached} of them cached` : ""}`);
  }
  return parts.join(" · ");
}

function addReasoning(message) {
  const details = element("details", "reasoning");
  details.open = true;
  const text = element("pre");
  details.append(element("summary", "", "Reasoning"), text);
  message.prepend(details);
  return text;
}

async function answer() {
  const message = addMessage("assistant", "");
  const body = message.querySelector(".body");
  const line = element("div", "facts", "…");
  message.append(line);
  const began = performance.now();
  let text = "", reasoning = null, usage = null, first = 0, last = 0, counted = 0, reason = "";
  running = new AbortController();
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await fault(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      const thought = choice?.delta?.reasoning_content;
      const piece = choice?.delta?.content;
      if (!piece && !thought) continue;
      last = performance.now();
      first ||= last;
      counted += 1;
      if (thought) (reasoning ??= addReasoning(message)).append(thought);
      if (piece) show(body, (text += piece));
      line.textContent = facts({ completion_tokens: counted, prompt_tokens: "?" }, began, first, last).replace(/ · prompt.*/, "");
      if (at("messages").scrollHeight - at("messages").scrollTop - at("messages").clientHeight < 160) {
        message.scrollIntoView({ block: "end" });
      }
    }
    line.textContent = facts(usage, began, first, last) + (reason === "length" ? " · cut at the token limit" : "");
  } catch (error) {
    if (error.name === "AbortError") {
      line.textContent += " · stopped";
    } else {
      line.className = "facts error";
      line.textContent = error.message;
    }
  } finally {
    running = null;
  }
  if (text) messages.push({ role: "assistant", content: text });
  else messages.pop();
}

async function send() {
  const text = at("input").value.trim();
  if (!text || running) return;
  at("input").value = "";
  fit();
  messages.push({ role: "user", content: text });
  addMessage("user", text);
  at("send").hidden = true;
  at("stop").hidden = false;
  await answer();
  at("send").hidden = false;
  at("stop").hidden = true;
  at("input").focus();
}

function fit() {
  const input = at("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

async function loadModels() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await fault(response));
    const { data } = await response.json();
    at("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
  } catch (error) {
    const message = addMessage("assistant", "");
    message.append(element("div", "facts error", `The models cannot be listed: ${error.message}`));
  }
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("input").addEventListener("input", fit);
at("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => { running?.abort(); welcome(); });
at("key").addEventListener("change", loadModels);
at("panel").addEventListener("submit", (event) => { event.preventDefault(); at("settings").open = false; });
welcome();
loadModels();
