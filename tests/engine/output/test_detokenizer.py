"""Text comes out whole and lossless, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.output.detokenizer import MAX_HELD, Detokenizer
from engine.output.vocabulary import Vocabulary
from tests.engine.output.small_tokenizers import GEMMA, LLAMA2, WORDS, byte_level, id_of, sentencepiece, with_added

BYTE_LEVEL, GEMMA_LIKE, LLAMA_LIKE = byte_level(), sentencepiece(GEMMA), sentencepiece(LLAMA2)
METASPACE = sentencepiece(decoders.Metaspace())
PLAIN_METASPACE = sentencepiece(decoders.Metaspace(prepend_scheme="never"))
WORDPIECE = with_added(
    Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##ing": 2, "world": 3, "日": 4, "##本": 5}))
)
WORDPIECE.decoder = decoders.WordPiece(cleanup=False)
VOCABULARIES = {
    id(t): Vocabulary(t) for t in (BYTE_LEVEL, GEMMA_LIKE, LLAMA_LIKE, METASPACE, PLAIN_METASPACE, WORDPIECE)
}


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    """What each token brought, and the end."""
    detokenizer = Detokenizer(VOCABULARIES[id(tokenizer)], skip)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30)


def test_the_table_decoders_need_no_tokenizer() -> None:
    kinds = {t: VOCABULARIES[id(t)].tokenizer is None for t in (BYTE_LEVEL, GEMMA_LIKE, LLAMA_LIKE, METASPACE)}
    assert all(kinds.values())
    assert VOCABULARIES[id(WORDPIECE)].tokenizer is not None


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300)
@pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, METASPACE, PLAIN_METASPACE], ids=["byte level", "metaspace", "metaspace, no prefix"]
)
def test_any_tokens_give_the_text_of_the_tokenizer(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(token_ids(tokenizer))
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_any_tokens_of_a_real_model_give_the_text_of_its_tokenizer(smollm2_folder: Path) -> None:
    vocabulary = Vocabulary.load(smollm2_folder)
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))

    @given(ids=st.lists(st.integers(0, 49_151), max_size=60), skip=st.booleans())
    @settings(max_examples=200)
    def check(ids: list[int], skip: bool) -> None:
        detokenizer = Detokenizer(vocabulary, skip)
        text = "".join([*(detokenizer.feed(token) for token in ids), detokenizer.flush()])
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=300)
@pytest.mark.parametrize("tokenizer", [GEMMA_LIKE, LLAMA_LIKE], ids=["gemma", "llama 2"])
def test_any_tokens_with_byte_fallback_give_their_bytes_as_text(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    """The tokenizer itself makes every byte of a run U+FFFD where one of them is wrong; ours keeps what is right."""
    ids = data.draw(token_ids(tokenizer))
    vocabulary = VOCABULARIES[id(tokenizer)]
    kept = [token for token in ids if not (skip and vocabulary.is_special(token))]
    text = b"".join(vocabulary.token_bytes(token) for token in kept).decode("utf-8", "replace")
    if tokenizer is LLAMA_LIKE:
        text = text.removeprefix(" ")
    assert "".join(pieces(tokenizer, ids, skip)) == text
    theirs = tokenizer.decode(ids, skip_special_tokens=skip)
    assert text == theirs or "\ufffd" in theirs


@given(words=st.lists(st.sampled_from([*WORDS, " ", "é", "漢", "👩‍👩‍👧", "<"]), max_size=12).map("".join))
@pytest.mark.parametrize("tokenizer", [GEMMA_LIKE, LLAMA_LIKE, BYTE_LEVEL], ids=["gemma", "llama 2", "byte level"])
def test_text_that_was_encoded_byte_by_byte_comes_back_without_replacement(tokenizer: Tokenizer, words: str) -> None:
    if tokenizer is BYTE_LEVEL:
        ids = tokenizer.encode(words).ids
    else:
        ids = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in words.encode()]
    found = pieces(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in found)
    assert "".join(found) == tokenizer.decode(ids)


@given(data=st.data())
@settings(max_examples=200)
def test_a_decoder_that_looks_around_is_followed_through_its_tokenizer(data: st.DataObject) -> None:
    ids = data.draw(token_ids(WORDPIECE))
    assert "".join(pieces(WORDPIECE, ids)) == WORDPIECE.decode(ids)


def test_a_character_split_over_tokens_is_shown_once_and_whole() -> None:
    ids = [id_of(BYTE_LEVEL, char) for char in "ðŁĻĤ"]  # the bytes of 🙂
    assert pieces(BYTE_LEVEL, ids) == ["", "", "", "🙂", ""]
    assert pieces(BYTE_LEVEL, ids[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_are_shown_only_on_request_and_do_not_split_a_character() -> None:
    first, last = (id_of(BYTE_LEVEL, token) for token in ("ðŁ", "ĻĤ"))
    ids = [id_of(BYTE_LEVEL, "<s>"), first, id_of(BYTE_LEVEL, "</s>"), last]
    assert "".join(pieces(BYTE_LEVEL, ids)) == "🙂"
    assert "".join(pieces(BYTE_LEVEL, ids, skip=False)) == "<s>\ufffd</s>\ufffd\ufffd"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WORDPIECE], ids=["table", "window"])
def test_ids_that_no_token_has_bring_nothing(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, [10**6, tokenizer.get_vocab_size()])) == ""
    assert VOCABULARIES[id(tokenizer)].token_text(10**6) == ""


def test_bytes_that_never_become_a_character_are_not_held() -> None:
    continuation = id_of(BYTE_LEVEL, "Ļ")
    assert pieces(BYTE_LEVEL, [continuation] * 1000) == ["\ufffd"] * 1000 + [""]


class _Endless:
    """A tokenizer whose every text ends in half a character. Counts the tokens it is asked to decode."""

    def __init__(self) -> None:
        self.most = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.most = max(self.most, len(ids))
        return "\ufffd" * len(ids)


def test_a_decoder_that_looks_around_is_never_asked_for_more_than_a_window() -> None:
    vocabulary = Vocabulary(WORDPIECE)
    endless = _Endless()
    vocabulary.tokenizer = endless  # type: ignore[assignment]
    detokenizer = Detokenizer(vocabulary)
    text = "".join(detokenizer.feed(1) for _ in range(1000)) + detokenizer.flush()
    assert text == "\ufffd" * 1000
    assert endless.most <= 2 * MAX_HELD


def test_a_first_space_is_dropped_where_the_tokenizer_drops_it() -> None:
    space_hello = id_of(GEMMA_LIKE, "▁hello")
    texts: dict[str, Callable[[], list[str]]] = {
        " hello hello": lambda: pieces(GEMMA_LIKE, [space_hello] * 2),
        "hello hello": lambda: pieces(LLAMA_LIKE, [space_hello] * 2),
    }
    for text, made in texts.items():
        assert "".join(made()) == text
    assert "".join(pieces(METASPACE, [space_hello] * 2)) == "hello hello"


@pytest.mark.parametrize("tokenizer", [GEMMA_LIKE, LLAMA_LIKE, METASPACE], ids=["gemma", "llama 2", "metaspace"])
def test_a_first_space_stays_where_the_text_goes_on_from_a_prompt(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(VOCABULARIES[id(tokenizer)], continues=True)
    assert detokenizer.feed(id_of(tokenizer, "▁hello")) + detokenizer.flush() == " hello"


@given(first=st.integers(0, 300), second=st.integers(0, 300))
def test_requests_share_a_vocabulary_but_no_state(first: int, second: int) -> None:
    vocabulary = VOCABULARIES[id(BYTE_LEVEL)]
    assume(max(first, second) < BYTE_LEVEL.get_vocab_size())
    one, other = Detokenizer(vocabulary), Detokenizer(vocabulary)
    one.feed(id_of(BYTE_LEVEL, "ð"))
    assert other.feed(first) + other.feed(second) + other.flush() == BYTE_LEVEL.decode([first, second])
