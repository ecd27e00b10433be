"""A conversion is whole or absent, a GGUF file loads as the model it holds, and a slow tokenizer becomes a fast one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.models import ModelError, check_folder
from engine import conversion
from engine.conversion import convert_folder, convert_gguf, whole_folder
from engine.native.formats import round_to

VOCABULARY, HEADS = 260, 2
F32 = GGMLQuantizationType.F32
Array = np.ndarray[Any, Any]


def nothing(phase: str, fraction: float) -> None:
    """A progress callback for tests that do not look."""


def is_readable(kind: GGMLQuantizationType) -> bool:
    """Whether gguf knows what numbers a block stands for."""
    try:
        return bool(dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind).size)
    except NotImplementedError:
        return False


KINDS = [kind for kind in GGMLQuantizationType if is_readable(kind)]


def stored(numbers: Array, kind: GGMLQuantizationType) -> Array:
    """The numbers as `kind`; for one that gguf cannot write, other numbers in blocks of random bytes."""
    try:
        return np.asarray(quantize(numbers, kind))
    except NotImplementedError:
        size, block = GGML_QUANT_SIZES[kind]
        draw = np.random.default_rng(int(kind))
        data = draw.integers(0, 256, (*numbers.shape[:-1], numbers.shape[-1] // size * block), np.uint8)
        data[..., 1::2] &= 0x3F  # a float16 then is below 2
        return data


def write_gguf(
    path: Path, architecture: str = "llama", kinds: Sequence[GGMLQuantizationType] = (F32, F32), embedding: int = F32,
    width: int = 32, without: str = "", add: Callable[[GGUFWriter], None] = lambda writer: None,
) -> dict[str, Array]:  # fmt: skip
    """A small Llama with a byte-level vocabulary and a layer of each of `kinds`. Returns its tensors' numbers."""
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(len(kinds))
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(2 * width)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    printable = [chr(256 + i) for i in range(VOCABULARY - 4)]
    printable.append(printable[0] + printable[1])
    writer.add_token_list(["<|start|>", "<|end|>", "<|unknown|>", *printable])
    writer.add_token_types([3, 3, 3] + [1] * len(printable))
    writer.add_token_merges([f"{printable[0]} {printable[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    shapes = {"token_embd.weight": (VOCABULARY, width), "output_norm.weight": (width,)}
    for layer in range(len(kinds)):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (width, width)
        shapes[f"blk.{layer}.ffn_gate.weight"] = shapes[f"blk.{layer}.ffn_up.weight"] = (2 * width, width)
        shapes[f"blk.{layer}.ffn_down.weight"] = (width, 2 * width)
        shapes[f"blk.{layer}.attn_norm.weight"] = shapes[f"blk.{layer}.ffn_norm.weight"] = (width,)
    numbers = {}
    for name, shape in shapes.items():
        tensor = np.round(draw.normal(size=shape) * 32).astype(np.float32) / 32  # as eight bits hold it
        kind = F32 if len(shape) == 1 else kinds[int(name.split(".")[1])] if "blk." in name else embedding
        data = stored(tensor, GGMLQuantizationType(kind))
        numbers[name] = dequantize(data, GGMLQuantizationType(kind))
        if name != without:
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType(kind))
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def test_a_gguf_file_becomes_a_folder_that_holds_the_same_model(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "x.gguf")
    target = tmp_path / "cache" / "x"
    fractions: list[float] = []
    convert_gguf(tmp_path / "x.gguf", target, lambda phase, fraction: fractions.append(fraction))
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert check_folder(target)["model_type"] == "llama"
    assert "quantization_config" not in check_folder(target)
    assert (
        Tokenizer.from_file(str(target / "tokenizer.json")).get_vocab_size() >= VOCABULARY
    )  # a default unknown token may be added
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    np.testing.assert_array_equal(
        model.model.embed_tokens.weight.detach().float().numpy(), tensors["token_embd.weight"]
    )
    assert [path.name for path in target.parent.iterdir()] == ["x"]


def test_every_type_of_tensor_becomes_the_numbers_it_stands_for(tmp_path: Path) -> None:
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "BF16"} <= {kind.name for kind in KINDS}
    numbers = write_gguf(tmp_path / "x.gguf", kinds=KINDS, width=256)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "x", nothing)
    found = load_file(tmp_path / "x" / "model.safetensors")
    for layer, kind in enumerate(KINDS):
        for there, here in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
            expected = numbers[f"blk.{layer}.{there}.weight"]
            assert np.isfinite(expected).all(), kind.name
            np.testing.assert_array_equal(found[f"model.layers.{layer}.{here}.weight"], expected, kind.name)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1])
def test_four_bits_are_served_as_they_are(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", kinds=(kind,), width=64)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "x", nothing)
    for name, weight in load_file(tmp_path / "x" / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            assert torch.equal(round_to(weight, "int4"), weight), name


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "bfloat16"), ("BF16", "bfloat16"), ("Q8_0", "float32")])
def test_sixteen_bits_are_written_where_they_lose_nothing(kind: str, dtype: str, tmp_path: Path) -> None:
    ggml = GGMLQuantizationType[kind]
    numbers = write_gguf(tmp_path / "x.gguf", kinds=(ggml,), embedding=ggml)
    convert_gguf(tmp_path / "x.gguf", tmp_path / "x", nothing)
    assert check_folder(tmp_path / "x")["dtype"] == dtype
    weight = load_file(tmp_path / "x" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert str(weight.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(weight.float(), numbers["blk.0.ffn_down.weight"])


def test_half_precision_that_bfloat16_cannot_hold_stays_half_precision() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight.data[:] = 1 + 2**-10
    assert conversion._least_dtype(layer) is torch.float16
    layer.weight.data[:] = 1 + 2**-11
    assert conversion._least_dtype(layer) is torch.float32


def retype(path: Path, tensor: bytes, kind: int) -> None:
    """Says in the file that the one-dimensional `tensor` has the type `kind`."""
    data = bytearray(path.read_bytes())
    at = data.index(tensor) + len(tensor) + 4 + 8
    data[at : at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize(("kind", "name"), [(999, "999"), (int(GGMLQuantizationType.I32), "I32")])
def test_a_type_that_cannot_be_read_is_named(kind: int, name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf")
    retype(tmp_path / "x.gguf", b"output_norm.weight", kind)
    with pytest.raises(ModelError, match=rf"x\.gguf has tensors of type {name}, which gguf \d.* cannot read"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "cache" / "x", nothing)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"it lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "cache" / "x", nothing)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", "no-such-architecture")
    with pytest.raises(ModelError, match=r"x\.gguf .*no-such-architecture"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "cache" / "x", nothing)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf")
    data = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"x\.gguf"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "cache" / "x", nothing)


def test_too_little_disk_or_memory_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "x.gguf")
    usage = type("Usage", (), {"free": 10})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(ModelError, match=r"needs 0\.0 GiB of disk, but 0\.0 are free"):
            convert_gguf(tmp_path / "x.gguf", tmp_path / "cache" / "x", nothing)
    monkeypatch.setattr(conversion, "free_memory", lambda device: 10)
    with pytest.raises(ModelError, match=r"needs 0\.0 GiB of memory, but 0\.0 are free"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "cache" / "x", nothing)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_slow_tokenizer_becomes_a_fast_one_beside_linked_weights(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    (source / "model.safetensors").write_bytes(b"weights")
    (source / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    target = tmp_path / "cache" / "converted"
    convert_folder(source, target, nothing)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("ab").ids == [2]
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert (target / "model.safetensors").is_symlink()


def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="has no tokenizer that can be read"):
        convert_folder(tmp_path / "source", tmp_path / "cache" / "x", nothing)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "x"
    with pytest.raises(ZeroDivisionError), whole_folder(target) as folder:
        (folder / "half").write_text(str(1 / 0))
    assert list(target.parent.iterdir()) == []


def test_two_conversions_at_once_leave_one_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with whole_folder(target) as slow:
        (slow / "file").write_text("slow")
        with whole_folder(target) as fast:
            (fast / "file").write_text("fast")
    assert (target / "file").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_conversion_left_is_removed_by_the_next(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".partial-{dead.pid}-x").mkdir()
    (tmp_path / f".partial-{os.getpid()}-y").mkdir()
    (tmp_path / ".partial-strange").mkdir()
    with whole_folder(tmp_path / "target"):
        pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"target", f".partial-{os.getpid()}-y", ".partial-strange"}


def test_sigterm_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from engine.conversion import whole_folder\n"
        "with whole_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('x'); print('writing', flush=True); time.sleep(60)"
    )
    root = Path(conversion.__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "cache" / "x")], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=30) == 128 + signal.SIGTERM
    assert list((tmp_path / "cache").iterdir()) == []
    child.stdout.close()
