"""The runner's own promises: what it reports of the model, its limits, and logits only where they are wanted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from common.config import Config, EngineConfig, ModelConfig
from common.models import ModelError
from engine.attention.reference import ReferenceBackend
from engine.model.decorators import strip_decorators
from engine.model.modules import Modules
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner, end_token_ids, resolve_device, resolve_kv_dtype, resolve_max_model_len
from tests.engine.model.driver import load_runner

Zoo = Callable[[str], Path]


@pytest.fixture(scope="module")
def runner(zoo_folder: Zoo) -> ModelRunner:
    runner = load_runner(zoo_folder("llama"))
    runner.allocate(16, 16)
    runner.warm_up()
    return runner


def test_it_reports_what_the_model_is(runner: ModelRunner) -> None:
    assert (runner.vocab_size, runner.max_model_len, runner.eos_token_ids) == (2048, 8192, (2,))
    assert (runner.dtype, runner.device) == (torch.float32, torch.device("cpu"))
    assert runner.bytes_per_block(16) == 6 * 2 * (16 + 16) * 16 * 4
    assert runner.weights == "float32"


def test_logits_come_only_for_the_tokens_asked_for(runner: ModelRunner) -> None:
    chunks, tables = [[5, 6, 7], [8, 9]], [[1], [2]]

    def logits(wanted: list[int] | None) -> torch.Tensor:
        return runner.forward(make_batch(chunks, [0, 0], tables, 16, runner.device, wanted))

    everything = logits(None).clone()
    assert everything.shape == (5, 2048)
    assert everything.dtype is torch.float32
    torch.testing.assert_close(logits([4, 2]), everything[[4, 2]], rtol=1e-4, atol=1e-4)
    assert logits([]).shape == (0, 2048)


def test_a_chunk_without_logits_still_fills_the_cache(runner: ModelRunner) -> None:
    tokens = list(range(10, 40))
    whole = runner.forward(make_batch([tokens], [0], [[1, 2]], 16, runner.device, [29])).clone()
    runner.forward(make_batch([tokens[:20]], [0], [[3, 4]], 16, runner.device, []))
    rest = runner.forward(make_batch([tokens[20:]], [20], [[3, 4]], 16, runner.device, [9]))
    torch.testing.assert_close(rest, whole, rtol=1e-3, atol=1e-3)


def test_without_a_cache_nothing_runs(zoo_folder: Zoo) -> None:
    runner = load_runner(zoo_folder("llama"))
    with pytest.raises(RuntimeError, match="forward before allocate"):
        runner.forward(make_batch([[1]], [0], [[1]], 16, runner.device))
    with pytest.raises(RuntimeError, match="warm_up before allocate"):
        runner.warm_up()


def test_the_kv_budget_is_the_users_when_given(zoo_folder: Zoo) -> None:
    config = Config(ModelConfig(folder=str(zoo_folder("llama"))), EngineConfig(device="cpu", kv_cache_memory_bytes=777))
    phases: list[tuple[str, float]] = []
    runner = ModelRunner.load(config, lambda phase, fraction: phases.append((phase, fraction)))
    assert runner.available_kv_bytes() == 777
    fractions = [fraction for _, fraction in phases]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("length", [0, -1, 8193])
def test_a_context_outside_the_models_is_refused_by_flag_and_range(length: int, zoo_folder: Zoo) -> None:
    with pytest.raises(ModelError, match=rf"--max-model-len is {length}, but must be from 1 to the model's 8192"):
        load_runner(zoo_folder("llama"), max_model_len=length)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {"max_position_embeddings": 512}, 512),
        ("gpt2", {"n_positions": 300}, 300),
        ("llama", {"max_position_embeddings": 1024, "rope_parameters": YARN}, 4096),
        ("llama", {"max_position_embeddings": 4096, "rope_parameters": YARN}, 4096),
    ],
)
def test_the_models_own_context_is_the_default(family: str, fields: dict[str, Any], expected: int) -> None:
    assert resolve_max_model_len(AutoConfig.for_model(family, **fields), None) == expected


def test_a_model_that_names_no_context_needs_the_flag() -> None:
    config = AutoConfig.for_model("bloom")
    assert resolve_max_model_len(config, 100) == 100
    with pytest.raises(ModelError, match="give one with --max-model-len"):
        resolve_max_model_len(config, None)


def test_end_tokens_come_from_both_files(tmp_path: Path, zoo_folder: Zoo) -> None:
    folder = Path(shutil.copytree(zoo_folder("llama"), tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert end_token_ids(folder, AutoConfig.from_pretrained(folder)) == (2, 5, 7)
    (folder / "generation_config.json").unlink()
    assert end_token_ids(folder, AutoConfig.from_pretrained(folder)) == (2,)


def test_a_device_that_is_not_there_is_refused_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    for name in ("cuda", "tpu"):
        with pytest.raises(ModelError, match=f"--device is '{name}', but this machine offers cpu$"):
            resolve_device(name)


@pytest.fixture(scope="module")
def modules(zoo_folder: Zoo) -> Modules:
    executor = load_runner(zoo_folder("llama"), impl="transformers").executor
    assert isinstance(executor, Modules)
    return executor


def test_every_layer_loses_its_decorators(modules: Modules) -> None:
    attention: Any = modules.model.model.layers[0].self_attn
    assert not hasattr(attention.forward, "__wrapped__")
    assert not hasattr(modules.model.forward, "__wrapped__")
    assert strip_decorators(modules.model) > 6 * 2


def test_torch_itself_runs_on_one_thread_beside_native_layers(zoo_folder: Zoo) -> None:
    modules = load_runner(zoo_folder("llama"), impl="transformers")
    modules.allocate(4, 16)
    torch.set_num_threads(2)
    modules.forward(make_batch([[1]], [0], [[1]], 16, modules.device))
    assert torch.get_num_threads() == 1


def test_without_numba_a_model_runs_in_plain_torch(zoo_folder: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "engine.model.native", None)
    monkeypatch.delattr("engine.model.native", raising=False)
    plain = load_runner(zoo_folder("llama"))
    assert isinstance(plain.executor, Modules)
    assert isinstance(plain.executor.backend, ReferenceBackend)


@pytest.mark.parametrize(
    ("name", "weights", "stored"),
    [
        ("auto", "float32", torch.float32),
        ("auto", "float16", torch.float16),
        ("auto", "bfloat16", torch.float16),
        ("auto", "int8", torch.float16),
        ("bfloat16", "float32", torch.bfloat16),
        ("float32", "int4", torch.float32),
    ],
)
def test_keys_and_values_are_stored_as_asked_or_in_sixteen_bits(name: str, weights: str, stored: torch.dtype) -> None:
    assert resolve_kv_dtype(name, weights, torch.float32) is stored


def test_what_is_computed_in_sixteen_bits_is_stored_likewise() -> None:
    assert resolve_kv_dtype("auto", "bfloat16", torch.bfloat16) is torch.bfloat16


def test_a_cache_of_sixteen_bits_takes_half_the_memory_and_gives_nearly_the_same(zoo_folder: Zoo) -> None:
    found = []
    for dtype in ("float32", "float16"):
        config = Config(
            model=ModelConfig(folder=str(zoo_folder("llama")), dtype="float32"),
            engine=EngineConfig(device="cpu", kv_cache_dtype=dtype),
        )
        runner = ModelRunner.load(config, lambda phase, fraction: None)
        runner.allocate(8, 16)
        batch = make_batch([list(range(40))], [0], [[1, 2, 3]], 16, runner.device)
        found.append((runner.bytes_per_block(16), runner.forward(batch).clone()))
    (whole, exact), (half, near) = found
    assert half * 2 == whole
    error = (near - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < error.median() < 0.01


def test_the_cost_of_a_step_never_falls_with_its_tokens(runner: ModelRunner) -> None:
    costs = runner.step_costs()
    assert len(costs) == 17
    assert costs[0] > 0
    assert (costs[1:] >= costs[:-1]).all()
