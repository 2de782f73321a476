"""What the service counts, as Prometheus reads it. No metric holds anything of a text."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

# They would double the lines, and Prometheus makes no use of them.
disable_created_metrics()


class ServiceMetrics:
    """Counters, gauges and histograms of one server; each server has its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.requests = Counter(
            "scalerun_requests",
            "Requests that were answered, by route and HTTP status; 499: the client left first",
            ["route", "status"],
            registry=self.registry,
        )
        self.refused = Counter(
            "scalerun_requests_refused",
            "Requests that found no place in the queue",
            registry=self.registry,
        )
        self.queue_length = Gauge(
            "scalerun_queue_length",
            "Prompts that wait for their first token",
            registry=self.registry,
        )
        self.live_rows = Gauge(
            "scalerun_live_rows",
            "Answers that are being generated",
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "scalerun_prompt_tokens", "Tokens of accepted prompts", registry=self.registry
        )
        self.generated_tokens = Counter(
            "scalerun_generated_tokens", "Tokens that were generated", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "scalerun_time_to_first_token_seconds",
            "Seconds from a prompt's arrival in the queue to the first that comes of it",
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self.registry,
        )
        self.token_seconds = Histogram(
            "scalerun_time_per_token_seconds",
            "Seconds between two tokens of an answer",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)
