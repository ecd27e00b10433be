"""What one forward pass computes on: a flat row of tokens and where each one's context lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Batch:
    """T tokens of S sequences, sequence after sequence. All tensors on the model's device.

    A sequence with one query token is a decode row; with more, a prefill chunk. The KV-cache slot of a token is
    `block * block_size + offset`; block 0 is scratch and never holds live context.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, where each token's key and value are written
    query_starts: torch.Tensor  # [S + 1] int32, cumulative query tokens
    context_lens: torch.Tensor  # [S] int32, tokens of context, this step's included
    block_tables: torch.Tensor  # [S, blocks] int32, wide enough for the longest context
    logits_index: torch.Tensor  # [n] int64, the tokens (index into T) whose logits are wanted
    max_query: int  # most query tokens of any sequence
    max_context: int  # longest context
