"""Compressed weights become the numbers they stand for, to the bit; what cannot be read is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.models import ModelError, check_folder, resolve
from engine.compressed_tensors import Compressed, unpack
from engine.conversion import convert_folder
from engine.native.formats import round_to
from engine.prepare import prepare
from tests.engine.model.driver import Driver, decidable_greedy, load_runner
from tests.models import ZOO_VOCABULARY

OUT, IN = 70, 256
Tensors = dict[str, torch.Tensor]


def nothing(*_: object) -> None:
    """A progress callback for tests that do not look."""


def pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, columns] int8 to words [rows, ceil(columns · bits / 32)] int32: the other way round than `unpack`."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers.long() + 2 ** (bits - 1), (0, -numbers.shape[1] % each))
    words = (numbers.view(len(numbers), -1, each) << torch.arange(0, 32, bits)).sum(2)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def quantize(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Symmetric: numbers int8, scales of each group in bfloat16, and the weight they stand for."""
    groups = weight.view(len(weight), -1, group)
    scale = (groups.abs().amax(2) / (2 ** (bits - 1) - 0.5)).bfloat16()
    numbers = (groups / scale.float()[..., None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return numbers.to(torch.int8).flatten(1), scale, (numbers * scale.float()[..., None]).flatten(1)


def config_of(format: str, weights: Mapping[str, Any] | None, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights and {"type": "int", "symmetric": True, **weights}}
    quantization = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return {"model_type": "llama", "torch_dtype": "bfloat16", "quantization_config": {**quantization, **changes}}


def convert(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """What comes of a folder of these."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    target = folder.parent / "cache" / folder.name
    convert_folder(folder, target, nothing)
    return {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_words_are_unpacked_from_their_lowest_bits() -> None:
    words = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    assert unpack(words, 4, 10).tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1, 7, 7]]
    assert unpack(words, 8, 5).tolist() == [[0x10 - 128, 0x32 - 128, 0x54 - 128, 0x76 - 128, 127]]


WEIGHT = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)) / 10
ZERO = torch.arange(OUT * 2).view(OUT, 2).remainder(15).to(torch.int8) - 7


def packed(bits: int, group: int, **more: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    numbers, scale, weight = quantize(WEIGHT, bits, group)
    words, shape = pack(numbers, bits), torch.tensor([OUT, IN])
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": shape, **more}, weight


def integers(group: int) -> tuple[Tensors, torch.Tensor]:
    numbers, scale, weight = quantize(WEIGHT, 8, group)
    return {"weight": numbers, "weight_scale": scale}, weight


def with_zeros(zero: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    tensors, weight = packed(4, 128, weight_zero_point=zero)
    offset = ZERO.float() * tensors["weight_scale"].float()
    return tensors, (weight.view(OUT, 2, 128) - offset[..., None]).flatten(1)


def in_order() -> tuple[Tensors, torch.Tensor]:
    order = torch.arange(IN).flip(0) // 128
    tensors, _ = packed(4, 128, weight_g_idx=order.int())
    numbers = unpack(tensors["weight_packed"], 4, IN)
    return tensors, numbers.float() * tensors["weight_scale"].float()[:, order]


def floats(scale: torch.Tensor, spread: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    stored = (WEIGHT / spread).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * spread


def blocks() -> tuple[Tensors, torch.Tensor]:
    scale = torch.rand(3, 2, generator=torch.Generator().manual_seed(1)) / 100 + 1e-3
    return floats(scale, scale.repeat_interleave(32, 0)[:OUT].repeat_interleave(128, 1))


Made = tuple[Tensors, torch.Tensor]
GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 128}
KINDS: dict[str, tuple[str, dict[str, Any], Callable[[], Made]]] = {
    "four bits, groups": ("pack-quantized", GROUPS, lambda: packed(4, 128)),
    "four bits, small groups": ("pack-quantized", {**GROUPS, "group_size": 32}, lambda: packed(4, 32)),
    "four bits, channels": ("pack-quantized", {"num_bits": 4, "group_size": -1}, lambda: packed(4, IN)),
    "eight packed bits": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, lambda: packed(8, IN)),
    "two bits": ("pack-quantized", {**GROUPS, "num_bits": 2}, lambda: packed(2, 128)),
    "packed zero points": ("pack-quantized", GROUPS, lambda: with_zeros(pack(ZERO.t(), 4).t())),
    "plain zero points": ("pack-quantized", GROUPS, lambda: with_zeros(ZERO)),
    "inputs out of order": ("pack-quantized", {**GROUPS, "actorder": "group"}, in_order),
    "an order that is none": (
        "pack-quantized", GROUPS, lambda: packed(4, 128, weight_g_idx=torch.full((IN,), -1, dtype=torch.int32)),
    ),
    "eight bits, channels": ("int-quantized", {"strategy": "channel"}, lambda: integers(IN)),
    "eight bits, groups": ("naive-quantized", {"strategy": "group", "group_size": 64}, lambda: integers(64)),
    "floats, tensor": ("float-quantized", {"type": "float"}, lambda: floats(torch.tensor([0.01]), torch.tensor(0.01))),
    "floats, blocks": (
        "float-quantized", {"type": "float", "strategy": "block", "block_structure": [32, 128]}, blocks,
    ),
    "dense": ("dense", {"strategy": "channel"}, lambda: ({"weight": WEIGHT, "weight_scale": WEIGHT[:, :1]}, WEIGHT)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_becomes_the_numbers_it_stands_for(kind: str, tmp_path: Path) -> None:
    format, weights, make = KINDS[kind]
    tensors, weight = make()
    stored = {f"a.b.{name}": tensor for name, tensor in tensors.items()} | {"a.b.input_scale": torch.ones(1)}
    found = convert(tmp_path / "x", config_of(format, weights), stored)
    assert list(found) == ["a.b.weight"]
    assert found["a.b.weight"].dtype is torch.float32
    assert torch.equal(found["a.b.weight"], weight)


def test_four_bits_stay_the_same_bits_when_they_are_served() -> None:
    for group in (32, 128, IN):
        weight = quantize(WEIGHT, 4, group)[2]
        assert torch.equal(round_to(weight, "int4"), weight)
    weight = quantize(WEIGHT, 8, IN)[2]
    assert torch.equal(round_to(weight, "int8"), weight)


def test_what_is_not_compressed_stays_and_other_files_are_linked(tmp_path: Path) -> None:
    source = tmp_path / "x"
    tensors = {f"a.{name}": tensor for name, tensor in packed(4, 128)[0].items()}
    norm, bias = torch.randn(8).bfloat16(), torch.randn(8).bfloat16()
    found = convert(source, config_of("pack-quantized", GROUPS), {**tensors, "norm.weight": norm, "a.bias": bias})
    assert torch.equal(found["norm.weight"], norm)
    assert torch.equal(found["a.bias"], bias)
    target = tmp_path / "cache" / "x"
    config = check_folder(target)
    assert config == {"model_type": "llama", "dtype": "float32"}
    assert (target / "tokenizer.json").is_symlink()
    assert not (target / "model.safetensors").exists()


def test_a_layer_may_be_spread_over_files(tmp_path: Path) -> None:
    tensors, weight = packed(4, 128)
    files = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        files[f"a.{name}"] = f"part-{index}.safetensors"
        save_file({f"a.{name}": tensor}, tmp_path / f"part-{index}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"a.weight": WEIGHT}, tmp_path / "consolidated.safetensors")  # the index does not name it
    target = tmp_path / "target"
    target.mkdir()
    Compressed(tmp_path, config_of("pack-quantized", GROUPS)).write(target, nothing)
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(index) == ["a.weight"]
    assert torch.equal(load_file(target / index["a.weight"])["a.weight"], weight)


def test_each_layer_is_read_as_its_group_says(tmp_path: Path) -> None:
    config = config_of("mixed-precision", None)
    config["quantization_config"]["config_groups"] = {
        "rest": {"targets": ["Linear"], "format": "pack-quantized", "weights": GROUPS},
        "named": {"targets": ["b.c"], "format": "pack-quantized", "weights": {"num_bits": 8, "group_size": -1}},
        "matched": {"targets": [r"re:d\d+\.x"], "format": "int-quantized", "weights": {"strategy": "channel"}},
        "activations": {"targets": ["Attention"], "weights": None},
    }
    parts = {"a": packed(4, 128), "b.c": packed(8, IN), "d12.x": integers(IN)}
    stored = {f"{module}.{name}": tensor for module, made in parts.items() for name, tensor in made[0].items()}
    found = convert(tmp_path / "x", config, stored)
    assert set(found) == {f"{module}.weight" for module in parts}
    for module, made in parts.items():
        assert torch.equal(found[f"{module}.weight"], made[1])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown format": (config_of("nvfp4-pack-quantized", GROUPS), r"format 'nvfp4-pack-quantized' \(group_0\)"),
    "an unknown strategy": (config_of("int-quantized", {"strategy": "tensor_group"}), "strategy 'tensor_group'"),
    "bits that straddle words": (config_of("pack-quantized", {"num_bits": 3, "group_size": 128}), "3-bit packed ints"),
    "a cache of eight bits": (config_of("int-quantized", GROUPS, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "rotations": (config_of("int-quantized", GROUPS, transform_config={"config_groups": {"u": 1}}), "transform_config"),
    "sparse weights": (
        config_of("int-quantized", GROUPS, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask",
    ),
    "a preset's name alone": (config_of("int-quantized", GROUPS, config_groups={"W8A8": ["Linear"]}), "is not valid"),
    "no weights": (config_of("int-quantized", None), "names no weights"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(what: str, tmp_path: Path) -> None:
    config, reason = REFUSED[what]
    with pytest.raises(ModelError, match=reason) as caught:
        convert(tmp_path / "x", config, {"a.weight": WEIGHT})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


DAMAGED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scale": (lambda tensors: tensors.pop("a.weight_scale"), "has no weight_scale"),
    "no shape": (lambda tensors: tensors.pop("a.weight_shape"), "with weight_shape None"),
    "too few scales": (
        lambda tensors: tensors.update({"a.weight_scale": torch.ones(OUT, 1)}), "weight_packed cannot be unpacked",
    ),
    "stacked experts": (
        lambda tensors: tensors.update({"a.weight_packed": torch.ones(2, 3, 4, dtype=torch.int32)}), r"\(2, 3, 4\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_tensors_that_do_not_fit_together_are_refused_and_nothing_is_left(what: str, tmp_path: Path) -> None:
    damage, reason = DAMAGED[what]
    tensors = {f"a.{name}": tensor for name, tensor in packed(4, 128)[0].items()}
    damage(tensors)
    with pytest.raises(ModelError, match=reason):
        convert(tmp_path / "x", config_of("pack-quantized", GROUPS), tensors)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_layer_of_no_group_is_refused(tmp_path: Path) -> None:
    group = {"targets": ["b"], "weights": GROUPS}
    config = config_of("pack-quantized", None, config_groups={"one": group, "two": group})
    tensors = {f"a.{name}": tensor for name, tensor in packed(4, 128)[0].items()}
    with pytest.raises(ModelError, match="no group of its quantization_config names a"):
        convert(tmp_path / "x", config, tensors)


def test_too_little_disk_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"a.{name}": tensor for name, tensor in packed(4, 128)[0].items()}
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 4 * OUT * IN}))
    with pytest.raises(ModelError, match=r"needs 0\.0 GiB of disk, but 0\.0 are free"):
        convert(tmp_path / "x", config_of("pack-quantized", GROUPS), tensors)
    assert list((tmp_path / "cache").iterdir()) == []


def compress(source: Path, folder: Path, group: int) -> Tensors:
    """The model in `source` with its layers' matrices in four bits. Returns what its weights then are."""
    folder.mkdir()
    tensors, weights = {}, load_file(source / "model.safetensors")
    for name, weight in list(weights.items()):
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        numbers, scale, weights[name] = quantize(weight, 4, group)
        tensors[f"{name}_packed"], tensors[f"{name}_scale"] = pack(numbers, 4), scale
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = config_of("pack-quantized", {**GROUPS, "group_size": group}, ignore=["lm_head"])
    config = json.loads((source / "config.json").read_text())
    quantization = {"quantization_config": quantization["quantization_config"]}
    (folder / "config.json").write_text(json.dumps({**config, **quantization}))
    return weights


def test_a_compressed_model_is_served_as_the_model_it_stands_for(
    zoo_folder: Callable[[str], Path], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, folder, plain = zoo_folder("llama"), tmp_path / "compressed", tmp_path / "plain"
    weights = compress(source, folder, group=32)
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    shutil.copytree(source, plain)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})

    prepared = prepare(resolve(str(folder)), nothing)
    assert prepared.is_relative_to(tmp_path / "cache")
    assert resolve(str(folder)).folder == prepared
    prompts, greedy = decidable_greedy(plain, (20, 7), 8, ZOO_VOCABULARY)
    driver = Driver(load_runner(prepared, 256))
    assert [s.output for s in driver.run(prompts, 8, driver.whole)] == [tokens for tokens, _ in greedy]
    outputs = []
    for served in (prepared, plain):
        driver = Driver(load_runner(served, 256, quantization="int4"))
        outputs.append([s.output for s in driver.run(prompts, 8, driver.whole)])
    assert outputs[0] == outputs[1]
