"""Puts native layers in the place of transformers' own: linear layers, experts, RMS norms and the embedding."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.model.anatomy import rms_norm
from engine.model.experts import Experts, RouterWeight, is_experts, is_router
from engine.native.formats import FORMATS, head_format, pack
from engine.native.kernels import kernels
from engine.native.layers import FusedNorm, PackedEmbedding, PackedLinear, owned
from engine.native.team import Team

log = logging.getLogger(__name__)

_PROBED_ROWS = 3
_ROUNDING = 0.02  # of what is stored, relative to its norm


def pack_layers(model: PreTrainedModel, format: str, team: Team) -> None:
    """Replaces what can be, in place. Weights are stored in `format` from then on, and the plain ones freed."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: Any = model.get_input_embeddings()
    tied = getattr(head, "weight", None) is embedding.weight
    packed_head: PackedLinear | None = None
    child: Any
    for parent, name, child in list(_children(model)):
        layer: nn.Module | None = None
        if type(child) in (nn.Linear, Conv1D):
            weight, bias = _weights(child)
            layer = _linear(team, head_format(format) if child is head else format, weight, bias)
            if child is head:
                packed_head = layer
        elif is_experts(child):
            layer = Experts(child, partial(_linear, team, format))
        elif is_router(child):
            weight = child.weight.detach()
            del child._parameters["weight"]
            child.weight = RouterWeight.of(weight, _linear(team, "float32", weight, None))
        elif type(child).__name__.endswith("RMSNorm"):
            norm = rms_norm(child)
            layer = FusedNorm(norm.scales, norm.epsilon, team) if norm else None
        if layer is not None:
            setattr(parent, name, layer)
            _free(child)
    if isinstance(embedding, nn.Embedding) and (not tied or packed_head is not None):
        stored = torch.float16 if FORMATS[format].is_integer else FORMATS[format].dtype
        table = packed_head.packed if tied and packed_head else embedding.weight.detach().to(stored).contiguous()
        scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
        packed = PackedEmbedding(table, scale, team)
        some = torch.arange(min(_PROBED_ROWS, embedding.num_embeddings))
        found, expected = packed(some), embedding(some)
        # A subclass may do more than look up and scale.
        if float((found - expected).norm()) <= _ROUNDING * float(expected.norm()):
            for parent, name, child in list(_children(model)):
                if child is embedding:
                    setattr(parent, name, packed)
            _free(embedding)
    for parameter in model.parameters():
        parameter.data = owned(parameter.data)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _linear(team: Team, format: str, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    return PackedLinear(pack(weight, format, kernels().lanes), bias, team)


def _weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight as [out, in] and bias, detached. GPT-2's Conv1D keeps its weight as [in, out]."""
    weight = layer.weight.detach()
    bias = None if layer.bias is None else layer.bias.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight, bias


def _free(module: nn.Module) -> None:
    """Its parameters' memory, whoever still holds the module."""
    for name in module._parameters:
        module._parameters[name] = None
