"""The operations of a tape, as numba compiles them. Every thread of a team calls each of them; they share the work
by claiming pieces from a counter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import (  # type: ignore[attr-defined]
    carray,
    njit,
)

from engine.native import tape as t
from engine.native.attention import MAX_LINES, attend_segment, finish, fold, segment_size
from engine.native.block_tiles import LEVELS, MAX_ROWS
from engine.native.formats import GROUP as _GROUP
from engine.native.functions import activate, cap, silu
from engine.native.intrinsics import call_reader, call_tile, fetch_add, float32_at, int16_at, int32_at, int64_at

PANELS = 4  # of one claim
BAND = 16  # tiles' height of one claim
_FLOAT = 4  # bytes

_compiled = njit(nogil=True)


@_compiled
def claim(step: Any, line: int) -> int:
    """The next piece of an operation that nobody has taken."""
    return fetch_add(step[t.CLAIMS] + 8 * line, 1)  # type: ignore[call-arg]  # numba hands the context over


@_compiled
def embed(op: Any, floats: Any, step: Any, line: int) -> None:
    tokens = carray(int64_at(step[t.TOKEN_IDS]), step[t.TOKENS])
    scale, columns, size = floats[0], max(1, op[t.COLUMNS]), op[t.IN]
    token = claim(step, line)
    while token < tokens.size:
        out = op[t.C] + token * op[t.LDC] * _FLOAT
        source = op[t.WEIGHT] + tokens[token] // columns * op[t.ROW_BYTES]
        call_reader(op[t.READER], (source, tokens[token] % columns, out, size))
        if scale != 1:
            row = carray(float32_at(out), size)
            for i in range(size):
                row[i] *= scale
        token = claim(step, line)


@njit(nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _square_sum(row: Any) -> Any:
    total = np.float32(0.0)
    for i in range(row.size):
        total += row[i] * row[i]
    return total


@njit(nogil=True)
def _normalize(row: Any, weight: Any, epsilon: Any, out: Any) -> None:
    scale = np.float32(1.0) / np.sqrt(_square_sum(row) / np.float32(row.size) + epsilon)
    for i in range(row.size):
        out[i] = row[i] * scale * weight[i]


@njit(nogil=True, fastmath={"contract", "nsz"})
def _quantize(row: Any, limit: int, filled: int, address: int) -> None:
    """The record of a row for integer tiles, `filled` numbers long (a multiple of 32), at an address."""
    groups = filled // _GROUP
    floats = carray(float32_at(address), 1 + groups)
    numbers = carray(int16_at(address + (_FLOAT * (1 + groups) + 63) // 64 * 64), filled)
    top = np.float32(1e-30)
    for i in range(row.size):
        top = max(top, abs(row[i]))
    floats[0] = top / np.float32(limit)
    scale = np.float32(limit) / top
    for i in range(row.size):
        numbers[i] = np.int16(np.floor(row[i] * scale + np.float32(0.5)))
    numbers[row.size :] = 0
    for g in range(groups):
        total = np.int32(0)
        for i in range(g * _GROUP, (g + 1) * _GROUP):
            total += np.int32(numbers[i])
        floats[1 + g] = np.float32(total)


@_compiled
def norm(op: Any, floats: Any, step: Any, line: int, scratch: Any) -> None:
    size = op[t.IN]
    weight = carray(float32_at(op[t.WEIGHT]), size)
    rows = step[t.LOGITS] if op[t.OF_LOGITS] else step[t.TOKENS]
    index = carray(int64_at(step[t.LOGITS_INDEX]), step[t.LOGITS])
    r = claim(step, line)
    while r < rows:
        source = index[r] if op[t.OF_LOGITS] else r
        row = carray(float32_at(op[t.A] + source * op[t.LDA] * _FLOAT), size)
        to = op[t.C] + r * op[t.LDC] * _FLOAT
        if op[t.LIMIT] == 0:
            _normalize(row, weight, floats[0], carray(float32_at(to), size))
        elif op[t.WEIGHT]:
            normed = scratch[:size]
            _normalize(row, weight, floats[0], normed)
            _quantize(normed, op[t.LIMIT], op[t.FILLED], to)
        else:
            _quantize(row, op[t.LIMIT], op[t.FILLED], to)
        r = claim(step, line)


@_compiled
def add(op: Any, floats: Any, step: Any, line: int, scratch: Any) -> None:
    size, rows = op[t.IN], step[t.TOKENS]
    weight = carray(float32_at(op[t.WEIGHT]), size)
    r = claim(step, line)
    while r < rows:
        row = carray(float32_at(op[t.A] + r * op[t.LDA] * _FLOAT), size)
        out = carray(float32_at(op[t.C] + r * op[t.LDC] * _FLOAT), size)
        if op[t.WEIGHT]:
            normed = scratch[:size]
            _normalize(row, weight, floats[0], normed)
            _add_scaled(normed, floats[1], out)
        else:
            _add_scaled(row, floats[1], out)
        r = claim(step, line)


@njit(nogil=True, fastmath={"contract"})
def _add_scaled(row: Any, scale: Any, out: Any) -> None:
    for i in range(row.size):
        out[i] += row[i] * scale


@_compiled
def cap_logits(op: Any, floats: Any, step: Any, line: int) -> None:
    r = claim(step, line)
    while r < step[t.LOGITS]:
        row = carray(float32_at(op[t.C] + r * op[t.LDC] * _FLOAT), op[t.IN])
        for i in range(row.size):
            row[i] *= floats[0]
        if floats[1] > 0:
            cap(row, floats[1])
        r = claim(step, line)


@_compiled
def _tiles(op: Any, first: int, rows: int, panel: int, panels: int, c: int, ldc: int) -> None:
    """`panels` panels from `panel` on, for `rows` rows from `first` on, to the address `c`."""
    tiles = carray(int64_at(op[t.TILES]), (rows + 1, 3))
    a = op[t.A] + first * op[t.LDA]
    init = op[t.INIT] + first * op[t.LDI] * _FLOAT
    width = tiles[0, 0]
    wide, done = tiles[rows, 0], 0
    while done < panels:
        some = wide if done + wide <= panels else 1
        function = tiles[rows, 2] if some == wide else tiles[rows, 1]
        at = panel + done
        call_tile(
            function,
            (
                a, op[t.LDA], op[t.WEIGHT] + at * op[t.PANEL], op[t.PANEL],
                init + at * width * _FLOAT, op[t.LDI],
                c + done * width * _FLOAT, ldc, op[t.IN],
            ),
        )  # fmt: skip
        done += some


@_compiled
def linear(op: Any, step: Any, line: int, scratch: Any) -> None:
    rows = step[t.LOGITS] if op[t.OF_LOGITS] else step[t.TOKENS]
    if rows == 0:
        return
    heads = carray(int64_at(op[t.TILES]), 3)
    width, most = heads[0], heads[1]
    bands = -(-rows // (most * BAND))
    height = -(-rows // bands)
    groups = -(-op[t.PANELS] // PANELS)
    piece = claim(step, line)
    while piece < bands * groups:
        band, group = piece // groups, piece % groups
        begin, end = band * height, min(rows, (band + 1) * height)
        panel = group * PANELS
        panels = min(PANELS, op[t.PANELS] - panel)
        blocks = -(-(end - begin) // most)
        for b in range(blocks):
            first = begin + (end - begin) * b // blocks
            count = begin + (end - begin) * (b + 1) // blocks - first
            if op[t.KIND] == t.LINEAR:
                _tiles(
                    op, first, count, panel, panels, op[t.C] + (first * op[t.LDC] + panel * width) * _FLOAT, op[t.LDC]
                )
            else:
                _tiles(op, first, count, panel, panels, scratch.ctypes.data, PANELS * width)
                _gate(op, first, count, panel, panels, width, scratch)
        piece = claim(step, line)


@_compiled
def _gate(op: Any, first: int, count: int, panel: int, panels: int, width: int, products: Any) -> None:
    for r in range(count):
        for pair in range(panels // 2):
            at = op[t.C] + ((first + r) * op[t.LDC] + (panel // 2 + pair) * width) * _FLOAT
            out = carray(float32_at(at), width)
            begin = r * PANELS * width + 2 * pair * width
            gates = products[begin : begin + width]
            ups = products[begin + width : begin + 2 * width]
            if op[t.ACTIVATION] == t.SILU:
                for j in range(width):
                    out[j] = silu(gates[j]) * ups[j]
            else:
                for j in range(width):
                    out[j] = activate(gates[j], op[t.ACTIVATION]) * ups[j]


@_compiled
def _rotate_head(head: Any, cos: Any, sin: Any, half: int) -> None:
    for i in range(half):
        low, high = head[i], head[half + i]
        head[i] = low * cos[i] - high * sin[i]
        head[half + i] = high * cos[i] + low * sin[i]


@_compiled
def rotate(op: Any, floats: Any, step: Any, line: int) -> None:
    heads, kv_heads, dim, half = op[t.HEADS], op[t.KV_HEADS], op[t.DIM], op[t.ROTARY] // 2
    positions = carray(int64_at(step[t.POSITIONS]), step[t.TOKENS])
    slots = carray(int64_at(step[t.SLOTS]), step[t.TOKENS])
    tiles, keys, values, _, size = _layer_cache(op, step)
    number, store = tiles[0, 0, 0, 0], tiles[0, 0, 0, 1]
    value_dim, both = op[t.VALUE_DIM], heads + kv_heads
    token = claim(step, line)
    while token < positions.size:
        at = op[t.QKV] + token * op[t.LDQ] * _FLOAT
        row = carray(float32_at(at), (both, dim))
        cos = carray(float32_at(op[t.COS] + positions[token] * half * _FLOAT), half)
        sin = carray(float32_at(op[t.SIN] + positions[token] * half * _FLOAT), half)
        block, offset = slots[token] // size, slots[token] % size
        for h in range(both):
            weight = op[t.Q_NORM] if h < heads else op[t.K_NORM]
            if weight:
                _normalize(row[h], carray(float32_at(weight), dim), floats[1], row[h])
            if op[t.COS]:
                _rotate_head(row[h], cos, sin, half)
        for h in range(heads):
            for d in range(dim):
                row[h, d] *= floats[0]
        for h in range(kv_heads):
            place = block * kv_heads + h
            entry = keys + (place * dim * size + offset) * number
            call_reader(store, (at + (heads + h) * dim * _FLOAT, entry, dim, size))
            entry = values + (place * size + offset) * value_dim * number
            call_reader(store, (at + (both * dim + h * value_dim) * _FLOAT, entry, value_dim, 1))
        token = claim(step, line)


@_compiled
def _load_rows(op: Any, tile: Any, head: int, rows: Any) -> None:
    """The tile's queries for one kv head: `group` heads of each of its tokens."""
    group, dim = op[t.HEADS] // op[t.KV_HEADS], op[t.DIM]
    for i in range(tile[2]):
        at = op[t.QKV] + ((tile[1] + i) * op[t.LDQ] + head * group * dim) * _FLOAT
        source = carray(float32_at(at), (group, dim))
        for g in range(group):
            for d in range(dim):
                rows[i * group + g, d] = source[g, d]


@_compiled
def _write_rows(op: Any, tile: Any, head: int, result: tuple[Any, Any, Any]) -> None:
    sums, tops, totals = result
    heads, dim = op[t.HEADS], op[t.VALUE_DIM]
    group = heads // op[t.KV_HEADS]
    for r in range(tile[2] * group):
        query_head = head * group + r % group
        out = carray(float32_at(op[t.OUT] + ((tile[1] + r // group) * op[t.LDO] + query_head * dim) * _FLOAT), dim)
        sink = carray(float32_at(op[t.SINKS]), heads)[query_head] if op[t.SINKS] else np.float32(0.0)
        finish(sums[r], tops[r], totals[r], sink, op[t.SINKS] != 0, out)


@_compiled
def _layer_cache(op: Any, step: Any) -> tuple[Any, int, int, int, int]:
    """The table of block tiles, addresses of a layer's keys [blocks, kv_heads, dim, size] and values [blocks,
    kv_heads, size, value_dim], its kv heads, tokens of a block."""
    tiles = carray(int64_at(step[t.BLOCK_TILES]), (2, MAX_ROWS + 1, LEVELS, 2))
    layer = op[t.LAYER]
    keys = carray(int64_at(step[t.KEYS]), layer + 1)[layer]
    values = carray(int64_at(step[t.VALUES]), layer + 1)[layer]
    return tiles, keys, values, op[t.KV_HEADS], step[t.BLOCK_SIZE]


@_compiled
def _reach(op: Any, tile: Any, width: int) -> tuple[int, int]:
    """The first and the last segment that a tile's queries see."""
    first = max(0, tile[3] + 1 - op[t.WINDOW]) // width if op[t.WINDOW] else 0
    return first, (tile[3] + tile[2] - 1) // width


@_compiled
def attend(op: Any, floats: Any, step: Any, line: int, scratch: Any) -> None:
    """Each piece is a tile of queries and a kv head, or, where there are few of those, one segment for them."""
    kv_heads, dim, window, softcap = op[t.KV_HEADS], op[t.VALUE_DIM], op[t.WINDOW], floats[0]
    group, width, segments = op[t.HEADS] // kv_heads, segment_size(step[t.BLOCK_SIZE]), step[t.SEGMENTS]
    cache = _layer_cache(op, step)
    tiles = carray(int32_at(step[t.TILE_LIST]), (step[t.TILE_COUNT], 4))
    lines = max(MAX_LINES, group)
    at = lines * op[t.DIM]
    rows = scratch[:at].reshape(lines, op[t.DIM])
    sums, more = _result(scratch[at:], lines, dim), _result(scratch[at + lines * (dim + 2) :], lines, dim)
    begin = at + 2 * lines * (dim + 2)
    scores = scratch[begin : begin + lines * width].reshape(lines, width)
    parts = max(1, segments)
    piece = claim(step, line)
    while piece < tiles.shape[0] * kv_heads * parts:
        unit, part = piece // parts, piece % parts
        tile, head = tiles[unit // kv_heads], unit % kv_heads
        table = carray(int32_at(step[t.TABLES] + tile[0] * step[t.TABLE_WIDTH] * 4), step[t.TABLE_WIDTH])
        first, last = _reach(op, tile, width)
        if segments == 0:
            _load_rows(op, tile, head, rows)
            for s in range(first, last + 1):
                into = sums if s == first else more
                attend_segment(rows, group, tile, s, head, window, softcap, table, cache, scores, into)
                if s > first:
                    fold(tile[2] * group, sums, more)
            _write_rows(op, tile, head, sums)
        elif first <= part <= last:
            _load_rows(op, tile, head, rows)
            into = _result(_partial(step, piece, lines, dim), lines, dim)
            attend_segment(rows, group, tile, part, head, window, softcap, table, cache, scores, into)
        piece = claim(step, line)


@_compiled
def _result(memory: Any, lines: int, dim: int) -> tuple[Any, Any, Any]:
    """Sums [lines, dim], greatest scores [lines] and totals [lines], one after the other."""
    at = lines * dim
    return memory[:at].reshape(lines, dim), memory[at : at + lines], memory[at + lines : at + 2 * lines]


@_compiled
def _partial(step: Any, piece: int, lines: int, dim: int) -> Any:
    size = lines * (dim + 2)
    return carray(float32_at(step[t.PARTIALS] + piece * size * _FLOAT), size)


@_compiled
def combine(op: Any, step: Any, line: int) -> None:
    """Puts together what the segments of a tile gave, where they were computed apart."""
    segments, kv_heads, dim = step[t.SEGMENTS], op[t.KV_HEADS], op[t.VALUE_DIM]
    if segments == 0:
        return
    width, group = segment_size(step[t.BLOCK_SIZE]), op[t.HEADS] // kv_heads
    lines = max(MAX_LINES, group)
    tiles = carray(int32_at(step[t.TILE_LIST]), (step[t.TILE_COUNT], 4))
    unit = claim(step, line)
    while unit < tiles.shape[0] * kv_heads:
        tile = tiles[unit // kv_heads]
        first, last = _reach(op, tile, width)
        into = _result(_partial(step, unit * segments + first, lines, dim), lines, dim)
        for s in range(first + 1, last + 1):
            fold(tile[2] * group, into, _result(_partial(step, unit * segments + s, lines, dim), lines, dim))
        _write_rows(op, tile, unit % kv_heads, into)
        unit = claim(step, line)
