"""Turn examples into input_ids and labels, and decode these into texts."""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.byte_level import ByteLevel, overlap_mask
from finetune.data.chat_format import ChatFormat, common_prefix_length
from finetune.data.checks import BadRow, or_bad_row, quoted
from finetune.data.conversation import Example, Message
from finetune.data.template import Rendered, Span, Template, moved_spans
from finetune.errors import DataError, RecipeError
from finetune.settings.methods import NOT_TRAINED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.pictures.processing import PictureProcessor
    from finetune.data.pictures.source import PictureSource
    from finetune.data.tokenizer import ProcessorLoader

#: Four or more equal tokens in angle or square brackets.
_REPEATED_TOKEN = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\1{3,}")


@dataclass
class Encoded:
    """One sequence, as int32."""

    input_ids: np.ndarray
    #: The id of each trained token and -100 elsewhere; the first token is never trained.
    labels: np.ndarray
    notes: set[str] = field(default_factory=set)  # for the report, names of `shards.FLAGS`

    @property
    def trained_count(self) -> int:
        return int((self.labels != NOT_TRAINED).sum())

    @property
    def first_trained(self) -> int:
        return int((self.labels != NOT_TRAINED).argmax())  # its index; 0 if no token is trained


class Encoder:
    """Turns examples into tokens with one tokenizer and chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, with_template: bool = False, train_on_inputs: bool = False,
        processor_loader: ProcessorLoader | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self._processor_loader = processor_loader  # called for the first row with images
        self.template: Template | None = None
        self.train_on_inputs = train_on_inputs
        self.stops = self._eos_ids = {tokenizer.eos_token_id} - {None}  # ids that end an answer, in generation too
        special_ids = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._inside_ids = self._eos_ids | special_ids
        self._escaper = SpecialTokenEscaper(tokenizer)
        sequence_ids = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        # GPT-2's unknown token is its EOS
        self._unknown_id = tokenizer.unk_token_id if tokenizer.unk_token_id not in sequence_ids else None
        if with_template:  # else the first conversation loads it
            self.use_template()

    def use_template(self) -> Template:
        """Return the chat template. Raise RecipeError without a template or an end token."""
        if self.template is None:
            self.template = Template(self.tokenizer)
            self.stops = self.template.format.stops
            self._template_inside_ids = self.template.format.ends | self._inside_ids
            self._require_eos()
        return self.template

    def _require_eos(self) -> None:
        if not self.stops:
            raise RecipeError(
                "the model's tokenizer has no EOS token, so the model could never learn to stop",
                'Add "eos_token" to its tokenizer_config.json, naming a token of its vocabulary.',
            )

    @cached_property
    def identity(self) -> str:
        """Return the sha256 of everything that decides a row's tokens."""
        tokenizer = self.tokenizer
        inputs = [tokenizer.special_tokens_map, tokenizer.chat_template, self.vocabulary_digest, self.train_on_inputs]
        inputs += self._processor_loader.identity if self._processor_loader else []
        return sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()

    @cached_property
    def vocabulary_digest(self) -> str:
        tokenizer = self.tokenizer
        rules: Any = tokenizer.get_vocab()
        if tokenizer.is_fast:
            # the current padding and truncation don't count
            rules = {**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None}
        return sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()

    def encode(self, examples: Sequence[Example]) -> list[list[Encoded] | BadRow]:
        """Return each example's sequences, or why it has none."""
        if any(example.messages for example in examples):
            self.use_template()
        if any(example.pictures for example in examples):
            if self.template is None or not self.template.reads_pictures:
                raise RecipeError(
                    "the rows have images, and the model reads text only: its chat template writes nothing for an image",
                    "Choose a model that reads images, for example  model_name_or_path=Qwen/Qwen3-VL-4B-Instruct\n"
                    "or leave the images out:  'dataset.ignore_columns=[images, image]'",
                )
            self.picture_processor  # noqa: B018 - a model without one is refused before rows are read
        self._require_eos()
        rows = [or_bad_row(self._render_pair if example.is_pair else self._render, example) for example in examples]
        # the texts of all rows are tokenised together, which is faster
        sequences = iter(self._tokenise([text for texts in rows if not isinstance(texts, BadRow) for text in texts]))
        return [
            texts if isinstance(texts, BadRow)
            else or_bad_row(_checked_sequences, example, list(itertools.islice(sequences, len(texts))))
            for example, texts in zip(examples, rows, strict=True)
        ]  # fmt: skip

    @cached_property
    def picture_processor(self) -> PictureProcessor:
        """Return the model's processor. Raise RecipeError without one."""
        if self._processor_loader is None:
            raise RecipeError("there are images, and this command reads text only", "Leave the images out.")
        return self._processor_loader(self.tokenizer)

    def prompt_ids(
        self, question: list[Message] | str, tools: tuple[dict[str, Any], ...] = (), pictures: Sequence[PictureSource] = ()
    ) -> list[int]:
        """Return the tokens of a prompt exactly as in training."""
        if isinstance(question, str):
            ids = self._tokenise_texts([question], plain=True)[0][0]
            # some tokenizers add an EOS to plain text
            return ids[:-1] if ids[-1:] == [self.tokenizer.eos_token_id] else ids
        return self.conversation_ids(question, tools, add_generation_prompt=True, pictures=pictures)

    def conversation_ids(
        self, messages: list[Message], tools: tuple[dict[str, Any], ...] = (), *, add_generation_prompt: bool = False,
        pictures: Sequence[PictureSource] = (),
    ) -> list[int]:  # fmt: skip
        """Return the tokens of messages exactly as in training. Raise DataError."""
        template = self.use_template()
        try:
            text = template.render(self._escaper.escape(messages), tools, add_generation_prompt=add_generation_prompt)
            rendered = self._completed(Rendered(text, []), pictures)
        except BadRow as error:
            raise DataError(f"{error.field}: {error.reason}") from None
        return self._tokenise([rendered])[0].input_ids.tolist()

    def _completed(self, rendered: Rendered, pictures: Sequence[PictureSource]) -> Rendered:
        # with the images' texts, one for each mark in the messages, and the users' special tokens
        return self._escaper.unescape(self.picture_processor.expanded(rendered, pictures) if pictures else rendered)

    @property
    def chat_format(self) -> ChatFormat:
        return self.use_template().format

    def _render_pair(self, example: Example) -> list[Rendered]:
        rendered: list[Rendered] = []
        for name, answer in zip(("chosen", "rejected"), example.pair(), strict=True):
            sequences = self._render(answer)
            if len(sequences) != 1:
                raise BadRow(name, "has several answers, and the chat template rewrites earlier ones")
            rendered += sequences
        return rendered

    def _render(self, example: Example) -> list[Rendered]:
        # one text, or several if the template rewrites earlier turns
        if not example.messages:
            text = example.text if example.text is not None else f"{example.prompt or ''}{example.completion or ''}"
            start = 0 if self.train_on_inputs else len(example.prompt or "")
            notes = {"control"} if self._escaper.contains_special(text) else set[str]()
            return [Rendered(text, [(start, len(text))], notes, is_plain=True)]
        escaped = replace(example, messages=tuple(self._escaper.escape(list(example.messages))))
        sequences = self.use_template().sequences(escaped, train_on_inputs=self.train_on_inputs)
        rendered = [self._completed(sequence, example.pictures) for sequence in sequences]
        if any(sequence.escaped_spans for sequence in rendered):
            rendered[0].notes.add("literal")  # special tokens in user or tool texts, tokenised as text
        # special tokens left in answers and system prompts, which are not escaped
        if any(self._escaper.contains_special(message["content"]) for message in escaped.messages):
            rendered[0].notes.add("control")
        return rendered

    def _tokenise(self, texts: list[Rendered]) -> list[Encoded]:
        encoded = dict[int, Encoded]()  # by index in `texts`
        bos = self.tokenizer.bos_token_id
        if self._byte_level is not None:
            group = {index: text for index, text in enumerate(texts) if not text.is_plain and not text.escaped_spans}
            all_ids = self._byte_level.ids([rendered.text for rendered in group.values()])
            for (index, rendered), ids in zip(group.items(), all_ids, strict=True):
                # trained tokens follow from the tokens' lengths in bytes
                trained_mask = self._byte_level.trained_mask(ids, rendered.text, rendered.spans)
                # a second BOS is left to `_tokenise_texts`, which drops it
                if trained_mask is not None and ids[:2] != [bos, bos]:
                    encoded[index] = self._with_labels(ids, trained_mask, rendered)
        for plain in (False, True):
            group = {index: text for index, text in enumerate(texts) if text.is_plain == plain and index not in encoded}
            tokenised = self._tokenise_texts([rendered.text for rendered in group.values()], plain=plain)
            for (index, rendered), (ids, encoding) in zip(group.items(), tokenised, strict=True):
                if rendered.escaped_spans:
                    ids, offsets = self._escaper.tokenise(rendered.text, rendered.escaped_spans)
                    trained_mask = overlap_mask(offsets, rendered.spans)
                elif encoding is None:  # slow tokenizers have no offsets
                    trained_mask = self._mask_by_prefix(ids, rendered)
                else:
                    trained_mask = overlap_mask(encoding.offsets, rendered.spans)
                # offsets include the BOS that was dropped from the ids
                encoded[index] = self._with_labels(ids, trained_mask[-len(ids) :], rendered)
        return [encoded[index] for index in range(len(texts))]

    @cached_property
    def _byte_level(self) -> ByteLevel | None:
        return ByteLevel.of(self.tokenizer)

    def _tokenise_texts(self, texts: list[str], *, plain: bool) -> list[tuple[list[int], Any]]:
        """Return ids without a second BOS, and the encoding, which keeps both."""
        if not texts:
            return []
        batch = self.tokenizer(  # only plain text gets the tokenizer's BOS; chat templates write their own
            texts, add_special_tokens=plain, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        bos = self.tokenizer.bos_token_id
        return [
            (ids[1:] if ids[:2] == [bos, bos] else ids, encoding)
            for ids, encoding in zip(batch["input_ids"], batch.encodings or [None] * len(texts), strict=True)
        ]

    def _mask_by_prefix(self, ids: list[int], rendered: Rendered) -> np.ndarray:
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in rendered.spans:
            prefixes = self._tokenise_texts([rendered.text[:start], rendered.text[:end]], plain=rendered.is_plain)
            # the span's tokens are between the tokens that the text shares with each prefix
            first, end_index = (common_prefix_length(prefix_ids, ids) for prefix_ids, _ in prefixes)
            mask[first:end_index] = True
        return mask

    def _with_labels(self, ids: list[int], trained_mask: np.ndarray, rendered: Rendered) -> Encoded:
        """Train each answer up to its EOS; add a final EOS if none is written."""
        notes, template = rendered.notes, None if rendered.is_plain else self.template
        # an answer ends with an id of `inside_ids`, or with an id of `after_ids` that follows its text
        after_ids = template.format.ends if template else self._eos_ids
        inside_ids = self._template_inside_ids if template else self._inside_ids
        answer_ends = np.flatnonzero(trained_mask & ~np.append(trained_mask[1:], False)) + 1
        for end in answer_ends.tolist() if not self.train_on_inputs else []:
            # white space between text and EOS is trained on, white space after the EOS is not
            if (eos_index := self._find_end(ids, range(end)[::-1], inside_ids, trained_mask)) is not None:
                trained_mask[eos_index + 1 : end] = False
            elif (eos_index := self._find_end(ids, range(end, len(ids)), after_ids)) is not None:
                trained_mask[end : eos_index + 1] = True
            elif not self._is_blank(ids[end:]):
                notes.add("endless")
        eos = self.tokenizer.eos_token_id
        end = len(ids) - int(trained_mask[::-1].argmax()) if trained_mask.any() else 0
        # the last answer ends the text, and has no EOS
        if end and eos is not None and self._is_blank(ids[end:]) and self._find_end(ids, range(end)[::-1], inside_ids) is None:
            ids, trained_mask = [*ids[:end], eos], np.append(trained_mask[:end], True)
            notes |= set() if rendered.is_plain else {"ended"}
        if self._unknown_id is not None and self._unknown_id in ids:
            notes.add("unknown")
        tokens = np.frombuffer(array("i", ids), dtype=np.int32)
        labels = np.where(trained_mask, tokens, np.int32(NOT_TRAINED))
        labels[:1] = NOT_TRAINED  # nothing predicts the first token
        return Encoded(tokens, labels, notes)

    def _find_end(self, ids: list[int], indices: range, end_ids: set[int], mask: np.ndarray | None = None) -> int | None:
        """Return the first index with an end id, if only white space inside `mask` comes before."""
        for index in indices:
            if ids[index] in end_ids:
                return index
            if (mask is not None and not mask[index]) or not self._is_blank(ids[index : index + 1]):
                break
        return None

    def _is_blank(self, ids: list[int]) -> bool:
        return not ids or not str(self.tokenizer.decode(ids, skip_special_tokens=False)).strip()


def _checked_sequences(example: Example, sequences: list[Encoded]) -> list[Encoded]:
    if example.desirable is not None and len(sequences) != 1:
        raise BadRow("completion", "has several answers, and the chat template rewrites earlier ones")
    answers = {sequence.labels[sequence.first_trained :].tobytes() for sequence in sequences}
    if example.is_pair and len(answers) == 1:
        raise BadRow("chosen", "and rejected have the same trained tokens; there is nothing to prefer")
    if not all(sequence.trained_count for sequence in sequences):
        raise BadRow("messages" if example.messages else None, "has no token to train on")
    return sequences


#: First of the placeholders for special tokens while the chat template is rendered: the end of Unicode's private use area.
_FIRST_PLACEHOLDER = 0x10E000
#: Roles whose texts are escaped; a system prompt and the answers may have special tokens, such as <think>.
_ESCAPED_ROLES = ("user", "tool")


def _placeholder(index: int) -> str:
    return chr(_FIRST_PLACEHOLDER + index)


class SpecialTokenEscaper:
    """Escapes special tokens in users' texts while a template is rendered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added_tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # the longest first: a pattern takes its first alternative that matches
        self._special_tokens = sorted({*added_tokens, *map(str, tokenizer.all_special_tokens)} - {""}, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, self._special_tokens)) or "(?!)")  # which never matches
        self._placeholder_pattern = re.compile(f"[{_placeholder(0)}-{_placeholder(len(self._special_tokens))}]")

    def contains_special(self, text: str) -> bool:
        return self._special_pattern.search(text) is not None

    def escape(self, messages: list[Message]) -> list[Message]:
        """Put placeholders for special tokens in users' texts. Raise BadRow."""
        escaped = list(messages)
        for index, message in enumerate(messages):
            text = message["content"]
            if message["role"] not in _ESCAPED_ROLES or not (match := self._special_pattern.search(text)):
                continue
            if not self._can_tokenise_pieces() or self._placeholder_pattern.search(text):
                problem = f"has {quoted(match[0])}, a special token of the model; remove it or rewrite it"
                raise BadRow(f"messages[{index}].content", problem)
            text = self._special_pattern.sub(lambda token: _placeholder(self._special_tokens.index(token[0])), text)
            escaped[index] = {**message, "content": text}
        return escaped

    def unescape(self, rendered: Rendered) -> Rendered:
        """Put special tokens back in place of placeholders, as `escaped_spans`."""
        matches = self._placeholder_pattern.finditer(rendered.text)
        replaced = [(match.span(), len(self._token_of(match))) for match in matches]
        if not replaced:
            return rendered
        text = self._placeholder_pattern.sub(self._token_of, rendered.text)
        return replace(
            rendered, text=text, spans=moved_spans(rendered.spans, replaced),
            escaped_spans=moved_spans([before for before, _ in replaced], replaced),
        )  # fmt: skip

    def _token_of(self, placeholder: re.Match[str]) -> str:
        return self._special_tokens[ord(placeholder[0]) - _FIRST_PLACEHOLDER]

    def tokenise(self, text: str, escaped_spans: list[Span]) -> tuple[list[int], list[Span]]:
        """Return ids and character spans, with `escaped_spans` tokenised as text."""
        ids, offsets = list[int](), list[Span]()
        bounds = [0, *itertools.chain.from_iterable(escaped_spans), len(text)]
        for index, (start, end) in enumerate(itertools.pairwise(bounds)):
            piece = self._tokenizer(
                text[start:end], add_special_tokens=False, return_offsets_mapping=True, verbose=False,
                split_special_tokens=index % 2 == 1,  # every second piece is escaped
            )  # fmt: skip
            ids += piece["input_ids"]
            offsets += [(start + token_start, start + token_end) for token_start, token_end in piece["offset_mapping"]]
        return ids, offsets

    def _can_tokenise_pieces(self) -> bool:
        if not self._tokenizer.is_fast:
            return False
        backend = self._tokenizer.backend_tokenizer
        # a space at the start of a piece would change its tokens
        rules = f"{backend.normalizer} {backend.pre_tokenizer}"
        return not any(word in rules for word in ("Prepend", "Metaspace", "add_prefix_space=True"))


def decode_spans(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Decode ids into (text, is trained) spans."""
    spans: list[tuple[str, bool]] = []
    end, previous_text = 0, ""
    for trained, span_labels in itertools.groupby(labels, key=lambda label: label != NOT_TRAINED):
        start, end = end, end + sum(1 for _ in span_labels)
        # decode the whole prefix: by itself, a span may lose its leading space
        text = _decode(tokenizer, input_ids[:end])
        span_text = text[len(previous_text) :] if text.startswith(previous_text) else _decode(tokenizer, input_ids[start:end])
        spans.append((span_text, trained))
        previous_text = text
    return spans


def shorten_repeats(text: str) -> str:
    """Write equal tokens in a row, such as an image's, once with their count."""
    return _REPEATED_TOKEN.sub(lambda tokens: f"{tokens[1]} x {len(tokens[0]) // len(tokens[1]):,} ", text)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
