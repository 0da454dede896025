// Messages to the page's server, of buttons in the page's own HTML and of other scripts; and the focus, which stays where an
// answer replaces HTML.

// Gradio is told what its box has, or it would copy or send what it had before.
export const write = (box, text) => {
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
};
// The text box that takes messages is the one whose name ends so.
export const messageBox = () => document.querySelector('[id$="-act"] :is(textarea, input)');
let post = (message) => {
  const box = messageBox();
  if (box) write(box, JSON.stringify({ ...message, tick: performance.now() }));
};
export const send = (message) => post(message);
// Another way for the messages of this page.
export const sendBy = (way) => { post = way; };
document.addEventListener("click", ({ target }) => {
  const element = target.closest?.("[data-act]");
  if (element && (!element.dataset.confirm || confirm(element.dataset.confirm))) send(JSON.parse(element.dataset.act));
});

let focus = "";
document.addEventListener("focusin", ({ target }) => { focus = target.dataset?.key ?? ""; });
new MutationObserver(() => {
  if (focus && document.activeElement === document.body) document.querySelector(`[data-key="${focus}"]`)?.focus({ preventScroll: true });
}).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
