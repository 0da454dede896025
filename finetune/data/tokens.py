"""Examples -> input_ids and labels."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.checks import BadRow
from finetune.data.conversation import Message
from finetune.data.formats import Example
from finetune.data.literal import Literal
from finetune.data.template import Rendered, Span, Template
from finetune.errors import DataError, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The label of tokens that are not trained on.
NOT_TRAINED = -100


@dataclass
class Encoded:
    """One sequence, as int32. `labels` has the id of each trained token and -100 elsewhere; the first is never trained."""

    input_ids: np.ndarray
    labels: np.ndarray
    notes: set[str] = field(default_factory=set)

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int((self.labels != NOT_TRAINED).sum())

    @property
    def first(self) -> int:
        """Place of the first trained token."""
        return int((self.labels != NOT_TRAINED).argmax())


class Encoder:
    """Turns examples into tokens with one tokenizer and one chat template.

    Answers are trained with their EOS; everything is with `train_on_inputs`. `stops` are the ids that end an answer, in
    generation too. Raises RecipeError for conversations without a chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, conversations: bool | None = None, train_on_inputs: bool = False
    ) -> None:
        """`conversations`: whether there are any; None finds out from the rows."""
        self.tokenizer = tokenizer
        self.template: Template | None = None
        self.train_on_inputs = train_on_inputs
        self.stops = self._eos = {tokenizer.eos_token_id} - {None}
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        #: What may follow an answer as its end, and what ends one: of conversations, and of plain text.
        self._ends = [(self._eos, self._eos | special)] * 2
        self._literal = Literal(tokenizer)
        ends = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        self._unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in ends else None
        if conversations:
            self.use_template()
        if conversations is not None:
            self._require_end()

    def use_template(self) -> None:
        """Load the tokenizer's chat template. Raises RecipeError when it has none, or when no token ends an answer."""
        if self.template is None:
            self.template = Template(self.tokenizer)
            self.stops = self.template.stops
            self._ends = [(self.template.ends, self.template.ends | self._ends[1][1]), self._ends[1]]
            self._require_end()

    def _require_end(self) -> None:
        if not self.stops:
            raise RecipeError(
                "the model's tokenizer has no EOS token, so the model could never learn to stop",
                'Add "eos_token" to its tokenizer_config.json, naming a token of its vocabulary.',
            )

    @cached_property
    def identity(self) -> str:
        """sha256 of what decides the tokens of a row: vocabulary, rules, special tokens and chat template."""
        tokenizer = self.tokenizer
        parts = [tokenizer.special_tokens_map, tokenizer.chat_template, self.vocabulary, self.train_on_inputs]
        return sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def vocabulary(self) -> str:
        """sha256 of the tokenizer's vocabulary and rules, without its current padding and truncation."""
        tokenizer = self.tokenizer
        rules: Any = tokenizer.get_vocab()
        if tokenizer.is_fast:
            rules = {**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None}
        return sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()

    def encode(self, examples: Sequence[Example]) -> list[list[Encoded] | BadRow]:
        """The sequences of each example (one, or several for templates that rewrite earlier turns), or why there are none."""
        if any(example.messages for example in examples):
            self.use_template()
        self._require_end()
        rendered = [self._render(example) for example in examples]
        texts = [(one, not example.messages) for example, ones in zip(examples, rendered, strict=True) for one in _texts(ones)]
        encoded = iter(self._tokenise(texts))
        results: list[list[Encoded] | BadRow] = []
        for example, ones in zip(examples, rendered, strict=True):
            sequences = [next(encoded) for _ in _texts(ones)]
            results.append(ones if isinstance(ones, BadRow) else _checked(sequences, example))
        return results

    def prompt_ids(self, question: list[Message] | str, tools: tuple[dict[str, Any], ...] = ()) -> list[int]:
        """Tokens of a prompt exactly as in training: messages with the generation prompt, or a plain prompt."""
        if isinstance(question, str):
            ids = self._ids([question], plain=True)[0][0]
            return ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids
        self.use_template()
        assert self.template is not None
        try:
            text = self.template.render(self._literal.hidden(question), tools, prompt=True)
        except BadRow as bad:
            raise DataError(f"{bad.field}: {bad.reason}") from None
        prompt = self._literal.shown(Rendered(text, []))
        return self._literal.ids(prompt.text, prompt.literal)[0] if prompt.literal else self._ids([text], plain=False)[0][0]

    def _render(self, example: Example) -> list[Rendered] | BadRow:
        if not example.messages:
            text = example.text if example.text is not None else f"{example.prompt or ''}{example.completion or ''}"
            start = 0 if self.train_on_inputs else len(example.prompt or "")
            return [Rendered(text, [(start, len(text))], {"control"} if self._literal.found_in(text) else set())]
        assert self.template is not None, "conversations were announced"
        try:
            hidden = example
            if any(self._literal.found_in(message["content"]) for message in example.messages):
                hidden = replace(example, messages=tuple(self._literal.hidden(list(example.messages))))
            rendered = [self.template.whole(hidden)] if self.train_on_inputs else self.template.sequences(hidden)
        except BadRow as bad:
            return bad
        rendered = [self._literal.shown(one) for one in rendered]
        if any(one.literal for one in rendered):
            rendered[0].notes.add("literal")
        if hidden is not example and any(self._literal.found_in(message["content"]) for message in hidden.messages):
            rendered[0].notes.add("control")
        return rendered

    def _tokenise(self, flat: list[tuple[Rendered, bool]]) -> list[Encoded]:
        """Tokenise a batch of texts. Only plain ones get the tokenizer's BOS; chat templates write their own."""
        done: dict[int, Encoded] = {}
        for plain in (False, True):
            places = [place for place, (_, is_plain) in enumerate(flat) if is_plain == plain]
            texts = [flat[place][0] for place in places]
            for place, one, (ids, encoding) in zip(
                places, texts, self._ids([one.text for one in texts], plain=plain), strict=True
            ):
                trained = None
                if one.literal:
                    ids, offsets = self._literal.ids(one.text, one.literal)
                    trained = _overlapping(offsets, one.spans)
                elif encoding is None:
                    trained = self._by_prefix(ids, one, plain)
                elif not plain:
                    trained = _between(encoding, one)
                if trained is None and encoding is not None:
                    trained = _overlapping(encoding.offsets, one.spans)
                assert trained is not None
                done[place] = self._finished(ids, trained[-len(ids) :], one.notes, plain)
        return [done[place] for place in range(len(flat))]

    def _ids(self, texts: list[str], *, plain: bool) -> list[tuple[list[int], Any]]:
        """Ids, without a second BOS at the start, and from fast tokenizers the encoding, which has it and each token's span."""
        if not texts:
            return []
        batch = self.tokenizer(
            texts, add_special_tokens=plain, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        bos = self.tokenizer.bos_token_id
        doubled = [bos is not None and ids[:2] == [bos, bos] for ids in batch["input_ids"]]
        encodings = batch.encodings or [None] * len(texts)
        return [
            (ids[1:] if twice else ids, encoding)
            for ids, encoding, twice in zip(batch["input_ids"], encodings, doubled, strict=True)
        ]

    def _by_prefix(self, ids: list[int], one: Rendered, plain: bool) -> np.ndarray:
        """Trained positions for slow tokenizers, which give no offsets: count the tokens before each span."""
        trained = np.zeros(len(ids), dtype=bool)
        for start, end in one.spans:
            first, last = (_common_ids(self._ids([one.text[:place]], plain=plain)[0][0], ids) for place in (start, end))
            trained[first:last] = True
        return trained

    def _finished(self, ids: list[int], trained: np.ndarray, notes: set[str], plain: bool) -> Encoded:
        """Labels with the EOS of each answer trained and nothing after it; adds a final EOS if the text has none."""
        may_follow, ends = self._ends[plain or self.template is None]
        edges = (np.flatnonzero(trained[:-1] != trained[1:]) + 1).tolist()
        stops = [edge for edge in (*edges, len(ids)) if edge and trained[edge - 1]]
        for end in stops if not self.train_on_inputs else []:
            if not self._end_turn(ids, trained, end, ends, may_follow) and not self._blank(ids, end, len(ids)):
                notes.add("endless")
        ids, trained = self._closed(ids, trained, ends)
        if self._unknown is not None and self._unknown in ids:
            notes.add("unknown")
        tokens = np.frombuffer(array("i", ids), dtype=np.int32)
        labels = np.where(trained, tokens, np.int32(NOT_TRAINED))
        labels[:1] = NOT_TRAINED
        return Encoded(tokens, labels, notes)

    def _closed(self, ids: list[int], trained: np.ndarray, ends: set[int]) -> tuple[list[int], np.ndarray]:
        """Adds a trained EOS if the sequence ends with an answer that has none."""
        last = len(ids) - 1 - int(trained[::-1].argmax()) if trained.any() else None
        if last is None or self.tokenizer.eos_token_id is None or not self._blank(ids, last + 1, len(ids)):
            return ids, trained
        written = last
        while written > 0 and ids[written] not in ends and self._blank(ids, written, written + 1):
            written -= 1
        if ids[written] in ends:
            return ids, trained
        return [*ids[: last + 1], self.tokenizer.eos_token_id], np.append(trained[: last + 1], True)

    def _end_turn(self, ids: list[int], trained: np.ndarray, end: int, ends: set[int], may_follow: set[int]) -> bool:
        """End the trained tokens of the answer before `end` with its EOS; False when it has none."""
        place = end - 1
        while place > 0 and trained[place] and ids[place] not in ends and self._blank(ids, place, place + 1):
            place -= 1
        if ids[place] in ends:
            trained[place + 1 : end] = False
            return True
        place = end
        while place < len(ids) and ids[place] not in may_follow and self._blank(ids, place, place + 1):
            place += 1
        if place < len(ids) and ids[place] in may_follow:
            trained[end : place + 1] = True
            return True
        return False

    def _blank(self, ids: list[int], start: int, end: int) -> bool:
        return start >= end or not str(self.tokenizer.decode(ids[start:end], skip_special_tokens=False)).strip()


def _texts(rendered: list[Rendered] | BadRow) -> list[Rendered]:
    return [] if isinstance(rendered, BadRow) else rendered


def _checked(sequences: list[Encoded], example: Example) -> list[Encoded] | BadRow:
    if all(one.trained for one in sequences):
        return sequences
    return BadRow("messages" if example.messages else None, "has no token to train on")


def _between(encoding: Any, one: Rendered) -> np.ndarray | None:
    """The same as `_overlapping`, from two tokens of each span; None where tokens omit white space there."""
    trained = np.zeros(len(encoding), dtype=bool)
    for begin, stop in one.spans:
        first = encoding.char_to_token(begin)
        last = len(encoding) if stop >= len(one.text) else encoding.char_to_token(stop)
        if first is None or last is None:
            return None
        starts_inside = last < len(encoding) and encoding.token_to_chars(last)[0] < stop
        trained[first : last + starts_inside] = True
    return trained


def _overlapping(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Whether each token overlaps a span.

    Offsets may omit white space at a token's start, or be empty for a token of white space; such a token is taken to start at
    the end of the one before.
    """
    start, end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    before = np.append(0, np.maximum.accumulate(end)[:-1]) if len(end) else end
    first = np.where(start < end, start, before)
    trained = np.zeros(len(end), dtype=bool)
    for begin, stop in spans:
        trained |= (first < stop) & (end > begin)
    return trained


def _common_ids(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
