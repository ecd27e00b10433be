"""What layers are made of is read as it stands, and what cannot be read is left to transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.model.anatomy import Anatomy, read, rms_norm, rotations
from engine.model.loader import load_config, load_model

Zoo = Callable[[str], Path]


def model_of(folder: Path) -> Any:
    return load_model(folder, load_config(folder), torch.float32, torch.device("cpu"))


def anatomy_of(folder: Path) -> Anatomy:
    anatomy = read(model_of(folder))
    assert anatomy is not None
    return anatomy


def test_a_plain_layer_has_a_norm_before_each_half(zoo_folder: Zoo) -> None:
    layer = anatomy_of(zoo_folder("llama")).layers[0]
    assert len(layer.qkv) == 3
    assert len(layer.gate_up) == 2
    assert layer.before_attention is not None
    assert layer.before_mlp is not None
    assert (layer.after_attention, layer.after_mlp, layer.head_norms, layer.wide_norms) == (None, None, None, None)
    assert layer.rotary == ""


def test_fused_projections_are_one_layer(zoo_folder: Zoo) -> None:
    layer = anatomy_of(zoo_folder("phi3")).layers[0]
    assert (len(layer.qkv), len(layer.gate_up)) == (1, 1)


def test_norms_of_results_are_told_from_those_before(zoo_folder: Zoo) -> None:
    gemma, olmo = (anatomy_of(zoo_folder(family)).layers[0] for family in ("gemma2", "olmo2"))
    assert None not in (gemma.before_attention, gemma.after_attention, gemma.before_mlp, gemma.after_mlp)
    assert (olmo.before_attention, olmo.before_mlp) == (None, None)
    assert None not in (olmo.after_attention, olmo.after_mlp, olmo.wide_norms)


def test_some_layers_do_not_rotate_and_some_rotate_otherwise(zoo_folder: Zoo) -> None:
    smollm3 = model_of(zoo_folder("smollm3"))
    anatomy = read(smollm3)
    assert anatomy is not None
    assert [layer.rotary == "" for layer in anatomy.layers] == [bool(used) for used in smollm3.config.no_rope_layers]
    gemma3 = model_of(zoo_folder("gemma3_text"))
    assert set(rotations(gemma3, 8)) == set(gemma3.config.layer_types)
    cos, sin = rotations(smollm3, 8)[""]
    assert cos.shape == sin.shape == (8, smollm3.config.head_dim // 2)
    assert torch.equal(cos[0], torch.ones(cos.shape[1]))


@pytest.mark.parametrize("family", ["gpt2", "cohere", "mixtral", "starcoder2"])
def test_other_families_are_left_alone(family: str, zoo_folder: Zoo) -> None:
    assert read(model_of(zoo_folder(family))) is None


def test_another_activation_or_norm_is_left_alone(zoo_folder: Zoo) -> None:
    model = model_of(zoo_folder("llama"))
    model.config.hidden_act = "relu"
    assert read(model) is None
    model.config.hidden_act = "silu"
    model.model.layers[1].input_layernorm = nn.LayerNorm(64)
    assert read(model) is None


class CenteredNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (8,), self.weight)


def test_norms_are_known_by_what_they_compute(zoo_folder: Zoo) -> None:
    gemma, llama = model_of(zoo_folder("gemma2")).model.norm, model_of(zoo_folder("llama")).model.norm
    with torch.no_grad():
        for module in (gemma, llama):
            module.weight += torch.rand_like(module.weight)
    plain, counted = rms_norm(llama), rms_norm(gemma)
    assert plain is not None
    assert counted is not None
    assert torch.equal(plain.scales, llama.weight)
    assert torch.equal(counted.scales, 1 + gemma.weight)
    assert rms_norm(CenteredNorm()) is None
    assert rms_norm(nn.Linear(8, 8)) is None
