// A run's page: tabs, how often the open tab is refreshed, forms, and a note while the server does not answer.
import { tr } from "./language.js";
import { ask, chooseFile, find, onDrop, post, upload } from "./parts.js";

const TICK_MS = 1000, CHAT_MS = 500, IDLE_MS = 5000, SILENT_S = 5;
const runPage = () => find("#run-page");
let answered = Date.now(), alive = true, refused = "";

const setFollow = () => {
  const { dataset } = runPage(), { tab } = dataset;
  dataset.follow = `${dataset.address}?${new URLSearchParams({ tab, order: find("#result-order")?.value ?? "differ" })}`;
  dataset.every = tab === "chat" ? CHAT_MS : alive || tab === "answers" || tab === "use" ? TICK_MS : IDLE_MS;
};
const askNow = () => { setFollow(); ask(runPage()); };
document.addEventListener("answer", ({ target, detail }) => {
  if (target !== runPage()) return;
  ({ refused } = detail);
  if (detail.answer) [answered, alive] = [Date.now(), detail.answer.alive];
  setFollow();
  showSilence();
}, true);

// While no answer comes, the head is dimmed and a note says so.
const showSilence = () => {
  const note = find("#run-lost"), silent_s = Math.round((Date.now() - answered) / 1000);
  const isLost = silent_s > (alive ? SILENT_S : SILENT_S + IDLE_MS / 1000) && !document.hidden;
  document.body.toggleAttribute("data-lost", isLost && Boolean(note));
  if (!note) return void (answered = Date.now()); // not drawn yet
  note.hidden = !isLost && !refused;
  note.textContent = refused || !isLost ? refused : tr("No answer from the page's server for {s} s. The page shows the last state it received; the run continues.", { s: silent_s });
};
setInterval(showSilence, 1000);
document.addEventListener("visibilitychange", () => { answered = Date.now(); });

// The address names the open tab.
const openTab = (tab) => {
  runPage().dataset.tab = tab;
  for (const link of document.querySelectorAll(".ft-tabs a")) link.ariaCurrent = link.dataset.tab === tab ? "page" : null;
  for (const link of document.querySelectorAll("[data-rail]")) link.ariaCurrent = (link.dataset.rail === "chat") === (tab === "chat") ? "page" : null;
  askNow();
};
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-tab]");
  if (!link || !runPage() || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  const { tab } = link.dataset;
  if (tab !== runPage().dataset.tab) history.pushState(null, "", `/run?${new URLSearchParams({ run: runPage().dataset.run, tab })}`);
  openTab(tab);
  if (!link.closest(".ft-tabs")) document.querySelector(`.ft-tabs [data-tab="${tab}"]`)?.focus();
});
addEventListener("popstate", () => { const { tab } = Object.fromEntries(new URLSearchParams(location.search)); if (runPage()) openTab(find(`.ft-tabs [data-tab="${CSS.escape(tab)}"]`) ? tab : "overview"); });

// A form shows the server's answer.
document.addEventListener("submit", async (event) => {
  const form = event.target.closest?.("[data-task]"), values = {}, { question, waiting } = form?.elements ?? {};
  if (!form) return;
  event.preventDefault();
  if (form.dataset.busy) return;
  form.dataset.busy = "1";
  for (const [name, value] of new FormData(form)) values[name] = name in values ? [values[name], value].flat() : value;
  if (question) question.value = "";
  const { said, error } = await post(runPage(), { task: form.dataset.task, values }, form.querySelector(".ft-said")).finally(() => delete form.dataset.busy);
  if (question && (said || error)) question.value ||= values.question;
  else if (waiting) showPictures({ waiting: "", pictures: "" });
});
document.addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
document.addEventListener("change", ({ target }) => { if (target.id === "result-order") askNow(); });
document.addEventListener("keydown", (event) => {
  if (event.target.id !== "chat-question" || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit(find("#chat-send"));
});
// Images of the next message: chosen, or dropped anywhere on the tab.
const showPictures = ({ waiting, pictures }) => { [find("#chat-box").elements.waiting.value, find("#chat-pictures").innerHTML] = [waiting, pictures]; };
const addPicture = async (file) => {
  const box = find("#chat-box"), said = box.querySelector(".ft-said"), { path, error } = await upload(file);
  if (error) said.textContent = error;
  const answer = path && await post(runPage(), { task: "picture", values: { path, waiting: box.elements.waiting.value } }, said);
  if (answer?.pictures) showPictures(answer);
};
document.addEventListener("click", ({ target }) => {
  if (target.matches("[data-no-picture]")) showPictures({ waiting: "", pictures: "" });
  if (target.matches("[data-add-picture]")) chooseFile(addPicture, "image/*");
});
onDrop(addPicture, () => find("[data-add-picture]")?.checkVisibility());
