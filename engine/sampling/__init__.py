"""Choosing tokens on the device: parameters and penalties as tensors per row, no host round trip in a step."""
