"""Guided rows draw only what their grammar allows, are ready in time, and leave their neighbours alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from common.grammar import Grammars
from engine.sampling.guides import Guides

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(smollm2_folder: Path) -> Grammars:
    return Grammars(smollm2_folder, 49152, (EOS,))


def allowed(guides: Guides, row: int) -> set[int]:
    found = guides.masks(np.array([row]))
    assert found is not None
    bits = np.unpackbits(found[1].numpy().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_row_may_draw_what_its_grammar_goes_on_with(tokenizer: Tokenizer, grammars: Grammars) -> None:
    guides = Guides(4, 49152)
    guides.admit(1, grammars.compile(("regex", "yes|no")), (EOS,), ())
    (yes,), (no,) = (tokenizer.encode(word).ids for word in ("yes", "no"))
    assert {yes, no} <= allowed(guides, 1)
    assert all((tokenizer.id_to_token(token) or "?")[0] in "yn" for token in allowed(guides, 1))
    guides.advance(np.array([1]), np.array([yes]))
    assert allowed(guides, 1) == {EOS}
    guides.advance(np.array([1]), np.array([EOS]))
    assert allowed(guides, 1) == {EOS}, "what is over stays over"


def test_a_resumed_row_goes_on_where_it_was(tokenizer: Tokenizer, grammars: Grammars) -> None:
    guides = Guides(4, 49152)
    text = tokenizer.encode('{"a": 1').ids
    guides.admit(0, grammars.compile(("json", '{"type":"object"}')), (EOS,), tuple(text))
    found = allowed(guides, 0)
    assert tokenizer.encode("}").ids[0] in found
    assert tokenizer.encode("{").ids[0] not in found


def test_only_guided_rows_have_masks(grammars: Grammars) -> None:
    guides = Guides(4, 49152)
    assert guides.masks(np.array([0, 1])) is None
    guides.admit(2, grammars.compile(("regex", "a")), (EOS,), ())
    found = guides.masks(np.array([0, 2, 1, 2]))
    assert found is not None
    assert found[0].tolist() == [1, 3]
    guides.admit(2, None, (EOS,), ())
    assert guides.masks(np.array([2])) is None


def test_what_the_grammar_forbids_ends_the_row_and_no_other(tokenizer: Tokenizer, grammars: Grammars) -> None:
    guides = Guides(4, 49152)
    for row in (0, 1):
        guides.admit(row, grammars.compile(("regex", "ab+")), (EOS,), ())
    (a,), (b,) = (tokenizer.encode(word).ids for word in ("a", "b"))
    guides.advance(np.array([0, 1]), np.array([b, a]))
    assert allowed(guides, 0) == {EOS}
    assert b in allowed(guides, 1)


def test_several_end_tokens_are_all_possible_at_the_end(smollm2_folder: Path) -> None:
    guides = Guides(1, 49152)
    guides.admit(0, Grammars(smollm2_folder, 49152, (0, 2)).compile(("regex", "")), (0, 2), ())
    assert {0, 2} & allowed(guides, 0)


@pytest.mark.parametrize("vocab_size", [32, 100, 49152])
def test_masked_tokens_are_impossible_and_others_untouched(vocab_size: int) -> None:
    from engine.sampling.cpu import CpuOperations
    from engine.sampling.reference import ReferenceOperations

    torch.manual_seed(0)
    logits = torch.randn(3, vocab_size)
    words = torch.randint(-(2**31), 2**31, (2, -(-vocab_size // 32)), dtype=torch.int64).to(torch.int32)
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    expected = logits.clone()
    expected[[2, 0]] = torch.where(torch.from_numpy(bits).bool(), logits[[2, 0]], -torch.inf)
    for ops in (CpuOperations(), ReferenceOperations()):
        found = logits.clone()
        ops.mask(found, torch.tensor([2, 0]), words)
        assert torch.equal(found, expected)
