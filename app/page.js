// What the server can't do: set the tab's title, open a run's page when the run that was requested here has started, and load the
// charts.
const update = () => {
  const titled = document.querySelector("[data-title]"), title = `${titled?.dataset.title} · finetune`;
  if (titled && document.title !== title) document.title = title;
  const ready = document.querySelector("[data-go]");
  if (ready && !ready.dataset.gone) {
    ready.dataset.gone = "1";
    if (ready.dataset.go === "/" || ready.dataset.go.startsWith("/run?run=")) window.location.assign(ready.dataset.go);
  }
  if (document.querySelector("ft-chart:not(:defined)")) import("./chart.js");
  const theme = document.querySelector("[data-theme-choice]:not([data-set])");
  if (theme) Object.assign(theme, { value: localStorage.getItem("ft-theme") ?? "" }).dataset.set = "1";
};

new MutationObserver(update).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
update();

// A link inside a page moves the focus; followed, it would open Home, of which the page's <base> makes its address.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#']"), linked = link?.hash && document.querySelector(link.hash);
  if (!linked) return;
  event.preventDefault();
  Object.assign(linked, { tabIndex: -1 }).focus();
});

// Light or dark: the system's, until a person chooses here.
const applyTheme = () => {
  const chosen = localStorage.getItem("ft-theme");
  if (chosen && document.body.classList.contains("dark") !== (chosen === "dark")) document.body.classList.toggle("dark", chosen === "dark");
};
document.addEventListener("click", ({ target }) => {
  if (!target.closest?.("[data-theme-switch]")) return;
  localStorage.setItem("ft-theme", document.body.classList.contains("dark") ? "light" : "dark");
  applyTheme();
});
document.addEventListener("change", ({ target }) => {
  if (!target.matches?.("[data-theme-choice]")) return;
  if (target.value) localStorage.setItem("ft-theme", target.value); else localStorage.removeItem("ft-theme");
  const dark = target.value ? target.value === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.body.classList.toggle("dark", dark);
});
new MutationObserver(applyTheme).observe(document.body, { attributeFilter: ["class"] });
applyTheme();
