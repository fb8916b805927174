"""Text to token ids and back, as a checkpoint's metadata says."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncllm.errors import RequestError
from asyncllm.text.byte_pair import byte_pair_encoder
from asyncllm.text.sentence_piece import sentence_piece_encoder
from asyncllm.text.spellings import any_of
from asyncllm.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from asyncllm.text.chat import ChatTemplate

_ASCII_SPACE = " \t\n\v\f\r"


class Tokenizer:
    """A checkpoint's tokenizer; every method may be called from any thread at any time.

    The text of a `str` never becomes a control token unless `parse_special_tokens` is set. Tokens
    that the vocabulary calls user-defined are no control tokens and are found in any text.

    Attributes:
        vocab_size: ids are from 0 to `vocab_size - 1`.
        bos_id: the id that begins a text, or `None`.
        eos_id: the id that ends a text, or `None`.
        eog_ids: every id that ends a turn: end of text, of turn, of message.
        chat_template: the checkpoint's jinja template, or `None`.
        drops_leading_space: whether `decode` drops one leading space, see there.
    """

    def __init__(self, vocabulary: Vocabulary, chat_template: str | None = None) -> None:
        self._vocabulary = vocabulary
        make = byte_pair_encoder if vocabulary.kind == "gpt2" else sentence_piece_encoder
        self._encode_plain = make(vocabulary)
        tokens = vocabulary.tokens
        self._user_defined = any_of(tokens[i] for i in vocabulary.user_defined)
        self._special = any_of(tokens[i] for i in vocabulary.user_defined | vocabulary.control)
        self._bytes: list[bytes | None] = [None] * len(tokens)
        self._templates: dict[str, ChatTemplate] = {}
        self.vocab_size = len(tokens)
        self.bos_id = vocabulary.named.get("bos")
        self.eos_id = vocabulary.named.get("eos")
        self.eog_ids = vocabulary.eog_ids
        self.chat_template = chat_template
        self.drops_leading_space = vocabulary.add_space_prefix

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a GGUF file, which may hold a vocabulary and nothing else.

        Raises:
            UnsupportedModelError: for a kind of tokenizer that is not known here.
            CorruptCheckpointError: for a file or vocabulary that contradicts itself.
            ModelLoadError: if the file cannot be read.
        """
        from asyncllm.checkpoint.checkpoint import open_checkpoint

        with open_checkpoint(path) as checkpoint:
            return cls.from_metadata(checkpoint.metadata, os.fspath(path))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str = "") -> Tokenizer:
        """The tokenizer that GGUF metadata describes (`tokenizer.ggml.*`).

        Args:
            metadata: keys to plain values, lists of str, and lists or arrays of numbers.
            source: the file's name, for messages.

        Raises:
            UnsupportedModelError: for a kind of tokenizer that is not known here.
            CorruptCheckpointError: for missing or contradicting keys.
        """
        template = metadata.get("tokenizer.chat_template")
        return cls(
            Vocabulary.from_metadata(metadata, source),
            template if isinstance(template, str) else None,
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = False
    ) -> list[int]:
        """The ids of a text.

        Args:
            text: any text; it may be empty.
            add_special_tokens: begin with BOS and end with EOS where the vocabulary asks for it. A
                BOS that the text spells itself is not doubled.
            parse_special_tokens: let what is spelled as a control token become it.

        Raises:
            RequestError: for half a surrogate pair, which no encoding has.
        """
        ids = self._encode(text, parse_special_tokens)
        if add_special_tokens:
            ids = self._with_bos(ids)
            if self._vocabulary.add_eos and self.eos_id is not None:
                ids.append(self.eos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD.

        Vocabularies that encode a text as if a space stood before it give that space back as the
        first token's; one leading space is dropped there, so that decoding undoes encoding. The
        text of an output is made in the same way, as a text of its own.

        Args:
            ids: token ids.
            skip_special_tokens: leave control tokens out.

        Raises:
            RequestError: for an id outside the vocabulary.
        """
        data = b"".join([self.output_bytes(i, skip_special_tokens) for i in self._checked(ids)])
        if self.drops_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for, as bytes, which may be part of a character.

        Raises:
            RequestError: for an id outside the vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise RequestError(f"token {token}: expected are ids from 0 to {self.vocab_size - 1}")
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._vocabulary.token_bytes(token)
        return known

    def output_bytes(self, token: int, skip_special_tokens: bool) -> bytes:
        """`token_bytes`, or nothing for a control token that is to be skipped."""
        if skip_special_tokens and token in self._vocabulary.control:
            return b""
        return self.token_bytes(token)

    def is_special(self, token: int) -> bool:
        """Whether it is a control token: one that text does not become unless asked to."""
        return token in self._vocabulary.control

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """A conversation as the template writes it.

        Encoding this text with `parse_special_tokens=True` lets messages spell control tokens;
        `encode_chat` does not.

        Args:
            messages: mappings with `role` and `content` (text, `None`, or a list of text parts),
                and what else the template knows.
            tools: functions the model may call, as JSON schemas.
            add_generation_prompt: end with the opening of the assistant's turn.
            template_args: further variables for the template.
            chat_template: instead of the checkpoint's own.

        Raises:
            RequestError: for messages of another form, without a template, or if it fails.
        """
        return self._rendered(messages, tools, add_generation_prompt, template_args, chat_template)[
            0
        ]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_args: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[int]:
        """The ids of a conversation, with one BOS where the vocabulary or the template asks for it.

        Control tokens come from the template alone: what messages and tools spell stays text.

        Args: as for `apply_chat_template`; strings in `template_args` count as the template's own.

        Raises:
            RequestError: as `apply_chat_template` does.
        """
        text, foreign = self._rendered(
            messages, tools, add_generation_prompt, template_args, chat_template
        )
        return self._with_bos(self._encode(text, True, foreign))

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any] | None,
        chat_template: str | None,
    ) -> tuple[str, bytes]:
        known = self._vocabulary
        names = {f"{name}_token": known.tokens[token] for name, token in known.named.items()}
        return self._template(chat_template).render(
            messages, tools, add_generation_prompt, template_args, names
        )

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_id
        if self._vocabulary.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        # A template may spell it although the vocabulary adds it, or twice by itself.
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            del ids[0]
        return ids

    def _encode(self, text: str, parse_special: bool, foreign: bytes | None = None) -> list[int]:
        """Ids of a text; `foreign` has a 1 for each character that no control token may take."""
        if not isinstance(text, str):
            raise RequestError(f"text: a str is expected, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(
                f"text: character {exc.start} is half a surrogate pair ({text[exc.start]!r}); "
                "expected is Unicode text"
            ) from exc
        ids: list[int] = []
        after_special = True
        for part in self._parts(text, parse_special, foreign):
            if isinstance(part, int):
                ids.append(part)
            else:
                prefix = after_special and self._vocabulary.add_space_prefix
                ids += self._encode_plain(" " + part if prefix else part)
            after_special = isinstance(part, int)
        return ids

    def _parts(self, text: str, parse_special: bool, foreign: bytes | None) -> Iterator[int | str]:
        """The special tokens in a text, and what is between them."""
        known = self._vocabulary
        pattern = self._special if parse_special else self._user_defined
        start = at = 0
        while match := pattern.search(text, at):
            token = known.ids[match.group()]
            if foreign and token in known.control and 1 in foreign[match.start() : match.end()]:
                # Content spells it. A user-defined token may still begin here.
                at = match.start()
                match = self._user_defined.match(text, at)
                if match is None:
                    at += 1
                    continue
                token = known.ids[match.group()]
            if match.start() > start:
                yield text[start : match.start()]
            yield token
            at = match.end()
            if token in known.strip_after:
                while at < len(text) and text[at] in _ASCII_SPACE:
                    at += 1
            start = at
        if start < len(text):
            yield text[start:]

    def _checked(self, ids: Iterable[int]) -> Iterator[int]:
        for position, item in enumerate(ids):
            try:
                token = operator.index(item)
            except TypeError as exc:
                raise RequestError(f"ids[{position}] is {item!r}; a token id is expected") from exc
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"ids[{position}] is {token}; expected are ids from 0 to {self.vocab_size - 1}"
                )
            yield token

    def _template(self, source: str | None) -> ChatTemplate:
        from asyncllm.text.chat import ChatTemplate

        source = self.chat_template if source is None else source
        if source is None:
            raise RequestError(
                "this checkpoint has no chat template; pass chat_template, or a prompt of your own"
            )
        template = self._templates.get(source)
        if template is None:
            template = self._templates[source] = ChatTemplate(source)
        return template
