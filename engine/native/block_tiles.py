"""Products of a few rows with one block of the KV cache, and the cache's entries, in LLVM's textual language.

`product_<format>_<rows>_<lanes>x<vectors>[_add](a, lda, b, ldb, c, ldc, n, begin, end)`: for `rows` rows r and the
columns j from `begin` to `end`, a whole number of `lanes` · `vectors` of them: c[r, j] = Σᵢ a[r, i] · b[i, j], i < n in
rising order, added to what c holds where `_add` says so. a and c are float32; strides are in elements. As with matrix
tiles, an element's sum has one order whatever computes it.

`store_<format>(from, to, n, stride)`: float32 numbers as the cache keeps them, `stride` elements apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.native.formats import FORMATS, Format
from engine.native.machine import Machine
from engine.native.text import offset, splat, widen

MAX_ROWS = 6
LEVELS = 3  # widths of tiles, at most
_ACCUMULATORS = 12
_LARGEST_HALF = 65504.0

CACHE_FORMATS = tuple(format for format in FORMATS.values() if not format.is_integer)


def levels(machine: Machine, rows: int, add: bool) -> list[tuple[int, int]]:
    """(lanes, vectors) of the tiles for so many rows, from the widest to single columns. Scores (which begin with
    zero) are as wide as a block, usually sixteen tokens; sums of values (which add) as a head."""
    widest = max(v for v in (1, 2, 4, 8) if v == 1 or rows * v <= _ACCUMULATORS) if add else 16 // machine.lanes
    return [*((machine.lanes, v) for v in sorted({widest, 1}, reverse=True)), (1, 1)]


def product_name(format: Format, rows: int, lanes: int, vectors: int, add: bool) -> str:
    return f"product_{format.name}_{rows}_{lanes}x{vectors}{'_add' * add}"


def block_text(machine: Machine, format: Format) -> str:
    """All of them of a format, for `machine`."""
    kind = f"<{machine.lanes} x float>"
    parts = [
        "declare float @llvm.fma.f32(float, float, float)",
        "declare float @llvm.minnum.f32(float, float)",
        "declare float @llvm.maxnum.f32(float, float)",
        f"declare {kind} @llvm.fma.v{machine.lanes}f32({kind}, {kind}, {kind})",
        _store(format),
    ]
    for add in (False, True):
        for rows in range(1, MAX_ROWS + 1):
            parts += (_product(format, rows, lanes, vectors, add) for lanes, vectors in levels(machine, rows, add))
    return "\n".join(parts)


def _product(format: Format, rows: int, lanes: int, vectors: int, add: bool) -> str:
    kind = f"<{lanes} x float>"
    keys = [(r, v) for r in range(rows) for v in range(vectors)]
    lines = [
        f"define void @{product_name(format, rows, lanes, vectors, add)}"
        "(ptr %a, i64 %lda, ptr %b, i64 %ldb, ptr %c, i64 %ldc, i64 %n, i64 %begin, i64 %end) {",
        "entry:",
        *(offset(f"a{r}", "a", "float", "lda", r) for r in range(rows)),
        *(offset(f"c{r}", "c", "float", "ldc", r) for r in range(rows)),
        "br label %columns",
        "columns:",
        "%j = phi i64 [%begin, %entry], [%after, %exit]",
        f"%from = getelementptr {format.llvm}, ptr %b, i64 %j",
    ]
    for r, v in keys:
        lines += [
            f"%cj{r}_{v} = add i64 %j, {v * lanes}",
            f"%cp{r}_{v} = getelementptr float, ptr %c{r}, i64 %cj{r}_{v}",
        ]
        if add:
            lines.append(f"%z{r}_{v} = load {kind}, ptr %cp{r}_{v}, align 4")
    lines += [
        "br label %loop",
        "loop:",
        "%i = phi i64 [0, %columns], [%next, %loop]",
        *(
            f"%s{r}_{v} = phi {kind} [{f'%z{r}_{v}' if add else 'zeroinitializer'}, %columns], [%t{r}_{v}, %loop]"
            for r, v in keys
        ),
        "%line = mul i64 %i, %ldb",
        f"%row = getelementptr {format.llvm}, ptr %from, i64 %line",
    ]
    for v in range(vectors):
        lines += [
            f"%p.w{v} = getelementptr {format.llvm}, ptr %row, i64 {v * lanes}",
            f"%r.w{v} = load <{lanes} x {format.llvm}>, ptr %p.w{v}, align {format.size}",
            *widen(format, f"w{v}", f"%r.w{v}", lanes),
        ]
    for r in range(rows):
        lines += [f"%p.x{r} = getelementptr float, ptr %a{r}, i64 %i", f"%f.x{r} = load float, ptr %p.x{r}"]
        lines += splat(f"x{r}", f"%f.x{r}", "float", lanes)
        for v in range(vectors):
            lines += _fma(lanes, f"t{r}_{v}", f"%x{r}", f"%w{v}", f"%s{r}_{v}")
    lines += [
        "%next = add i64 %i, 1",
        "%done = icmp eq i64 %next, %n",
        "br i1 %done, label %exit, label %loop",
        "exit:",
        *(f"store {kind} %t{r}_{v}, ptr %cp{r}_{v}, align 4" for r, v in keys),
        f"%after = add i64 %j, {lanes * vectors}",
        "%last = icmp sge i64 %after, %end",
        "br i1 %last, label %out, label %columns",
        "out:",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def _fma(lanes: int, name: str, a: str, b: str, c: str) -> Iterator[str]:
    kind = f"<{lanes} x float>"
    if lanes > 1:
        yield f"%{name} = call {kind} @llvm.fma.v{lanes}f32({kind} {a}, {kind} {b}, {kind} {c})"
        return
    for part, vector in (("a", a), ("b", b), ("c", c)):
        yield f"%{part}.{name} = extractelement {kind} {vector}, i32 0"
    yield f"%e.{name} = call float @llvm.fma.f32(float %a.{name}, float %b.{name}, float %c.{name})"
    yield f"%{name} = insertelement {kind} poison, float %e.{name}, i32 0"


def _store(format: Format) -> str:
    return "\n".join(
        [
            f"define void @store_{format.name}(ptr %from, ptr %to, i64 %n, i64 %stride) {{",
            "entry:",
            "br label %loop",
            "loop:",
            "%i = phi i64 [0, %entry], [%next, %loop]",
            "%p = getelementptr float, ptr %from, i64 %i",
            "%x = load float, ptr %p, align 4",
            *_narrow(format),
            "%at = mul i64 %i, %stride",
            f"%o = getelementptr {format.llvm}, ptr %to, i64 %at",
            f"store {format.llvm} %y, ptr %o, align {format.size}",
            "%next = add i64 %i, 1",
            "%done = icmp eq i64 %next, %n",
            "br i1 %done, label %exit, label %loop",
            "exit:",
            "ret void",
            "}",
        ]
    )


def _narrow(format: Format) -> Iterator[str]:
    """%y: the float32 %x, rounded to the nearest that the format has."""
    match format.name:
        case "float32":
            yield "%y = fadd float %x, -0.0"
        case "float16":
            yield f"%low = call float @llvm.minnum.f32(float %x, float {_LARGEST_HALF})"
            yield f"%high = call float @llvm.maxnum.f32(float %low, float -{_LARGEST_HALF})"
            yield "%y = fptrunc float %high to half"
        case _:
            yield "%bits = bitcast float %x to i32"
            yield "%shifted = lshr i32 %bits, 16"
            yield "%odd = and i32 %shifted, 1"
            yield "%bias = add i32 %odd, 32767"
            yield "%rounded = add i32 %bits, %bias"
            yield "%top = lshr i32 %rounded, 16"
            yield "%y = trunc i32 %top to i16"
