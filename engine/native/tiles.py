"""Matrix tiles in LLVM's textual language: a few rows of activations times one or more panels of a weight.

`tile_<format>_<rows>_<panels>(a, lda, b, panel, init, ldi, c, ldc, n)`: for `rows` rows r and all columns j of
`panels` panels: c[r, j] = init[r, j] + Σᵢ a[r, i] · b[i, j], i < n in rising order. init and c are float32 with
row strides in elements (ldi = 0: the same for every row, a bias); `lda` is the bytes from one row of a to the next,
`panel` those from one panel to the next. With float formats a is float32, with integer ones it is as `rows` has it.
The accumulators are registers by construction. An element's sum has one order whatever tile computes it, so that a
row's result never depends on the rows beside it, to the last bit.

`column_<format>(panel, j, out, n)`: the float32 numbers of a panel's column j. `row_<format>(row, _, out, n)`: those
of a plain row.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.native import integer_tiles
from engine.native.formats import FORMATS, Format
from engine.native.machine import Machine
from engine.native.text import VECTORS, finish, fma, offset, signature, splat, vector, widen, width


def tile_shapes(machine: Machine) -> dict[int, int]:
    """Panels that a tile covers, by its rows: as many accumulators as registers allow, and enough to hide latency."""
    most = 6
    return {rows: max(p for p in (1, 2, 4) if p == 1 or rows * p <= most) for rows in range(1, most + 1)}


def library_text(machine: Machine) -> str:
    """All tiles of all formats for `machine`."""
    parts = [f"declare {vector(machine)} @llvm.fma.v{machine.lanes}f32({', '.join([vector(machine)] * 3)})"]
    parts.append(integer_tiles.declarations(machine))
    for format in FORMATS.values():
        make = integer_tiles.tile if format.is_integer else _tile
        for rows, panels in tile_shapes(machine).items():
            parts += (make(machine, format, tile_name(format, rows, p), rows, p) for p in sorted({1, panels}))
        if format.is_integer:
            parts.append(integer_tiles.column(machine, format))
        else:
            parts += (_reader(format, "column", width(machine)), _reader(format, "row", 1))
    return "\n".join(parts)


def tile_name(format: Format, rows: int, panels: int) -> str:
    return f"tile_{format.name}_{rows}_{panels}"


def _tile(machine: Machine, format: Format, name: str, rows: int, panels: int) -> str:
    kind, columns = vector(machine), [(p, v) for p in range(panels) for v in range(VECTORS)]
    keys = [(r, p, v) for r in range(rows) for p, v in columns]
    lines = [
        signature(name),
        "entry:",
        *(offset(f"a{r}", "a", "i8", "lda", r) for r in range(rows)),
        *(offset(f"b{p}", "b", "i8", "panel", p) for p in range(panels)),
        "br label %loop",
        "loop:",
        "%i = phi i64 [0, %entry], [%next, %loop]",
        *(f"%s{r}_{p}_{v} = phi {kind} [zeroinitializer, %entry], [%t{r}_{p}_{v}, %loop]" for r, p, v in keys),
        f"%line = mul i64 %i, {width(machine) * format.size}",
    ]
    for p in range(panels):
        lines.append(f"%l{p} = getelementptr i8, ptr %b{p}, i64 %line")
        for v in range(VECTORS):
            lines += _load(machine, format, f"w{p}_{v}", f"l{p}", v * machine.lanes * format.size)
    for r in range(rows):
        lines += [f"%p.x{r} = getelementptr float, ptr %a{r}, i64 %i", f"%f.x{r} = load float, ptr %p.x{r}"]
        lines += splat(f"x{r}", f"%f.x{r}", "float", machine.lanes)
        lines += (fma(machine, f"t{r}_{p}_{v}", f"%x{r}", f"%w{p}_{v}", f"%s{r}_{p}_{v}") for p, v in columns)
    lines += [
        "%next = add i64 %i, 1",
        "%done = icmp eq i64 %next, %n",
        "br i1 %done, label %exit, label %loop",
        "exit:",
        *(offset(f"i{r}", "init", "float", "ldi", r) for r in range(rows)),
        *(offset(f"c{r}", "c", "float", "ldc", r) for r in range(rows)),
    ]
    for r, p, v in keys:
        column = (p * VECTORS + v) * machine.lanes
        lines += finish(machine, f"{r}_{p}_{v}", f"i{r}", f"c{r}", column, f"%t{r}_{p}_{v}")
    return "\n".join([*lines, "ret void", "}"])


def _load(machine: Machine, format: Format, name: str, line: str, at: int) -> Iterator[str]:
    """A vector of weights, widened to float32."""
    stored = vector(machine, format.llvm)
    yield f"%p.{name} = getelementptr i8, ptr %{line}, i64 {at}"
    yield f"%r.{name} = load {stored}, ptr %p.{name}, align {format.size}"
    yield from widen(format, name, f"%r.{name}", machine.lanes)


def _reader(format: Format, name: str, stride: int) -> str:
    return "\n".join(
        [
            f"define void @{name}_{format.name}(ptr %b, i64 %j, ptr %out, i64 %n) {{",
            "entry:",
            "br label %loop",
            "loop:",
            "%i = phi i64 [0, %entry], [%next, %loop]",
            f"%line = mul i64 %i, {stride}",
            "%at = add i64 %line, %j",
            f"%p = getelementptr {format.llvm}, ptr %b, i64 %at",
            f"%x = load <1 x {format.llvm}>, ptr %p, align {format.size}",
            *widen(format, "f", "%x", 1),
            "%o = getelementptr float, ptr %out, i64 %i",
            "store <1 x float> %f, ptr %o, align 4",
            "%next = add i64 %i, 1",
            "%done = icmp eq i64 %next, %n",
            "br i1 %done, label %exit, label %loop",
            "exit:",
            "ret void",
            "}",
        ]
    )
