"""Rounds a model's weights to what they will be stored in, so that what it is compared with later has the same ones."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.model.experts import experts_weights, is_experts
from engine.native.formats import FORMATS, head_format, round_to


def round_weights(model: PreTrainedModel, name: str) -> None:
    """Rounds the matrices of a float32 model, in place, to what the format `name` holds.

    Integer formats hold linear layers, experts, and an embedding that shares its weight with one; other matrices are
    then rounded to float16. Raises ValueError where numbers lie outside the format's range.
    """
    if name == "float32":
        return
    rounded: set[int] = set()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = _checked(
                round_to(module.weight.data, head_format(name) if module is head else name), name
            )
        elif isinstance(module, Conv1D):
            module.weight.data = _checked(round_to(module.weight.data.t(), name), name).t().contiguous()
        else:
            if is_experts(module):
                for _, weights in experts_weights(module):
                    for weight in weights:
                        weight.copy_(_checked(round_to(weight, name), name))
            continue
        rounded.add(id(module.weight))
    plain = "float16" if FORMATS[name].is_integer else name
    for parameter in model.parameters():
        if parameter.dim() == 2 and id(parameter) not in rounded:
            parameter.data = _checked(round_to(parameter.data, plain), plain)


def _checked(weight: torch.Tensor, name: str) -> torch.Tensor:
    if not torch.isfinite(weight).all():
        raise ValueError(f"it has weights that {name} cannot hold: another --dtype can")
    return weight
