"""Logprobs of token ids to logprobs of text."""

from __future__ import annotations

from common.messages import TokenLogprob
from engine.output.vocabulary import Vocabulary
from engine.sampling.logprobs import Entry


def render(entry: Entry, vocabulary: Vocabulary) -> TokenLogprob:
    """One token's, as it is sent. A token's text is that in the middle of a text; special tokens have theirs too."""
    token_id, logprob, top = entry
    candidates = [(vocabulary.token_text(i), value, vocabulary.token_bytes(i), i) for i, value in top]
    return vocabulary.token_text(token_id), logprob, vocabulary.token_bytes(token_id), candidates
