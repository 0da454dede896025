// Translations of the scripts' texts, which the page carries by their English, and the choice of a language, kept in a cookie.
const texts = JSON.parse(document.getElementById("ft-texts")?.textContent || "{}");
export const tr = (text, values = {}) => (texts[text] ?? text).replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
document.addEventListener("change", ({ target }) => {
  if (!target.matches?.("[data-language-choice]")) return;
  document.cookie = `ft_language=${target.value}; path=/; max-age=31536000; SameSite=Strict`;
  window.location.reload();
});
