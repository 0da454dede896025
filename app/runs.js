// The page of all runs: search, filters, selection, and the menu of a row. The server replaces the table when a run has moved on,
// so the selection is kept in `state` and applied again.
import { tr } from "./language.js";
import { find, post } from "./parts.js";

const rows = () => [...document.querySelectorAll(".ft-runs tr[data-run]")];
const shown = () => rows().filter((row) => !row.hidden);
const state = { chosen: new Set(), last: "", menu: "" };

// A filter offers the values that the rows have; the chosen value stays.
const setOptions = (select, values) => {
  const wanted = [select.options[0].text, ...new Set(values)];
  if ([...select.options].map(({ text }) => text).join("\n") === wanted.join("\n")) return;
  const before = select.value;
  select.replaceChildren(...wanted.map((text, n) => new Option(text, n ? text : "")));
  select.value = wanted.includes(before) ? before : "";
};

const applyState = () => {
  if (!find("#runs-controls")) return;
  const all = rows(), text = find("#runs-search").value.trim().toLowerCase();
  const filters = [[find("#runs-state"), "stateName"], [find("#runs-model"), "modelName"]];
  for (const [select, key] of filters) setOptions(select, all.map(({ dataset }) => dataset[key]));
  const names = new Set(all.map(({ dataset }) => dataset.run));
  for (const name of state.chosen) if (!names.has(name)) state.chosen.delete(name);
  for (const row of all) {
    const { run, modelName } = row.dataset;
    row.hidden = !`${run} ${modelName}`.toLowerCase().includes(text) || filters.some(([select, key]) => select.value && row.dataset[key] !== select.value);
    row.querySelector("input[type=checkbox]").checked = state.chosen.has(run);
    row.classList.toggle("chosen", state.chosen.has(run));
  }
  const bar = find("#runs-chosen");
  bar.hidden = state.chosen.size === 0;
  const count = tr("{n} chosen", { n: state.chosen.size });
  if (bar.firstChild.textContent !== count) bar.firstChild.textContent = count;
  bar.querySelector("[data-deed=compare]").disabled = state.chosen.size < 2;
  const number = find("#runs-queue [data-count]")?.dataset.count ?? "", queued = find("#runs-queued");
  queued.parentElement.hidden = !number;
  if (queued.textContent !== number) queued.textContent = number;
};

const choose = (row, isChosen, isSpan) => {
  const names = shown().map(({ dataset }) => dataset.run), index = names.indexOf(row.dataset.run), lastIndex = names.indexOf(state.last);
  const span = isSpan && lastIndex >= 0 ? names.slice(Math.min(index, lastIndex), Math.max(index, lastIndex) + 1) : [row.dataset.run];
  for (const name of span) if (isChosen) state.chosen.add(name); else state.chosen.delete(name);
  state.last = row.dataset.run;
  applyState();
};

const openMenu = (button) => {
  const menu = find("#runs-menu"), place = button.getBoundingClientRect();
  state.menu = button.closest("tr").dataset.run;
  menu.showPopover();
  menu.style.top = `${Math.min(place.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
  menu.style.left = `${Math.max(8, place.right - menu.offsetWidth)}px`;
  menu.firstElementChild.focus();
};

const act = (deed, isMenu) => {
  const runs = isMenu ? [state.menu] : rows().map(({ dataset }) => dataset.run).filter((name) => state.chosen.has(name));
  if (isMenu) find("#runs-menu").hidePopover();
  if (deed === "rename") {
    const name = prompt(tr("New name of {run}", { run: state.menu }), state.menu)?.trim();
    if (name && name !== state.menu) post(find("#runs-page"), { deed, runs, name });
  } else if (deed === "none") state.chosen.clear();
  else post(find("#runs-page"), { deed, runs });
  applyState();
};

document.addEventListener("click", (event) => {
  const { target } = event, row = target.closest?.("tr[data-run]");
  if (row && target.matches("input[type=checkbox]")) choose(row, target.checked, event.shiftKey);
  else if (row && target.matches(".ft-more")) openMenu(target);
  const { deed } = target.closest?.("#runs-menu [data-deed], #runs-chosen [data-deed]")?.dataset ?? {};
  if (deed) act(deed, Boolean(target.closest("#runs-menu")));
});
document.addEventListener("input", ({ target }) => { if (target.closest("#runs-controls")) applyState(); });
document.addEventListener("keydown", (event) => {
  if (!event.target.closest?.("#runs-menu") || !["ArrowDown", "ArrowUp"].includes(event.key)) return;
  event.preventDefault();
  event.target[event.key === "ArrowDown" ? "nextElementSibling" : "previousElementSibling"]?.focus();
});
document.addEventListener("answer", applyState, true);
applyState();
