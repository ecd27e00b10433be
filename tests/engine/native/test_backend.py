"""Every backend equals the reference, whatever the batch looks like; the reference equals a softmax written out."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.cache import KVCache, LayerShape
from engine.attention.interface import Backend
from engine.attention.reference import ReferenceBackend, attend_dense
from engine.model.batch import Batch
from engine.model.probe import make_batch
from engine.native.backend import NativeBackend
from engine.native.team import Team

CPU = torch.device("cpu")
TEAM = Team(2)


def native(kv_heads: int, group: int, key_dim: int, value_dim: int, team: Team = TEAM) -> NativeBackend:
    return NativeBackend(team, [kv_heads * group], [LayerShape(kv_heads, key_dim, value_dim)])


@dataclass(frozen=True)
class Case:
    """Query tokens and context length of each sequence, and the layer's geometry."""

    sequences: tuple[tuple[int, int], ...]
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32  # of the cache


def batch_of(case: Case, seed: int) -> tuple[Batch, int]:
    """The batch, its blocks in a shuffled order, and how many blocks a cache for it needs."""
    draw = random.Random(seed)
    counts = [-(-context // case.block_size) for _, context in case.sequences]
    free = draw.sample(range(1, sum(counts) + 1), sum(counts))
    tables = [[free.pop() for _ in range(count)] for count in counts]
    chunks = [[0] * query for query, _ in case.sequences]
    begins = [context - query for query, context in case.sequences]
    return make_batch(chunks, begins, tables, case.block_size, CPU), sum(counts) + 1


def both(case: Case, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, KVCache, KVCache]:
    """The reference's output and the fast one's over caches with the same past, and both caches after."""
    torch.manual_seed(seed)
    batch, blocks = batch_of(case, seed)
    shape = LayerShape(case.kv_heads, case.key_dim, case.value_dim)
    caches = [KVCache([shape], blocks, case.block_size, case.dtype, CPU) for _ in range(2)]
    caches[0].keys[0].normal_()
    caches[0].values[0].normal_()
    caches[1].keys[0].copy_(caches[0].keys[0])
    caches[1].values[0].copy_(caches[0].values[0])
    tokens, heads = batch.token_ids.numel(), case.kv_heads * case.group
    query, key, value = (
        torch.randn(1, tokens, n, dim).transpose(1, 2)[0]
        for n, dim in ((heads, case.key_dim), (case.kv_heads, case.key_dim), (case.kv_heads, case.value_dim))
    )
    sinks = torch.randn(heads) if case.sinks else None
    outputs = []
    fast = native(case.kv_heads, case.group, case.key_dim, case.value_dim)
    backends: list[Backend] = [ReferenceBackend(), fast]
    for backend, cache in zip(backends, caches, strict=True):
        backend.begin(batch, cache)
        outputs.append(backend.attend(0, query, key, value, case.key_dim**-0.5, case.window, case.softcap, sinks))
    return outputs[0], outputs[1], caches[0], caches[1]


def assert_equal(case: Case, seed: int = 0) -> None:
    expected, found, cache, other = both(case, seed)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.keys[0], other.keys[0])
    assert torch.equal(cache.values[0], other.values[0])


CASES = {
    "one token of context": Case(((1, 1),)),
    "one row": Case(((1, 200),)),
    "33 rows": Case(tuple((1, 1 + 7 * i) for i in range(33))),
    "block edges": Case(tuple((1, n) for n in (15, 16, 17, 31, 32, 33))),
    "chunks at block edges": Case(((16, 16), (17, 32), (1, 16), (15, 48), (3, 17))),
    "a chunk longer than a tile": Case(((70, 70), (41, 300))),
    "rows and chunks": Case(((1, 90), (30, 64), (1, 5), (2, 2))),
    "window": Case(((1, 90), (30, 64), (1, 5)), window=8),
    "window of one token": Case(((1, 40), (9, 30)), window=1),
    "window across tiles": Case(((100, 400),), window=64),
    "soft cap": Case(((1, 90), (30, 64)), softcap=2.0),
    "sinks": Case(((1, 90), (30, 64), (1, 1)), sinks=True),
    "all at once": Case(((1, 90), (30, 64)), window=20, softcap=5.0, sinks=True),
    "no grouping": Case(((1, 50), (20, 30)), group=1),
    "groups of five": Case(((1, 50), (20, 30)), group=5),
    "one kv head": Case(((1, 50), (20, 30)), kv_heads=1, group=8),
    "float16": Case(((1, 90), (30, 64), (1, 5)), dtype=torch.float16),
    "bfloat16": Case(((1, 90), (30, 64), (1, 5)), window=20, sinks=True, dtype=torch.bfloat16),
    "unequal dims in float16": Case(((1, 50), (20, 30)), key_dim=24, value_dim=16, dtype=torch.float16),
    "unequal dims": Case(((1, 50), (20, 30)), key_dim=24, value_dim=16),
    "wide values": Case(((1, 50), (20, 30)), key_dim=64, value_dim=208),
    "odd dims": Case(((1, 50), (20, 30)), key_dim=5, value_dim=19),
}


@pytest.mark.parametrize("name", CASES)
def test_the_native_backend_equals_the_reference(name: str) -> None:
    assert_equal(CASES[name])


@pytest.mark.parametrize("block_size", [1, 8, 32, 48])
@pytest.mark.parametrize("dim", [32, 64, 80, 128])
def test_the_native_backend_equals_the_reference_at_every_geometry(block_size: int, dim: int) -> None:
    assert_equal(Case(((1, 90), (30, 64), (1, 5)), block_size=block_size, key_dim=dim, value_dim=dim, group=3))


def test_a_context_longer_than_a_tile_of_scores_is_attended_to_in_full() -> None:
    assert_equal(Case(((1, 40_000), (3, 33_000)), group=2))


sequence = st.tuples(st.integers(1, 60), st.integers(0, 120)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(sequence, min_size=1, max_size=6), st.sampled_from([0, 1, 5, 16, 64]), st.sampled_from([0.0, 3.0]),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_any_batch_gives_what_the_reference_gives(
    sequences: list[tuple[int, int]], window: int, softcap: float, sinks: bool, seed: int
) -> None:
    assert_equal(Case(tuple(sequences), window=window, softcap=softcap, sinks=sinks), seed)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_scores_of_any_size_keep_their_softmax(scale: float) -> None:
    case = Case(((1, 70), (5, 20)))
    torch.manual_seed(0)
    batch, blocks = batch_of(case, 0)
    query, key, value = (torch.randn(n, 6, 16) for n in (4, 2, 2))
    outputs = []
    for backend in (ReferenceBackend(), native(2, 2, 16, 16)):
        cache = KVCache([LayerShape(2, 16, 16)], blocks, 16, torch.float32, CPU)
        backend.begin(batch, cache)
        outputs.append(backend.attend(0, query * scale, key, value, 1.0, 0, 0.0, None))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "softcap", "sinks"), [(0, 0.0, False), (2, 0.0, False), (0, 1.5, True)])
def test_the_reference_is_the_softmax_written_out(window: int, softcap: float, sinks: bool) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 3, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    sink = torch.randn(2) if sinks else None
    found = attend_dense(query, key, value, 0.5, window, softcap, sink)
    for head in range(2):
        for i in range(3):
            at = 2 + i
            seen = range(max(0, at - window + 1) if window else 0, at + 1)
            scores = [float(query[head, i] @ key[0, j]) * 0.5 for j in seen]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            total = sum(map(math.exp, scores)) + (math.exp(float(sink[head])) if sink is not None else 0.0)
            expected = sum((math.exp(s) / total) * value[0, j] for s, j in zip(scores, seen, strict=True))
            torch.testing.assert_close(found[i, head], expected, rtol=1e-5, atol=1e-6)


def test_layers_may_differ_in_shape() -> None:
    shapes, heads = [LayerShape(2, 16, 16), LayerShape(1, 24, 8)], [4, 5]
    torch.manual_seed(0)
    batch, blocks = batch_of(Case(((1, 90), (30, 64))), 0)
    outputs: list[list[torch.Tensor]] = []
    for backend in (ReferenceBackend(), NativeBackend(TEAM, heads, shapes)):
        torch.manual_seed(1)
        cache = KVCache(shapes, blocks, 16, torch.float32, CPU)
        backend.begin(batch, cache)
        outputs.append([])
        for layer, (shape, h) in enumerate(zip(shapes, heads, strict=True)):
            sizes = ((h, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim))
            query, key, value = (torch.randn(n, batch.token_ids.numel(), dim) for n, dim in sizes)
            outputs[-1].append(backend.attend(layer, query, key, value, 0.2, 0, 0.0, None))
    for found, expected in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_context_is_not_changed_by_its_neighbours() -> None:
    """Row-wise: the same sequence alone and among others gives the same bits."""
    case = Case(((1, 90), (30, 64), (1, 33)))
    torch.manual_seed(0)
    batch, blocks = batch_of(case, 0)
    query, key, value = (torch.randn(n, 32, 16) for n in (4, 2, 2))
    cache = KVCache([LayerShape(2, 16, 16)], blocks, 16, torch.float32, CPU)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    backend = native(2, 2, 16, 16)
    backend.begin(batch, cache)
    together = backend.attend(0, query, key, value, 0.25, 0, 0.0, None)
    row = batch.block_tables[2].tolist()
    alone = make_batch([[0]], [32], [row], 16, CPU)
    backend.begin(alone, cache)
    assert torch.equal(
        backend.attend(0, query[:, 31:], key[:, 31:], value[:, 31:], 0.25, 0, 0.0, None)[0], together[31]
    )
