"""The texts of a page that is open in a browser."""

import re

from tests.app.test_language import NAMES

#: `key=value` and `--flag`.
OPTION = re.compile(r"(?<![\w-])--[a-z]|\b[a-z_][\w.]*=[\w\"'{]")
#: Texts that are seen or spoken, outside of recipes, commands, logs and what is said in a chat.
_SHOWN = """() => {
  const names = ["aria-label", "title", "placeholder", "alt"];
  const elsewhere = "script, style, code, pre, textarea, .ft-mono, .ft-log, .ft-turn p";
  const texts = new Set([document.title]), walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    if (!node.parentElement.closest(elsewhere) && node.parentElement.checkVisibility()) texts.add(node.textContent.trim());
  }
  for (const each of document.querySelectorAll(names.map((name) => `[${name}]`))) {
    if (each.checkVisibility()) for (const name of names) texts.add(each.getAttribute(name) ?? "");
  }
  return [...texts];
}"""


def shown_texts(page):
    """Each text of the page that is seen, or spoken by a screen reader, once."""
    return page.evaluate(_SHOWN)


def english_texts(page, names=""):
    """Those with English words that are no names, `names` (a pattern) neither."""
    shown = {text: NAMES.sub("", re.sub(names, "", text)) for text in shown_texts(page)}
    return [text for text, others in shown.items() if re.search(r"[A-Za-z]{2,}", others)]
