"""What a checkpoint says of its vocabulary: tokens, their types, and the ids with a meaning.

Which tokens are control tokens and which ones end a turn follows llama.cpp (`llama-vocab.cpp`),
so that the same file behaves the same: a token spelled as a turn's end is one whatever its type
says, since converters are known to get the types wrong.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncllm import telemetry
from asyncllm.errors import CorruptCheckpointError, UnsupportedModelError
from asyncllm.text.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer

KINDS: Final = ("gpt2", "llama")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE: Final = "\u2581"  # how sentencepiece spells a space

_END_SPELLINGS: Final = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>"),
    *("<|flush|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "<turn|>", "<|tool_response>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
# Fill-in-the-middle: padding and what separates files or repositories ends an output too.
_FIM_END_SPELLINGS: Final = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
# These do not end anything, but text must not become them even where the file calls them ordinary.
_CONTROL_SPELLINGS: Final = (
    *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "\u2581<PRE>", "<|code_prefix|>"),
    *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "\u2581<SUF>", "<|code_suffix|>"),
    *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "\u2581<MID>", "<|code_middle|>"),
    *("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
# llama.cpp takes the file's word for these. Here text never opens a turn.
_TURN_SPELLINGS: Final = (
    *("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_text|>", "[INST]", "[/INST]"),
    *("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
)
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer's part of a checkpoint's metadata, checked.

    Attributes:
        source: the file, for messages.
        kind: `"gpt2"` (byte-level BPE) or `"llama"` (sentencepiece's BPE).
        pre: how byte-level BPE cuts text into words.
        tokens: spelling of each id; byte-level for `"gpt2"`, with U+2581 for space for `"llama"`.
        ids: the id of each spelling.
        types: `NORMAL`, `UNKNOWN`, `CONTROL`, `USER_DEFINED`, `UNUSED` or `BYTE` for each id.
        scores: float32 `[len(tokens)]` for `"llama"`, else `None`.
        merges: pairs "left right", best first, for `"gpt2"`.
        control: ids that text becomes only where control tokens are asked for.
        user_defined: ids that are found in any text before anything else.
        strip_after: ids that swallow the white space after them.
        named: special ids by name: `bos`, `eos`, `unk`, `pad` and so on, those that exist.
        eog_ids: every id that ends a turn.
        add_bos: whether a text begins with `bos`.
        add_eos: whether a text ends with `eos`.
        add_space_prefix: whether a text is encoded as if a space stood before it.
    """

    source: str
    kind: str
    pre: PreTokenizer
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]
    scores: Any
    merges: list[str]
    control: frozenset[int]
    user_defined: frozenset[int]
    strip_after: frozenset[int]
    named: dict[str, int]
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str = "") -> Vocabulary:
        """Read and check the `tokenizer.ggml.*` keys.

        Raises:
            UnsupportedModelError: for a kind of tokenizer that is not known here.
            CorruptCheckpointError: for missing or contradicting keys.
        """
        read = _Reader(metadata, source)
        kind = read.text("model")
        if kind not in KINDS:
            raise UnsupportedModelError(
                f"{read.where}tokenizer.ggml.model is {kind!r}; known are {', '.join(KINDS)}"
            )
        tokens = read.tokens()
        types = read.numbers("token_type", len(tokens), default=NORMAL)
        ids = _ids_of(tokens, read.where)
        for i, found in enumerate(types):
            if found == BYTE and not _BYTE_PIECE.fullmatch(tokens[i]):
                raise CorruptCheckpointError(
                    f"{read.where}token {i} is a byte by its type, but is spelled {tokens[i]!r}; "
                    "expected is <0x00> to <0xFF>"
                )
        scores = read.scores(len(tokens)) if kind == "llama" else None
        merges = read.strings("merges") if kind == "gpt2" else []
        pre = _pre_tokenizer(read) if kind == "gpt2" else DEFAULT

        named = read.named(len(tokens), {"bos": 1, "eos": 2, "unk": 0} if kind == "llama" else {})
        eog = _not_text((*_END_SPELLINGS, *_FIM_END_SPELLINGS), ids, types, merges)
        control = {i for i, found in enumerate(types) if found in (CONTROL, UNKNOWN)}
        control |= eog | _not_text((*_CONTROL_SPELLINGS, *_TURN_SPELLINGS), ids, types, merges)
        eog |= {
            named[n] for n in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if n in named
        }
        eog -= _no_ends(ids)
        user_defined = {i for i, found in enumerate(types) if found == USER_DEFINED} - control
        return cls(
            source=source,
            kind=kind,
            pre=pre,
            tokens=tokens,
            ids=ids,
            types=types,
            scores=scores,
            merges=merges,
            control=frozenset(control),
            user_defined=frozenset(user_defined),
            strip_after=_strip_after(metadata, ids, control | user_defined),
            named=named,
            eog_ids=frozenset(eog),
            add_bos=read.flag("add_bos_token", pre.adds_bos or kind == "llama") and "bos" in named,
            add_eos=read.flag("add_eos_token", False) and "eos" in named,
            add_space_prefix=kind == "llama" and read.flag("add_space_prefix", True),
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; control tokens stand for their spelling."""
        text = self.tokens[token]
        found = self.types[token]
        if found == BYTE:
            return bytes((int(text[3:5], 16),))
        if token in self.control or found == USER_DEFINED:
            return text.encode()
        if self.kind == "llama":
            return text.replace(SPACE, " ").encode()
        try:
            return bytes(map(BYTE_ALPHABET.__getitem__, text))
        except KeyError:  # spelled in plain characters, as padding of the vocabulary is
            return text.encode()


class _Reader:
    """Checked access to the keys below `tokenizer.ggml.`."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self._metadata = metadata
        self.where = f"{source}: " if source else ""

    def _wrong(self, key: str, found: object, expected: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self.where}metadata 'tokenizer.ggml.{key}' is {found}; expected is {expected}"
        )

    def _value(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise self._wrong(key, "missing" if value is None else repr(value), "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, repr(value), "true or false")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._value(key)
        if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
            found = "missing" if value is None else f"{type(value).__name__}"
            raise self._wrong(key, found, "an array of strings that is not empty")
        if set(map(type, value)) != {str}:
            raise self._wrong(key, "an array with other things", "an array of strings")
        return list(value)

    def tokens(self) -> list[str]:
        tokens = self.strings("tokens")
        for i, token in enumerate(tokens):
            if not token:
                tokens[i] = f"[EMPTY_{i}]"
        return tokens

    def numbers(self, key: str, count: int, *, default: int) -> list[int]:
        value = self._value(key)
        if value is None:
            return [default] * count
        try:
            numbers = list(map(int, _plain(value)))
        except (TypeError, ValueError) as exc:
            raise self._wrong(key, type(value).__name__, "an array of whole numbers") from exc
        self._same_length(key, len(numbers), count)
        return numbers

    def scores(self, count: int) -> Any:
        import numpy as np

        value = self._value("scores")
        if value is None:
            raise self._wrong("scores", "missing", "an array with a score for each token")
        try:
            scores = np.array(value, dtype="<f4")  # a copy: it may be a view into the file
        except (TypeError, ValueError) as exc:
            raise self._wrong("scores", type(value).__name__, "an array of numbers") from exc
        self._same_length("scores", len(scores), count)
        return scores

    def _same_length(self, key: str, found: int, count: int) -> None:
        if found != count:
            raise self._wrong(
                key, f"an array of {found}", f"one of {count}, as many as tokenizer.ggml.tokens has"
            )

    def named(self, count: int, defaults: Mapping[str, int]) -> dict[str, int]:
        """The ids that the file gives a meaning; one outside the vocabulary counts as not given."""
        named = {name: token for name, token in defaults.items() if token < count}
        for name, key in (
            *(("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("eom", "eom")),
            *(("unk", "unknown"), ("sep", "seperator"), ("pad", "padding"), ("mask", "mask")),
            *(
                (f"fim_{part}", f"fim_{part}")
                for part in ("pre", "suf", "mid", "pad", "rep", "sep")
            ),
        ):
            token = self._value(f"{key}_token_id")
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool):
                raise self._wrong(f"{key}_token_id", repr(token), "a token id")
            if 0 <= token < count:
                named[name] = token
            else:
                telemetry.record(
                    "bad-special-token", level=logging.WARNING, key=f"{key}_token_id", id=token
                )
        return named

    def pre(self) -> str | None:
        return None if self._value("pre") is None else self.text("pre")


def _plain(value: Any) -> Iterable[Any]:
    """A numpy array as plain numbers, many times faster to walk; anything else as it is."""
    listed: Iterable[Any] = value.tolist() if hasattr(value, "tolist") else value
    return listed


def _ids_of(tokens: list[str], where: str) -> dict[str, int]:
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) < len(tokens):
        for i, token in enumerate(tokens):
            # Bytes that are no UTF-8 were read as U+FFFD, so that different ones may look the same.
            if ids[token] != i and "\ufffd" not in token:
                raise CorruptCheckpointError(
                    f"{where}tokens {i} and {ids[token]} are both spelled {token!r}; "
                    "expected is a spelling of its own for each"
                )
    return ids


def _pre_tokenizer(read: _Reader) -> PreTokenizer:
    name = read.pre()
    if name is None or name not in PRE_TOKENIZERS:
        telemetry.record("unknown-pre-tokenizer", level=logging.WARNING, pre=name, used="default")
        return DEFAULT
    return PRE_TOKENIZERS[name]


def _not_text(
    spellings: Iterable[str], ids: Mapping[str, int], types: list[int], merges: list[str]
) -> set[int]:
    """The ids of those spellings, without ordinary tokens that merges make, as Qwen's "</s>"."""
    found = {spelling: ids[spelling] for spelling in spellings if spelling in ids}
    ordinary = {spelling for spelling, token in found.items() if types[token] == NORMAL}
    if ordinary and merges:
        ordinary &= {merge.replace(" ", "", 1) for merge in merges}
        for spelling in ordinary:
            del found[spelling]
    return set(found.values())


def _no_ends(ids: Mapping[str, int]) -> set[int]:
    """Spellings of an end that in the company of certain others do not end a turn."""
    kept_out = set()
    if {"<|return|>", "<|call|>"} <= ids.keys() or {"<|calls|>", "<|flush|>"} <= ids.keys():
        kept_out.add("<|end|>")  # there it ends one of a turn's messages
    if "<|tool_response>" in ids:
        kept_out.add("</s>")  # there it is HTML
    return {ids[spelling] for spelling in kept_out if spelling in ids}


def _strip_after(
    metadata: Mapping[str, Any], ids: Mapping[str, int], special: set[int]
) -> frozenset[int]:
    # The file has no place for this property; as llama.cpp does it goes by the model's name.
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    kept = {ids[s] for s in ("<unk>", "<s>", "<|endoftext|>") if s in ids}
    return frozenset(special - kept)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, the other way round."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(rest)
    }


BYTE_ALPHABET: Final = _byte_alphabet()  # the byte that each character stands for
