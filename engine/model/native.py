"""What runs a model with compiled operations. Importing it raises ImportError where numba is missing."""

from __future__ import annotations

from engine.model.decoder import Decoder
from engine.model.packing import pack_layers
from engine.native.backend import NativeBackend
from engine.native.team import Team

__all__ = ["Decoder", "NativeBackend", "Team", "pack_layers"]
