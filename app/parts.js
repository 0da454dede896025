// Keeps a page up to date. An element with `data-follow` asks that address every `data-every` ms for its changed parts: elements with
// `data-part`, whose stamp has changed. Buttons with `data-act` send their message to `data-address`, else to that address.
import { tr } from "./language.js";

export const find = (selector) => document.querySelector(selector);
const NO_ANSWER = () => tr("The page's server does not answer. Try again when it is back.");
const keyOf = (node) => node.dataset?.run ?? node.dataset?.key;
// Makes `node` equal to `wanted`. Nodes that stay keep focus, scrolling, selection, open details and what is being typed.
const morph = (node, wanted) => {
  if (node.nodeName !== wanted.nodeName || keyOf(node) !== keyOf(wanted)) return void node.replaceWith(wanted);
  if (!node.attributes) return void (node.data === wanted.data || (node.data = wanted.data));
  const { value } = wanted, before = [...node.childNodes], after = [...wanted.childNodes];
  for (const { name } of [...node.attributes]) if (name !== "open" && !wanted.hasAttribute(name)) node.removeAttribute(name);
  for (const { name, value: text } of wanted.attributes) if (name !== "open" && node.getAttribute(name) !== text) node.setAttribute(name, text);
  after.forEach((child, n) => (before[n] ? morph(before[n], child) : node.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
  if (node.matches("input, select, textarea") && node !== document.activeElement && node.value !== value) node.value = value;
};
export const show = (element, html) => {
  const wanted = element.cloneNode(false), used = element.contains(document.activeElement) ? document.activeElement : null;
  wanted.innerHTML = html;
  morph(element, wanted);
  if (used && !used.isConnected) element.querySelector(`[data-key="${CSS.escape(used.dataset.key ?? "")}"]`)?.focus({ preventScroll: true });
};
const timers = new Map(), requests = new Map(); // only the newest request counts: an older answer may be from before a message
const parts = (root) => [...root.querySelectorAll("[data-part]")];
const refresh = async (root, request) => {
  const shown = parts(root).map(({ dataset }) => dataset.stamp).filter(Boolean).join("."), { follow } = root.dataset;
  const response = await fetch(`${follow}${follow.includes("?") ? "&" : "?"}shown=${shown}`).catch(() => null);
  const answer = (response?.ok && await response.json().catch(() => null)) || null;
  const refused = response && !response.ok ? await response.text().catch(() => "") : "", said = root.querySelector("[data-said]");
  if (requests.get(root) !== request) return;
  for (const part of answer ? parts(root) : []) {
    const [stamp, html] = answer.parts[part.dataset.part] ?? [];
    if (stamp) { part.dataset.stamp = stamp; show(part, html); }
  }
  if (!find("#run-lost") && (!answer || said.dataset.lost)) [said.textContent, said.dataset.lost] = answer ? ["", ""] : [refused || NO_ANSWER(), "1"];
  root.dispatchEvent(new CustomEvent("answer", { detail: { answer, refused } }));
};
export const ask = async (root) => {
  const request = {};
  requests.set(root, request);
  timers.set(root, clearTimeout(timers.get(root)));
  if (!document.hidden) await refresh(root, request).catch(console.error);
  if (requests.get(root) === request) timers.set(root, setTimeout(ask, Number(root.dataset.every), root));
};
// Sends a message. The answer's text goes into the element `said`, its other parts into theirs.
export const post = async (root, message, said = root.querySelector("[data-said]")) => {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(message) };
  const response = await fetch(root.dataset.address ?? root.dataset.follow, options).catch(() => null);
  const answer = (response?.ok && await response.json().catch(() => null)) || { said: "", error: response && !response.ok ? await response.text() : NO_ANSWER() };
  said.innerHTML = answer.said;
  if (answer.error) said.append(Object.assign(document.createElement("p"), { className: "ft-note bad", textContent: answer.error }));
  for (const part of parts(root)) if (part.dataset.part in answer) part.innerHTML = answer[part.dataset.part];
  ask(root);
  return answer;
};
// Buttons outside of followed elements send by the function given to `sendBy`; earlier messages wait for it.
const waitingMessages = [];
let send = (message) => waitingMessages.push(message);
export const sendBy = (sender) => { send = sender; waitingMessages.splice(0).forEach(sender); };
document.addEventListener("click", ({ target }) => {
  const element = target.closest?.("[data-act]"), root = element?.closest("[data-follow]"), bar = find("[role=progressbar]");
  const [total, step] = ["max", "now"].map((name) => Number(bar?.getAttribute(`aria-value${name}`)));
  const question = element?.dataset.confirm?.replace("{n}", Math.max(0, total - step)).replace("{total}", total);
  if (element && (!question || confirm(question))) (root ? (message) => post(root, message) : send)(JSON.parse(element.dataset.act));
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) [...timers.keys()].forEach(ask); });
const follow = () => { for (const root of document.querySelectorAll("[data-follow]")) if (!timers.has(root)) ask(root); };
new MutationObserver(follow).observe(document.documentElement, { childList: true, subtree: true });
follow();

// Uploads a file; returns its path on the server, or an error text.
export const upload = async (file) => {
  const form = new FormData();
  form.append("files", file);
  const response = await fetch("/gradio_api/upload", { method: "POST", body: form }).catch(() => null);
  if (response?.ok) return { path: (await response.json())[0] };
  return { error: response ? await response.text() : NO_ANSWER() };
};
export const chooseFile = (take, accept = "") => {
  const chooser = Object.assign(document.createElement("input"), { type: "file", accept });
  chooser.addEventListener("change", () => chooser.files[0] && take(chooser.files[0]));
  chooser.click();
};
// Takes a dropped file, which would otherwise replace the page.
export const onDrop = (take, isWanted = () => true) => {
  for (const name of ["dragover", "drop"]) {
    document.addEventListener(name, (event) => {
      if (!event.dataTransfer?.types.includes("Files") || !isWanted()) return;
      event.preventDefault();
      if (name === "drop" && event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
    });
  }
};

// Copies images, one below the other under their titles; saves them as a file if the browser refuses.
export const save = async (blob, download) => Object.assign(document.createElement("a"), { href: await dataUrlOf(blob), download }).click();
export const colour = (name) => getComputedStyle(document.body).getPropertyValue(`--ft-${name}`).trim() || "#888";
export const copyPicture = async (rows, name, button) => {
  const scale = devicePixelRatio, titleHeight = 26 * scale, picture = document.createElement("canvas"), context = picture.getContext("2d");
  picture.width = Math.max(...rows.map(([, image]) => image.width));
  picture.height = rows.reduce((height, [, image]) => height + image.height + titleHeight, 0);
  Object.assign(context, { fillStyle: colour("ground") }).fillRect(0, 0, picture.width, picture.height);
  Object.assign(context, { fillStyle: colour("text"), font: `600 ${13 * scale}px Inter, system-ui, sans-serif` });
  rows.reduce((top, [title, image]) => {
    context.fillText(title, 8 * scale, top + 18 * scale, picture.width - 16 * scale);
    context.drawImage(image, 0, top + titleHeight);
    return top + titleHeight + image.height;
  }, 0);
  const blob = await new Promise((done) => picture.toBlob(done));
  const isCopied = await navigator.clipboard?.write([new ClipboardItem({ [blob.type]: blob })]).then(() => true, () => false);
  if (!isCopied) return save(blob, `${name}.png`);
  button.textContent = tr("Copied");
  setTimeout(() => { button.textContent = tr("Copy image"); }, 2000);
};
// The image of an element: an SVG draws a copy with its computed styles and an inlined font, as an SVG can't fetch one.
const dataUrlOf = (blob) => new Promise((done) => Object.assign(new FileReader(), { onload: ({ target }) => done(target.result) }).readAsDataURL(blob));
const styled = (node) => {
  const copy = node.cloneNode(false);
  if (!node.style) return copy; // a text
  const styles = getComputedStyle(node);
  copy.style.cssText = [...styles].map((name) => `${name}:${styles.getPropertyValue(name)}`).join(";");
  copy.append(...[...node.childNodes].filter((child) => !child.matches?.("[data-copy]")).map(styled));
  return copy;
};
const pictureOf = async (element) => {
  const { offsetWidth: width, offsetHeight: height } = element, scale = devicePixelRatio, html = new XMLSerializer().serializeToString(styled(element));
  const font = await fetch(new URL("inter.woff2", import.meta.url)).then((response) => response.blob()).then(dataUrlOf);
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${width * scale}" height="${height * scale}" viewBox="0 0 ${width} ${height}">
    <style>@font-face { font-family: Inter; font-weight: 100 900; src: url(${font}); }</style><foreignObject width="100%" height="100%">${html}</foreignObject></svg>`;
  const image = Object.assign(new Image(), { src: `data:image/svg+xml,${encodeURIComponent(svg)}` });
  await image.decode();
  return image;
};
// `data-copy` is the title of the copied image: the button's table row below the column names, else the element `data-picture`.
document.addEventListener("click", async ({ target }) => {
  const { copy } = target.dataset ?? {}, row = copy && target.closest("tr");
  const shown = row ? [row.closest("table").tHead, row] : copy ? [find("[data-picture]")] : [];
  const images = await Promise.all(shown.filter(({ offsetHeight }) => offsetHeight).map(pictureOf));
  if (copy) copyPicture(images.map((image, n) => [n ? "" : copy, image]), copy, target);
});
