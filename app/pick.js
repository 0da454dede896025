// A file that is dropped or chosen goes the way of Gradio's own upload button, which stands hidden beside the drop zone.
const input = ({ dataset }) => document.querySelector(`input[type=file]:has(+ #${dataset.pick})`);
const zoneOf = ({ target, dataTransfer }) => (dataTransfer?.types.includes("Files") ? target.closest?.("[data-pick]") ?? [...document.querySelectorAll("[data-pick]")].find((zone) => zone.checkVisibility()) : null);

document.addEventListener("click", ({ target }) => {
  const zone = target.closest?.("[data-pick]");
  if (zone) input(zone)?.click();
});
for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    const zone = zoneOf(event);
    if (!zone) return;
    event.preventDefault(); // a file beside the zone is taken, too, and does not replace the page
    zone.classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name !== "drop" || !event.dataTransfer.files.length) return;
    const box = input(zone), files = new DataTransfer();
    files.items.add(event.dataTransfer.files[0]);
    box.files = files.files;
    box.dispatchEvent(new Event("change", { bubbles: true }));
  });
}
