"""Families whose whole forward pass is one tape: RMS norm, rotary attention, gated MLP, nothing between.

What a layer asks of attention (scale, window, soft cap, sinks) is taken from the load gate's inspection of the
untouched model, and the gate compares the finished tape with it, so a wrong reading of a family cannot be served.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.cache import KVCache
from engine.model.batch import Batch
from engine.model.gate import Inspection
from engine.native import tape as t
from engine.native.formats import Packed, head_format, pack
from engine.native.kernels import kernels
from engine.native.program import Buffer, Program, interleave
from engine.native.team import Team

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_ACTIVATIONS = {"silu": t.SILU, "swish": t.SILU, "gelu_pytorch_tanh": t.GELU_TANH, "gelu": t.GELU}


class Decoder:
    """A model as a tape. Owner: the device thread."""

    invariant = True

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether the model's layers are what a tape is made for."""
        config: Any = model.config
        layers = getattr(getattr(model, "model", None), "layers", None)
        if config.model_type not in _FAMILIES or not layers or config.hidden_act not in _ACTIVATIONS:
            return False
        return all(layer.self_attn.o_proj.bias is None and layer.mlp.down_proj.bias is None for layer in layers)

    def __init__(self, model: PreTrainedModel, inspection: Inspection, positions: int, format: str, team: Team) -> None:
        """Packs the weights of `model`, whose own are given up one by one."""
        self._format = format
        self._program = program = Program(team)
        config: Any = model.config
        body: Any = model.model
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        tied = head.weight is body.embed_tokens.weight
        self._rotary = _rotary(body.rotary_emb, positions)
        self.vocab_size = config.vocab_size
        packed_head = self._pack(head, format=head_format(format))
        table: torch.Tensor | Packed = packed_head
        if not tied:
            stored = torch.float16 if packed_head.format.is_integer else packed_head.format.dtype
            table = body.embed_tokens.weight.detach().to(stored)
        body.embed_tokens.weight = None
        hidden = program.buffer(config.hidden_size)
        program.embed(table, hidden)
        self._buffers: dict[str, Buffer] = {"hidden": hidden}
        for index, layer in enumerate(body.layers):
            self._layer(index, layer, inspection)
        self._logits = program.buffer(config.vocab_size)
        normed = self._buffers["normed"]
        program.norm(hidden, body.norm.weight, body.norm.variance_epsilon, normed, packed_head, of_logits=True)
        program.linear(normed, packed_head, self._logits, bias=head.bias, of_logits=True)

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """The logits of `batch.logits_index`, [n, V] float32, good until the next step."""
        return self._program.run(batch, cache, self._logits)[:, : self.vocab_size]

    def _layer(self, index: int, layer: Any, inspection: Inspection) -> None:
        program, attention, mlp = self._program, layer.self_attn, layer.mlp
        shape, call = inspection.layers[index], inspection.calls[index]
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None if attention.q_proj.bias is None else torch.cat([p.bias.detach().float() for p in projections])
        heads = attention.q_proj.out_features // shape.key_dim
        into_qkv, into_hidden = self._pack(*projections), self._pack(attention.o_proj)
        gates = interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach(), 2 * kernels().lanes)
        mlp.gate_proj.weight = mlp.up_proj.weight = None
        into_inner, down = pack(gates, self._format, kernels().lanes), self._pack(mlp.down_proj)
        if index == 0:
            self._buffers |= {
                "normed": program.activations(into_qkv),
                "qkv": program.buffer(into_qkv.out_features),
                "attended": program.buffer(into_hidden.in_features),
                "attended ready": program.activations(into_hidden),
                "inner": program.buffer(down.in_features),
                "inner ready": program.activations(down),
            }
        b = self._buffers
        norm = layer.input_layernorm
        program.norm(b["hidden"], norm.weight, norm.variance_epsilon, b["normed"], into_qkv)
        program.linear(b["normed"], into_qkv, b["qkv"], bias=bias)
        program.attention(
            b["qkv"], index, heads, shape, b["attended"], call.scaling, self._rotary,
            (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None,
            norm.variance_epsilon, call.window, call.softcap, call.sinks,
        )  # fmt: skip
        source = program.prepared(b["attended"], into_hidden, b["attended ready"])
        program.linear(source, into_hidden, b["hidden"], residual=b["hidden"])
        norm = layer.post_attention_layernorm
        program.norm(b["hidden"], norm.weight, norm.variance_epsilon, b["normed"], into_inner)
        program.gated(b["normed"], into_inner, b["inner"], _ACTIVATIONS[mlp.config.hidden_act])
        source = program.prepared(b["inner"], down, b["inner ready"])
        program.linear(source, down, b["hidden"], residual=b["hidden"])

    def _pack(self, *layers: Any, format: str | None = None) -> Packed:
        """Linear layers side by side, in the model's format or another. Their own weights are given up."""
        weight = torch.cat([layer.weight.detach() for layer in layers])
        for layer in layers:
            layer.weight = None
        return pack(weight, format or self._format, kernels().lanes)


def _rotary(module: Any, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [positions, half of the rotated numbers] float32, as the model computes them."""
    cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.arange(positions)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
