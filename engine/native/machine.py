"""This host's processor as a compilation target, and the functions that LLVM makes for it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]


@dataclass(frozen=True, slots=True)
class Machine:
    """What code is generated for. `lanes` floats fill one vector register of the width that is used."""

    cpu: str
    features: str
    lanes: int

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    @property
    def registers(self) -> int:
        """Vector registers that a tile may count on."""
        return 32 if self.has("avx512vl") or not self.is_x86 else 16

    @property
    def is_x86(self) -> bool:
        return str(llvm.get_process_triple()).startswith(("x86_64", "i686"))


@functools.cache
def host() -> Machine:
    """The processor that this process runs on.

    Eight lanes everywhere: on a Zen 4, whose sixteen lanes take two turns, panels of sixteen columns are as fast for
    large batches and leave twice as many rows to a first-level cache.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    lanes = 8 if "+avx" in features.split(",") else 4
    return Machine(llvm.get_host_cpu_name(), features, lanes)


class Library:
    """Functions compiled from LLVM's textual language. Keeps their code alive; addresses are good as long as it is."""

    def __init__(self, text: str, machine: Machine) -> None:
        """Raises RuntimeError where the text is not valid."""
        module = llvm.parse_assembly(text)
        module.verify()
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=machine.cpu, features=machine.features, opt=3
        )
        builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))

    def function(self, name: str, arguments: Sequence[Any]) -> Any:
        """`name` as a ctypes function that returns nothing and lets go of the interpreter lock."""
        return ctypes.CFUNCTYPE(None, *arguments)(self.address(name))
