"""Whether a model computes a token to the same bits whatever else is in the batch, and by prefill or by decode.

Tapes do by construction. Of transformers' modules it is seen: what lies between native layers is torch's, row by row on
one thread, and rows of an odd width may share a vector with their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.cache import KVCache, LayerShape
from engine.model.gate import Forward, probe_tokens
from engine.model.probe import make_batch

_BLOCK_SIZE = 16
_BLOCKS = 2  # of a sequence
_LATE = 3  # tokens at a sequence's end that are fed one by one, too

Part = tuple[int, int, int]  # of a sequence: which, from, to


def is_invariant(forward: Forward, layers: Sequence[LayerShape], vocab_size: int, like: torch.Tensor) -> bool:
    """Feeds sequences whole and alone, together, in chunks, and token by token, over a cache of the dtype and device
    of `like`, and compares the logits bit by bit."""
    sequences = [tokens.tolist() for tokens in probe_tokens(vocab_size, like.device)]
    ends = [len(tokens) for tokens in sequences]
    alone: list[list[Part]] = [[(s, 0, end)] for s, end in enumerate(ends)]
    together: list[list[Part]] = [[(s, 0, end) for s, end in enumerate(ends)]]
    halves = [end // 2 + 2 * s for s, end in enumerate(ends)]
    chunks: list[list[Part]] = [[(s, 0, half) for s, half in enumerate(halves)]]
    chunks.append([(s, half, end) for s, (half, end) in enumerate(zip(halves, ends, strict=True))])
    singly: list[list[Part]] = [[(s, 0, end - _LATE) for s, end in enumerate(ends)]]
    singly += [[(s, end - i, end - i + 1)] for i in range(_LATE, 0, -1) for s, end in enumerate(ends)]
    cache = KVCache(layers, 1 + _BLOCKS * len(sequences), _BLOCK_SIZE, like.dtype, like.device)
    results = [_feed(forward, cache, sequences, steps) for steps in (alone, together, chunks, singly)]
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def _feed(
    forward: Forward, cache: KVCache, sequences: Sequence[list[int]], steps: list[list[Part]]
) -> list[torch.Tensor]:
    """The logits of each sequence's tokens, [tokens, V]."""
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    tables = [[1 + s * _BLOCKS + i for i in range(_BLOCKS)] for s in range(len(sequences))]
    for parts in steps:
        chunks = [sequences[s][begin:end] for s, begin, end in parts]
        begins, rows = [begin for _, begin, _ in parts], [tables[s] for s, _, _ in parts]
        batch = make_batch(chunks, begins, rows, _BLOCK_SIZE, cache.keys[0].device)
        logits = torch.split(forward(batch, cache), [len(chunk) for chunk in chunks])
        for (s, _, _), part in zip(parts, logits, strict=True):
            found[s].append(part.clone())  # the next step may take its memory
    return [torch.cat(parts) for parts in found]
