"""What numba lacks: addresses as arrays, calls by address, atomic counters, and waiting for another thread.

Nothing checks an address; the callers are this package's own.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.extending import intrinsic

_I64 = ir.IntType(64)
_PAUSES: dict[str, list[tuple[str, list[int]]]] = {
    "x86_64": [("llvm.x86.sse2.pause", [])],
    "aarch64": [("llvm.aarch64.hint", [1])],
}  # hint 1 is YIELD


def _make_pointer(kind: Any) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        """An address as a typed pointer, for `carray`."""

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen  # type: ignore[no-untyped-call]

    return pointer


float32_at = _make_pointer(types.float32)
int16_at = _make_pointer(types.int16)
int32_at = _make_pointer(types.int32)
int64_at = _make_pointer(types.int64)


def _make_call(count: int) -> Any:
    signature = types.void(types.int64, types.UniTuple(types.int64, count))  # type: ignore[no-untyped-call]

    @intrinsic
    def call(typing: Any, address: Any, arguments: Any) -> Any:
        """Calls the function at an address with integer (or pointer) arguments."""

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [_I64] * count)
            function = builder.inttoptr(values[0], kind.as_pointer())
            builder.call(function, cgutils.unpack_tuple(builder, values[1], count))  # type: ignore[no-untyped-call]
            return context.get_dummy_value()

        return signature, codegen

    return call


call_tile = _make_call(9)
call_reader = _make_call(4)


@intrinsic
def fetch_add(typing: Any, address: Any, number: Any) -> Any:
    """Adds to the int64 at an address, as one indivisible step. Returns what was there."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """The int64 at an address, with all that was written before it."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


_READ_KEEP_DATA = (0, 3, 1)


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Asks for the cache line at an address, to be read soon."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        builder.call(function, [pointer, *(ir.Constant(number, value) for value in _READ_KEEP_DATA)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _make_library_call(name: str, *numbers: int, takes_address: bool = True) -> Any:
    """A function of the C library, found by name when the code is loaded, of `numbers` and perhaps an address."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arguments = [ir.Constant(ir.IntType(32), number) for number in numbers]
        arguments += [builder.inttoptr(value, ir.IntType(8).as_pointer()) for value in values]
        kind = ir.FunctionType(ir.IntType(32), [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        return builder.call(function, arguments)

    if takes_address:

        @intrinsic
        def call_with_address(typing: Any, address: Any) -> Any:
            return types.int32(types.int64), codegen

        return call_with_address

    @intrinsic
    def call(typing: Any) -> Any:
        return types.int32(), codegen

    return call


sched_yield = _make_library_call("sched_yield", takes_address=False)
sem_wait = _make_library_call("sem_wait")
sem_post = _make_library_call("sem_post")
monotonic = _make_library_call("clock_gettime", 1)  # seconds and nanoseconds, as two int64 at an address


@intrinsic
def pause(typing: Any) -> Any:
    """A moment of a spinning loop in which the other thread of the core may run."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        for name, numbers in _PAUSES.get(platform.machine(), ()):
            arguments = [ir.Constant(ir.IntType(32), number) for number in numbers]
            kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(), codegen
