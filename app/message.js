// Messages to the page's server, of buttons in the page's own HTML and of other scripts; and the focus, which stays where an
// answer replaces HTML.

import { tr } from "./language.js";

// The text box that takes messages is the one whose name ends so; without the event Gradio would send what the box had before.
let post = (message) => {
  const box = document.querySelector('[id$="-act"] :is(textarea, input)');
  if (!box) return;
  box.value = JSON.stringify({ ...message, tick: performance.now() });
  box.dispatchEvent(new Event("input", { bubbles: true }));
};
export const send = (message) => post(message);
// Another way for the messages of this page.
export const sendBy = (way) => { post = way; };
document.addEventListener("click", ({ target }) => {
  const element = target.closest?.("[data-act]"), bar = document.querySelector("[role=progressbar]");
  const [total, step] = ["max", "now"].map((name) => Number(bar?.getAttribute(`aria-value${name}`)));
  const asked = element?.dataset.confirm?.replace("{n}", Math.max(0, total - step)).replace("{total}", total);
  if (element && (!asked || confirm(asked))) send(JSON.parse(element.dataset.act));
});

// A file for the page's server: its place there, or the error in words.
export const upload = async (file) => {
  const form = new FormData();
  form.append("files", file);
  const response = await fetch("/gradio_api/upload", { method: "POST", body: form }).catch(() => null);
  if (response?.ok) return { path: (await response.json())[0] };
  return { error: response ? await response.text() : tr("The page's server does not answer: try again when it is back.") };
};

let focus = "";
document.addEventListener("pointerdown", ({ target }) => { if (!target.closest?.("[data-key]")) focus = ""; });
document.addEventListener("focusin", ({ target }) => { focus = target.dataset?.key ?? ""; });
new MutationObserver(() => {
  if (focus && document.activeElement === document.body) document.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
}).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
