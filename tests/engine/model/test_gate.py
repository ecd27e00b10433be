"""Models that would run and be silently wrong are refused by name and reason; rounding is not a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.models import ModelError
from engine.model import gate
from engine.model.decorators import strip_decorators
from tests.engine.model.driver import Driver, load_runner, random_prompts, transformers_greedy
from tests.models import ZOO_VOCABULARY, random_model

Zoo = Callable[[str], Path]

SMALL = {"vocab_size": ZOO_VOCABULARY, "num_hidden_layers": 4}

# family: (configuration, part of the reason)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 4}, "none of its 4 layers calls the registered attention"),
    "xglm": ({"num_layers": 4, "attention_heads": 4, "d_model": 64, "ffn_dim": 160}, "none of its"),
    "mamba": ({}, "linear_attention"),
    "jamba": ({"num_experts": 2}, "linear_attention"),
    "qwen3_next": ({"num_experts": 2, "moe_intermediate_size": 64}, "linear_attention"),
    "llama4_text": ({"num_local_experts": 2}, "chunked_attention"),
    "diffllama": ({}, "call attention more than once"),
    "doge": ({}, "a mask of its own"),
    "bert": ({"max_position_embeddings": 512}, "hides other tokens than a causal window"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_wrong_is_refused_by_name(family: str) -> None:
    config, reason = REFUSED[family]
    try:
        folder = random_model(f"refused-{family}", family, {**SMALL, **config})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        pytest.skip(f"transformers cannot build {family}: {e}")
    with pytest.raises(ModelError, match=rf"cannot serve model type '{family}'.*{reason}"):
        load_runner(folder)


def test_a_family_without_registered_attention_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("falcon", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=r"model type 'falcon': it knows only attention of its own"):
        load_runner(tmp_path)


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"'t5': it is an encoder-decoder model"):
        load_runner(tmp_path)


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_that_follows_the_batch_is_refused_where_it_would_and_served_where_it_cannot(kind: str) -> None:
    limits = {"max_position_embeddings": 256 if kind == "longrope" else 128}
    folder = random_model(f"rope-{kind}", "llama", {**SMALL, **limits, "rope_parameters": ROPES[kind]})
    if kind == "longrope":
        with pytest.raises(ModelError, match=r"'llama': beyond 128 tokens its longrope RoPE .* --max-model-len 128"):
            load_runner(folder)
    runner = load_runner(folder, max_model_len=128)
    prompts = random_prompts((100, 20), ZOO_VOCABULARY)
    driver = Driver(runner)
    for sequence, (tokens, _) in zip(
        driver.run(prompts, 12, driver.chunked), transformers_greedy(folder, prompts, 12), strict=True
    ):
        assert sequence.output == tokens


def test_dynamic_rope_beyond_its_limit_is_refused() -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=128, rope_parameters=ROPES["dynamic"])
    gate.check_config(config, max_model_len=128)
    with pytest.raises(ModelError, match=r"--max-model-len 128 or less serves it"):
        gate.check_config(config, max_model_len=129)


def built(family: str, **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = AutoConfig.for_model(family, **{**small, "initializer_range": 0.2, **SMALL, **config})
    model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        made, dtype=torch.float32, attn_implementation="stepahead"
    )
    ready: PreTrainedModel = model.eval()
    return ready


def test_a_mask_that_is_not_the_window_the_layer_names_is_refused() -> None:
    model = built("gemma2", sliding_window=8, head_dim=16)
    for module in model.modules():
        if getattr(module, "sliding_window", None):
            setattr(module, "sliding_window", 9)  # noqa: B010  # torch types attributes as tensors
    with torch.inference_mode(), pytest.raises(ModelError, match="hides other tokens than a causal window does"):
        gate.inspect(model, ZOO_VOCABULARY, 4096)


def test_a_window_far_longer_than_the_probe_is_checked_all_the_same() -> None:
    model = built("mistral", sliding_window=4096)
    with torch.inference_mode():
        assert len(gate.inspect(model, ZOO_VOCABULARY, 32768).layers) == 4


@pytest.mark.parametrize("fault", ["positions", "attention"])
def test_a_model_that_differs_in_a_batch_is_refused(fault: str) -> None:
    model = built("llama")
    with torch.inference_mode():
        inspection = gate.inspect(model, ZOO_VOCABULARY, 2048)
        strip_decorators(model)

        def forward(batch: Any, cache: Any) -> torch.Tensor:
            """A model that takes no notice of positions, or attends to nothing."""
            from engine.attention.interface import begin_step
            from engine.attention.reference import ReferenceBackend

            backend = ReferenceBackend()
            if fault == "attention":
                backend.attend = lambda layer, query, *rest: torch.zeros_like(query).transpose(0, 1)  # type: ignore[method-assign]
            begin_step(backend, batch, cache)
            positions = None if fault == "positions" else batch.positions[None]
            logits: torch.Tensor = model(
                input_ids=batch.token_ids[None], position_ids=positions, use_cache=False
            ).logits
            return logits[0]

        with pytest.raises(ModelError, match=r"'llama': its logits in a batch and alone differ"):
            gate.verify(model.config, inspection, forward, torch.empty(0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_low_precision_is_no_reason_to_refuse(family: str, dtype: str, zoo_folder: Zoo) -> None:
    for impl in ("auto", "transformers"):
        assert load_runner(zoo_folder(family), dtype=dtype, impl=impl).weights == dtype


def test_two_chunked_prompts_longer_than_the_window_match_eager_logits(zoo_folder: Zoo) -> None:
    folder = zoo_folder("mistral")
    prompts = random_prompts((170, 150), ZOO_VOCABULARY, seed=3)
    expected = transformers_greedy(folder, prompts, 1)
    driver = Driver(load_runner(folder))
    sequences = [driver.start(prompt, 1) for prompt in prompts]
    while any(not s.output for s in sequences):
        driver.step([(s, min(37, s.waiting)) for s in sequences if not s.output])
    for sequence, (_, logits) in zip(sequences, expected, strict=True):
        torch.testing.assert_close(sequence.logits[0], logits[0], rtol=1e-3, atol=1e-3)
