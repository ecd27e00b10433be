"""Native layers take the place of transformers' own, which are freed, and the model computes the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.experts import Experts
from engine.model.loader import load_config, load_model
from engine.model.packing import pack_layers
from engine.model.rounding import round_weights
from engine.native.layers import FusedNorm, PackedEmbedding, PackedLinear
from engine.native.team import Team

Zoo = Callable[[str], Path]
TEAM = Team(2)


def model_of(folder: Path) -> Any:
    return load_model(folder, load_config(folder), torch.float32, torch.device("cpu"))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        found: torch.Tensor = model(torch.arange(3, 60)[None], use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "cohere", "opt", "mixtral", "qwen3_moe", "gpt_oss"])
def test_a_model_computes_the_same_with_native_layers(family: str, name: str, zoo_folder: Zoo) -> None:
    model = model_of(zoo_folder(family))
    round_weights(model, name)
    before = logits(model)
    pack_layers(model, name, TEAM)
    after = logits(model)
    errors = (after - before).norm(dim=-1) / before.norm(dim=-1)
    # Random models amplify rounding, and a mixture of experts may route a token elsewhere for it.
    assert errors.median() < (0.02 if name == "int8" else 1e-3)


def count(model: Any, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def test_every_layer_that_has_a_native_form_takes_it(zoo_folder: Zoo) -> None:
    llama, gemma, mixtral = (model_of(zoo_folder(f)) for f in ("llama", "gemma2", "mixtral"))
    depth = llama.config.num_hidden_layers
    for model in (llama, gemma, mixtral):
        pack_layers(model, "float16", TEAM)
        assert count(model, torch.nn.Linear) == count(model, torch.nn.Embedding) == 0
        assert count(model, PackedEmbedding) == 1
    assert count(llama, PackedLinear) == 7 * depth + 1
    assert count(llama, FusedNorm) == 2 * depth + 1
    assert count(gemma, FusedNorm) == 4 * depth + 1  # whose weights are counted from one
    assert count(mixtral, Experts) == mixtral.config.num_hidden_layers


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_plain_weights_are_freed(family: str, zoo_folder: Zoo) -> None:
    model = model_of(zoo_folder(family))
    positions = {id(p) for p in model.transformer.wpe.parameters()} if family == "gpt2" else set()
    matrices = [weakref.ref(p) for p in model.parameters() if p.numel() > 4000 and id(p) not in positions]
    pack_layers(model, "float16", TEAM)
    gc.collect()
    assert matrices
    assert not [ref().shape for ref in matrices if ref() is not None]  # type: ignore[union-attr]
