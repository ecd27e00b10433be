"""What the layers of decoder families are made of, read from transformers' modules: which weights, which norms where.

Families differ in few things: where RMS norms stand, whether projections are fused, which layers turn their queries,
and some constant factors. What a layer asks of attention is not read here; the load gate has seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

_PROBED_ROWS = 3
_ACTIVATIONS = frozenset({"silu", "swish", "gelu_pytorch_tanh", "gelu"})

# Pre-norm families, then those with other norms, factors, or fused projections.
_PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3"})
_FAMILIES = _PLAIN | {"gemma2", "gemma3_text", "olmo2"}


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """x / rms(x) * scales."""

    scales: torch.Tensor  # [n] float32
    epsilon: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: x += f · after(attention(before(x))), then the same with the gated MLP."""

    qkv: Sequence[Any]  # linear layers, side by side
    out: Any
    gate_up: Sequence[Any]  # one fused layer, or two
    down: Any
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    head_norms: tuple[Norm, Norm] | None  # of each query's and key's head
    wide_norms: tuple[Norm, Norm] | None  # of all queries together, and all keys
    rotary: str | None  # which of the model's rotations, None for none


@dataclass(frozen=True, slots=True)
class Anatomy:
    """A model that is embedding, layers, norm and head."""

    embedding: Any
    head: Any
    norm: Norm
    layers: list[Layer]
    activation: str
    embed_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    logit_softcap: float = 0.0


def read(model: PreTrainedModel) -> Anatomy | None:
    """None for a model that is made otherwise. Its modules are referred to, not copied."""
    config: Any = model.config
    if config.model_type not in _FAMILIES:
        return None
    body: Any = getattr(model, "model", None)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS:
        return None
    try:
        norm, layers = _norm_of(body, "norm"), [_layer(config, i, layer) for i, layer in enumerate(body.layers)]
    except _UnreadableError:
        return None
    assert norm is not None
    return Anatomy(
        embedding=body.embed_tokens,
        head=model.get_output_embeddings(),  # type: ignore[no-untyped-call]
        norm=norm,
        layers=layers,
        activation=activation,
        embed_factor=getattr(body.embed_tokens, "scalar_embed_scale", getattr(config, "embedding_multiplier", 1.0)),
        residual_factor=getattr(config, "residual_multiplier", 1.0),
        logit_factor=1 / getattr(config, "logits_scaling", 1.0),
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


def rotations(model: PreTrainedModel, positions: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """cos and sin of every position, [positions, half of the rotated numbers] float32, as the model computes them; by
    the names that `Layer.rotary` uses."""
    body: Any = model.model
    one, at = torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None]
    found = {}
    names = {_rotary(model.config, i) for i in range(len(body.layers))}
    for name in (name for name in names if name is not None):
        cos, sin = body.rotary_emb(one, at, name) if name else body.rotary_emb(one, at)
        half = cos.shape[-1] // 2
        found[name] = cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
    return found


def _rotary(config: Any, index: int) -> str | None:
    used = getattr(config, "no_rope_layers", None)
    if used is not None and not used[index]:
        return None
    return config.layer_types[index] if config.model_type == "gemma3_text" else ""


def _layer(config: Any, index: int, layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    separate = hasattr(attention, "q_proj")
    q_norm, k_norm = _norm_of(attention, "q_norm"), _norm_of(attention, "k_norm")
    pair = (q_norm, k_norm) if q_norm and k_norm else None
    wide = config.model_type == "olmo2"
    # Where there are norms of results, the one before the MLP has a name of its own.
    after = hasattr(layer, "post_feedforward_layernorm")
    between = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
    return Layer(
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj) if separate else (attention.qkv_proj,),
        out=attention.o_proj,
        gate_up=(mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj,
        before_attention=_norm_of(layer, "input_layernorm"),
        after_attention=_norm_of(layer, "post_attention_layernorm") if after else None,
        before_mlp=_norm_of(layer, between),
        after_mlp=_norm_of(layer, "post_feedforward_layernorm"),
        head_norms=None if wide else pair,
        wide_norms=pair if wide else None,
        rotary=_rotary(config, index),
    )


class _UnreadableError(Exception):
    """A norm that is no RMS norm."""


def _norm_of(module: Any, name: str) -> Norm | None:
    """The norm under that name, None where there is none. Raises _UnreadableError."""
    if not hasattr(module, name):
        return None
    norm = rms_norm(getattr(module, name))
    if norm is None:
        raise _UnreadableError(name)
    return norm


def rms_norm(module: Any) -> Norm | None:
    """What an RMS norm computes, whether its weight is used as it is or counted from one; None where it is neither."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if epsilon is None or weight is None or weight.dim() != 1:
        return None
    x = torch.randn(_PROBED_ROWS, weight.numel(), generator=torch.Generator().manual_seed(0))
    try:
        expected = module(x)
    except TypeError:  # it wants more than its input
        return None
    unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
    for scales in (weight.detach().float(), 1 + weight.detach().float()):
        if torch.allclose(unit * scales, expected, rtol=1e-5, atol=1e-6):
            return Norm(scales, float(epsilon))
    return None
