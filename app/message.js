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
  const element = target.closest?.("[data-act]");
  if (element && (!element.dataset.confirm || confirm(element.dataset.confirm))) send(JSON.parse(element.dataset.act));
});

// A file for the page's server: its place there, or the error in words.
export const upload = async (file) => {
  const form = new FormData();
  form.append("files", file);
  const response = await fetch("/gradio_api/upload", { method: "POST", body: form }).catch(() => null);
  if (response?.ok) return { path: (await response.json())[0] };
  return { error: response ? await response.text() : tr("The page's server does not answer: close this and open it again.") };
};

let focus = "";
document.addEventListener("focusin", ({ target }) => { focus = target.dataset?.key ?? ""; });
new MutationObserver(() => {
  if (focus && document.activeElement === document.body) document.querySelector(`[data-key="${focus}"]`)?.focus({ preventScroll: true });
}).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
