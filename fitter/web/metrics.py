"""The server's figures in Prometheus's format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.registry import Collector

from fitter.web.known_answers import KnownAnswers
from fitter.web.pool import Pool


class Metrics(Collector):
    """Counts questions, and reads the pool's and the known answers' figures when it is asked."""

    def __init__(self, pool: Pool, known: KnownAnswers) -> None:
        self._pool, self._known = pool, known
        self._registry = CollectorRegistry()
        self._questions = Counter("fitter_questions", "Answered questions", ["status"], registry=self._registry)
        self._seconds = Histogram(
            "fitter_answer_seconds",
            "Seconds from a question to its answer",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.3, 1, 3, 10, 30),
            registry=self._registry,
        )
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def answered(self, status: int, seconds: float) -> None:
        """Count a question that was answered with ``status`` after ``seconds``."""
        self._questions.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def collect(self) -> list[Metric]:
        """Return the current figures."""
        figures = {
            ("fitter_planners", "Planners, each with two processes of llama.cpp at most"): self._pool.planners,
            ("fitter_waiting", "Questions that wait for a planner"): self._pool.waiting,
            ("fitter_known_answers", "Answers that are kept"): len(self._known),
            ("fitter_known_answers_bytes", "Bytes of the answers that are kept"): self._known.bytes,
            ("fitter_known_answers_hits", "Questions whose answer was kept"): self._known.hits,
        }
        return [GaugeMetricFamily(name, about, value=value) for (name, about), value in figures.items()]

    def text(self) -> bytes:
        """Write all figures."""
        return generate_latest(self._registry)


__all__ = ["CONTENT_TYPE", "Metrics"]
