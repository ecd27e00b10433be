"""Prometheus metrics, made when they are asked for: from the engines' last heartbeats and our own counts."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api_server.state import ServerState
from common.messages import Finish

FINISHED = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort", Finish.ERROR: "error"}

# ours, and the name under which vLLM's dashboards look for it, if they do
_ENGINE_GAUGES = {
    "running": ("Requests that hold a row.", "stepahead_requests_running", "vllm:num_requests_running"),
    "waiting": ("Requests that wait for a row.", "stepahead_requests_waiting", "vllm:num_requests_waiting"),
    "kv_cache_usage": ("Share of the KV cache in use.", "stepahead_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"),
}
_ENGINE_COUNTERS = {
    "prefix_cache_queries": ("Tokens looked for in the prefix cache.", "vllm:prefix_cache_queries"),
    "prefix_cache_hits": ("Tokens found there.", "vllm:prefix_cache_hits"),
    "draft_tokens": ("Tokens drafted by prompt lookup.", "vllm:spec_decode_num_draft_tokens"),
    "accepted_draft_tokens": ("Drafted tokens that came true.", "vllm:spec_decode_num_accepted_tokens"),
}


def registry(state: ServerState) -> CollectorRegistry:
    """A registry for this process alone."""
    metrics = CollectorRegistry()
    ProcessCollector(registry=metrics)
    metrics.register(_StateCollector(state))
    return metrics


class _StateCollector(Collector):
    def __init__(self, state: ServerState) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._engines()
        yield from self._tokens()
        yield from self._requests()
        yield GaugeMetricFamily("stepahead_ready", "1 while requests are served.", float(self._state.is_ready))

    @property
    def _model(self) -> str:
        return self._state.config.model.names[0]

    def _engines(self) -> Iterable[Metric]:
        latest = {str(engine.number): engine.stats for engine in self._state.engines.engines.values() if engine.stats}
        for key, (text, *names) in _ENGINE_GAUGES.items():
            for name in names:
                gauge = GaugeMetricFamily(name, text, labels=("model_name", "engine"))
                for engine, stats in latest.items():
                    gauges = {"running": stats.running, "waiting": stats.waiting, **stats.gauges}
                    gauge.add_metric((self._model, engine), float(gauges.get(key, 0.0)))
                yield gauge
        for key, (text, name) in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=("model_name", "engine"))
            for engine, stats in latest.items():
                counter.add_metric((self._model, engine), stats.counters.get(key, 0))
            yield counter
        for name in sorted({name for stats in latest.values() for name in stats.counters}):
            counter = CounterMetricFamily(f"stepahead_engine_{name}", "Since the engine began.", labels=("engine",))
            for engine, stats in latest.items():
                counter.add_metric((engine,), stats.counters.get(name, 0))
            yield counter

    def _tokens(self) -> Iterable[Metric]:
        totals = self._state.engines.totals
        for kind, text, value in (
            ("prompt", "Prompt tokens sent to engines.", totals.prompt_tokens),
            ("generation", "Tokens that engines generated.", totals.generation_tokens),
        ):
            for prefix in ("stepahead_", "vllm:"):
                counter = CounterMetricFamily(f"{prefix}{kind}_tokens", text, labels=("model_name",))
                counter.add_metric((self._model,), value)
                yield counter

    def _requests(self) -> Iterable[Metric]:
        admission, totals = self._state.engines.admission, self._state.engines.totals
        ended = CounterMetricFamily("stepahead_requests", "Sequences that ended, by how.", labels=("outcome",))
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended regularly.", labels=("model_name", "finished_reason")
        )
        for finish, reason in FINISHED.items():
            ended.add_metric((reason,), totals.finished[finish])
            if finish in (Finish.STOP, Finish.LENGTH):
                success.add_metric((self._model, reason), totals.finished[finish])
        ended.add_metric(("rejected",), admission.rejected)
        yield ended
        yield success
        errors = CounterMetricFamily("stepahead_http_errors", "Answers of 400 and above.", labels=("status",))
        for status, count in sorted(self._state.errors.items()):
            errors.add_metric((str(status),), count)
        yield errors
        yield GaugeMetricFamily("stepahead_queued_requests", "Without a first token yet.", admission.requests)
        yield GaugeMetricFamily("stepahead_queued_tokens", "Prompt tokens of those.", admission.tokens)
        yield GaugeMetricFamily("stepahead_open_http_requests", "For generation.", self._state.open_requests)
