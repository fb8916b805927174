"""Byte-level BPE (`tokenizer.ggml.model` "gpt2") through the Rust `tokenizers` package."""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.errors import CorruptCheckpointError
from asyncllm.text.vocabulary import BYTE_ALPHABET, Vocabulary


def byte_pair_encoder(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from plain text, in which nothing is special, to ids; safe from any thread.

    Raises:
        CorruptCheckpointError: for merges that do not fit the vocabulary.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    # A spelling of several characters that is not there cannot be arrived at by merging.
    hidden = {vocabulary.tokens[i] for i in vocabulary.control if len(vocabulary.tokens[i]) > 1}
    known = {text: i for text, i in vocabulary.ids.items() if text not in hidden}
    # A byte that the vocabulary lacks is left out, but nothing merges over the gap.
    size = len(vocabulary.tokens)
    missing = [character for character in BYTE_ALPHABET if character not in known]
    known |= {character: size + n for n, character in enumerate(missing)}
    merges: list[tuple[str, str]] = []
    for rank, merge in enumerate(vocabulary.merges):
        left, _, right = merge.partition(" ")
        if not (left and right):
            raise CorruptCheckpointError(
                f"{vocabulary.source}: tokenizer.ggml.merges[{rank}] is {merge!r}; "
                "expected are two tokens with a space between them"
            )
        if left + right not in hidden:
            merges.append((left, right))
    try:
        model = models.BPE(known, merges, ignore_merges=vocabulary.pre.whole_words)
    except Exception as exc:  # the package raises plain Exception
        raise CorruptCheckpointError(
            f"{vocabulary.source}: tokenizer.ggml.merges does not fit the tokens: {exc}"
        ) from exc
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(p), "isolated") for p in vocabulary.pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < size] if missing else ids

    return encode
