"""Every family gives the same bits in any batch; where one does not, it is seen, and refused if that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config import Config, EngineConfig, ModelConfig
from common.models import ModelError
from engine.attention.cache import KVCache
from engine.model.batch import Batch
from engine.model.invariance import is_invariant
from engine.model.runner import ModelRunner
from tests.engine.model.driver import load_runner
from tests.models import ZOO, ZOO_VOCABULARY

Zoo = Callable[[str], Path]
LIKE = torch.empty(0)


@pytest.mark.parametrize("family", ZOO)
def test_every_family_gives_the_same_bits_in_any_batch(family: str, zoo_folder: Zoo) -> None:
    assert load_runner(zoo_folder(family), impl="transformers").executor.invariant
    taped = load_runner(zoo_folder(family))
    assert is_invariant(taped.executor.forward, taped.layers, ZOO_VOCABULARY, LIKE)


@pytest.mark.parametrize("what", ["rows", "tokens", "position"])
def test_a_bit_that_depends_on_the_batch_is_seen(what: str, zoo_folder: Zoo) -> None:
    runner = load_runner(zoo_folder("llama"))

    def forward(batch: Batch, cache: KVCache) -> torch.Tensor:
        logits = runner.executor.forward(batch, cache).clone()
        odd = {"rows": len(batch.context_lens) > 1, "tokens": len(batch.token_ids) == 1, "position": False}[what]
        if what == "position":  # in the flat row of tokens
            logits[20:] *= 1 + 2**-23
        return logits * (1 + 2**-23) if odd else logits

    assert not is_invariant(forward, runner.layers, ZOO_VOCABULARY, LIKE)


def config(folder: Path, **engine: Any) -> Config:
    return Config(model=ModelConfig(folder=str(folder)), engine=replace(EngineConfig(device="cpu"), **engine))


def test_the_option_refuses_what_is_not_and_serves_what_is(zoo_folder: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = config(zoo_folder("gpt2"), batch_invariant=True)
    assert ModelRunner.load(strict, lambda phase, fraction: None).executor.invariant
    monkeypatch.setattr("engine.model.runner.is_invariant", lambda *_: False)
    with pytest.raises(ModelError, match="--batch-invariant: 'gpt2' as transformers' modules gives other bits"):
        ModelRunner.load(strict, lambda phase, fraction: None)
    lenient = config(zoo_folder("gpt2"))
    assert not ModelRunner.load(lenient, lambda phase, fraction: None).executor.invariant
