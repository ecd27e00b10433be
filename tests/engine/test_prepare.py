"""Preparing a model: what exists is used, what is missing is made or fetched, a failure is one reported line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors
from safetensors.torch import save_file

from common.config import Config, ModelConfig
from common.models import DEFAULT_MODEL, Kind, ModelError, Resolved, check_folder
from engine.prepare import prepare

ROOT = Path(__file__).parents[2]
HUB = Resolved(Kind.HUB, "owner/name", "owner/name", revision="v2")


def nothing(phase: str, fraction: float) -> None:
    """A progress callback for tests that do not look."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """`hub(answer)`: the hub gives this folder or raises this error. Returns what it is then asked."""

    def install(answer: Any) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []

        def snapshot_download(repo: str, tqdm_class: Any, **arguments: Any) -> str:
            asked.append({"repo": repo, **arguments})
            with tqdm_class(total=10, disable=True) as bar:
                bar.update(5)
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        return asked

    return install


def test_a_folder_that_is_ready_is_returned_at_once(tmp_path: Path) -> None:
    assert prepare(Resolved(Kind.FOLDER, "x", str(tmp_path), folder=tmp_path), nothing) == tmp_path


def test_the_default_model_becomes_an_ordinary_folder(smollm2_folder: Path) -> None:
    config = check_folder(smollm2_folder)
    assert (config["model_type"], config["num_hidden_layers"], config["dtype"]) == ("llama", 30, "float32")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (smollm2_folder / name).is_file()


def test_a_hub_model_is_fetched_with_revision_folder_and_only_what_is_needed(
    tiny_folder: Path, hub: Callable[[Any], list[dict[str, Any]]]
) -> None:
    asked = hub(tiny_folder)
    told: list[tuple[str, float]] = []
    model = Resolved(Kind.HUB, "owner/name", "owner/name", revision="v2", download_dir="/downloads")
    assert prepare(model, lambda phase, fraction: told.append((phase, fraction))) == tiny_folder
    assert (asked[0]["repo"], asked[0]["revision"], asked[0]["cache_dir"]) == ("owner/name", "v2", "/downloads")
    assert "*.safetensors" in asked[0]["allow_patterns"]
    assert not any(name.endswith((".py", ".bin", ".gguf")) for name in asked[0]["allow_patterns"])
    assert told[0] == ("downloading", 0.0)
    assert told[-1] == ("downloading", 1.0)


def test_a_hub_model_of_compressed_weights_is_converted(
    tmp_path: Path, hub: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engine.test_compressed_tensors import GROUPS, config_of, packed

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    save_file({f"a.{name}": tensor for name, tensor in packed(4, 128)[0].items()}, snapshot / "model.safetensors")
    (snapshot / "config.json").write_text(json.dumps(config_of("pack-quantized", GROUPS)))
    (snapshot / "tokenizer.json").write_text("{}")
    hub(snapshot)
    folder = prepare(HUB, nothing)
    assert folder.is_relative_to(tmp_path / "cache")
    assert "quantization_config" not in check_folder(folder)
    assert prepare(HUB, nothing) == folder


def test_a_hub_model_without_weights_is_refused(tmp_path: Path, hub: Callable[[Any], Any]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    hub(tmp_path)
    with pytest.raises(ModelError, match="holds no weights"):
        prepare(HUB, nothing)


def http_error(kind: type[errors.HfHubHTTPError]) -> Exception:
    response: Any = SimpleNamespace(headers={}, request=None)
    return kind("long\nstory", response=response)


FAILURES: dict[str, tuple[Exception, str]] = {
    "gated": (http_error(errors.GatedRepoError), "is gated on the hub: accept its terms there and set HF_TOKEN"),
    "unknown": (http_error(errors.RepositoryNotFoundError), "is neither a local folder nor on the hub"),
    "revision": (http_error(errors.RevisionNotFoundError), "has no revision 'v2' on the hub"),
    "offline": (errors.LocalEntryNotFoundError("offline"), "not in the download cache, and the hub cannot be reached"),
    "invalid": (errors.HFValidationError("bad"), "nor a valid hub id"),
    "broken": (http_error(errors.HfHubHTTPError), "cannot be downloaded: long story"),
    "disk": (OSError(28, "No space left on device"), "cannot be downloaded: .*No space left on device"),
    "strange": (ZeroDivisionError("x"), "cannot be downloaded: x"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_download_that_fails_is_one_clear_line(what: str, hub: Callable[[Any], Any]) -> None:
    error, line = FAILURES[what]
    hub(error)
    with pytest.raises(ModelError, match=rf"^model 'owner/name' .*{line}") as caught:
        prepare(HUB, nothing)
    assert "\n" not in str(caught.value)


def run(model: str, cache: Path) -> tuple[int, list[dict[str, Any]], str]:
    """The process: its exit status, its events and its stderr."""
    environment = {
        **os.environ,
        "STEPAHEAD_CONFIG": Config(model=ModelConfig(model=model)).to_json(),
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache / "hub"),
    }
    environment.pop("STEPAHEAD_STATUS_FD", None)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.prepare"], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_the_process_reports_the_folder(tiny_folder: Path, tmp_path: Path) -> None:
    status, events, stderr = run(str(tiny_folder), tmp_path)
    assert (status, events, stderr) == (0, [{"event": "prepared", "folder": str(tiny_folder)}], "")


def test_the_process_reports_a_failure_without_a_traceback(tmp_path: Path) -> None:
    for model, reason in (
        ("./nope", "no such file"),
        ("owner/name", "the hub cannot be reached"),
        (str(ROOT), "config.json"),
    ):
        status, events, stderr = run(model, tmp_path)
        assert (status, events[-1]["event"], stderr) == (1, "fatal", "")
        assert reason in events[-1]["reason"]


def test_the_process_converts_a_gguf_file_and_finds_it_converted_the_next_time(tmp_path: Path) -> None:
    from tests.engine.test_conversion import write_gguf

    file = tmp_path / "small.gguf"
    write_gguf(file)
    status, events, _ = run(str(file), tmp_path / "cache")
    assert status == 0
    assert {event["phase"] for event in events[:-1]} == {"converting"}
    folder = Path(events[-1]["folder"])
    assert check_folder(folder)["hidden_size"] == 32
    assert run(str(file), tmp_path / "cache")[1] == events[-1:]
    shutil.rmtree(folder)


@pytest.mark.slow
def test_the_default_is_converted_from_its_wheel(tmp_path: Path, smollm2_folder: Path) -> None:
    status, events, _ = run(DEFAULT_MODEL, tmp_path)
    assert status == 0
    folder = Path(events[-1]["folder"])
    assert folder.is_relative_to(tmp_path)
    for file in smollm2_folder.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
