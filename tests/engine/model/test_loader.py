"""A folder that cannot be loaded is refused in one clear line; a good one comes up in eval mode with our attention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from common.config import ModelConfig
from common.models import ModelError
from engine.attention.interface import NAME
from engine.model import loader
from engine.model.loader import load_config, load_model, resolve_weights, weight_bytes

Zoo = Callable[[str], Path]
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, zoo_folder: Zoo) -> Path:
    """A copy of a small model, to be damaged."""
    return Path(shutil.copytree(zoo_folder("llama"), tmp_path / "model"))


def load(folder: Path) -> Any:
    return load_model(folder, load_config(folder), torch.float32, CPU)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_model_comes_up_ready_with_our_attention(folder: Path) -> None:
    model = load(folder)
    assert not model.training
    assert model.config._attn_implementation == NAME
    assert not any(p.requires_grad for p in model.parameters())


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": ({"model_type": "nonsense"}, r"model type 'nonsense': it is unknown \(transformers \d"),
    "a type of its own code": (
        {"model_type": "nonsense", "auto_map": {"AutoModel": "x.Y"}},
        "remote code is not run",
    ),
    "not a causal model": ({"model_type": "clip"}, "'clip': it is not a causal language model"),
    "encoder and decoder": ({"is_encoder_decoder": True}, "encoder-decoder"),
    "another quantization": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "it is quantized with 'gptq'; plain, GGUF and compressed-tensors checkpoints can be loaded",
    ),
    "an unknown quantization": ({"quantization_config": {"quant_method": "new"}}, "it is quantized with 'new'"),
    "a quantization without a name": ({"quantization_config": {"bits": 4}}, "it is quantized with 'unknown'"),
    "an old bitsandbytes": ({"quantization_config": {"load_in_4bit": True}}, "it is quantized with 'bitsandbytes'"),
    "a quantized part": ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "quantized with 'awq'"),
    "mxfp4 of another family": ({"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4', which only gpt_oss"),
    "compressed weights": (
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        "its weights are compressed: engine.prepare makes",
    ),
    "an impossible field": ({"hidden_size": "wide"}, "config.json is not valid for 'llama'"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_config_that_cannot_be_served_is_refused_in_one_line(what: str, folder: Path) -> None:
    changes, reason = CONFIGS[what]
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=reason) as caught:
        load_config(folder)
    assert "\n" not in str(caught.value)


def test_code_of_its_own_beside_a_known_type_is_not_run_and_not_needed(folder: Path) -> None:
    change_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    assert type(load(folder)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "fp8", "quanto", "hqq", "aqlm", "eetq", "torchao", "nvfp4"])
def test_a_quantized_checkpoint_is_refused_by_name(method: str, folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=f"quantized with '{method}'"):
        load_config(folder)


def test_a_checkpoint_of_modelopt_is_told_by_its_file(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match="quantized with 'modelopt'"):
        load_config(folder)


def test_a_config_that_says_it_is_not_quantized_is_plain(folder: Path) -> None:
    change_config(folder, quantization_config=None)
    assert not load(folder).training


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_of_which_the_config_says_nothing_are_refused(dtype: torch.dtype, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lm_head\.weight is quantized \((I8|F8_E4M3)\), but config\.json"):
        load(folder)


def test_gpt_oss_in_mxfp4_is_read_as_the_numbers_it_stands_for(zoo_folder: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo_folder("gpt_oss"), tmp_path / "model"))
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    weights = load_file(folder / "model.safetensors")
    numbers = sum(w.numel() for w in weights.values())
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        weights[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=draw).to(torch.uint8)
        weights[f"{name}_scales"] = torch.randint(118, 122, shape, generator=draw).to(torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    scales = sum(w.numel() for name, w in weights.items() if name.endswith("_scales"))
    assert weight_bytes(folder, torch.float32) == 4 * numbers + scales
    down = "model.layers.0.mlp.experts.down_proj"
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks, scale = weights[f"{down}_blocks"].long(), weights[f"{down}_scales"]
    values = torch.cat([half, -half])[torch.stack([blocks & 15, blocks >> 4], -1)].flatten(3)
    expected = (values * torch.exp2(scale.float() - 127)[..., None]).flatten(2).transpose(1, 2)
    assert torch.equal(load(folder).model.layers[0].mlp.experts.down_proj, expected)


def test_missing_weights_are_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: w for name, w in weights.items() if "q_proj" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"the weights lack model\.layers\.0\.self_attn\.q_proj\.weight, .* and 3 more"
    ):
        load(folder)


def test_a_truncated_file_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="loading the weights failed"):
        load(folder)
    file.write_bytes(b"rubbish")
    with pytest.raises(ModelError, match="no valid safetensors file"):
        load(folder)


def test_too_little_memory_is_said_with_both_figures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "free_memory", lambda device: 200 << 20)
    with pytest.raises(ModelError, match=r"too little memory: in float32 the model needs 0\.3 GiB, but 0\.2 are free"):
        load(folder)


def test_weights_are_counted_in_the_dtype_they_are_loaded_in(folder: Path) -> None:
    numbers = sum(w.numel() for w in load_file(folder / "model.safetensors").values())
    assert weight_bytes(folder, torch.float32) == 4 * numbers
    assert weight_bytes(folder, torch.bfloat16) == 2 * numbers


def test_auto_stores_weights_in_sixteen_bits_that_lose_the_least() -> None:
    half, whole = AutoConfig.for_model("llama", dtype="bfloat16"), AutoConfig.for_model("llama", dtype="float32")
    assert resolve_weights(ModelConfig(), half) == "bfloat16"
    assert resolve_weights(ModelConfig(), whole) == "float16"
    assert resolve_weights(ModelConfig(dtype="float32"), half) == "float32"
    assert resolve_weights(ModelConfig(dtype="float32", quantization="int8"), half) == "int8"
    with pytest.raises(ModelError, match="--dtype is 'half', but must be one of auto, float32"):
        resolve_weights(ModelConfig(dtype="half"), half)
