"""A model whose whole forward pass is one tape: RMS norms, rotary attention, gated MLPs, nothing between.

What a layer asks of attention (scale, window, soft cap, sinks) is taken from the load gate's inspection of the
untouched model, and the gate compares the finished tape with it, so a wrong reading of a family cannot be served.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.cache import KVCache
from engine.model.anatomy import Anatomy, Layer, Norm
from engine.model.batch import Batch
from engine.model.gate import Inspection
from engine.native import tape as t
from engine.native.formats import Packed, head_format, pack
from engine.native.kernels import kernels
from engine.native.program import Buffer, Program, interleave
from engine.native.team import Team

_ACTIVATIONS = {"silu": t.SILU, "swish": t.SILU, "gelu_pytorch_tanh": t.GELU_TANH, "gelu": t.GELU}

Rotations = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Decoder:
    """A model as a tape. Owner: the device thread."""

    invariant = True

    def __init__(self, anatomy: Anatomy, inspection: Inspection, rotations: Rotations, format: str, team: Team) -> None:
        """Packs the weights of the model that `anatomy` refers to; its own are given up one by one."""
        self._format, self._inspection, self._rotations = format, inspection, rotations
        self.program = program = Program(team)
        self._factor = anatomy.residual_factor
        self._activation = _ACTIVATIONS[anatomy.activation]
        self._buffers: dict[tuple[str, int], Buffer] = {}
        head, embedding = anatomy.head, anatomy.embedding
        self.vocab_size: int = head.weight.shape[0]
        tied = head.weight is embedding.weight
        packed = self._pack(head, format=head_format(format))
        table: torch.Tensor | Packed = packed
        if not tied:
            stored = torch.float16 if packed.format.is_integer else packed.format.dtype
            table = embedding.weight.detach().to(stored)
        embedding.weight = None
        self._hidden = program.buffer(packed.in_features)
        program.embed(table, self._hidden, anatomy.embed_factor)
        for index, layer in enumerate(anatomy.layers):
            self._attention(index, layer)
            self._mlp(layer)
        self._logits = program.buffer(packed.out_features)
        normed = self._norm(self._hidden, anatomy.norm, packed, of_logits=True)
        program.linear(normed, packed, self._logits, bias=_bias(head), of_logits=True)
        if anatomy.logit_factor != 1 or anatomy.logit_softcap:
            program.cap(self._logits, anatomy.logit_factor, anatomy.logit_softcap)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """The logits of `batch.logits_index`, [n, V] float32, good until the next step."""
        return self.program.run(batch, cache, self._logits)[:, : self.vocab_size]

    def _attention(self, index: int, layer: Layer) -> None:
        program, shape, call = self.program, self._inspection.layers[index], self._inspection.calls[index]
        biases = [_bias(part) for part in layer.qkv]
        bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
        into_qkv = self._pack(*layer.qkv)
        qkv = self._buffer("qkv", into_qkv.out_features)
        program.linear(self._norm(self._hidden, layer.before_attention, into_qkv), into_qkv, qkv, bias=bias)
        width = call.heads * shape.key_dim
        if layer.wide_norms is not None:
            for norm, at in zip(layer.wide_norms, (0, width), strict=True):
                part = Buffer(qkv.index, qkv.width, at)
                program.norm(part, norm.scales, norm.epsilon, part)
        norms = layer.head_norms
        attended = self._buffer("attended", call.heads * shape.value_dim)
        program.attention(
            qkv, index, call.heads, shape, attended, call.scaling,
            None if layer.rotary is None else self._rotations[layer.rotary],
            norms and (norms[0].scales, norms[1].scales), norms[0].epsilon if norms else 0.0,
            call.window, call.softcap, call.sinks,
        )  # fmt: skip
        self._to_hidden(attended, layer.out, layer.after_attention)

    def _mlp(self, layer: Layer) -> None:
        lanes = kernels().lanes
        parts, biases = [], []
        for module in layer.gate_up:
            parts += module.weight.detach().chunk(3 - len(layer.gate_up))
            if module.bias is not None:
                biases += [b[:, None] for b in module.bias.detach().chunk(3 - len(layer.gate_up))]
            module.weight = None
        inner = self._buffer("inner", parts[0].shape[0])
        weight = pack(interleave(parts[0], parts[1], 2 * lanes), self._format, lanes)
        bias = interleave(biases[0], biases[1], 2 * lanes)[:, 0] if biases else None
        source = self._norm(self._hidden, layer.before_mlp, weight)
        self.program.gated(source, weight, inner, self._activation, bias)
        self._to_hidden(inner, layer.down, layer.after_mlp)

    def _to_hidden(self, source: Buffer, layer: Any, norm: Norm | None) -> None:
        """hidden += factor · norm(layer(source))."""
        weight, bias, program = self._pack(layer), _bias(layer), self.program
        source = self._norm(source, None, weight)
        if norm is None and bias is None and self._factor == 1:
            program.linear(source, weight, self._hidden, residual=self._hidden)
            return
        result = self._buffer("result", weight.out_features)
        program.linear(source, weight, result, bias=bias)
        scales, epsilon = (norm.scales, norm.epsilon) if norm else (None, 0.0)
        program.add(result, scales, epsilon, self._hidden, self._factor)

    def _norm(self, source: Buffer, norm: Norm | None, weight: Packed, of_logits: bool = False) -> Buffer:
        """`source` normed, if there is a norm, in the form in which `weight` is multiplied with it."""
        if norm is None and not weight.format.is_integer:
            return source
        into = self._buffer("ready", self.program.activation_floats(weight))
        scales, epsilon = (norm.scales, norm.epsilon) if norm else (None, 0.0)
        self.program.norm(source, scales, epsilon, into, weight, of_logits)
        return into

    def _buffer(self, name: str, width: int) -> Buffer:
        """One buffer for all that is called so and is as wide; layers take turns."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = self.program.buffer(width)
        return self._buffers[name, width]

    def _pack(self, *layers: Any, format: str | None = None) -> Packed:
        """Linear layers side by side, in the model's format or another. Their own weights are given up."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        for layer in layers:
            layer.weight = None
        return pack(weight, format or self._format, kernels().lanes)


def _bias(layer: Any) -> torch.Tensor | None:
    return None if layer.bias is None else layer.bias.detach().float()
