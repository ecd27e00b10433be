"""What a token is by itself, and what of a tokenizer's file can go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders

from engine.output.vocabulary import Vocabulary
from tests.engine.output.small_tokenizers import GEMMA, LLAMA2, byte_level, id_of, sentencepiece


def test_a_token_has_its_bytes_even_where_they_are_no_text() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    half = id_of(tokenizer, "ðŁ")
    assert vocabulary.token_bytes(half) == b"\xf0\x9f"
    assert vocabulary.token_text(half) == "\ufffd"
    assert vocabulary.token_text(id_of(tokenizer, "Ġwo")) == " wo"


@pytest.mark.parametrize("decoder", [GEMMA, LLAMA2, decoders.Metaspace()], ids=["gemma", "llama 2", "metaspace"])
def test_a_token_keeps_the_space_that_it_has_in_the_middle_of_a_text(decoder: decoders.Decoder) -> None:
    tokenizer = sentencepiece(decoder)
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.token_text(id_of(tokenizer, "▁hello")) == " hello"
    assert vocabulary.token_bytes(id_of(tokenizer, "日本語")) == "日本語".encode()


def test_byte_tokens_are_bytes_only_with_byte_fallback() -> None:
    for decoder, data in ((GEMMA, b"\xe3"), (decoders.Metaspace(), b"<0xE3>")):
        tokenizer = sentencepiece(decoder)
        assert Vocabulary(tokenizer).token_bytes(id_of(tokenizer, "<0xE3>")) == data


def test_added_tokens_are_plain_text_and_only_special_ones_are_special() -> None:
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.token_text(id_of(tokenizer, "<tool call>")) == "<tool call>"
    assert vocabulary.token_text(id_of(tokenizer, "▁added é")) == "▁added é"
    assert [vocabulary.is_special(id_of(tokenizer, t)) for t in ("<s>", "<tool call>", "he")] == [
        True,
        False,
        False,
    ]
    assert not vocabulary.is_special(10**6)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
    ],
    ids=["word piece", "strips the end", "strips every token", "replaces across tokens"],
)
def test_a_decoder_that_no_table_can_stand_for_keeps_its_tokenizer(decoder: decoders.Decoder) -> None:
    assert Vocabulary(sentencepiece(decoder)).tokenizer is not None


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Vocabulary.load(tmp_path)


def test_a_saved_tokenizer_is_read_back(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.load(tmp_path)
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [vocabulary.token_text(i) for i in range(again.get_vocab_size())] == [
        Vocabulary(tokenizer).token_text(i) for i in range(again.get_vocab_size())
    ]
