"""Text to token ids, by the `tokenizers` package alone: `transformers` would load torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

INLINE_CHARS = 2_000  # about 1.2 ms of encoding; below that a thread costs more than it saves
THREADS = 2


class Tokenizer:
    """A model's tokenizer. Encoding is safe from any thread and lets go of the interpreter lock."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(THREADS, "tokenizer")
        self.bos_token = _token_text(config, "bos_token")
        self.eos_token = _token_text(config, "eos_token")
        self.special_tokens = {name: text for name in _SPECIAL if (text := _token_text(config, name)) is not None}
        if "add_bos_token" in config or "add_eos_token" in config:
            self._frame(bool(config.get("add_bos_token")), bool(config.get("add_eos_token")))
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        # Bytes, since characters outside the alphabet become several tokens.
        self._longest_token = max((len(text.encode()) for text in tokenizer.get_vocab()), default=1)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and tokenizer_config.json. Raises OSError or ValueError when they are not right."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        return cls(tokenizers.Tokenizer.from_file(str(path)), read_config(folder))

    def _frame(self, bos: bool, eos: bool) -> None:
        """What `add_bos_token` and `add_eos_token` say wins over tokenizer.json, as in transformers."""
        first = self.bos_token if bos else None
        last = self.eos_token if eos else None
        ids = {text: self._tokenizer.token_to_id(text) for text in (first, last) if text is not None}
        self._tokenizer.post_processor = TemplateProcessing(
            single=[*([first] if first else []), "$A", *([last] if last else [])],
            special_tokens=[(text, token_id) for text, token_id in ids.items() if token_id is not None],
        )

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def at_least(self, text: str) -> int:
        """A number of tokens that `text` cannot be encoded in less than."""
        return len(text) // self._longest_token

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text; long ones are encoded in a thread."""
        if sum(map(len, texts)) <= INLINE_CHARS:
            return self._encode(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encode_long, texts, add_special_tokens)

    def _encode_long(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """In a thread. Only the batch form lets go of the interpreter lock; `encode` keeps it to its end."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encoded]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def name(self, token_id: int) -> str:
        """A token as the vocabulary writes it; empty where it has none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty when there is none. Raises ValueError when it is not a JSON object."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as e:
        raise ValueError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object")
    return config


_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _token_text(config: dict[str, Any], name: str) -> str | None:
    """tokenizer_config.json has special tokens as strings or as objects with a `content`."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
