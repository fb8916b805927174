"""Making an output's text while its tokens arrive."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from asyncllm.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one output's tokens into text as they come, each token once.

    The pieces joined, `flush` included, are `tokenizer.decode` of all the ids, however they were
    split. That decoding is of the output as a text of its own: where the vocabulary has a leading
    space (sentencepiece with `add_space_prefix`), one is dropped at the beginning; else none.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._drop_space = tokenizer.drops_leading_space
        self._decoder = _UTF8("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is certain with these tokens; an unfinished character is held back."""
        data = b"".join([self._tokenizer.output_bytes(i, self._skip_special) for i in ids])
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What was held back: U+FFFD for a character that was never finished, or nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
