"""Weights are rounded to what they will be stored in before anything is compared with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.loader import load_config, load_model
from engine.model.rounding import round_weights
from engine.native.formats import round_to

Zoo = Callable[[str], Path]
CPU = torch.device("cpu")


def model_of(folder: Path) -> Any:
    return load_model(folder, load_config(folder), torch.float32, CPU)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_matrix_is_what_its_format_holds(name: str, family: str, zoo_folder: Zoo) -> None:
    before, after = model_of(zoo_folder(family)), model_of(zoo_folder(family))
    round_weights(after, name)
    stored = {"int4": "int8"}.get(name, name)
    assert torch.equal(after.lm_head.weight, round_to(before.lm_head.weight, stored))
    if family == "llama":
        there, here = after.model.layers[0].mlp.down_proj.weight, before.model.layers[0].mlp.down_proj.weight
    else:  # GPT-2 keeps its matrices turned round
        there, here = after.transformer.h[0].mlp.c_proj.weight.t(), before.transformer.h[0].mlp.c_proj.weight.t()
    assert torch.equal(there, round_to(here, name))


def test_float32_stays_as_it_is(zoo_folder: Zoo) -> None:
    model = model_of(zoo_folder("llama"))
    before = model.lm_head.weight.clone()
    round_weights(model, "float32")
    assert torch.equal(model.lm_head.weight, before)


def test_weights_outside_the_range_are_refused_by_name(zoo_folder: Zoo) -> None:
    model = model_of(zoo_folder("llama"))
    model.lm_head.weight.data[0, 0] = 1e6
    with pytest.raises(ValueError, match="float16 cannot hold: another --dtype can"):
        round_weights(model, "float16")
