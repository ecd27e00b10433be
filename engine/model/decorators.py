"""Takes the decorators off transformers' forward methods: per step and layer they cost more than small models compute.

They serve training, deprecated argument names, tuple outputs and output capturing, none of which a step uses. Only
those in the tables are taken off, and the load gate compares the result with the untouched model.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from transformers import PreTrainedModel

# By qualified name of the wrapping function. Around layers:
_LAYER = frozenset(
    {
        "GradientCheckpointingLayer.__init_subclass__.<locals>.forward_with_checkpointing",
        "deprecate_kwarg.<locals>.wrapper.<locals>.wrapped_func",
        # Recomputes frequencies by the batch's largest position; the gate admits only lengths where they are constant.
        "dynamic_rope_update.<locals>.wrapper",
    }
)
# Around whole models. Where one model wraps another (text and vision), they also hand arguments down: then they stay.
_MODEL = frozenset(
    {
        "can_return_tuple.<locals>.wrapper",
        "capture_outputs.<locals>.wrapped_fn.<locals>.wrapper",
        # Fills in `use_cache`, which a step always passes, and `is_causal`, which the gate has checked.
        "merge_with_config_defaults.<locals>.wrapper",
    }
)


def strip_decorators(model: PreTrainedModel) -> int:
    """Binds each module's innermost needed forward to the instance. Returns how many modules that made cheaper."""
    text_only = model.config.get_text_config(decoder=True) is model.config
    needless = _LAYER | _MODEL if text_only else _LAYER
    stripped = 0
    for module in model.modules():
        forward = _inner(type(module).forward, needless)
        if forward is not type(module).forward:
            module.forward = MethodType(forward, module)
            stripped += 1
    return stripped


def _inner(forward: Callable[..., Any], needless: frozenset[str]) -> Callable[..., Any]:
    while getattr(getattr(forward, "__code__", None), "co_qualname", None) in needless:
        forward = forward.__wrapped__  # type: ignore[attr-defined]  # functools.wraps has set it
    return forward
