"""Sentencepiece's BPE by scores with bytes to fall back on (`tokenizer.ggml.model` "llama").

The `sentencepiece` package reads a model file, which GGUF does not keep, so one is written here:
a protocol buffer of a few fields (`sentencepiece_model.proto`), simple enough to need no library.
Its pieces are those of the vocabulary; white space, special tokens and the leading space are dealt
with outside, so its normaliser does nothing but turn spaces into U+2581.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.errors import CorruptCheckpointError
from asyncllm.text.vocabulary import BYTE, SPACE, Vocabulary

_PIECE_NORMAL, _PIECE_UNKNOWN, _PIECE_CONTROL, _PIECE_BYTE = 1, 2, 3, 6
_MODEL_BPE = 2


def sentence_piece_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from plain text, in which nothing is special, to ids; safe from any thread.

    Raises:
        CorruptCheckpointError: if the pieces do not make a model.
    """
    from sentencepiece import SentencePieceProcessor

    bytes_known = {
        text.upper() for i, text in enumerate(vocabulary.tokens) if vocabulary.types[i] == BYTE
    }
    fallback = len(bytes_known) == 256
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(_model(vocabulary, fallback))
    except RuntimeError as exc:
        raise CorruptCheckpointError(
            f"{vocabulary.source}: tokenizer.ggml.tokens do not make a sentencepiece model: {exc}"
        ) from exc
    if fallback:
        return processor.EncodeAsIds

    unknown = [vocabulary.named["unk"]] if "unk" in vocabulary.named else []
    last = len(vocabulary.tokens)

    def encode(text: str) -> list[int]:
        pieces = processor.EncodeAsIds(text)
        return [i for piece in pieces for i in ([piece] if piece < last else unknown)]

    return encode


def _model(vocabulary: Vocabulary, fallback: bool) -> bytes:
    """The serialised `ModelProto`: the pieces in order of id, and one more for the unknown."""
    import numpy as np

    # Written for all pieces at once as far as possible, since there are up to 262,144 of them.
    spellings = [token.encode() for token in vocabulary.tokens]
    kinds = bytearray([_PIECE_NORMAL]) * len(spellings)
    hidden = set(vocabulary.control)
    if len(vocabulary.ids) < len(spellings):
        hidden |= set(range(len(spellings))) - set(vocabulary.ids.values())
    for i, found in enumerate(vocabulary.types):
        if found == BYTE and fallback:
            spellings[i] = spellings[i].upper().replace(b"X", b"x")
            kinds[i] = _PIECE_BYTE
        elif found == BYTE:
            hidden.add(i)
    for i in hidden:
        # Spelled so that no text has it: a single character would still be looked up.
        spellings[i] = b"%s<hidden %d>" % (SPACE.encode(), i)
        kinds[i] = _PIECE_CONTROL
    spellings.append(SPACE.encode() + b"<unknown>")
    kinds.append(_PIECE_UNKNOWN)

    # SentencePiece { string piece = 1; float score = 2; Type type = 3; }: what follows the spelling
    # has 7 bytes in each.
    tails = np.empty((len(kinds), 7), np.uint8)
    tails[:, 0] = _key(2, 5)
    tails[:-1, 1:5] = vocabulary.scores.view(np.uint8).reshape(-1, 4)
    tails[-1, 1:5] = 0
    tails[:, 5] = _key(3, 0)
    tails[:, 6] = np.frombuffer(kinds, np.uint8)
    tail = tails.tobytes()
    heads = [
        b"%c%s%c%s" % (_key(1, 2), _varint(len(_varint(n)) + n + 8), _key(1, 2), _varint(n))
        for n in range(max(map(len, spellings)) + 1)
    ]
    pieces = b"".join(
        [heads[len(text)] + text + tail[7 * i : 7 * i + 7] for i, text in enumerate(spellings)]
    )
    trainer = _number(3, _MODEL_BPE) + _number(35, int(fallback))
    # add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    normalizer = _field(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    return pieces + _field(2, trainer) + _field(3, normalizer)


def _key(field: int, wire: int) -> int:
    return field << 3 | wire


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(_key(field, 0)) + _varint(value)


def _field(field: int, value: bytes) -> bytes:
    return _varint(_key(field, 2)) + _varint(len(value)) + value
