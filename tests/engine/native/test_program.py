"""Operations of a tape against plain torch, and the promise that a row's result is its own, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine.attention.cache import KVCache, LayerShape
from engine.attention.reference import attend_dense
from engine.model.probe import make_batch
from engine.native import tape as t
from engine.native.formats import FORMATS, pack, round_to
from engine.native.kernels import kernels
from engine.native.program import Buffer, Program, interleave
from engine.native.team import Team

CPU = torch.device("cpu")
FORMAT_NAMES = sorted(FORMATS)
Build = Callable[[Program, Buffer], Buffer]


@cache
def team(threads: int) -> Team:
    return Team(threads)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(build: Build, rows: torch.Tensor, threads: int = 1) -> torch.Tensor:
    """What a program makes of `rows` [T, n], which it is given as embeddings."""
    program = Program(team(threads))
    source = program.buffer(rows.shape[1])
    program.embed(rows, source)
    out = build(program, source)
    count = len(rows)
    blocks = -(-count // 16)
    cache_ = KVCache([LayerShape(1, 16, 16)], blocks + 1, 16, torch.float32, CPU)
    batch = make_batch([list(range(count))], [0], [list(range(1, blocks + 1))], 16, CPU, list(range(count)))
    return program.run(batch, cache_, out).clone()


def product(weight: torch.Tensor, name: str, bias: torch.Tensor | None = None) -> Build:
    def build(program: Program, source: Buffer) -> Buffer:
        packed = pack(weight, name, kernels().lanes)
        out = program.buffer(weight.shape[0])
        if packed.format.is_integer:
            plain, source = source, program.buffer(program.activation_floats(packed))
            program.norm(plain, None, 0.0, source, packed)
        program.linear(source, packed, out, bias=bias)
        return out

    return build


def tolerance(name: str) -> float:
    return 1e-3 if FORMATS[name].is_integer else 1e-5


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 33])
@pytest.mark.parametrize(("out", "inputs"), [(1, 1), (16, 2), (17, 17), (100, 33), (250, 576)])
def test_a_product_is_that_of_the_rounded_weight(name: str, rows: int, out: int, inputs: int) -> None:
    x, weight, bias = numbers(rows, inputs), numbers(out, inputs, seed=1), numbers(out, seed=2)
    expected = x.double() @ round_to(weight, name).double().t() + bias.double()
    found = run(product(weight, name, bias), x)[:, :out]
    error = (found - expected).norm() / expected.norm()
    assert error < tolerance(name)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_row_has_the_same_bits_alone_and_in_company(name: str) -> None:
    x, build = numbers(33, 576), product(numbers(250, 576, seed=1), name)
    together = run(build, x)
    for count in (1, 2, 3, 4, 5, 6, 12):
        assert torch.equal(run(build, x[:count]), together[:count])
    assert torch.equal(run(build, x[7:8])[0], together[7])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_number_of_threads_changes_no_bit(name: str) -> None:
    x, build = numbers(100, 576), product(numbers(1000, 576, seed=1), name)
    alone = run(build, x)
    assert torch.equal(run(build, x, threads=2), alone)
    assert torch.equal(run(build, x, threads=3), alone)


def test_the_greatest_integers_do_not_overflow() -> None:
    weight, x = torch.ones(16, 4096), torch.full((2, 4096), 1000.0)
    x[1] = -1000.0
    found = run(product(weight, "int8"), x)
    torch.testing.assert_close(found[0], torch.full((16,), 4_096_000.0), rtol=1e-3, atol=0)
    torch.testing.assert_close(found[1], -found[0])


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (t.SILU, torch.nn.functional.silu),
        (t.GELU, torch.nn.functional.gelu),
        (t.GELU_TANH, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
@pytest.mark.parametrize("inner", [16, 40, 160])
def test_a_gated_product(kind: int, function: Callable[[torch.Tensor], torch.Tensor], inner: int) -> None:
    x, gate, up = numbers(9, 48), numbers(inner, 48, seed=1), numbers(inner, 48, seed=2)

    def build(program: Program, source: Buffer) -> Buffer:
        packed = pack(interleave(gate, up, 2 * kernels().lanes), "float32", kernels().lanes)
        out = program.buffer(inner)
        program.gated(source, packed, out, kind)
        return out

    torch.testing.assert_close(run(build, x)[:, :inner], function(x @ gate.t()) * (x @ up.t()), rtol=1e-4, atol=1e-4)


def test_a_norm_and_a_residual() -> None:
    x, scale, weight = numbers(5, 64), numbers(64, seed=1), numbers(64, 64, seed=2)

    def build(program: Program, source: Buffer) -> Buffer:
        packed = pack(weight, "float32", kernels().lanes)
        normed = program.buffer(program.activation_floats(packed))
        program.norm(source, scale, 1e-6, normed, packed)
        program.linear(normed, packed, source, residual=source)
        return source

    normed = torch.nn.functional.rms_norm(x, (64,), scale, 1e-6)
    torch.testing.assert_close(run(build, x)[:, :64], x + normed @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_embeddings_come_out_of_a_packed_head(name: str) -> None:
    weight = numbers(50, 70)
    program = Program(team(1))
    out = program.buffer(70)
    program.embed(pack(weight, name, kernels().lanes), out, scale=2.0)
    cache_ = KVCache([LayerShape(1, 16, 16)], 2, 16, torch.float32, CPU)
    found = program.run(make_batch([[0, 49, 17]], [0], [[1]], 16, CPU, [0, 1, 2]), cache_, out)
    torch.testing.assert_close(found[:, :70], 2 * round_to(weight, name)[[0, 49, 17]])


HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16


class Attention:
    """One attention of a tape over a cache of one sequence, fed in chunks."""

    def __init__(
        self, qkv: torch.Tensor, threads: int, window: int = 0, softcap: float = 0.0, sinks: bool = False,
        dtype: torch.dtype = torch.float32,
    ):  # fmt: skip
        self.qkv, self.window, self.softcap = qkv, window, softcap
        self.sinks = numbers(HEADS, seed=9) if sinks else None
        self.program = Program(team(threads))
        source, self.out = self.program.buffer(qkv.shape[1]), self.program.buffer(HEADS * DIM)
        self.program.embed(qkv, source)
        self.program.attention(
            source,
            0,
            HEADS,
            LayerShape(KV_HEADS, DIM, DIM),
            self.out,
            DIM**-0.5,
            None,
            None,
            0.0,
            window,
            softcap,
            self.sinks,
        )
        blocks = -(-len(qkv) // BLOCK)
        self.table = [1 + (7 * i) % blocks for i in range(blocks)] if blocks % 7 else list(range(1, blocks + 1))
        self.cache = KVCache([LayerShape(KV_HEADS, DIM, DIM)], blocks + 1, BLOCK, dtype, CPU)

    def feed(self, begin: int, end: int) -> torch.Tensor:
        wanted = list(range(end - begin))
        batch = make_batch([list(range(begin, end))], [begin], [self.table], BLOCK, CPU, wanted)
        return self.program.run(batch, self.cache, self.out).clone()

    def expected(self) -> torch.Tensor:
        parts = self.qkv.view(len(self.qkv), -1, DIM).transpose(0, 1)
        q, k, v = parts[:HEADS], parts[HEADS : HEADS + KV_HEADS], parts[HEADS + KV_HEADS :]
        return attend_dense(q, k, v, DIM**-0.5, self.window, self.softcap, self.sinks).flatten(1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 600])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(0, 0.0, False), (40, 0.0, False), (300, 0.0, True), (0, 5.0, False)]
)
def test_attention_is_that_of_plain_torch(length: int, window: int, softcap: float, sinks: bool) -> None:
    attention = Attention(numbers(length, (HEADS + 2 * KV_HEADS) * DIM), 2, window, softcap, sinks)
    torch.testing.assert_close(attention.feed(0, length), attention.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_token_has_the_same_bits_in_a_prefill_and_in_a_decode_step_spread_over_threads(
    dtype: torch.dtype, window: int
) -> None:
    qkv = numbers(900, (HEADS + 2 * KV_HEADS) * DIM)
    prefill = Attention(qkv, 1, window, dtype=dtype).feed(0, 900)
    for threads in (1, 2, 3):
        attention = Attention(qkv, threads, window, dtype=dtype)
        attention.feed(0, 890)
        rest = torch.cat([attention.feed(i, i + 1) for i in range(890, 900)])
        assert torch.equal(rest, prefill[890:])


def test_helpers_end_with_their_team() -> None:
    made = Team(3)
    helpers = made.close.peek()[2][1]  # type: ignore[index]
    assert all(helper.is_alive() for helper in helpers)
    del made
    assert not any(helper.is_alive() for helper in helpers)


def test_times_are_taken_of_each_operation_once_they_are_wanted() -> None:
    attention = Attention(numbers(300, (HEADS + 2 * KV_HEADS) * DIM), 2)
    attention.feed(0, 290)
    attention.program.measure()
    assert not any(attention.program.spent().values())
    attention.feed(290, 300)
    spent = attention.program.spent()
    assert set(spent) == {"embed", "rotate", "attend", "combine"}
    assert all(0 < seconds < 10 for seconds in spent.values())
