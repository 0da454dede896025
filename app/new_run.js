// New run: sends edits in their order, shows the returned screen and then the plan of that draft, and opens panels.
import { tr } from "./language.js";
import { chooseFile, find, onDrop, sendBy, show as morphTo, upload } from "./parts.js";

const TICK_MS = 1500;
// The draft's stamp, edits without an answer, the running request for a plan, and what the user has opened.
const state = { stamp: -1, waiting: [], edits: Promise.resolve(), planning: null, starting: false, mine: "", panel: "", query: "", why: "" };

const ask = (path, options = {}) => fetch(`/ft/new/${path}`, options).then((response) => (response.ok ? response.json() : null)).catch(() => null);
const fill = (element, html) => {
  if (element.dataset.html !== html) morphTo(element, html);
  element.dataset.html = html;
};
const show = (parts) => {
  for (const [name, html] of Object.entries(parts)) for (const element of document.querySelectorAll(`[data-part="${name}"]`)) fill(element, html);
  showExplanation();
};
const showExplanation = () => {
  const chosen = find(`[data-why-of="${state.why}"]`) ? state.why : "";
  for (const text of document.querySelectorAll("[data-why-of]")) text.hidden = text.dataset.whyOf !== chosen;
};
const takeScreen = (answer) => {
  if (!answer) return;
  const isNew = answer.stamp !== state.stamp;
  state.stamp = answer.stamp;
  state.mine = answer.mine || state.mine;
  show(answer.parts);
  find("[data-doing]").textContent = answer.doing;
  if (state.starting && !answer.starting) find("#new-run > :is([data-part=refused], [data-part=progress]):not(:empty)")?.scrollIntoView({ block: "center" });
  setStart(state.canStart, answer.starting);
  for (const field of document.querySelectorAll("[data-field]")) {
    field.dataset.usual ??= field.value;
    if (field !== document.activeElement) field.value = answer.values[field.dataset.field] ?? field.dataset.usual;
  }
  if (isNew) askForPlan();
  if (isNew && state.panel === "data") loadRows();
};
// A run starts once, however often the button is pressed.
const setStart = (canStart, starting) => {
  Object.assign(state, { canStart, starting });
  find("#nr-start").disabled = !canStart || starting;
};
const askForPlan = async () => {
  state.planning?.abort();
  const { signal } = (state.planning = new AbortController());
  document.body.toggleAttribute("data-planning", true);
  setStart(false, state.starting);
  for (const complete of ["", "?complete=true"]) {
    const answer = await ask(`plan${complete}`, { signal });
    if (signal.aborted) return;
    if (!answer || answer.stamp !== state.stamp) return void setTimeout(() => signal.aborted || askForPlan(), 500); // a newer draft, or no server
    show(answer.parts);
    document.body.toggleAttribute("data-planning", false);
    setStart(answer.start, state.starting);
    if (answer.complete !== false) return;
  }
};
// Each edit waits for the answer to the edit before. An edit that the server did not get is sent again; a refused edit is not.
// `keepalive`: a browser lets a request of at most 64 KiB outlive its page.
const postOptions = (message, body = JSON.stringify(message)) => ({ method: "POST", headers: { "content-type": "application/json" }, body, keepalive: body.length < 60_000 });
const noteOf = (css, textContent) => Object.assign(document.createElement("p"), { className: `ft-note ${css}`, textContent }).outerHTML;
const answerTo = async (message) => {
  const response = await fetch("/ft/new/change", postOptions(message)).catch(() => null);
  if (!response || response.status > 500) return null;
  if (response.ok) return response.json().catch(() => ({ parts: {} })); // the next tick has the screen
  return { parts: { refused: noteOf("bad", await response.text()) } };
};
const send = (message) => {
  if ((message.start || message.demo) && state.starting) return;
  setStart(state.canStart, state.starting || Boolean(message.start || message.demo));
  state.waiting.push(message);
  state.edits = state.edits.then(async () => {
    let answer = null;
    while (!(answer = await answerTo(message))) await new Promise((done) => setTimeout(done, 1000));
    state.waiting.shift();
    if ("stamp" in answer) takeScreen(answer);
    else show(answer.parts);
    if (["model", "gpu", "recipe"].includes(state.panel) && state.panel in message && !answer.parts.refused) find("#nr-panel").close();
  });
  document.body.toggleAttribute("data-unsaved", true);
  state.edits.then(() => document.body.toggleAttribute("data-unsaved", state.waiting.length > 0));
};
// When the page is left, waiting edits and the edit being typed are sent; the first waiting edit is already on its way.
window.addEventListener("pagehide", () => {
  const box = document.activeElement, typed = box.matches("input[data-set], [data-field]") && box.value !== box.defaultValue && editOf(box);
  for (const message of [...state.waiting.slice(1), ...(typed ? [typed] : [])]) fetch("/ft/new/change", postOptions(message));
});
const editOf = (box) => {
  const { set, field, column } = box.dataset;
  if (set === "text" || !box.reportValidity()) return null;
  if (set || field) return { set: set ?? field, text: box.value };
  return column ? { columns: Object.fromEntries([...document.querySelectorAll("[data-column]")].map((select) => [select.dataset.column, select.value])) } : null;
};
sendBy((message) => ("search" in message ? open("model", message.search) : send(message)));

// Panels: fetched when opened, the models' panel at each tick. The event `close` comes late, when the next panel may be open.
const loadRows = async () => {
  const answer = await ask("panel/look"), shown = find("[data-look]");
  if (answer !== null && shown) fill(shown, answer);
};
const loadPanel = async (check = "") => {
  const request = check ? state.request : (state.request = {}), name = state.panel; // only answers to the user's newest request count
  const html = await ask(`panel/${name}?query=${encodeURIComponent(state.query)}${check}`);
  if (state.request === request && state.panel === name) fill(find("[data-panel-body]"), html ?? tr("The page's server does not answer. Close this panel and open it again."));
};
const open = async (name, query = "") => {
  [state.panel, state.query] = [name, query];
  const panel = find("#nr-panel");
  if (!panel.open) panel.showModal();
  await loadPanel();
  panel.scrollTop = 0;
  takeScreen(await ask(`screen?mine=${state.mine}`));
  if (state.panel === "data") loadRows();
};
document.addEventListener("close", () => { if (!find("#nr-panel").open) state.panel = ""; }, true);

const uploadData = async (file) => {
  find("[data-look]").textContent = tr("Uploading {name} …", { name: file.name });
  const { path, error } = await upload(file);
  if (path) send({ upload: path }); else find("[data-look]").textContent = error;
};
document.addEventListener("click", ({ target }) => {
  const element = target.closest?.("[data-panel], [data-close], [data-why], [data-upload], [data-use-text], #nr-start");
  if (!element) return;
  if (element.dataset.panel) open(element.dataset.panel);
  else if (element.dataset.why) { state.why = state.why === element.dataset.why ? "" : element.dataset.why; showExplanation(); }
  else if (element.matches("[data-close]")) find("#nr-panel").close();
  else if (element.matches("[data-upload]")) chooseFile(uploadData);
  else if (element.matches("[data-use-text]")) send({ set: "text", text: find("#nr-text").value });
  else if (find(".nr-settings :invalid")) find(".nr-settings :invalid").reportValidity();
  else send({ start: true, name: find("#nr-name").value });
});
document.addEventListener("change", ({ target }) => {
  const message = editOf(target);
  if (message) send(message);
});
document.addEventListener("submit", (event) => {
  const form = event.target.closest?.("[data-form]");
  if (!form) return;
  event.preventDefault();
  if (form.dataset.form === "search") open("model", form.elements.value.value);
  else send({ [form.dataset.form]: form.elements.value.value });
});
onDrop(async (file) => {
  if (state.panel !== "data") await open("data");
  uploadData(file);
});
const follow = async () => {
  if (!find("#new-run")) return;
  const answer = await ask(`screen?mine=${state.mine}`);
  show({ lost: answer ? "" : noteOf("warn", tr("No answer from the page's server. This tab keeps your choices and sends them when the server answers.")) });
  if (!state.waiting.length) takeScreen(answer);
  if (state.panel === "model") state.checking ??= loadPanel("&check=true").finally(() => { state.checking = null; });
};
const tick = () => follow().finally(() => setTimeout(tick, document.hidden ? 4 * TICK_MS : TICK_MS));
tick();
