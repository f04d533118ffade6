"""Kinds of figures that the Prometheus library lacks: filled for many values at once, or read when somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))  # 1, 2, 5, 10, ... 500000
LAGS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)
RATES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)  # tokens per second of one request


class Distribution:
    """A histogram that takes in all values of a step at once. The library's histogram takes a lock for each value.
    bounds: upper bounds of the buckets, ascending."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, bounds: Sequence[float] = SECONDS):
        self._name, self._text, self._bounds = name, text, np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)  # by bucket, the last one without an upper bound
        self._sum = 0.0
        registry.register(self)

    def observe(self, values: Sequence[float]) -> None:
        """Add values. A value below zero (the clock was set back) counts as zero."""
        if values:
            array = np.maximum(values, 0.0)
            self._counts += np.bincount(np.searchsorted(self._bounds, array), minlength=len(self._counts))
            self._sum += float(array.sum())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class Series(Collector):
    """Figures whose labels change from scrape to scrape. See ``EngineMetrics.add_series``."""

    def __init__(self, name: str, text: str, label: str, read: Callable[[], Mapping[str, float]]):
        self._name, self._text, self._label, self._read = name, text, label, read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=[self._label])
        for value, figure in self._read().items():
            family.add_metric([value], figure)
        yield family


class Count(Collector):
    """A counter whose value is kept elsewhere. See ``EngineMetrics.add_counter``."""

    def __init__(self, name: str, text: str, read: Callable[[], float]):
        self._name, self._text, self._read = name, text, read

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._text, self._read())


class Info(Collector):
    """A figure that is always 1, whose labels tell constants."""

    def __init__(self, name: str, text: str, constants: Mapping[str, str]):
        self._name, self._text, self._constants = name, text, constants

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(self._name, self._text, labels=[*self._constants])
        family.add_metric([*self._constants.values()], 1.0)
        yield family
