// Texts of scripts: the page has those in its language, by their English; and the choice of a language, kept in a cookie.
const texts = JSON.parse(document.getElementById("ft-texts")?.textContent || "{}");
export const tr = (text, values = {}) => (texts[text] ?? text).replace(/\{(\w+)\}/g, (all, name) => values[name] ?? all);
const choose = (code) => {
  document.cookie = `ft_language=${code}; path=/; max-age=31536000; SameSite=Strict`;
  window.location.reload();
};
document.addEventListener("click", ({ target }) => { if (target.matches?.("[data-language]")) choose(target.dataset.language); });
document.addEventListener("change", ({ target }) => { if (target.matches?.("[data-language-choice]")) choose(target.value); });
