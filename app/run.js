// A run's page: the open tab, the parts of it that change while it is open, its forms, and how old what it shows is.
import { tr } from "./language.js";
import { sendBy, upload } from "./message.js";

const TICK_MS = 1000, CHAT_MS = 500, IDLE_MS = 5000, SILENT_S = 5;
const find = (selector) => document.querySelector(selector), live = () => find("#run-live");
const parts = () => [...document.querySelectorAll("#run-head [data-part], #run-body [data-part]")];
const address = () => `/ft/run/${encodeURIComponent(live().dataset.run)}`;
let answered = Date.now(), alive = true, refused = "", timer = 0;

// Asks for the parts of the tab whose checksum is another one.
const ask = async () => {
  clearTimeout(timer);
  const { tab } = document.body.dataset;
  if (live() && !document.hidden) {
    const shown = parts().map(({ dataset }) => dataset.stamp).filter(Boolean).join(".");
    const response = await fetch(`${address()}?${new URLSearchParams({ tab, shown, order: find("#result-order")?.value ?? "differ" })}`).catch(() => null);
    const answer = response?.ok ? await response.json().catch(() => null) : null;
    refused = response && !response.ok ? await response.text().catch(() => "") : "";
    if (answer) take(answer);
  }
  clearTimeout(timer);
  timer = setTimeout(ask, tab === "chat" ? CHAT_MS : alive || tab === "evaluate" || tab === "export" ? TICK_MS : IDLE_MS);
};
const take = (answer) => {
  [answered, alive] = [Date.now(), answer.alive];
  for (const part of parts()) {
    const news = answer.parts[part.dataset.part];
    if (!news) continue;
    const focus = part.contains(document.activeElement) ? document.activeElement.dataset.key : "";
    const folded = [...part.querySelectorAll("details")].map(({ open }) => open), scrolled = part.querySelector(".ft-log")?.scrollTop;
    [part.dataset.stamp, part.innerHTML] = news;
    part.querySelectorAll("details").forEach((details, n) => { details.open = folded[n] ?? details.open; });
    if (scrolled) part.querySelector(".ft-log").scrollTop = scrolled;
    if (focus) part.querySelector(`[data-key="${focus}"]`)?.focus({ preventScroll: true });
  }
  silence();
};

// How long there was no answer: the head is dimmed, and nothing is covered.
const silence = () => {
  const note = document.querySelector("#run-lost"), silent_s = Math.round((Date.now() - answered) / 1000);
  const isLost = silent_s > (alive ? SILENT_S : SILENT_S + IDLE_MS / 1000) && !document.hidden;
  document.body.toggleAttribute("data-lost", isLost && Boolean(note));
  if (!note) return;
  note.hidden = !isLost && !refused;
  note.textContent = refused || !isLost ? refused : tr("No answer from the page's server for {s} s: what you see is as of then. The run itself goes on.", { s: silent_s });
};
setInterval(silence, 1000);
document.addEventListener("visibilitychange", () => { answered = Date.now(); if (!document.hidden) ask(); });

// Tabs: the address has the open one.
const open = (tab) => {
  document.body.dataset.tab = tab;
  for (const link of document.querySelectorAll(".ft-tabs a")) {
    if (link.dataset.tab === tab) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  ask();
};
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[data-tab]");
  if (!link || !live() || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  event.preventDefault();
  const { tab } = link.dataset;
  if (tab !== document.body.dataset.tab) history.pushState(null, "", `/run?${new URLSearchParams({ run: live().dataset.run, tab })}`);
  open(tab);
  if (!link.closest(".ft-tabs")) document.querySelector(`.ft-tabs [data-tab="${tab}"]`)?.focus();
});
addEventListener("popstate", () => { if (live()) open(new URLSearchParams(location.search).get("tab") || "overview"); });

// Buttons and forms: what the server says stands in the head, or in the form.
const post = async (message, said = find("#run-said")) => {
  const response = await fetch(address(), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(message) }).catch(() => null);
  const answer = (response?.ok && await response.json().catch(() => null)) || { said: "", error: response && !response.ok ? await response.text() : tr("The page's server does not answer: try again when it is back.") };
  said.innerHTML = answer.said ?? "";
  if (answer.error) said.append(Object.assign(document.createElement("p"), { className: "ft-note bad", textContent: answer.error }));
  ask();
  return answer;
};
document.addEventListener("submit", async (event) => {
  const form = event.target.closest?.("[data-task]"), values = {}, { question, waiting } = form?.elements ?? {};
  if (!form) return;
  event.preventDefault();
  if (form.dataset.busy) return;
  form.dataset.busy = "1";
  for (const [name, value] of new FormData(form, event.submitter)) values[name] = name in values ? [values[name], value].flat() : value;
  if (question) question.value = "";
  const { said, error } = await post({ task: form.dataset.task, values }, form.querySelector(".ft-said")).finally(() => delete form.dataset.busy);
  if (question && (said || error)) question.value ||= values.question;
  else if (waiting) showPictures({ waiting: "", pictures: "" });
});
document.addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
document.addEventListener("change", ({ target }) => { if (target.id === "result-order") ask(); });
document.addEventListener("keydown", (event) => {
  if (event.target.id !== "chat-question" || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit(find("#chat-send"));
});
// Pictures of the next message: chosen, or dropped anywhere on the tab.
const showPictures = ({ waiting, pictures }) => { [find("#chat-box").elements.waiting.value, find("#chat-pictures").innerHTML] = [waiting, pictures]; };
const addPicture = async (file) => {
  const box = find("#chat-box"), said = box.querySelector(".ft-said"), { path, error } = await upload(file);
  if (error) said.textContent = error;
  const answer = path && await post({ task: "picture", values: { path, waiting: box.elements.waiting.value } }, said);
  if (answer?.pictures) showPictures(answer);
};
document.addEventListener("click", ({ target }) => {
  if (target.matches("[data-no-picture]")) showPictures({ waiting: "", pictures: "" });
  if (!target.matches("[data-add-picture]")) return;
  const chooser = Object.assign(document.createElement("input"), { type: "file", accept: "image/*" });
  chooser.addEventListener("change", () => chooser.files[0] && addPicture(chooser.files[0]));
  chooser.click();
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if (!find("[data-add-picture]")?.checkVisibility() || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault(); // a dropped file does not replace the page
    if (name === "drop" && event.dataTransfer.files[0]) addPicture(event.dataTransfer.files[0]);
  });
}

// When the head has arrived: the tab that the server has chosen.
const started = new MutationObserver(() => {
  if (!live()) return;
  started.disconnect();
  document.body.dataset.tab = live().dataset.tab;
  answered = Date.now();
  ask();
});
sendBy(post);
started.observe(document.documentElement, { childList: true, subtree: true });
