"""A GGUF file's scaling of rotary frequencies reaches the config, or the file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, GGUFWriter, RopeScalingType
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.models import ModelError
from engine.conversion import convert_gguf
from engine.gguf_rope import scale_frequencies
from tests.engine.test_conversion import nothing, write_gguf

HALF = 8  # of a head's numbers


def converted(tmp_path: Path, add: Callable[[GGUFWriter], None]) -> Any:
    """The config of a file that `add` has written more to."""
    write_gguf(tmp_path / "x.gguf", add=add)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "x", nothing)
    return AutoConfig.from_pretrained(tmp_path / "x")


def frequencies(config: Any) -> torch.Tensor:
    found: torch.Tensor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, torch.device("cpu"))[0]
    return found


def test_without_scaling_the_frequencies_are_the_plain_ones(tmp_path: Path) -> None:
    config = converted(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(HALF, np.float32)))
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}


def test_the_divisors_of_llama_3_become_its_parameters(tmp_path: Path) -> None:
    scaled = AutoConfig.for_model("llama", hidden_size=32, num_attention_heads=2)
    scaled.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    plain = 10000.0 ** -(torch.arange(HALF) / HALF)
    divisors = (plain / frequencies(scaled)).numpy().astype(np.float32)
    assert 1 < divisors[6] < 8
    config = converted(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    assert config.rope_parameters == scaled.rope_parameters
    torch.testing.assert_close(frequencies(config), torch.from_numpy(plain.numpy() / divisors))


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 2, HALF, dtype=np.float32)
    with pytest.raises(ModelError, match=r"its rope_freqs\.weight is not Llama 3's"):
        converted(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", divisors))


def scaling(kind: RopeScalingType, **more: float) -> Callable[[GGUFWriter], None]:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        for name, value in more.items():
            writer.add_float32(f"llama.rope.scaling.{name}", value)

    return add


def test_linear_scaling_is_kept(tmp_path: Path) -> None:
    config = converted(tmp_path, scaling(RopeScalingType.LINEAR))
    assert config.rope_parameters == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


def test_yarn_is_kept(tmp_path: Path) -> None:
    rope = converted(tmp_path, scaling(RopeScalingType.YARN, yarn_beta_fast=16.0)).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 32)
    assert rope["beta_fast"] == 16.0


def test_where_layers_differ_those_of_full_attention_are_scaled(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", add=scaling(RopeScalingType.LINEAR))
    rope: dict[str, Any] = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    scale_frequencies(tmp_path / "x.gguf", GGUFReader(tmp_path / "x.gguf"), rope)
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 4.0}
    assert rope["sliding_attention"] == {"rope_type": "default"}


def test_scaling_that_cannot_be_expressed_is_refused_by_name(tmp_path: Path) -> None:
    for add, reason in (
        (scaling(RopeScalingType.LONGROPE), "longrope RoPE is not supported"),
        (
            lambda writer: writer.add_tensor("rope_factors_long.weight", np.ones(HALF, np.float32)),
            "longrope RoPE is not supported",
        ),
        (scaling(RopeScalingType.YARN, yarn_log_multiplier=0.1), "yarn_log_multiplier is not supported"),
    ):
        with pytest.raises(ModelError, match=reason):
            converted(tmp_path, add)
