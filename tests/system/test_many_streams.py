"""Hundreds of streams at once, some of them given up: the rest are whole, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from tests.system.server import Server, serving, wait_until

STREAMS = 500
TOKENS = 24
ENOUGH = 5  # chunks, after which some clients go; a chunk may hold several tokens


async def one_stream(server: Server, index: int, give_up_after: int | None) -> int:
    """Tokens received; reads raw bytes, since five hundred full clients would only test themselves."""
    body = {"prompt": f"stream {index}", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    data = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    seen, usage, done = 0, 0, False
    async for line in reader:
        if line.startswith(b"data: {"):
            seen += 1
            if seen == give_up_after:
                break
            found = json.loads(line[6:])
            usage = (found.get("usage") or {}).get("completion_tokens", usage)
        done = done or line.startswith(b"data: [DONE]")
    writer.close()
    assert done or give_up_after is not None
    return usage


async def one_round(server: Server) -> None:
    results = await asyncio.gather(
        *(one_stream(server, index, ENOUGH if index % 3 == 0 else None) for index in range(STREAMS))
    )
    assert [count for index, count in enumerate(results) if index % 3] == [TOKENS] * (
        STREAMS - len(range(0, STREAMS, 3))
    )


def at_rest(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(server.metric(name) == 0 for name in names)


async def test_five_hundred_streams_a_third_given_up_half_way(tiny_folder: Path) -> None:
    with serving(tiny_folder) as server:
        await one_round(server)
        await asyncio.to_thread(wait_until, lambda: at_rest(server), 10, what="the counters to return to 0")
        assert server.client.get("/load").json()["server_load"] == 0


@pytest.mark.slow
async def test_memory_is_flat_over_ten_rounds(tiny_folder: Path) -> None:
    # Cached prefixes fill the whole KV cache in time, so it must be one that is full after a round or two.
    with serving(tiny_folder, "--kv-cache-memory-bytes", "16Mi") as server:
        sizes: list[list[int]] = []
        for _ in range(10):
            await one_round(server)
            await asyncio.to_thread(wait_until, lambda: at_rest(server), 10)
            children = [server.child("api_server"), server.child("engine"), psutil.Process(server.process.pid)]
            sizes.append([child.memory_info().rss >> 20 for child in children])
        for process in range(3):
            settled, last = sizes[3][process], sizes[-1][process]
            assert last <= settled + max(8, settled // 50), f"MiB by round: {[row[process] for row in sizes]}"
