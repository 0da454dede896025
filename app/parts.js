// Keeps a page up to date. An element with `data-follow` has an address that is asked every `data-every` milliseconds for the parts
// inside it, elements with `data-part`, whose stamp has changed. Buttons with `data-act` send their message to `data-address`, or to
// the same address.
import { tr } from "./language.js";

const NO_ANSWER = () => tr("The page's server does not answer: try again when it is back.");
const timers = new Map();
const parts = (root) => [...root.querySelectorAll("[data-part]")];
const fill = (part, [stamp, html]) => {
  const key = part.contains(document.activeElement) ? document.activeElement.dataset.key : "";
  const folded = [...part.querySelectorAll("details")].map(({ open }) => open), scrolled = part.querySelector(".ft-log")?.scrollTop;
  [part.dataset.stamp, part.innerHTML] = [stamp, html];
  part.querySelectorAll("details").forEach((details, n) => { details.open = folded[n] ?? details.open; });
  if (scrolled) part.querySelector(".ft-log").scrollTop = scrolled;
  if (key) part.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
};
export const ask = async (root) => {
  timers.set(root, clearTimeout(timers.get(root)));
  if (!document.hidden) {
    const shown = parts(root).map(({ dataset }) => dataset.stamp).filter(Boolean).join("."), { follow } = root.dataset;
    const response = await fetch(`${follow}${follow.includes("?") ? "&" : "?"}shown=${shown}`).catch(() => null);
    const answer = (response?.ok && await response.json().catch(() => null)) || null;
    for (const part of answer ? parts(root) : []) if (answer.parts[part.dataset.part]) fill(part, answer.parts[part.dataset.part]);
    const refused = response && !response.ok ? await response.text().catch(() => "") : "";
    root.dispatchEvent(new CustomEvent("answer", { detail: { answer, refused } }));
  }
  clearTimeout(timers.get(root));
  timers.set(root, setTimeout(ask, Number(root.dataset.every), root));
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
  const element = target.closest?.("[data-act]"), bar = document.querySelector("[role=progressbar]");
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
