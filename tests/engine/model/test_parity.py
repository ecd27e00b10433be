"""Every family gives transformers' own greedy tokens, and the comparison bites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from common.models import ModelError
from engine.attention.interface import Backend
from engine.attention.reference import ReferenceBackend
from engine.model.anatomy import Anatomy, read
from engine.model.batch import Batch
from engine.model.decoder import Decoder
from engine.model.gate import Inspection
from engine.model.modules import Modules
from engine.model.probe import make_batch
from engine.model.runner import ModelRunner
from tests.engine.model.driver import Driver, Greedy, Sequence, decidable_greedy, load_runner
from tests.models import WINDOW, ZOO, ZOO_VOCABULARY, random_model

NEW_TOKENS = 24
LENGTHS = (2 * WINDOW + 21, WINDOW + 17, 7)  # longer than the window, across it while decoding, and short

TAPED = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "granite", "gemma2", "gemma3_text", "olmo2")

Zoo = Callable[[str], Path]


@cache
def expected(folder: Path) -> tuple[list[list[int]], list[Greedy]]:
    """The prompts for this model, and what `generate` makes of them."""
    return decidable_greedy(folder, LENGTHS, NEW_TOKENS, ZOO_VOCABULARY)


def assert_same(sequences: list[Sequence], folder: Path) -> None:
    for sequence, (tokens, logits) in zip(sequences, expected(folder)[1], strict=True):
        assert sequence.output == tokens
        assert difference(sequence, logits) < 2e-3


def difference(sequence: Sequence, logits: torch.Tensor) -> float:
    """The largest over the tokens, relative to the logits' norm."""
    error = (torch.stack(sequence.logits) - logits).norm(dim=-1) / logits.norm(dim=-1)
    return float(error.max())


def same_tokens(sequences: list[Sequence], folder: Path) -> bool:
    return [s.output for s in sequences] == [tokens for tokens, _ in expected(folder)[1]]


def assert_parity(runner: ModelRunner, folder: Path) -> None:
    """Each prompt alone, and all in one mixture of chunks."""
    driver = Driver(runner)
    alone = [driver.run([prompt], NEW_TOKENS, driver.whole)[0] for prompt in expected(folder)[0]]
    assert_same(alone, folder)
    assert_same(Driver(runner).run(expected(folder)[0], NEW_TOKENS, driver.chunked), folder)


@pytest.mark.parametrize("family", ZOO)
def test_each_family_gives_the_tokens_of_generate(family: str, zoo_folder: Zoo) -> None:
    folder = zoo_folder(family)
    runner = load_runner(folder, impl="transformers")
    modules = runner.executor
    assert isinstance(modules, Modules)
    for backend in (modules.backend, ReferenceBackend()):
        modules.backend = backend
        assert_parity(runner, folder)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("family", TAPED)
def test_each_family_with_a_tape_gives_the_tokens_of_generate(family: str, threads: int, zoo_folder: Zoo) -> None:
    folder = zoo_folder(family)
    runner = load_runner(folder, threads=threads)
    assert isinstance(runner.executor, Decoder)
    assert_parity(runner, folder)


def test_the_real_model_gives_the_tokens_of_generate(smollm2_folder: Path) -> None:
    runner = load_runner(smollm2_folder)
    prompts, reference = decidable_greedy(smollm2_folder, (40, 9), 8, 49152)
    driver = Driver(runner)
    for sequence, (tokens, logits) in zip(driver.run(prompts, 8, driver.chunked), reference, strict=True):
        assert sequence.output == tokens
        assert difference(sequence, logits) < 1e-4


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_the_block_size_changes_nothing(block_size: int, zoo_folder: Zoo) -> None:
    folder = zoo_folder("gemma2")
    driver = Driver(load_runner(folder), block_size, num_blocks=600)
    assert_same(driver.run(expected(folder)[0], NEW_TOKENS, driver.chunked), folder)


class Sabotage:
    """A backend that changes one argument of attention on its way to the real one."""

    name = "sabotage"

    def __init__(self, backend: Backend, change: Callable[[dict[str, Any]], None]) -> None:
        self.backend, self.change, self.begin = backend, change, backend.begin

    def attend(self, layer: int, *args: Any) -> torch.Tensor:
        names = ("query", "key", "value", "scaling", "window", "softcap", "sinks")
        arguments = dict(zip(names, args, strict=True))
        self.change(arguments)
        return self.backend.attend(layer, **arguments)


SABOTAGE: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "attention zeroed": ("llama", lambda a: a.update(value=a["value"] * 0)),
    "window ignored": ("mistral", lambda a: a.update(window=0)),
    "window ignored, in some layers": ("gemma3_text", lambda a: a.update(window=0)),
    "window one too long": ("phi3", lambda a: a.update(window=a["window"] + 1)),
    "soft cap ignored": ("gemma2", lambda a: a.update(softcap=0.0)),
    "scaling halved": ("granite", lambda a: a.update(scaling=a["scaling"] / 2)),
    "sinks ignored": ("gpt_oss", lambda a: a.update(sinks=None)),
}


@pytest.mark.parametrize("what", SABOTAGE)
def test_sabotaged_attention_is_seen_in_the_tokens(what: str, zoo_folder: Zoo) -> None:
    family, change = SABOTAGE[what]
    folder = zoo_folder(family)
    runner = load_runner(folder, impl="transformers")
    modules = runner.executor
    assert isinstance(modules, Modules)
    modules.backend = Sabotage(modules.backend, change)
    driver = Driver(runner)
    assert not same_tokens(driver.run(expected(folder)[0], NEW_TOKENS, driver.chunked), folder)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", TAPED)
def test_a_quantized_tape_agrees_with_modules_of_the_same_weights(
    quantization: str, family: str, zoo_folder: Zoo
) -> None:
    folder = zoo_folder(family)
    tape = load_runner(folder, quantization=quantization)
    modules = load_runner(folder, quantization=quantization, impl="transformers")
    tokens = expected(folder)[0][0]
    found = []
    for runner in (tape, modules):
        runner.allocate(20, 16)
        batch = make_batch([tokens], [0], [list(range(1, 17))], 16, runner.device)
        found.append(runner.forward(batch).clone())
    error = (found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)
    assert float(error.median()) < 0.01, "models this wide magnify rounding token by token, but not in most"


TAPE_SABOTAGE: dict[str, tuple[str, Callable[[Inspection], Inspection]]] = {
    "window ignored": ("mistral", lambda i: replace(i, calls=tuple(replace(c, window=0) for c in i.calls))),
    "window one too long": (
        "mistral",
        lambda i: replace(i, calls=tuple(replace(c, window=c.window + 1) for c in i.calls)),
    ),
    "scaling halved": (
        "llama",
        lambda i: replace(i, calls=tuple(replace(c, scaling=c.scaling / 2) for c in i.calls)),
    ),
}


@pytest.mark.parametrize("what", TAPE_SABOTAGE)
def test_a_sabotaged_tape_is_refused_by_the_gate(what: str, zoo_folder: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    family, change = TAPE_SABOTAGE[what]
    made = Decoder.__init__

    def sabotaged(self: Decoder, anatomy: Anatomy, inspection: Inspection, *rest: Any) -> None:
        made(self, anatomy, change(inspection), *rest)

    monkeypatch.setattr(Decoder, "__init__", sabotaged)
    monkeypatch.setattr("engine.model.gate.SEQUENCES", (2 * WINDOW + 21, 18))
    monkeypatch.setattr("engine.model.gate.FIRST_CHUNKS", (WINDOW + 9, 17))
    monkeypatch.setattr("engine.model.gate._PROBE_BLOCKS", 12)
    with pytest.raises(ModelError, match="in a batch and alone differ"):
        load_runner(zoo_folder(family))


def each_layer(**changes: Any) -> Callable[[Anatomy], Anatomy]:
    return lambda anatomy: replace(anatomy, layers=[replace(layer, **changes) for layer in anatomy.layers])


ANATOMY_SABOTAGE: dict[str, tuple[str, Callable[[Anatomy], Anatomy]]] = {
    "a norm left out": ("gemma2", each_layer(after_mlp=None)),
    "norms of heads left out": ("qwen3", each_layer(head_norms=None)),
    "norms of all queries and keys left out": ("olmo2", each_layer(wide_norms=None)),
    "every layer rotates": ("smollm3", each_layer(rotary="")),
    "no layer rotates": ("phi3", each_layer(rotary=None)),
    "one rotation for all": ("gemma3_text", each_layer(rotary="full_attention")),
    "residuals not scaled": ("granite", lambda a: replace(a, residual_factor=1.0)),
    "logits not scaled": ("granite", lambda a: replace(a, logit_factor=1.0)),
    "logits not capped": ("gemma2", lambda a: replace(a, logit_softcap=0.0)),
    "embeddings not scaled": ("gemma2", lambda a: replace(a, embed_factor=1.0)),
    "another activation": ("llama", lambda a: replace(a, activation="gelu")),
}


@pytest.mark.parametrize("what", ANATOMY_SABOTAGE)
def test_a_family_read_wrongly_is_refused_by_the_gate(
    what: str, zoo_folder: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, change = ANATOMY_SABOTAGE[what]
    anatomy = read

    def misread(model: PreTrainedModel) -> Anatomy | None:
        found = anatomy(model)
        return found and change(found)

    monkeypatch.setattr("engine.model.runner.read", misread)
    with pytest.raises(ModelError, match="in a batch and alone differ"):
        load_runner(zoo_folder(family))


@pytest.mark.parametrize("dim", [5, 12, 24])
@pytest.mark.parametrize("name", ["float16", "int8", "int4"])
def test_heads_and_widths_that_fill_no_panel(dim: int, name: str) -> None:
    config = {
        "head_dim": 2 * dim, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 9 * dim,
        "intermediate_size": 10 * dim + 1, "vocab_size": ZOO_VOCABULARY, "num_hidden_layers": 2,
    }  # fmt: skip
    folder = random_model(f"odd-{dim}", "llama", config)
    quantization = name if name.startswith("int") else "none"
    runner = load_runner(folder, dtype="auto" if quantization != "none" else name, quantization=quantization)
    assert isinstance(runner.executor, Decoder)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_zeroed_positions_are_seen_in_the_tokens(family: str, zoo_folder: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = zoo_folder(family)
    runner = load_runner(folder)
    forward = ModelRunner.forward

    def without_positions(self: ModelRunner, batch: Batch) -> torch.Tensor:
        return forward(self, replace(batch, positions=torch.zeros_like(batch.positions)))

    monkeypatch.setattr(ModelRunner, "forward", without_positions)
    driver = Driver(runner)
    assert not same_tokens(driver.run(expected(folder)[0], NEW_TOKENS, driver.chunked), folder)
