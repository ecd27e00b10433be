"""Which attention backend runs where."""

from __future__ import annotations

import logging

import torch

from engine.attention.interface import Backend
from engine.attention.reference import ReferenceBackend

log = logging.getLogger(__name__)


def choose_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """The fastest backend for `device` and `dtype` among those installed."""
    if device.type == "cpu" and dtype is torch.float32:
        try:
            from engine.attention.cpu import CpuBackend
        except ImportError as e:
            log.warning("attention runs in plain torch, which is slow: %s", e)
        else:
            return CpuBackend()
    return ReferenceBackend()
