"""Numba kernels over one row of logits after another: one thread, the interpreter lock released while they run.

They agree with `reference` token for token. What makes them fast: weights and hashes are computed in blocks that
vectorize, and the exact race (two logarithms a token) is run only by tokens that a cheap bound cannot rule out, about
ten of a vocabulary. Nothing is sorted.

The four entry points name their types, so they are compiled when this module is imported, which takes seconds the
first time on a machine; from then on they come from disk. No request ever waits for the compiler.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from engine.sampling.logprobs import FLOOR
from engine.sampling.noise import GOLDEN, MIX32, MIX32_LAST, MIX64, MIX64_LAST

BLOCK = 256  # tokens of a block: long enough to vectorize, short enough to be skipped

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True}
_FAST: dict[str, Any] = {**_OPTIONS, "fastmath": {"contract", "reassoc", "nsz", "arcp"}}

_GOLDEN = np.uint64(GOLDEN)
(_S64A, _F64A), (_S64B, _F64B), _S64C = *((np.uint64(s), np.uint64(f)) for s, f in MIX64), np.uint64(MIX64_LAST)
(_S1, _F1), (_S2, _F2), (_S3, _F3) = ((np.uint32(shift), np.uint32(factor)) for shift, factor in MIX32)
_S4 = np.uint32(MIX32_LAST)

_LOG2E = 1.4426950408889634
_LOWEST = np.float32(-126.0)  # binary exponent of the smallest normal float32
_SLACK = 1.001 * 2.0**31  # the rounding errors of the bound are far below a thousandth
_ONE = np.int32(0x3F800000)  # float32 1.0


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _mix64(x: Any) -> Any:
    x = (x ^ (x >> _S64A)) * _F64A
    x = (x ^ (x >> _S64B)) * _F64B
    return x ^ (x >> _S64C)


@njit(inline="always", **_OPTIONS)  # type: ignore[untyped-decorator]
def _hash(token: Any, low: Any, high: Any) -> Any:
    """As in `noise.uniforms`; the casts are there because numba widens arithmetic to 64 bits."""
    x = np.uint32(token) ^ low
    x = np.uint32(np.uint32(x ^ (x >> _S1)) * _F1)
    x = np.uint32(np.uint32(np.uint32(x ^ (x >> _S2)) + high) * _F2)
    x = np.uint32(np.uint32(x ^ (x >> _S3)) * _F3)
    return np.uint32(x ^ (x >> _S4))


@njit(inline="always", **_OPTIONS)  # type: ignore[untyped-decorator]
def _order(z: Any) -> Any:
    """An integer in the order of the floats."""
    bits = np.float32(z).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _finish(z: Any, best: Any, temperature: Any, noise: Any) -> Any:
    """E / weight: the token with the smallest wins the race."""
    exponential = -math.log1p(-(np.float64(noise) + 0.5) * 2.0**-32)
    weight = math.exp((np.float64(z) - np.float64(best)) / temperature)
    return exponential / weight if weight > 0 else math.inf


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _weigh(z: Any, best: Any, scale: Any, out: Any) -> None:
    """out = 2 ** ((z − best) · scale) for z ≤ best, to 2 ulp, but never below 2 ** −126."""
    for j in range(out.size):
        y = max((z[j] - best) * scale, _LOWEST)
        n = np.floor(y + np.float32(0.5))
        f = y - n  # in [−½, ½]; the polynomial is the Taylor series of 2**f
        p = np.float32(1.5252733804059840e-5)
        p = p * f + np.float32(1.5403530393381609e-4)
        p = p * f + np.float32(1.3333558146428443e-3)
        p = p * f + np.float32(9.6181291076284772e-3)
        p = p * f + np.float32(5.5504108664821580e-2)
        p = p * f + np.float32(2.4022650695910071e-1)
        p = p * f + np.float32(6.9314718055994531e-1)
        p = p * f + np.float32(1.0)
        out[j] = p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _sum(values: Any) -> Any:
    total = 0.0
    for start in range(0, values.size, BLOCK):
        part: Any = np.float32(0.0)
        block = values[start : start + BLOCK]
        for j in range(block.size):
            part += block[j]
        total += part
    return total


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _maximum(z: Any) -> Any:
    """In integer order: a maximum of floats does not vectorize."""
    top = np.int32(-(2**31))
    for j in range(z.size):
        top = max(top, _order(z[j]))
    return top


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _measure_from(keys: Any, measure: Any, threshold: Any) -> Any:
    """How much of the measure lies at or above a threshold."""
    total = 0.0
    for start in range(0, keys.size, BLOCK):
        part: Any = np.float32(0.0)
        key, amount = keys[start : start + BLOCK], measure[start : start + BLOCK]
        for j in range(key.size):
            part += amount[j] if key[j] >= threshold else np.float32(0.0)
        total += part
    return total


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _narrow(keys: Any, measure: Any, low: Any, high: Any, keys_out: Any, measure_out: Any) -> Any:
    """Copies what lies in [low, high). Returns its size. The arrays may be the same."""
    size = 0
    for start in range(0, keys.size, BLOCK):
        key, amount = keys[start : start + BLOCK], measure[start : start + BLOCK]
        count = np.int32(0)
        for j in range(key.size):
            count += np.int32((key[j] >= low) & (key[j] < high))
        if count > 0:
            for j in range(key.size):
                if low <= key[j] < high:
                    keys_out[size], measure_out[size] = key[j], amount[j]
                    size += 1
    return size


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _threshold(keys: Any, measure: Any, target: Any, low: Any, high: Any, keys_out: Any, measure_out: Any) -> Any:
    """The highest threshold in [low, high) at or above which lies at least `target`; `low` where there is not as much.

    By bisection: exact, ties are kept together, nothing is sorted. Every few steps what is still undecided is copied to
    the scratch `keys_out` and `measure_out`, so only the first steps look at everything.
    """
    decided = 0.0  # the measure of what was left behind above
    low, high = np.int64(low), np.int64(high)
    step = 0
    while low + 1 < high:
        middle = (low + high) >> 1
        if decided + _measure_from(keys, measure, np.int32(middle)) >= target:
            low = middle
        else:
            high = middle
        step += 1
        if step % 6 == 0 and keys.size > BLOCK:
            decided += _measure_from(keys, measure, np.int32(high))
            size = _narrow(keys, measure, np.int32(low), np.int32(high), keys_out, measure_out)
            keys, measure = keys_out[:size], measure_out[:size]
    return np.int32(low)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _gather(z: Any, maxima: Any, cut: Any, ids: Any, values: Any, keys: Any) -> Any:
    """The tokens that reach `cut`, their logits and these in integer order. Returns how many."""
    size = 0
    for b in range(maxima.size):
        if maxima[b] >= cut:
            for i in range(b * BLOCK, min(z.size, (b + 1) * BLOCK)):
                key = _order(z[i])
                if key >= cut:
                    ids[size], values[size], keys[size] = i, z[i], key
                    size += 1
    return size


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _top_k(z: Any, k: Any, ints: Any, floats: Any) -> Any:
    """Puts the k likeliest tokens, and those as likely as the last of them, into scratch. Returns how many.

    Blocks' maxima give a lower bound of the k-th greatest logit, so that only the few blocks that reach it are looked
    at: the k-th greatest of them is one; where there are fewer, the least is usually one too.
    """
    ids, keys, undecided = ints[1], ints[2], ints[3]
    values, measure, ones = floats[0], floats[1], floats[3]
    blocks = -(-z.size // BLOCK)
    maxima = ints[4, :blocks]
    for b in range(blocks):
        maxima[b] = _maximum(z[b * BLOCK : (b + 1) * BLOCK])
    lowest, end = np.int32(-(2**31)), np.int64(maxima.max()) + 1
    cut = np.int32(maxima.min())
    if k <= blocks:
        cut = _threshold(maxima, ones[:blocks], k, lowest, end, undecided, measure)
    size = _gather(z, maxima, cut, ids, values, keys)
    if size < k:
        cut = lowest
        size = _gather(z, maxima, cut, ids, values, keys)
    cut = _threshold(keys[:size], ones[:size], k, cut, end, undecided, measure)
    kept = 0
    for j in range(size):
        if keys[j] >= cut:
            ids[kept], values[kept] = ids[j], values[j]
            kept += 1
    return kept


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _any_contender(ids: Any, weights: Any, floor: Any, low: Any, high: Any, limit: Any) -> Any:
    """Whether some token of a block may finish within `limit`: E = −log(1 − u) ≥ u, so u / weight is a lower bound."""
    bound = np.float32(limit * _SLACK)
    count = np.int32(0)
    for j in range(ids.size):
        u = np.float32(np.int32(_hash(ids[j], low, high) >> np.uint32(1)))
        count += np.int32((u <= bound * weights[j]) & (weights[j] >= floor))
    return count > 0


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _race(
    ids: Any, z: Any, weights: Any, floor: Any, best: Any, temperature: Any, low: Any, high: Any, winner: Any
) -> Any:
    """The token with the smallest E / weight of those that weigh `floor` or more. `winner` is the likeliest."""
    limit = _finish(best, best, temperature, _hash(winner, low, high))
    for start in range(0, ids.size, BLOCK):
        block, weight = ids[start : start + BLOCK], weights[start : start + BLOCK]
        if _any_contender(block, weight, floor, low, high, limit):
            for j in range(block.size):
                noise = _hash(block[j], low, high)
                if weight[j] >= floor and noise <= limit * 2.0 * _SLACK * weight[j]:
                    time = _finish(z[start + j], best, temperature, noise)
                    if time < limit or (time == limit and block[j] < winner):
                        winner, limit = np.int64(block[j]), time
    return winner


@njit(
    "void(f4[:,::1], i8[::1], i8[::1], i8[::1], i8[::1], f8[::1], i8[::1], f8[::1], f8[::1], i4[:,::1], f4[:,::1])",
    **_OPTIONS,
)
def draw(
    logits: Any, tokens: Any, positions: Any, places: Any, seeds: Any, temperature: Any, top_k: Any, top_p: Any,
    min_p: Any, ints: Any, floats: Any,
) -> None:  # fmt: skip
    """`Operations.draw`, with the draws' columns. Scratch: ints [5, V] int32, whose first row counts from 0, and floats
    [4, V] float32, whose last row is ones."""
    everything, ids, undecided = ints[0], ints[1], ints[3]
    values, weights, measure = floats[0], floats[1], floats[2]
    for i in range(places.size):
        place = places[i]
        z, winner = logits[place], tokens[place]
        best = z[winner]
        if not math.isfinite(best):
            continue
        key = _mix64(_mix64(np.uint64(seeds[i]) + _GOLDEN) + np.uint64(positions[place]))
        low, high = np.uint32(key), np.uint32(key >> np.uint64(32))
        contenders, heights = everything, z
        if top_k[i] < z.size:
            size = _top_k(z, top_k[i], ints, floats)
            contenders, heights = ids[:size], values[:size]
        weight = weights[: heights.size]
        _weigh(heights, best, np.float32(_LOG2E / temperature[i]), weight)
        floor = np.float32(min_p[i])
        if top_p[i] < 1:
            order = weight.view(np.int32)
            mass = _measure_from(order, weight, np.float32(floor).view(np.int32))
            # what lies below this is too light for the nucleus, even all of it together
            lightest = np.float32(0.999 * (1.0 - top_p[i]) * mass / heights.size).view(np.int32)
            cut = _threshold(order, weight, top_p[i] * mass, lightest, _ONE + 1, undecided, measure)
            floor = max(floor, np.int32(cut).view(np.float32))
        tokens[place] = _race(contenders, heights, weight, floor, best, temperature[i], low, high, winner)


@njit(**_FAST)  # type: ignore[untyped-decorator]
def _penalize(z: Any, in_prompt: Any, counts: Any, repetition: Any, presence: Any, frequency: Any) -> None:
    for t in range(z.size):
        value, count = z[t], np.float32(counts[t])
        produced = count > np.float32(0.0)
        repeated = value / repetition if value > np.float32(0.0) else value * repetition
        value = repeated if in_prompt[t] | produced else value
        z[t] = value - (frequency * count + (presence if produced else np.float32(0.0)))


@njit("void(f4[:,::1], i8[::1], i8[::1], f4[::1], f4[::1], f4[::1], b1[:,::1], i4[:,::1])", **_OPTIONS)
def penalize(
    logits: Any, places: Any, slots: Any, repetition: Any, presence: Any, frequency: Any, in_prompt: Any, counts: Any
) -> None:
    """`Operations.penalize`, with the penalties' columns."""
    for i in range(places.size):
        slot = slots[i]
        _penalize(logits[places[i]], in_prompt[slot], counts[slot], repetition[i], presence[i], frequency[i])


@njit("void(f4[:,::1], i8[::1], i4[:,::1])", **_OPTIONS)
def mask(logits: Any, places: Any, words: Any) -> None:
    """`Operations.mask`."""
    size = logits.shape[1]
    for i in range(places.size):
        z = logits[places[i]]
        for w in range(words.shape[1]):
            word = words[i, w]
            if word == np.int32(-1):
                continue
            for j in range(w * 32, min(size, w * 32 + 32)):
                if not (word >> np.int32(j & 31)) & np.int32(1):
                    z[j] = -np.float32(np.inf)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _log_total(z: Any, weights: Any) -> Any:
    """log Σ exp z in float64; NaN where no logit is finite, or one is not a number. `weights` is scratch."""
    top = np.int32(-(2**31))
    for start in range(0, z.size, BLOCK):
        top = max(top, _maximum(z[start : start + BLOCK]))
    best = np.int32(_order(np.int32(top).view(np.float32))).view(np.float32)  # the mapping is its own inverse
    if not math.isfinite(best):
        return math.nan
    total = 0.0
    for start in range(0, z.size, BLOCK):
        block = weights[: min(BLOCK, z.size - start)]
        _weigh(z[start : start + BLOCK], best, np.float32(_LOG2E), block)
        total += _sum(block)
    return best + math.log(total)


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _likeliest(z: Any, ids: Any, orders: Any) -> None:
    """Fills `ids` [count] with the greatest logits' tokens, greatest first, the lower of equals first."""
    filled, last = 0, ids.size - 1
    for start in range(0, z.size, BLOCK):
        block = z[start : start + BLOCK]
        if filled > last and _maximum(block) <= orders[last]:
            continue
        for j in range(block.size):
            order = _order(block[j])
            if filled <= last or order > orders[last]:
                at = min(filled, last)
                filled = min(filled + 1, last + 1)
                while at > 0 and orders[at - 1] < order:
                    ids[at], orders[at] = ids[at - 1], orders[at - 1]
                    at -= 1
                ids[at], orders[at] = start + j, order


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _logprob(z: Any, log_total: Any) -> Any:
    value = np.float64(z) - log_total
    return np.float32(max(value, FLOOR)) if value <= 0 or value > 0 else np.float32(FLOOR)


@njit("void(f4[:,::1], i8[::1], i8[::1], f4[::1], i8[:,::1], f4[:,::1], i4[::1], f4[::1])", **_OPTIONS)
def logprobs(
    logits: Any, places: Any, chosen: Any, chosen_out: Any, top_ids: Any, top_out: Any, orders: Any, weights: Any
) -> None:
    """`Operations.logprobs`. Scratch: orders [top] int32, weights [BLOCK] float32."""
    count = top_ids.shape[1]
    for i in range(places.size):
        z = logits[places[i]]
        log_total = _log_total(z, weights)
        chosen_out[i] = _logprob(z[chosen[i]], log_total)
        if count > 0:
            _likeliest(z, top_ids[i], orders)
            for j in range(count):
                top_out[i, j] = _logprob(z[top_ids[i, j]], log_total)
