"""Token ids to text, one token at a time, at a constant cost per token whatever came before."""

from __future__ import annotations

from codecs import utf_8_decode

from tokenizers import Tokenizer

from engine.output.vocabulary import Vocabulary

__all__ = ["Detokenizer", "Vocabulary"]

MAX_HELD = 8  # tokens that may wait for the rest of a character, where no table tells their bytes


class Detokenizer:
    """One request's output text: what `feed` and `flush` return, joined.

    A character whose bytes come in several tokens is returned once, whole; at most its first 3 bytes are held. Bytes
    that are not UTF-8 become U+FFFD, one for each maximal part of a character, as in Python and on the web.
    """

    __slots__ = ("_begun", "_bytes", "_held", "_plain", "_strip_left", "_texts", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool = True, continues: bool = False) -> None:
        """continues: the tokens go on from a text, as an answer does from its prompt, so that a first space stays."""
        self._vocabulary = vocabulary
        self._texts, self._bytes = vocabulary.tables(skip_special_tokens)
        self._held = b""
        self._strip_left = vocabulary.start.strip_count
        self._begun = continues or not (vocabulary.start.dropped or self._strip_left)
        self._window = (
            None if vocabulary.tokenizer is None else _Window(vocabulary, vocabulary.tokenizer, skip_special_tokens)
        )
        self._plain = self._begun and self._window is None

    def feed(self, token_id: int) -> str:
        """The text that this token completes; nothing for an id that no token has."""
        try:
            if self._plain and (text := self._texts[token_id]) is not None:
                return text
            data = self._bytes[token_id]
        except IndexError:  # models may have more logits than their tokenizer has tokens
            return ""
        if self._window is not None:
            return self._window.feed(token_id)
        if not self._begun and data:
            return self._begin(self._vocabulary.first_bytes(token_id))
        return self._decode(data)

    def flush(self) -> str:
        """What is still held. The text ends here."""
        if self._window is not None:
            return self._window.flush()
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")

    def _decode(self, data: bytes) -> str:
        data = self._held + data
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        self._plain = self._begun and not self._held
        return text

    def _begin(self, data: bytes) -> str:
        text = self._decode(data)
        stripped = self._vocabulary.start.stripped
        while self._strip_left and text and text[0] == stripped:
            text = text[1:]
            self._strip_left -= 1
        self._begun = bool(text) or not self._strip_left
        self._plain = self._begun and not self._held
        return text


class _Window:
    """Text by decoding the last few tokens with and without the new one, for decoders that look around.

    A decoded U+FFFD at the end may be half a character, so it waits for more, but for `MAX_HELD` tokens only.
    """

    __slots__ = ("_before", "_ids", "_shown", "_skip_special", "_tokenizer", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._ids: list[int] = []  # tokens shown last, then those that wait
        self._shown = 0  # how many of them have been shown
        self._before = ""  # their text

    def feed(self, token_id: int) -> str:
        if self._skip_special and self._vocabulary.is_special(token_id):
            return ""  # what surrounds it is decoded as neighbours
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < MAX_HELD:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode()) if len(self._ids) > self._shown else ""

    def _show(self, text: str) -> str:
        new = text[len(self._before) :]
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        self._before = self._decode()
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)
        return text
