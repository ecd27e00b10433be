"""Batches made from plain lists, for what is not the engine's loop: the load gate and the warm-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.batch import Batch


def make_batch(
    tokens: Sequence[Sequence[int]],
    begins: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
    logits: Sequence[int] | None = None,
) -> Batch:
    """Feeds `tokens[i]` (not empty) to the sequence whose context holds `begins[i]` tokens and lies in `tables[i]`.

    `logits` are indices into the flat row of tokens; None wants all.
    """
    positions = [p for chunk, begin in zip(tokens, begins, strict=True) for p in range(begin, begin + len(chunk))]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for chunk, begin, table in zip(tokens, begins, tables, strict=True)
        for p in range(begin, begin + len(chunk))
    ]
    starts = [0]
    for chunk in tokens:
        starts.append(starts[-1] + len(chunk))
    lengths = [begin + len(chunk) for chunk, begin in zip(tokens, begins, strict=True)]
    width = max(map(len, tables))
    padded = [[*table, *[0] * (width - len(table))] for table in tables]

    def column(values: Sequence[object], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        token_ids=column([token for chunk in tokens for token in chunk]),
        positions=column(positions),
        slots=column(slots),
        query_starts=column(starts, torch.int32),
        context_lens=column(lengths, torch.int32),
        block_tables=column(padded, torch.int32),
        logits_index=column(range(len(positions)) if logits is None else logits),
        max_query=max(map(len, tokens)),
        max_context=max(lengths),
    )
