"""Logprobs in the three shapes that clients read: chat's, completions', and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from common.messages import TokenLogprob

Columns = dict[str, list[Any]]

FLOOR = -9999.0  # stands for impossible; JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # false for NaN as well


def chat_logprobs(tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    """`{content: [{token, logprob, bytes, top_logprobs}], refusal}`; `top` entries each, the chosen among them."""
    return {"content": [_chat_token(token, top) for token in tokens], "refusal": None}


def _chat_token(token: TokenLogprob, top: int) -> dict[str, Any]:
    text, logprob, data, candidates = token
    likeliest = [_chat_entry(*candidate[:3]) for candidate in candidates[:top]]
    chosen = _chat_entry(text, logprob, data)
    if likeliest and chosen not in likeliest:
        likeliest[-1] = chosen
    return {**chosen, "top_logprobs": likeliest}


def _chat_entry(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """Grows token by token: `tokens`, `token_logprobs`, `top_logprobs`, and `text_offset` in characters.

    Offsets count the characters that begin in the bytes so far, so tokens that hold a part of one share its offset.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def unscored(self, text: str, visible: bool) -> Columns:
        """A token without a logprob: a prompt's first. One that is not `visible` takes no room in the text."""
        columns: Columns = {
            "tokens": [text],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._offset += len(text) if visible else 0
        return columns

    def scored(self, tokens: Iterable[TokenLogprob | None]) -> Columns:
        """The next tokens. The chosen one always stands in `top_logprobs` too, with the identical number."""
        columns: Columns = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for text, logprob, data, candidates in filter(None, tokens):
            top = {candidate[0]: finite(candidate[1]) for candidate in reversed(candidates[: self._top])}
            columns["tokens"].append(text)
            columns["token_logprobs"].append(finite(logprob))
            columns["top_logprobs"].append({**dict(reversed(top.items())), text: finite(logprob)})
            columns["text_offset"].append(self._offset)
            self._offset += sum(byte & 0xC0 != 0x80 for byte in data)
        return columns


def joined(first: Columns, second: Columns) -> Columns:
    """The columns of consecutive tokens."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs(
    tokens: Sequence[TokenLogprob | None] | None, ids: Sequence[int], top: int
) -> list[dict[str, Any] | None]:
    """As in vLLM: for each prompt token a map of token id to `{logprob, rank, decoded_token}`; null for the first.

    tokens: None for a prompt of one token, of which engines have nothing to say. rank: null beyond the `top` likeliest.
    """
    scored = [None] if tokens is None else tokens
    return [None if token is None else _by_id(token, chosen, top) for token, chosen in zip(scored, ids, strict=True)]


def _by_id(token: TokenLogprob, chosen: int, top: int) -> dict[str, Any]:
    text, logprob, _, candidates = token
    entries: dict[str, Any] = {str(chosen): {"logprob": finite(logprob), "rank": None, "decoded_token": text}}
    for rank, (text, logprob, _, token_id) in enumerate(candidates[:top], start=1):
        entries[str(token_id)] = {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
    return entries
