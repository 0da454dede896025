// What the server can't do: the tab's title says how it stands, and a start that was asked for here leads to its run.
const told = () => {
  const titled = document.querySelector("[data-title]");
  if (titled) {
    const title = `${titled.dataset.title} · finetune`;
    if (document.title !== title) document.title = title;
  }
  const ready = document.querySelector("[data-go]");
  if (ready && !ready.dataset.gone) {
    ready.dataset.gone = "1";
    if (ready.dataset.go.startsWith("/run?run=")) window.location.assign(ready.dataset.go);
  }
};
new MutationObserver(told).observe(document.documentElement, { childList: true, subtree: true });
told();
