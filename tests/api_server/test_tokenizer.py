from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from api_server.tokenizer import INLINE_CHARS, Tokenizer
from tests.api_server.fake_engine import make_model_folder

BEGIN, END = 0, 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_model_folder(tmp_path_factory.mktemp("model")))


def with_config(folder: Path, **config: object) -> Tokenizer:
    path = make_model_folder(folder) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return Tokenizer.load(folder)


async def test_short_and_long_texts_are_encoded_alike(tokenizer: Tokenizer) -> None:
    text = "an example " * INLINE_CHARS
    (long,) = await tokenizer.encode([text], False)
    (short,) = await tokenizer.encode(["an example "], False)
    assert long == short * INLINE_CHARS


async def test_special_tokens_written_in_a_text_become_their_ids(tokenizer: Tokenizer) -> None:
    (ids,) = await tokenizer.encode(["<|begin|>a<|end|>"], False)
    assert (ids[0], ids[-1], len(ids)) == (BEGIN, END, 3)
    assert tokenizer.is_special(BEGIN)
    assert not tokenizer.is_special(ids[1])


async def test_the_tokenizer_config_decides_about_begin_and_end(tmp_path: Path) -> None:
    plain = with_config(tmp_path)
    assert await plain.encode(["a"], True) == await plain.encode(["a"], False)
    framed = with_config(tmp_path, add_bos_token=True)
    (ids,) = await framed.encode(["a"], True)
    assert ids[0] == BEGIN
    assert ids[1:] == (await framed.encode(["a"], False))[0]
    both = with_config(tmp_path, add_bos_token=True, add_eos_token=True)
    (ids,) = await both.encode(["a"], True)
    assert (ids[0], ids[-1]) == (BEGIN, END)


async def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    path = str(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(path)
    (ids,) = await Tokenizer.load(folder).encode(["abcd"], False)
    assert len(ids) == 4


def test_special_tokens_may_be_objects(tmp_path: Path) -> None:
    tokenizer = with_config(tmp_path, bos_token={"content": "<|begin|>", "lstrip": False})
    assert tokenizer.bos_token == "<|begin|>"
    assert tokenizer.special_tokens == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@given(text=st.text(max_size=200))
def test_the_lower_bound_on_tokens_holds_and_decoding_returns_the_text(tokenizer: Tokenizer, text: str) -> None:
    (ids,) = tokenizer._encode([text], False)
    assert tokenizer.at_least(text) <= len(ids)
    assert tokenizer.decode(ids) == text
