// Keeps a page up to date. An element with `data-follow` has an address that is asked every `data-every` ms for its parts, elements
// with `data-part`, whose stamp has changed. Buttons with `data-act` send their message there, or to `data-address`.
import { tr } from "./language.js";

export const find = (selector) => document.querySelector(selector);
const NO_ANSWER = () => tr("The page's server does not answer. Try again when it is back.");
const keyOf = (node) => node.dataset?.run ?? node.dataset?.key;
// Makes `node` equal to `wanted`. Nodes that stay keep focus, scrolling, selection, open details and what is being typed.
const morph = (node, wanted) => {
  if (node.nodeName !== wanted.nodeName || keyOf(node) !== keyOf(wanted)) return void node.replaceWith(wanted);
  if (!node.attributes) return void (node.data === wanted.data || (node.data = wanted.data));
  const { value } = wanted, before = [...node.childNodes], after = [...wanted.childNodes];
  for (const { name } of [...node.attributes]) if (name !== "open" && !wanted.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value: text } of wanted.attributes) if (name !== "open" && node.getAttribute(name) !== text) node.setAttribute(name, text);
  after.forEach((child, n) => (before[n] ? morph(before[n], child) : node.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
  if (node.matches("input, select, textarea") && node !== document.activeElement && node.value !== value) node.value = value;
};
export const show = (element, html) => {
  const wanted = element.cloneNode(false), used = element.contains(document.activeElement) ? document.activeElement : null;
  wanted.innerHTML = html;
  morph(element, wanted);
  if (used && !used.isConnected) element.querySelector(`[data-key="${CSS.escape(used.dataset.key ?? "")}"]`)?.focus({ preventScroll: true });
};
const timers = new Map(), turns = new Map(); // only the newest turn counts: an older answer may be from before a message
const parts = (root) => [...root.querySelectorAll("[data-part]")];
const refresh = async (root, turn) => {
  const shown = parts(root).map(({ dataset }) => dataset.stamp).filter(Boolean).join("."), { follow } = root.dataset;
  const response = await fetch(`${follow}${follow.includes("?") ? "&" : "?"}shown=${shown}`).catch(() => null);
  const answer = (response?.ok && await response.json().catch(() => null)) || null;
  const refused = response && !response.ok ? await response.text().catch(() => "") : "", said = root.querySelector("[data-said]");
  if (turns.get(root) !== turn) return;
  for (const part of answer ? parts(root) : []) {
    const [stamp, html] = answer.parts[part.dataset.part] ?? [];
    if (stamp) { part.dataset.stamp = stamp; show(part, html); }
  }
  if (!find("#run-lost") && (!answer || said.dataset.lost)) [said.textContent, said.dataset.lost] = answer ? ["", ""] : [refused || NO_ANSWER(), "1"];
  root.dispatchEvent(new CustomEvent("answer", { detail: { answer, refused } }));
};
export const ask = async (root) => {
  const turn = {};
  turns.set(root, turn);
  timers.set(root, clearTimeout(timers.get(root)));
  if (!document.hidden) await refresh(root, turn).catch(console.error);
  if (turns.get(root) === turn) timers.set(root, setTimeout(ask, Number(root.dataset.every), root));
};
// Sends a message; what the server says of it stands in `said`, other parts of the answer in their places.
export const post = async (root, message, said = root.querySelector("[data-said]")) => {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(message) };
  const response = await fetch(root.dataset.address ?? root.dataset.follow, options).catch(() => null);
  const answer = (response?.ok && await response.json().catch(() => null)) || { said: "", error: response && !response.ok ? await response.text() : NO_ANSWER() };
  said.innerHTML = answer.said;
  if (answer.error) said.append(Object.assign(document.createElement("p"), { className: "ft-note bad", textContent: answer.error }));
  for (const part of parts(root)) if (part.dataset.part in answer) part.innerHTML = answer[part.dataset.part];
  ask(root);
  return answer;
};
// Another way for the messages of this page, also for those that were sent before its script was there.
const early = [];
let send = (message, root) => (root ? post(root, message) : early.push(message));
export const sendBy = (way) => { send = way; early.splice(0).forEach((message) => way(message)); };
document.addEventListener("click", ({ target }) => {
  const element = target.closest?.("[data-act]"), bar = find("[role=progressbar]");
  const [total, step] = ["max", "now"].map((name) => Number(bar?.getAttribute(`aria-value${name}`)));
  const asked = element?.dataset.confirm?.replace("{n}", Math.max(0, total - step)).replace("{total}", total);
  if (element && (!asked || confirm(asked))) send(JSON.parse(element.dataset.act), element.closest("[data-follow]"));
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) [...timers.keys()].forEach(ask); });
const follow = () => { for (const root of document.querySelectorAll("[data-follow]")) if (!timers.has(root)) ask(root); };
new MutationObserver(follow).observe(document.documentElement, { childList: true, subtree: true });
follow();

// A file for the page's server: its place there, or the error in words.
export const upload = async (file) => {
  const form = new FormData();
  form.append("files", file);
  const response = await fetch("/gradio_api/upload", { method: "POST", body: form }).catch(() => null);
  if (response?.ok) return { path: (await response.json())[0] };
  return { error: response ? await response.text() : NO_ANSWER() };
};
