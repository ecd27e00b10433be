"""Takes the decorators off transformers' forward methods: per step and layer they cost more than small models compute.

They serve training, deprecated argument names, tuple outputs and output capturing, none of which a step uses. Only
those in the table are taken off, and the load gate compares the result with the untouched model.
"""

from __future__ import annotations

from types import MethodType

from torch import nn

# By qualified name of the wrapping function.
_NEEDLESS = frozenset(
    {
        "GradientCheckpointingLayer.__init_subclass__.<locals>.forward_with_checkpointing",
        "can_return_tuple.<locals>.wrapper",
        "capture_outputs.<locals>.wrapped_fn.<locals>.wrapper",
        "deprecate_kwarg.<locals>.wrapper.<locals>.wrapped_func",
        # Fills in `use_cache`, which a step always passes, and `is_causal`, which the gate has checked.
        "merge_with_config_defaults.<locals>.wrapper",
        # Recomputes frequencies by the batch's largest position; the gate admits only lengths where they are constant.
        "dynamic_rope_update.<locals>.wrapper",
    }
)


def strip_decorators(model: nn.Module) -> int:
    """Binds each module's innermost needed forward to the instance. Returns how many modules that made cheaper."""
    stripped = 0
    for module in model.modules():
        forward = type(module).forward
        while getattr(forward, "__code__", None) is not None and forward.__code__.co_qualname in _NEEDLESS:
            forward = forward.__wrapped__  # type: ignore[attr-defined]
        if forward is not type(module).forward:
            module.forward = MethodType(forward, module)
            stripped += 1
    return stripped
