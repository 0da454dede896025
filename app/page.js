// What the server can't do: set the tab's title, and open a run's page when the run that was requested here has started.
const update = () => {
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
new MutationObserver(update).observe(document.documentElement, { childList: true, subtree: true });
update();
