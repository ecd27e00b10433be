"""Mixtures of experts as transformers writes them: one module per layer that holds all experts' weights in 3-D
parameters, and says by attributes how they lie there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

_ROUTER = re.compile("Router|Gate$")

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], nn.Module]


def is_experts(module: nn.Module) -> bool:
    """Whether `Experts` can stand in for it."""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_gate") and not module.has_post_expert_norm


def experts_weights(module: Any) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The names of its parameters that hold matrices, each with the experts' [out, in]: views of what they are in."""
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        yield name, list(weight.transpose(1, 2) if module.is_transposed else weight)


def is_router(module: nn.Module) -> bool:
    """Whether it may hand its own `weight` [experts, n] to torch's linear function."""
    weight = module._parameters.get("weight")
    return bool(_ROUTER.search(type(module).__name__)) and weight is not None and weight.dim() == 2


class RouterWeight(torch.Tensor):
    """A weight that torch's linear function leaves to another layer, whose rows do not depend on their neighbours."""

    layer: nn.Module

    @classmethod
    def of(cls, weight: torch.Tensor, layer: nn.Module) -> RouterWeight:
        made = weight.detach().as_subclass(cls)
        made.layer = layer
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs and isinstance(args[1], cls):
            x, weight, *rest = args
            out = weight.layer(x)
            return out if not rest or rest[0] is None else out + rest[0]
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        # A cast that changes nothing gives the weight itself.
        same = isinstance(args[0], cls) and isinstance(found, torch.Tensor) and found.data_ptr() == args[0].data_ptr()
        return args[0] if same and found.stride() == args[0].stride() else found


class Experts(nn.Module):
    """Each expert's layers as modules of their own, run over the tokens that are routed to it."""

    def __init__(self, module: Any, make_linear: MakeLinear) -> None:
        """Takes the place of `module`, whose own weights are given up."""
        super().__init__()
        self._has_gate: bool = module.has_gate
        stacks = []
        for name, weights in experts_weights(module):
            biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
            stacks.append(nn.ModuleList(make_linear(w, b) for w, b in zip(weights, biases, strict=True)))
            del module._parameters[name]
        self.up, self.down = stacks
        self.rule = [module]  # for its activation; in a list, so that it is no submodule

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, n], top_k_index [T, k] int64, top_k_weights [T, k]. Returns [T, n]: for each token its
        experts' outputs added up in rising order of experts, whoever its neighbours are."""
        rule: Any = self.rule[0]
        out = torch.zeros_like(hidden_states)
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self.up)).tolist()
        places = order // top_k_index.shape[1]
        weights = top_k_weights.reshape(-1)[order, None]
        begin = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            here = slice(begin, begin + count)
            x = self.up[expert](hidden_states[places[here]])
            x = rule._apply_gate(x) if self._has_gate else rule.act_fn(x)
            out.index_add_(0, places[here], self.down[expert](x) * weights[here])
            begin += count
        return out
