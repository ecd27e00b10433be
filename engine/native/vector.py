"""Register tiles for the attention kernels, written in LLVM's vector types because loops did not become them.

Numba's loops over small constant lengths vectorize, but reload their accumulators and check for aliasing on every
entry. Here the accumulators are registers by construction: 17 GFLOP/s became 60 on one core of a Zen 4. LLVM lowers a
vector of sixteen floats to whatever the machine has.

Operands are C-contiguous float32 arrays with an offset and strides in elements; nothing checks bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.core.extending import intrinsic
from numba.np.arrayobj import make_array

LANES = 16
ROWS = 4
VECTORS = 4

_FLOAT = ir.FloatType()
_CONTRACT = ("contract",)  # a · b + c may be one rounding, nothing else is loosened


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    view = make_array(array_type)(context, builder, array)  # type: ignore[no-untyped-call]
    return builder.gep(view.data, [offset])


def _load(builder: Any, pointer: Any, lanes: int) -> Any:
    vector = builder.bitcast(pointer, ir.VectorType(_FLOAT, lanes).as_pointer())
    return builder.load(vector, align=4)


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _splat(builder: Any, scalar: Any, lanes: int) -> Any:
    zero = ir.Constant(ir.IntType(32), 0)
    vector = builder.insert_element(ir.Constant(ir.VectorType(_FLOAT, lanes), ir.Undefined), scalar, zero)
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(vector, vector, mask)


def _multiply_add(builder: Any, a: Any, b: Any, slot: Any) -> None:
    product = builder.fmul(a, b, flags=_CONTRACT)
    builder.store(builder.fadd(builder.load(slot), product, flags=_CONTRACT), slot)


def _make_product(rows: int, vectors: int, lanes: int, accumulate: bool) -> Any:
    """An intrinsic for out[r, j] (+)= Σᵢ a[r, i] · b[i, j] with i < n, r < `rows`, j < `vectors` · `lanes`."""

    @intrinsic
    def product(
        typing: Any, n: Any, a: Any, a_at: Any, a_stride: Any, b: Any, b_at: Any, b_stride: Any,
        out: Any, out_at: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        integer = types.int64
        signature = types.void(integer, a, integer, integer, b, integer, integer, out, integer, integer)

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            n, a, a_at, a_stride, b, b_at, b_stride, out, out_at, out_stride = values
            vector = ir.VectorType(_FLOAT, lanes)
            a_data = _pointer(context, builder, signature.args[1], a, a_at)
            b_data = _pointer(context, builder, signature.args[4], b, b_at)
            out_data = _pointer(context, builder, signature.args[7], out, out_at)

            def row(data: Any, stride: Any, r: int) -> Any:
                return builder.gep(data, [builder.mul(stride, ir.Constant(n.type, r))])

            def column(line: Any, v: int) -> Any:
                return builder.gep(line, [ir.Constant(n.type, v * lanes)])

            at = {(r, v): column(row(out_data, out_stride, r), v) for r in range(rows) for v in range(vectors)}
            slots = {key: cgutils.alloca_once(builder, vector) for key in at}  # type: ignore[no-untyped-call]
            for key, slot in slots.items():
                start = _load(builder, at[key], lanes) if accumulate else ir.Constant(vector, [0.0] * lanes)
                builder.store(start, slot)
            with cgutils.for_range(builder, n) as loop:
                line = builder.gep(b_data, [builder.mul(loop.index, b_stride)])
                b_vectors = [_load(builder, column(line, v), lanes) for v in range(vectors)]
                for r in range(rows):
                    number = builder.load(builder.gep(row(a_data, a_stride, r), [loop.index]))
                    weight = _splat(builder, number, lanes)
                    for v in range(vectors):
                        _multiply_add(builder, weight, b_vectors[v], slots[r, v])
            for key, slot in slots.items():
                _store(builder, builder.load(slot), at[key])
            return context.get_dummy_value()

        return signature, codegen

    return product


# Named one by one, because numba finds an intrinsic through a module's global.
score_rows = _make_product(ROWS, 1, LANES, accumulate=False)
score_row = _make_product(1, 1, LANES, accumulate=False)
score_rows_scalar = _make_product(ROWS, 1, 1, accumulate=False)
score_row_scalar = _make_product(1, 1, 1, accumulate=False)
sum_rows = _make_product(ROWS, VECTORS, LANES, accumulate=True)
sum_row = _make_product(1, VECTORS, LANES, accumulate=True)
sum_rows_narrow = _make_product(ROWS, 1, LANES, accumulate=True)
sum_row_narrow = _make_product(1, 1, LANES, accumulate=True)
sum_rows_scalar = _make_product(ROWS, 1, 1, accumulate=True)
sum_row_scalar = _make_product(1, 1, 1, accumulate=True)


def _make_prefetch() -> Any:
    @intrinsic
    def prefetch(typing: Any, array: Any, at: Any) -> Any:
        """Asks for the cache line of array element `at`, to be read soon."""

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            pointer = _pointer(context, builder, signature.args[0], *values)
            byte_pointer = builder.bitcast(pointer, ir.IntType(8).as_pointer())
            number = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte_pointer.type, number, number, number])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
            builder.call(function, [byte_pointer, *(ir.Constant(number, value) for value in _READ_KEEP_DATA)])
            return context.get_dummy_value()

        return types.void(array, types.int64), codegen

    return prefetch


_READ_KEEP_DATA = (0, 3, 1)
prefetch = _make_prefetch()
