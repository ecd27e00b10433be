"""A conversion is whole or absent, a GGUF file loads as the model it holds, and a slow tokenizer becomes a fast one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from common.models import ModelError, check_folder
from engine import conversion
from engine.conversion import convert_gguf, convert_tokenizer, whole_folder

VOCABULARY, WIDTH, LAYERS, HEADS = 260, 32, 2, 2


def nothing(phase: str, fraction: float) -> None:
    """A progress callback for tests that do not look."""


def write_gguf(path: Path, architecture: str = "llama") -> dict[str, np.ndarray[Any, Any]]:
    """A small Llama with a byte-level vocabulary. Returns its tensors."""
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(64)
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
    shapes = {"token_embd.weight": (VOCABULARY, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH, WIDTH)
        shapes[f"blk.{layer}.ffn_gate.weight"] = shapes[f"blk.{layer}.ffn_up.weight"] = (64, WIDTH)
        shapes[f"blk.{layer}.ffn_down.weight"] = (WIDTH, 64)
        shapes[f"blk.{layer}.attn_norm.weight"] = shapes[f"blk.{layer}.ffn_norm.weight"] = (WIDTH,)
    tensors = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


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
    assert model.dtype is torch.float32
    np.testing.assert_array_equal(model.model.embed_tokens.weight.detach().numpy(), tensors["token_embd.weight"])
    assert [path.name for path in target.parent.iterdir()] == ["x"]


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
    convert_tokenizer(source, target, nothing)
    assert Tokenizer.from_file(str(target / "tokenizer.json")).encode("ab").ids == [2]
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert (target / "model.safetensors").is_symlink()


def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="has no tokenizer that can be read"):
        convert_tokenizer(tmp_path / "source", tmp_path / "cache" / "x", nothing)


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
