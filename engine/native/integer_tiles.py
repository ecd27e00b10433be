"""Tiles of integer weights: products of sixteen-bit activations with eight- or four-bit weights, summed in 32 bits.

A row of activations is a record: its scale (float32), the sums of its groups of 32 numbers (float32 each, in units of
the scale), filled up to a multiple of 64 bytes, then the numbers (int16). Integer sums are exact, so their order does
not matter; what bounds the activations keeps them from overflowing (`formats.Packed.limit`).

int8 panel: a scale (float32) for each column, then for each pair of inputs 2 bytes a column.
int4 panel: for each group of 32 inputs the columns' scales d and least values m (float16), then for each pair of
inputs a byte a column, the even input in its low half; a weight is d · q + m.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.native.formats import GROUP, Format
from engine.native.machine import Machine
from engine.native.text import VECTORS, finish, fma, offset, signature, splat, vector, width

_PAIRS = GROUP // 2


def tile(machine: Machine, format: Format, name: str, rows: int, panels: int) -> str:
    keys = [(r, p, v) for r in range(rows) for p in range(panels) for v in range(VECTORS)]
    lines = [
        signature(name),
        "entry:",
        *_header(),
        *(offset(f"a{r}", "a", "i8", "lda", r) for r in range(rows)),
        *(f"%d{r} = getelementptr i8, ptr %a{r}, i64 %header" for r in range(rows)),
        *(offset(f"b{p}", "b", "i8", "panel", p) for p in range(panels)),
    ]
    body = _int8 if format.name == "int8" else _int4
    lines += body(machine, rows, panels)
    lines += (offset(f"i{r}", "init", "float", "ldi", r) for r in range(rows))
    lines += (offset(f"c{r}", "c", "float", "ldc", r) for r in range(rows))
    for r in range(rows):
        lines += [f"%rs{r} = load float, ptr %a{r}", *splat(f"rv{r}", f"%rs{r}", "float", machine.lanes)]
    for r, p, v in keys:
        key = f"{r}_{p}_{v}"
        lines.append(f"%y{key} = fmul {vector(machine)} %z{key}, %rv{r}")
        lines += finish(machine, key, f"i{r}", f"c{r}", (p * VECTORS + v) * machine.lanes, f"%y{key}")
    return "\n".join([*lines, "ret void", "}"])


def _header() -> Iterator[str]:
    """Bytes of a row's record before its numbers."""
    yield f"%groups = udiv i64 %n, {GROUP}"
    yield "%floats = add i64 %groups, 1"
    yield "%bytes = mul i64 %floats, 4"
    yield "%more = add i64 %bytes, 63"
    yield "%header = and i64 %more, -64"


def _int8(machine: Machine, rows: int, panels: int) -> Iterator[str]:
    whole, ints = vector(machine), vector(machine, "i32")
    keys = [(r, p, v) for r in range(rows) for p in range(panels) for v in range(VECTORS)]
    yield "%pairs = udiv i64 %n, 2"
    yield "br label %loop"
    yield "loop:"
    yield "%i = phi i64 [0, %entry], [%next, %loop]"
    for r, p, v in keys:
        yield f"%s{r}_{p}_{v} = phi {ints} [zeroinitializer, %entry], [%t{r}_{p}_{v}, %loop]"
    yield f"%line = mul i64 %i, {2 * width(machine)}"
    yield f"%at = add i64 %line, {4 * width(machine)}"
    bytes_, halves = f"<{2 * machine.lanes} x i8>", f"<{2 * machine.lanes} x i16>"
    for p in range(panels):
        for v in range(VECTORS):
            yield f"%l{p}_{v} = getelementptr i8, ptr %b{p}, i64 %at"
            yield f"%m{p}_{v} = getelementptr i8, ptr %l{p}_{v}, i64 {v * 2 * machine.lanes}"
            yield f"%q{p}_{v} = load {bytes_}, ptr %m{p}_{v}, align 1"
            yield f"%w{p}_{v} = sext {bytes_} %q{p}_{v} to {halves}"
    yield from _products(machine, rows, panels, "i")
    yield "%next = add i64 %i, 1"
    yield "%done = icmp eq i64 %next, %pairs"
    yield "br i1 %done, label %exit, label %loop"
    yield "exit:"
    for p in range(panels):
        for v in range(VECTORS):
            yield f"%cs{p}_{v} = getelementptr float, ptr %b{p}, i64 {v * machine.lanes}"
            yield f"%cv{p}_{v} = load {whole}, ptr %cs{p}_{v}, align 4"
    for r, p, v in keys:
        yield f"%x{r}_{p}_{v} = sitofp {ints} %t{r}_{p}_{v} to {whole}"
        yield f"%z{r}_{p}_{v} = fmul {whole} %x{r}_{p}_{v}, %cv{p}_{v}"


def _products(machine: Machine, rows: int, panels: int, pair: str) -> Iterator[str]:
    """%t = %s + the products of the pair number %pair: even lanes times even, odd times odd, added."""
    halves, ints = f"<{2 * machine.lanes} x i16>", vector(machine, "i32")
    for r in range(rows):
        yield f"%ap{r} = getelementptr i32, ptr %d{r}, i64 %{pair}"
        yield f"%av{r} = load i32, ptr %ap{r}, align 4"
        yield from splat(f"as{r}", f"%av{r}", "i32", machine.lanes)
        yield f"%ah{r} = bitcast {ints} %as{r} to {halves}"
        for p in range(panels):
            for v in range(VECTORS):
                key = f"{r}_{p}_{v}"
                yield f"%mm{key} = call {ints} @{multiply_add(machine)}({halves} %ah{r}, {halves} %w{p}_{v})"
                yield f"%t{key} = add {ints} %s{key}, %mm{key}"


def multiply_add(machine: Machine) -> str:
    """The function that multiplies lanes of 16 bits and adds neighbours: the processor's own, where LLVM names one."""
    if machine.is_x86:
        return "llvm.x86.avx2.pmadd.wd" if machine.lanes == 8 else "llvm.x86.sse2.pmadd.wd"
    return "multiply_add"


def declarations(machine: Machine) -> str:
    lanes, halves, ints = machine.lanes, f"<{2 * machine.lanes} x i16>", vector(machine, "i32")
    if machine.is_x86:
        return f"declare {ints} @{multiply_add(machine)}({halves}, {halves})"
    lines = [f"define internal {ints} @multiply_add({halves} %a, {halves} %b) alwaysinline {{"]
    for which, first in (("e", 0), ("o", 1)):
        places = ", ".join(f"i32 {first + 2 * i}" for i in range(lanes))
        for name in ("a", "b"):
            lines.append(
                f"%{name}{which}h = shufflevector {halves} %{name}, {halves} poison, <{lanes} x i32> <{places}>"
            )
            lines.append(f"%{name}{which} = sext <{lanes} x i16> %{name}{which}h to {ints}")
        lines.append(f"%m{which} = mul {ints} %a{which}, %b{which}")
    return "\n".join([*lines, f"%t = add {ints} %me, %mo", f"ret {ints} %t", "}"])


def _int4(machine: Machine, rows: int, panels: int) -> Iterator[str]:
    whole, ints, lanes, columns = vector(machine), vector(machine, "i32"), machine.lanes, width(machine)
    keys = [(r, p, v) for r in range(rows) for p in range(panels) for v in range(VECTORS)]
    yield "br label %group"
    yield "group:"
    yield "%g = phi i64 [0, %entry], [%gnext, %folded]"
    for r, p, v in keys:
        yield f"%f{r}_{p}_{v} = phi {whole} [zeroinitializer, %entry], [%z{r}_{p}_{v}, %folded]"
    yield f"%start = mul i64 %g, {group_bytes(columns)}"
    yield f"%firstpair = mul i64 %g, {_PAIRS}"
    yield "br label %loop"
    yield "loop:"
    yield "%i = phi i64 [0, %group], [%next, %loop]"
    for r, p, v in keys:
        yield f"%s{r}_{p}_{v} = phi {ints} [zeroinitializer, %group], [%t{r}_{p}_{v}, %loop]"
    yield "%pair = add i64 %firstpair, %i"
    yield f"%line = mul i64 %i, {columns}"
    yield "%inside = add i64 %start, %line"
    yield f"%at = add i64 %inside, {4 * columns}"
    for p in range(panels):
        for v in range(VECTORS):
            yield f"%l{p}_{v} = getelementptr i8, ptr %b{p}, i64 %at"
            yield f"%m{p}_{v} = getelementptr i8, ptr %l{p}_{v}, i64 {v * lanes}"
            yield f"%q{p}_{v} = load <{lanes} x i8>, ptr %m{p}_{v}, align 1"
            yield f"%qz{p}_{v} = zext <{lanes} x i8> %q{p}_{v} to {ints}"
            yield f"%qs{p}_{v} = shl {ints} %qz{p}_{v}, splat (i32 12)"
            yield f"%qo{p}_{v} = or {ints} %qz{p}_{v}, %qs{p}_{v}"
            yield f"%qa{p}_{v} = and {ints} %qo{p}_{v}, splat (i32 {0x000F000F})"
            yield f"%w{p}_{v} = bitcast {ints} %qa{p}_{v} to <{2 * lanes} x i16>"
    yield from _products(machine, rows, panels, "pair")
    yield "%next = add i64 %i, 1"
    yield f"%done = icmp eq i64 %next, {_PAIRS}"
    yield "br i1 %done, label %folded, label %loop"
    yield "folded:"
    yield from _fold(machine, rows, panels)
    yield "%gnext = add i64 %g, 1"
    yield "%gdone = icmp eq i64 %gnext, %groups"
    yield "br i1 %gdone, label %exit, label %group"
    yield "exit:"


def _fold(machine: Machine, rows: int, panels: int) -> Iterator[str]:
    """%z = %f + d · %t + m · (sum of the row's group)."""
    whole, ints, lanes, columns = vector(machine), vector(machine, "i32"), machine.lanes, width(machine)
    for p in range(panels):
        for v in range(VECTORS):
            for name, first in (("dv", 0), ("mv", columns)):
                key = f"{name}{p}_{v}"
                yield f"%l.{key} = getelementptr i8, ptr %b{p}, i64 %start"
                yield f"%p.{key} = getelementptr half, ptr %l.{key}, i64 {first + v * lanes}"
                yield f"%h.{key} = load <{lanes} x half>, ptr %p.{key}, align 2"
                yield f"%{key} = fpext <{lanes} x half> %h.{key} to {whole}"
    for r in range(rows):
        yield f"%gi{r} = add i64 %g, 1"
        yield f"%gp{r} = getelementptr float, ptr %a{r}, i64 %gi{r}"
        yield f"%gs{r} = load float, ptr %gp{r}, align 4"
        yield from splat(f"gv{r}", f"%gs{r}", "float", lanes)
        for p in range(panels):
            for v in range(VECTORS):
                key = f"{r}_{p}_{v}"
                yield f"%x{key} = sitofp {ints} %t{key} to {whole}"
                yield fma(machine, f"u{key}", f"%x{key}", f"%dv{p}_{v}", f"%f{key}")
                yield fma(machine, f"z{key}", f"%gv{r}", f"%mv{p}_{v}", f"%u{key}")


def group_bytes(columns: int) -> int:
    """Bytes of one group of an int4 panel."""
    return 4 * columns + _PAIRS * columns


def column(machine: Machine, format: Format) -> str:
    """Reads a column, number by number: embeddings that share the head's weight."""
    read = _int8_number(width(machine)) if format.name == "int8" else _int4_number(width(machine))
    return "\n".join(
        [
            f"define void @column_{format.name}(ptr %b, i64 %j, ptr %out, i64 %n) {{",
            "entry:",
            "br label %loop",
            "loop:",
            "%i = phi i64 [0, %entry], [%next, %loop]",
            *read,
            "%o = getelementptr float, ptr %out, i64 %i",
            "store float %f, ptr %o",
            "%next = add i64 %i, 1",
            "%done = icmp eq i64 %next, %n",
            "br i1 %done, label %exit, label %loop",
            "exit:",
            "ret void",
            "}",
        ]
    )


def _int8_number(columns: int) -> list[str]:
    """%f: input %i of column %j of the panel %b."""
    return [
        "%pair = udiv i64 %i, 2",
        "%odd = urem i64 %i, 2",
        f"%l0 = mul i64 %pair, {2 * columns}",
        "%l1 = mul i64 %j, 2",
        "%l2 = add i64 %l0, %l1",
        "%l3 = add i64 %l2, %odd",
        f"%l4 = add i64 %l3, {4 * columns}",
        "%p = getelementptr i8, ptr %b, i64 %l4",
        "%q = load i8, ptr %p",
        "%x = sitofp i8 %q to float",
        "%sp = getelementptr float, ptr %b, i64 %j",
        "%s = load float, ptr %sp",
        "%f = fmul float %x, %s",
    ]


def _int4_number(columns: int) -> list[str]:
    """%f: input %i of column %j of the panel %b."""
    return [
        f"%g = udiv i64 %i, {GROUP}",
        f"%in = urem i64 %i, {GROUP}",
        f"%start = mul i64 %g, {group_bytes(columns)}",
        "%gb = getelementptr i8, ptr %b, i64 %start",
        "%dp = getelementptr half, ptr %gb, i64 %j",
        "%dh = load half, ptr %dp",
        f"%mp = getelementptr half, ptr %dp, i64 {columns}",
        "%mh = load half, ptr %mp",
        "%pair = udiv i64 %in, 2",
        f"%l0 = mul i64 %pair, {columns}",
        "%l1 = add i64 %l0, %j",
        f"%l2 = add i64 %l1, {4 * columns}",
        "%p = getelementptr i8, ptr %gb, i64 %l2",
        "%q = load i8, ptr %p",
        "%odd = urem i64 %in, 2",
        "%shift64 = mul i64 %odd, 4",
        "%shift = trunc i64 %shift64 to i8",
        "%q1 = lshr i8 %q, %shift",
        "%q2 = and i8 %q1, 15",
        "%x = uitofp i8 %q2 to float",
        "%d = fpext half %dh to float",
        "%m = fpext half %mh to float",
        "%dq = fmul float %x, %d",
        "%f = fadd float %dq, %m",
    ]
