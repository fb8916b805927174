"""What a sequence need not compute: a sibling's prompt, or a prefix that others left."""

from __future__ import annotations

from asyncllm.kv.blocks import KvCache, Match
from asyncllm.scheduler.request import Sequence, State
from asyncllm.scheduler.transfers import Transfers

# Adoptions that may fail before a sequence is computed from what the pool has. The first finds all
# bad blocks that it reads; but what making room evicts may push out of a small store what is read.
MOST_ADOPTIONS = 3


def find_match(sequence: Sequence, cache: KvCache, transfers: Transfers | None) -> Match | None:
    """The blocks that a sequence is to be admitted with.

    Args:
        sequence: the next to be admitted.
        cache: where the blocks are.
        transfers: to and from the block store, if there is one.

    Returns:
        `None` if it should wait: what it can share is about to be there.
    """
    siblings = () if sequence.output_ids else sequence.request.sequences
    if transfers is not None and any(map(transfers.is_loading, siblings)):
        return None  # a plan copies before it loads: there is nothing to copy yet
    match = _match_sibling(sequence, siblings, cache)
    if match is not None:
        return match
    if any(sibling.state in (State.ADOPTING, State.PREFILLING) for sibling in siblings):
        return None  # it shares the prompt as soon as that is computed
    chain = sequence.chain
    if chain is None:
        return cache.no_match("prefix_cache is off")
    if sequence.request.wants_prompt_scores:
        return cache.no_match("prompt_logprobs computes the whole prompt")
    most = sequence.length - 1
    chain.reach(sequence.tokens, most // cache.block_tokens)
    if transfers is None or sequence.failed_adoptions >= MOST_ADOPTIONS:
        return cache.match(chain, most)
    match = transfers.match(cache, chain, most)
    return None if transfers.is_underway(match, chain) else match


def _match_sibling(
    sequence: Sequence, siblings: tuple[Sequence, ...], cache: KvCache
) -> Match | None:
    size = sequence.prompt_tokens
    for sibling in siblings:
        if sibling.blocks is not None and sibling.committed >= size:
            match = cache.match_sibling(sibling.blocks, size - 1)
            if match is not None:
                return match
    return None
