// What only the browser can do: the tab's title, opening the page of a started run, loading the charts.
const update = () => {
  const titled = document.querySelector("[data-title]"), title = `${titled?.dataset.title} · finetune`;
  if (titled && document.title !== title) document.title = title;
  const target = document.querySelector("[data-go]:not([data-gone])");
  if (target) window.location.assign(Object.assign(target.dataset, { gone: "1" }).go);
  if (document.querySelector("ft-chart:not(:defined)")) import("./chart.js");
  const theme = document.querySelector("[data-theme-choice]:not([data-shown])");
  if (theme) Object.assign(theme, { value: localStorage.getItem("ft-theme") || "system" }).dataset.shown = "1";
};

new MutationObserver(update).observe(document.documentElement, { childList: true, subtree: true, characterData: true });
update();

// A link to an id moves the focus; followed, it would open Home, because Gradio's <base> prefixes its address.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='#']"), linked = link?.hash && document.querySelector(link.hash);
  if (!linked) return;
  event.preventDefault();
  Object.assign(linked, { tabIndex: -1 }).focus();
});

// Light or dark: the system's choice, until the user chooses here.
const applyTheme = (chosen = localStorage.getItem("ft-theme")) => {
  const isDark = chosen === "system" ? matchMedia("(prefers-color-scheme: dark)").matches : chosen === "dark";
  if (chosen && document.body.classList.contains("dark") !== isDark) document.body.classList.toggle("dark", isDark);
};
const choose = (theme) => { localStorage.setItem("ft-theme", theme === "system" ? "" : theme); applyTheme(theme); };
document.addEventListener("change", ({ target }) => { if (target.matches?.("[data-theme-choice]")) choose(target.value); });
new MutationObserver(() => applyTheme()).observe(document.body, { attributeFilter: ["class"] });
applyTheme();
