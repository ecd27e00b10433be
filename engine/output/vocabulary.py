"""What each token id stands for, as bytes, read once from a tokenizer.

Decoders that work token by token become a table: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2), sentencepiece with
byte fallback (Llama 2, Mistral, Gemma) and Metaspace (T5, Unigram). Others keep their tokenizer, see `detokenizer`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Start:
    """How the beginning of a text differs from its middle."""

    dropped: str = ""  # left out of the first token, wherever it stands in it: Metaspace's mark
    stripped: str = ""  # a character taken off the beginning of the text …
    strip_count: int = 0  # … this many times at most


class Vocabulary:
    """Immutable, shared by all requests.

    `tokenizer` is what turns tokens into text where no table can, else None; `start` how a text begins.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokens = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
        added = tokenizer.get_added_tokens_decoder()
        self._tokens.update((token_id, token.content) for token_id, token in added.items())
        self._specials = frozenset(token_id for token_id, token in added.items() if token.special)
        scheme = _scheme(_steps(tokenizer))
        self.tokenizer: Tokenizer | None = tokenizer if scheme is None else None
        self.start = scheme.start if scheme else Start()
        self._scheme = scheme
        self._bytes = [b""] * (max(self._tokens, default=-1) + 1)
        for token_id, token in self._tokens.items():
            self._bytes[token_id] = scheme.to_bytes(token) if scheme else tokenizer.decode([token_id], False).encode()
        self._shown = list(self._bytes)  # with `skip_special_tokens`
        for token_id in self._specials:
            self._shown[token_id] = b""
        self._texts = [_whole(data) for data in self._bytes]
        self._shown_texts = [_whole(data) for data in self._shown]

    @classmethod
    def load(cls, folder: str | Path) -> Vocabulary:
        """From the `tokenizer.json` of a model's folder. Raises OSError or ValueError where it cannot be read."""
        path = Path(folder) / "tokenizer.json"
        text = path.read_text(encoding="utf-8")
        try:
            return cls(Tokenizer.from_str(text))
        except Exception as e:  # the library raises plain Exception
            raise ValueError(f"{path} is not a tokenizer that can be read: {e}") from e

    def tables(self, skip_special_tokens: bool) -> tuple[list[str | None], list[bytes]]:
        """By token id: its text, None where its bytes are not whole UTF-8; and its bytes. Not to be changed."""
        return (self._shown_texts, self._shown) if skip_special_tokens else (self._texts, self._bytes)

    def first_bytes(self, token_id: int) -> bytes:
        """A token's bytes at the beginning of a text."""
        token = self._tokens[token_id]
        return self._scheme.to_bytes(token.replace(self.start.dropped, "")) if self._scheme else self._bytes[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """Its bytes in the middle of a text; none for an id that no token has."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """Those bytes as text, U+FFFD for what is not UTF-8 by itself."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether it is left out of text with `skip_special_tokens`."""
        return token_id in self._specials


@dataclass(frozen=True, slots=True)
class _Scheme:
    """A decoder that can be a table: how a token becomes bytes."""

    replaced: tuple[tuple[str, str], ...] = ()
    byte_level: bool = False  # GPT-2's alphabet of printable characters for bytes
    byte_fallback: bool = False  # tokens <0x00> … <0xFF> are bytes
    start: Start = Start()

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token, in plain text
                return token.encode()
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        for old, new in self.replaced:
            token = token.replace(old, new)
        return token.encode()


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's steps as in tokenizer.json."""
    if tokenizer.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _scheme(steps: list[dict[str, Any]]) -> _Scheme | None:
    """None where text depends on more than one token at a time."""
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return _Scheme(byte_level=True)
    if kinds == "Metaspace":
        mark = steps[0]["replacement"]
        dropped = "" if steps[0].get("prepend_scheme", "always") == "never" else mark
        return _Scheme(replaced=((mark, " "),), start=Start(dropped=dropped))
    if not re.fullmatch(r"(Replace )*ByteFallback( Fuse( Strip)?)?", kinds):
        return None
    if any("String" not in step["pattern"] for step in steps if step["type"] == "Replace"):
        return None
    strip: dict[str, Any] = {"content": "", "start": 0, "stop": 0} if steps[-1]["type"] != "Strip" else steps[-1]
    if strip["stop"]:
        return None
    return _Scheme(
        replaced=tuple((step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"),
        byte_fallback=True,
        start=Start(stripped=strip["content"], strip_count=strip["start"]),
    )


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for the code points from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
