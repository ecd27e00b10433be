"""What cannot be served is refused within seconds, by one line and a non-zero exit status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.system.server import COMMAND


def refused(*arguments: str, **environment: str) -> str:
    """Standard error of a server that must not start."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def error_of(stderr: str) -> str:
    (line,) = [line for line in stderr.splitlines() if "error: " in line]
    return line.partition("error: ")[2]


def test_a_path_that_does_not_exist() -> None:
    assert "no such file or folder" in error_of(refused("/nowhere/model", "--port", "0"))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert "config.json" in error_of(refused(str(tmp_path), "--port", "0"))


def test_a_model_that_needs_remote_code(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "code" in error_of(refused(str(tmp_path), "--port", "0"))


def test_an_architecture_that_is_unknown(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tiny_folder / "config.json").read_text()) | {"model_type": "no_such_thing"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "no_such_thing" in error_of(refused(str(tmp_path), "--port", "0"))


def test_a_hub_model_that_cannot_be_fetched(tmp_path: Path) -> None:
    line = error_of(refused("nobody/nothing", "--port", "0", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)))
    assert "nobody/nothing" in line


def test_a_port_that_is_taken(tiny_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port}" in error_of(refused(str(tiny_folder), "--port", port))


def test_a_cache_too_small_for_one_sequence(tiny_folder: Path) -> None:
    line = error_of(refused(str(tiny_folder), "--port", "0", "--kv-cache-memory-bytes", "1Mi", "--max-model-len", "8k"))
    assert "--kv-cache-memory-bytes" in line
    assert "--max-model-len" in line


def test_a_context_beyond_the_models(tiny_folder: Path) -> None:
    assert "--max-model-len" in error_of(refused(str(tiny_folder), "--port", "0", "--max-model-len", "1000000"))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("--port", "70000"), "--port"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--dtype", "int3"), "--dtype"),
        (("--async-output", "perhaps"), "--async-output"),
        (("--max-num-batched-tokens", "8"), "--max-num-batched-tokens"),
        (("--engine-procs", "0", "--api-server-count", "2"), "--api-server-count"),
    ],
)
def test_a_setting_out_of_range_is_named(arguments: tuple[str, ...], names: str) -> None:
    assert names in error_of(refused(*arguments))
