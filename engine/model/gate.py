"""The load gate: refuses, by family and reason, a model that would run and be silently wrong here.

Three looks, from cheap to sure: at the configuration; at what each layer asks of attention, mask rule included, while
the untouched model reads a few tokens; and at the logits of the finished model against those of the untouched one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from common.models import ModelError, one_line
from engine.attention.cache import KVCache, LayerShape
from engine.attention.interface import NAME
from engine.attention.reference import attend_dense
from engine.model.batch import Batch
from engine.model.probe import make_batch

_SPY = f"{NAME}_spy"
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Two sequences, each fed in two chunks, so that positions restart in the middle of a batch and lie beyond cached ones.
SEQUENCES = (21, 18)
FIRST_CHUNKS = (9, 17)
_PROBE_BLOCK_SIZE = 16
_PROBE_BLOCKS = -(-max(SEQUENCES) // _PROBE_BLOCK_SIZE)

# Largest difference of logits, relative to their norm: rounding stays far below, a wrong position or mask far above.
_TOLERANCE = {torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.15
_QUANTIZED_TOLERANCE = 0.02  # activations have sixteen bits, and a row's largest may dwarf its others


Forward = Callable[[Batch, KVCache], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What a layer asks of attention beside keys and values; as in `Backend.attend`."""

    heads: int  # of queries
    scaling: float
    window: int
    softcap: float
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the untouched model showed."""

    layers: tuple[LayerShape, ...]
    calls: tuple[Call, ...]
    logits: tuple[torch.Tensor, ...]  # of each probe sequence, [tokens, V] float32


def check_config(config: PretrainedConfig, max_model_len: int) -> None:
    """Raises ModelError for layer types and position encodings that paged, flattened batches cannot serve."""
    text = config.get_text_config(decoder=True)
    if unknown := sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES):
        raise _refusal(config, f"layers of type {', '.join(unknown)} are not supported")
    for rope in _ropes(text):
        kind = str(rope.get("rope_type", "default"))
        if "dynamic" not in kind and kind != "longrope":
            continue
        limit = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if max_model_len > limit:
            raise _refusal(
                config,
                f"beyond {limit} tokens its {kind} RoPE turns with the longest sequence of the batch;"
                f" --max-model-len {limit} or less serves it",
            )


def _ropes(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters: one set, or one for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def probe_tokens(vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    """The probe sequences, [n] int64 each: different tokens, the same at every load."""
    return [(torch.arange(n, device=device) * 7919 + 11 * n) % vocab_size for n in SEQUENCES]


def inspect(model: PreTrainedModel, vocab_size: int, max_model_len: int) -> Inspection:
    """Runs the untouched model on the probe, with transformers' eager attention and with a spy in its place.

    Raises ModelError where a layer does not call the registered attention exactly once, or hides other tokens from
    a query than attention over a causal window does.
    """
    config = model.config
    sequences = probe_tokens(vocab_size, model.device)
    try:
        with _attention(model, "eager"):
            logits = tuple(_logits(model, tokens) for tokens in sequences)
        spy = _Spy(reach=max_model_len)
        with spy.installed(), _attention(model, _SPY):
            _logits(model, sequences[0])
    except ModelError:
        raise
    except Exception as e:  # whatever a family does that a plain decoder does not
        raise _refusal(config, f"a probing forward pass failed: {type(e).__name__}: {one_line(e)}") from e
    _check_calls(config, spy)
    layers = range(len(spy.calls))
    return Inspection(tuple(spy.shapes[i] for i in layers), tuple(spy.asked[i] for i in layers), logits)


def verify(
    config: PretrainedConfig, inspection: Inspection, forward: Forward, like: torch.Tensor, quantized: bool = False
) -> None:
    """Feeds the probe sequences to the finished model, chunked and in one batch, and compares its logits with the
    untouched model's. The cache is of the dtype and device of `like`.

    Raises ModelError where they differ by more than rounding.
    """
    vocab_size = inspection.logits[0].shape[-1]
    sequences = [tokens.tolist() for tokens in probe_tokens(vocab_size, like.device)]
    tables = [[1 + i * len(sequences) + s for i in range(_PROBE_BLOCKS)] for s in range(len(sequences))]
    cache = KVCache(inspection.layers, 1 + _PROBE_BLOCKS * len(sequences), _PROBE_BLOCK_SIZE, like.dtype, like.device)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    try:
        for begins, ends in (([0] * len(sequences), FIRST_CHUNKS), (FIRST_CHUNKS, SEQUENCES)):
            chunks = [tokens[begin:end] for tokens, begin, end in zip(sequences, begins, ends, strict=True)]
            logits = forward(make_batch(chunks, begins, tables, _PROBE_BLOCK_SIZE, like.device), cache)
            for parts, part in zip(found, torch.split(logits, [len(chunk) for chunk in chunks]), strict=True):
                parts.append(part.clone())  # the next step may take its memory
    except Exception as e:
        raise _refusal(config, f"a chunked forward pass failed: {type(e).__name__}: {one_line(e)}") from e
    error = torch.cat([_errors(torch.cat(parts), want) for parts, want in zip(found, inspection.logits, strict=True)])
    # In low precision a mixture of experts may route a token differently for a rounding: most must agree, not all.
    worst = error.max() if like.dtype in _TOLERANCE and not quantized else error.median()
    limit = _QUANTIZED_TOLERANCE if quantized else _TOLERANCE.get(like.dtype, _LOW_PRECISION_TOLERANCE)
    if not worst <= limit:
        raise _refusal(config, f"its logits in a batch and alone differ by {worst:.2g} of their norm")


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    errors: torch.Tensor = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    return errors


class _Spy:
    """Stands in for attention and notes what each layer asks for. Computes the same over the sequence it is given."""

    def __init__(self, reach: int) -> None:
        self.calls: dict[int, int] = {}
        self.shapes: dict[int, LayerShape] = {}
        self.asked: dict[int, Call] = {}
        self.faults: list[str] = []
        self._reach = reach

    @contextmanager
    def installed(self) -> Iterator[None]:
        AttentionInterface.register(_SPY, self._attend)
        AttentionMaskInterface.register(_SPY, self._mask)
        try:
            yield
        finally:
            del AttentionInterface._global_mapping[_SPY], AttentionMaskInterface._global_mapping[_SPY]

    def _mask(self, q_length: int, kv_length: int, mask_function: Any, device: Any = "cpu", **_: Any) -> torch.Tensor:
        """A mask of the usual shape that carries the rule it is made from, good for positions beyond the probe."""
        mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
        mask.rule = mask_function  # type: ignore[attr-defined]
        return mask

    def _attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
        s_aux: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            self.faults.append(f"a {type(module).__name__} calls attention without a layer index")
            layer = -1
        self.calls[layer] = self.calls.get(layer, 0) + 1
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1])
        rule = getattr(attention_mask, "rule", None)
        if rule is None:
            self.faults.append(f"layer {layer} brings a mask of its own")
        elif not self._is_causal_window(rule, sliding_window or 0, query.device):
            self.faults.append(f"layer {layer} hides other tokens than a causal window does")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.asked[layer] = Call(query.shape[1], scaling, sliding_window or 0, softcap or 0.0, s_aux)
        out = attend_dense(query[0], key[0], value[0], scaling, sliding_window or 0, softcap or 0.0, s_aux)
        return out[None], None

    def _is_causal_window(self, rule: Any, window: int, device: torch.device) -> bool:
        """Whether the rule shows a query the last `window` tokens up to its own (0: all), at positions that tell."""
        far = self._reach - 1
        zero = torch.zeros((), dtype=torch.long, device=device)
        for position in sorted({0, 1, window - 1, window, window + 1, 2 * window, far // 2, far}):
            if not 0 <= position <= far:
                continue
            edge = position - window
            seen = {0, 1, edge - 1, edge, edge + 1, position // 2, position - 1, position, position + 1}
            at = torch.tensor(sorted(k for k in seen if k >= 0), device=device)
            shown = rule(zero, zero, torch.tensor(position, device=device), at)
            if not torch.equal(torch.as_tensor(shown).expand_as(at), (at <= position) & ((at > edge) | (window == 0))):
                return False
        return True


def _check_calls(config: PretrainedConfig, spy: _Spy) -> None:
    expected = config.get_text_config(decoder=True).num_hidden_layers
    silent = [i for i in range(expected) if i not in spy.calls]
    if len(silent) == expected:
        raise _refusal(config, f"none of its {expected} layers calls the registered attention")
    if silent:
        raise _refusal(config, f"layers {_listed(silent)} never call the registered attention")
    if odd := sorted(i for i, n in spy.calls.items() if n != 1 or i >= expected):
        raise _refusal(config, f"layers {_listed(odd)} call attention more than once, or are not among its {expected}")
    if spy.faults:
        raise _refusal(config, spy.faults[0])


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:4])) + (", …" if len(layers) > 4 else "")


def _logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.numel(), device=tokens.device)[None]
    out = model(input_ids=tokens[None], position_ids=positions, use_cache=False).logits
    logits: torch.Tensor = out[0].float()
    return logits


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def _refusal(config: PretrainedConfig, reason: str) -> ModelError:
    return ModelError(f"cannot serve model type {config.model_type!r}: {reason}")
