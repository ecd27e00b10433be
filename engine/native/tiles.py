"""Matrix tiles in LLVM's textual language: a few rows of activations times one or more panels of a weight.

`tile_<format>_<rows>_<panels>(a, lda, b, panel, init, ldi, c, ldc, n)`: for `rows` rows r and all columns j of
`panels` panels: c[r, j] = init[r, j] + Σᵢ a[r, i] · b[i, j], i < n in rising order. a, init and c are float32 with
row strides in elements (ldi = 0: the same for every row, a bias); `panel` is the bytes from one panel to the next.
The accumulators are registers by construction. An element's sum has one order whatever tile computes it, so that a
row's result never depends on the rows beside it, to the last bit.

`column_<format>(b, n, out)`: the float32 numbers of one column, b being the address of its first one.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.native.formats import FORMATS, Format
from engine.native.machine import Machine

VECTORS = 2  # of a panel's width


def tile_shapes(machine: Machine) -> dict[int, int]:
    """Panels that a tile covers, by its rows: as many accumulators as registers allow, and enough to hide latency."""
    most = (machine.registers - 4) // VECTORS if machine.registers == 16 else 6
    return {rows: max(p for p in (1, 2, 4) if p == 1 or rows * p <= most) for rows in range(1, most + 1)}


def library_text(machine: Machine) -> str:
    """All tiles of all formats for `machine`."""
    parts = [f"declare {_vector(machine)} @llvm.fma.v{machine.lanes}f32({', '.join([_vector(machine)] * 3)})"]
    for format in FORMATS.values():
        for rows, panels in tile_shapes(machine).items():
            parts += (_tile(machine, format, rows, p) for p in sorted({1, panels}))
        parts.append(_column(machine, format))
    return "\n".join(parts)


def tile_name(format: Format, rows: int, panels: int) -> str:
    return f"tile_{format.name}_{rows}_{panels}"


def _vector(machine: Machine, of: str = "float") -> str:
    return f"<{machine.lanes} x {of}>"


def _tile(machine: Machine, format: Format, rows: int, panels: int) -> str:
    vector, columns = _vector(machine), [(p, v) for p in range(panels) for v in range(VECTORS)]
    lines = [
        f"define void @{tile_name(format, rows, panels)}(ptr %a, i64 %lda, ptr %b, i64 %panel, ptr %init, i64 %ldi,"
        " ptr %c, i64 %ldc, i64 %n) {",
        "entry:",
        *(_at(f"a{r}", "a", "float", "lda", r) for r in range(rows)),
        *(_at(f"b{p}", "b", "i8", "panel", p) for p in range(panels)),
        "br label %loop",
        "loop:",
        "%i = phi i64 [0, %entry], [%next, %loop]",
    ]
    keys = [(r, p, v) for r in range(rows) for p, v in columns]
    lines += (f"%s{r}_{p}_{v} = phi {vector} [zeroinitializer, %entry], [%t{r}_{p}_{v}, %loop]" for r, p, v in keys)
    lines.append(f"%line = mul i64 %i, {VECTORS * machine.lanes * format.size}")
    for p in range(panels):
        lines.append(f"%l{p} = getelementptr i8, ptr %b{p}, i64 %line")
        for v in range(VECTORS):
            lines += _load(machine, format, f"w{p}_{v}", f"l{p}", v * machine.lanes * format.size)
    for r in range(rows):
        lines += _splat(machine, f"x{r}", f"a{r}")
        for p, v in columns:
            operands = f"{vector} %x{r}, {vector} %w{p}_{v}, {vector} %s{r}_{p}_{v}"
            lines.append(f"%t{r}_{p}_{v} = call {vector} @llvm.fma.v{machine.lanes}f32({operands})")
    lines += [
        "%next = add i64 %i, 1",
        "%done = icmp eq i64 %next, %n",
        "br i1 %done, label %exit, label %loop",
        "exit:",
        *(_at(f"i{r}", "init", "float", "ldi", r) for r in range(rows)),
        *(_at(f"c{r}", "c", "float", "ldc", r) for r in range(rows)),
    ]
    for r, p, v in keys:
        lines += _finish(machine, r, p, v)
    return "\n".join([*lines, "ret void", "}"])


def _at(name: str, base: str, kind: str, stride: str, index: int) -> str:
    return f"%o.{name} = mul i64 %{stride}, {index}\n%{name} = getelementptr {kind}, ptr %{base}, i64 %o.{name}"


def _load(machine: Machine, format: Format, name: str, line: str, offset: int) -> Iterator[str]:
    """A vector of weights, widened to float32."""
    vector, stored = _vector(machine), _vector(machine, format.llvm)
    yield f"%p.{name} = getelementptr i8, ptr %{line}, i64 {offset}"
    yield f"%r.{name} = load {stored}, ptr %p.{name}, align {format.size}"
    match format.name:
        case "float32":
            yield f"%{name} = bitcast {stored} %r.{name} to {vector}"
        case "float16":
            yield f"%{name} = fpext {stored} %r.{name} to {vector}"
        case _:
            wide = _vector(machine, "i32")
            yield f"%z.{name} = zext {stored} %r.{name} to {wide}"
            yield f"%h.{name} = shl {wide} %z.{name}, splat (i32 16)"
            yield f"%{name} = bitcast {wide} %h.{name} to {vector}"


def _splat(machine: Machine, name: str, row: str) -> Iterator[str]:
    vector = _vector(machine)
    yield f"%p.{name} = getelementptr float, ptr %{row}, i64 %i"
    yield f"%f.{name} = load float, ptr %p.{name}"
    yield f"%v.{name} = insertelement {vector} poison, float %f.{name}, i32 0"
    yield f"%{name} = shufflevector {vector} %v.{name}, {vector} poison, {_vector(machine, 'i32')} zeroinitializer"


def _finish(machine: Machine, r: int, p: int, v: int) -> Iterator[str]:
    vector, key = _vector(machine), f"{r}_{p}_{v}"
    column = (p * VECTORS + v) * machine.lanes
    yield f"%ip{key} = getelementptr float, ptr %i{r}, i64 {column}"
    yield f"%iv{key} = load {vector}, ptr %ip{key}, align 4"
    yield f"%sum{key} = fadd {vector} %iv{key}, %t{key}"
    yield f"%cp{key} = getelementptr float, ptr %c{r}, i64 {column}"
    yield f"store {vector} %sum{key}, ptr %cp{key}, align 4"


def _column(machine: Machine, format: Format) -> str:
    widen = {
        "float32": ["%f = bitcast float %x to float"],
        "float16": ["%f = fpext half %x to float"],
        "bfloat16": ["%z = zext i16 %x to i32", "%h = shl i32 %z, 16", "%f = bitcast i32 %h to float"],
    }[format.name]
    return "\n".join(
        [
            f"define void @column_{format.name}(ptr %b, i64 %stride, ptr %out, i64 %n) {{",
            "entry:",
            "br label %loop",
            "loop:",
            "%i = phi i64 [0, %entry], [%next, %loop]",
            "%at = mul i64 %i, %stride",
            f"%p = getelementptr {format.llvm}, ptr %b, i64 %at",
            f"%x = load {format.llvm}, ptr %p",
            *widen,
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
