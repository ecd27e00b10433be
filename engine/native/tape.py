"""The words of a tape: which operations there are, and where their operands stand.

A tape is an int64 array with one line per operation of a forward pass, read by every thread of a team in the same
order. It holds addresses, sizes and strides (in elements, but LDA of products in bytes), and is made once. What
changes from step to step stands in the step record.
"""

from __future__ import annotations

WIDTH = 20  # numbers of a line
FLOATS = 4  # float32 constants of a line

# Operations. Operands are named by their index in the line.
EMBED, NORM, LINEAR, GATED, ROTATE, ATTEND, COMBINE, ADD, CAP = range(9)
NAMES = ("embed", "norm", "linear", "gated", "rotate", "attend", "combine", "add", "cap")

KIND = 0

# LINEAR and GATED: c = init + a · weight; GATED: c = act(a · gate) * (a · up), panels of gate and up taking turns.
A, LDA, WEIGHT, PANEL, PANELS, IN, INIT, LDI, C, LDC, TILES, OF_LOGITS, ACTIVATION = range(1, 14)
SILU, GELU_TANH, GELU = range(3)

# EMBED: c[t] = row `token` of a table, times floats[0]. READER: the function that reads it; COLUMNS: outputs of a
# panel of the table, 0 for plain rows; ROW_BYTES: of a panel or a row. Shares C, LDC, WEIGHT, IN with LINEAR.
READER, COLUMNS, ROW_BYTES = 1, 2, 4

# NORM: c = a / rms(a) * weight, or a where WEIGHT is 0; floats[0]: epsilon. LIMIT > 0: c is the record of a row for
# integer tiles, FILLED numbers long. Of the rows whose logits are wanted where OF_LOGITS is 1.
LIMIT, FILLED = 7, 8

# ADD: c += floats[1] * a, or a's RMS norm where WEIGHT is not 0; floats[0]: epsilon. Shares A, LDA, WEIGHT, IN, C, LDC.
# CAP: rows of logits, c = c * floats[0], and where floats[1] > 0 c = floats[1] * tanh(c / floats[1]). C, LDC, IN.

# ROTATE: rotary embedding of queries and keys, in place, and the cache's new entries.
# QKV: [T, LDQ], in each row heads and kv_heads of DIM numbers, then kv_heads of VALUE_DIM. COS, SIN:
# [positions, ROTARY / 2], 0 for none. Q_NORM, K_NORM: [dim] or 0.
# floats[0]: what queries are multiplied by; floats[1]: epsilon.
QKV, HEADS, KV_HEADS, DIM, LAYER, COS, SIN, ROTARY, Q_NORM, K_NORM = range(1, 11)

# ATTEND: OUT [T, LDO], in each row heads of VALUE_DIM numbers. WINDOW: tokens that a query sees, 0 for all.
# SINKS: [heads] or 0. floats[0]: soft cap.
OUT, WINDOW, SINKS, VALUE_DIM, LDQ, LDO = range(11, 17)

# The step record. TIMES: where each line's nanoseconds are added up, 0 for nowhere; CLOCK: room for a time.
(
    TOKENS, LOGITS, TOKEN_IDS, POSITIONS, SLOTS, LENGTHS, TABLES, TABLE_WIDTH, LOGITS_INDEX, KEYS, VALUES,
    BLOCK_SIZE, TILE_LIST, TILE_COUNT, SEGMENTS, PARTIALS, CLAIMS, BARRIER, THREADS, LINES, CONSTANTS,
    COUNT, BLOCK_TILES, TIMES, CLOCK,
) = range(25)  # fmt: skip
STEP_WIDTH = 27  # the clock takes two numbers more than its field
