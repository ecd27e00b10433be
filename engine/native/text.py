"""Pieces of LLVM's textual language that several generators write."""

from __future__ import annotations

from collections.abc import Iterator

from engine.native.formats import Format
from engine.native.machine import Machine

VECTORS = 2  # of a panel's width


def vector(machine: Machine, of: str = "float") -> str:
    return f"<{machine.lanes} x {of}>"


def width(machine: Machine) -> int:
    """Columns of a panel."""
    return VECTORS * machine.lanes


def offset(name: str, base: str, kind: str, stride: str, index: int) -> str:
    """%name = %base + index · %stride elements of `kind`."""
    return f"%o.{name} = mul i64 %{stride}, {index}\n%{name} = getelementptr {kind}, ptr %{base}, i64 %o.{name}"


def splat(name: str, scalar: str, kind: str, lanes: int) -> Iterator[str]:
    yield f"%v.{name} = insertelement <{lanes} x {kind}> poison, {kind} {scalar}, i32 0"
    yield (
        f"%{name} = shufflevector <{lanes} x {kind}> %v.{name}, <{lanes} x {kind}> poison, <{lanes} x i32>"
        " zeroinitializer"
    )


def fma(machine: Machine, name: str, a: str, b: str, c: str) -> str:
    kind = vector(machine)
    return f"%{name} = call {kind} @llvm.fma.v{machine.lanes}f32({kind} {a}, {kind} {b}, {kind} {c})"


def finish(machine: Machine, key: str, init: str, c: str, column: int, total: str) -> Iterator[str]:
    """c[column …] = init[column …] + total."""
    kind = vector(machine)
    yield f"%ip{key} = getelementptr float, ptr %{init}, i64 {column}"
    yield f"%iv{key} = load {kind}, ptr %ip{key}, align 4"
    yield f"%sum{key} = fadd {kind} %iv{key}, {total}"
    yield f"%cp{key} = getelementptr float, ptr %{c}, i64 {column}"
    yield f"store {kind} %sum{key}, ptr %cp{key}, align 4"


def signature(name: str) -> str:
    return (
        f"define void @{name}(ptr %a, i64 %lda, ptr %b, i64 %panel, ptr %init, i64 %ldi, ptr %c, i64 %ldc, i64 %n) {{"
    )


def widen(format: Format, name: str, value: str, lanes: int) -> Iterator[str]:
    """%name: float32 numbers of the stored ones in `value`."""
    stored, wide, bits = (f"<{lanes} x {kind}>" for kind in (format.llvm, "float", "i32"))
    match format.name:
        case "float32":
            yield f"%{name} = bitcast {stored} {value} to {wide}"
        case "float16":
            yield f"%{name} = fpext {stored} {value} to {wide}"
        case _:
            yield f"%z.{name} = zext {stored} {value} to {bits}"
            yield f"%h.{name} = shl {bits} %z.{name}, splat (i32 16)"
            yield f"%{name} = bitcast {bits} %h.{name} to {wide}"
