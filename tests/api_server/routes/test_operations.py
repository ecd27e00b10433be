from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from api_server.state import ServerState
from common.messages import Finish
from tests.api_server.conftest import NAME, Client
from tests.api_server.fake_engine import FakeEngine, Reply
from tests.api_server.reading import CHAT, say


async def metrics(client: Client) -> dict[str, float]:
    """Samples by name and labels."""
    text = (await client.get("/metrics")).text
    return {
        sample.name + "".join(f",{value}" for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_engines_gauges_are_shown_under_our_names_and_vllms(client: Client, engine: FakeEngine) -> None:
    engine.automatic = False
    task = asyncio.create_task(client.post(CHAT, json=say()))
    while not engine.submits:
        await asyncio.sleep(0)
    engine.heartbeat(kv_cache_usage=0.25)
    found = await metrics(client)
    for name in ("stepahead_requests_running", "vllm:num_requests_running"):
        assert found[f"{name},0,{NAME}"] == 1
    for name in ("stepahead_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"):
        assert found[f"{name},0,{NAME}"] == 0.25
    assert found[f"vllm:num_requests_waiting,0,{NAME}"] == 0
    assert found["stepahead_queued_requests"] == 1
    assert (await client.get("/load")).json() == {"server_load": 1}
    engine.run()
    await task
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_outcomes_tokens_and_errors_are_counted(client: Client, engine: FakeEngine, state: ServerState) -> None:
    await client.post(CHAT, json=say())
    engine.reply = lambda submit: Reply([], error="no")
    await client.post(CHAT, json=say())
    await client.post(CHAT, json=say(temperature=9))
    found = await metrics(client)
    assert found["stepahead_requests_total,length"] == 1
    assert found["stepahead_requests_total,error"] == 1
    assert found[f"vllm:request_success_total,length,{NAME}"] == 1
    assert found[f"vllm:generation_tokens_total,{NAME}"] == 3
    assert found["stepahead_http_errors_total,400"] == 1
    assert found["stepahead_http_errors_total,500"] == 1
    assert found["stepahead_ready"] == 1
    assert state.engines.totals.finished[Finish.ERROR] == 1


async def test_the_small_paths_answer(client: Client) -> None:
    assert (await client.get("/")).json() == {"status": "ok"}
    assert (await client.get("/health")).json()["status"] == "ok"
    assert (await client.get("/version")).json()["version"]
    assert "swagger" in (await client.get("/docs")).text


async def test_some_of_an_engines_counters_have_vllms_names_too(client: Client, engine: FakeEngine) -> None:
    names = {
        "prefix_cache_queries": "prefix_cache_queries",
        "prefix_cache_hits": "prefix_cache_hits",
        "draft_tokens": "spec_decode_num_draft_tokens",
        "accepted_draft_tokens": "spec_decode_num_accepted_tokens",
    }
    engine.heartbeat({name: 50 + i for i, name in enumerate(names)})
    found = await metrics(client)
    for i, (ours, theirs) in enumerate(names.items()):
        assert found[f"vllm:{theirs}_total,0,{NAME}"] == 50 + i
        assert found[f"stepahead_engine_{ours}_total,0"] == 50 + i
