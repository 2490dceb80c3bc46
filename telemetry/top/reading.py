"""Scrapes: the metrics of one or more engines at one moment, as an endpoint shows them."""

from __future__ import annotations

import http.client
import ipaddress
import math
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias
from urllib.error import HTTPError
from urllib.parse import urlsplit

import prometheus_client.openmetrics.parser as openmetrics
import prometheus_client.parser as plain
from prometheus_client.samples import Sample

from ...errors import InvalidRequest, describe
from ..metrics.catalogue import CATALOGUE, Metric

MOST_BYTES: Final = 16 << 20
"""A scrape of Octavo has some ten thousand bytes: what is larger is something else."""
CHUNK: Final = 1 << 16

Labels: TypeAlias = frozenset[tuple[str, str]]


class Series(NamedTuple):
    """Who says it and about what."""

    engine: Labels
    """The constant labels, those that are not in the catalogue: they tell engines apart."""
    labels: Labels
    """Those of the catalogue, and ``le``."""


Values: TypeAlias = Mapping[str, Mapping[Series, float]]
"""By the name of the sample."""


class Scrape(NamedTuple):
    """All that was read at one moment."""

    when: float
    """Seconds of the monotonic clock."""
    values: Values


class Failure(NamedTuple):
    """Why there is no scrape."""

    reason: str
    """In words."""
    answered: bool
    """Something is there, but what it says is of no use."""


class _Page(NamedTuple):
    text: str
    content_type: str


def sample_names(metric: Metric) -> tuple[str, ...]:
    """What the samples of a family are called in the text formats."""
    if metric.kind == "histogram":
        return tuple(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))
    return (f"{metric.name}_info",) if metric.kind == "info" else (metric.name,)


KNOWN: Final = MappingProxyType({name: metric for metric in CATALOGUE for name in sample_names(metric)})


def checked_url(url: str) -> str:
    """``url``, made whole where it is only ``host:port``.

    Raises :class:`InvalidRequest` for what is no HTTP address.
    """
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(f"{url!r} is no address of a metrics endpoint: give http://host:port/metrics")
    return whole if parts.path not in {"", "/"} else parts._replace(path="/metrics").geturl()


def read(url: str, chosen: Labels, clock: Callable[[], float], timeout: float) -> Scrape | Failure:
    """One scrape of ``url``; blocks for little more than twice ``timeout`` seconds.

    ``chosen``: labels that series must have to count, as in ``engine="a"``.
    """
    try:
        page = _fetch(url, clock, timeout)
        return parsed(page.text, page.content_type, chosen, clock())
    except HTTPError as error:
        error.close()
        return Failure(f"HTTP status {error.code}", answered=True)
    except (OSError, http.client.HTTPException) as error:
        return Failure(_plainly(error), answered=False)
    except ValueError as error:
        return Failure(str(error), answered=True)


def parsed(text: str, content_type: str, chosen: Labels, when: float) -> Scrape:
    """The series of ``text`` that the catalogue knows and that have the labels ``chosen``.

    Raises ``ValueError`` for what is no exposition, and where no series is left.
    """
    values: defaultdict[str, dict[Series, float]] = defaultdict(dict)
    engines: set[Labels] = set()
    for sample in _samples(text, content_type):
        metric = KNOWN.get(sample.name)
        if metric is None or not math.isfinite(sample.value):  # says nothing
            continue
        float(sample.labels.get("le", 0))  # a bound that is none is found here
        series = _series(metric, sample.labels)
        engines.add(series.engine)
        if chosen <= series.engine | series.labels:
            values[sample.name][series] = sample.value
    if not values:
        raise ValueError(_nothing(chosen, engines))
    return Scrape(when, dict(values))


def as_words(labels: Labels) -> str:
    """As in PromQL: ``engine="a", zone="b"``."""
    return ", ".join(f'{name}="{value}"' for name, value in sorted(labels))


def _nothing(chosen: Labels, engines: Iterable[Labels]) -> str:
    there = sorted(as_words(labels) or "one without labels" for labels in engines)
    if not there:
        return "no metrics of Octavo there"
    return f"no engine with {as_words(chosen)}; there: {'; '.join(there)}"


def _series(metric: Metric, labels: Mapping[str, str]) -> Series:
    own = {*metric.labels, "le"}
    return Series(
        frozenset((name, value) for name, value in labels.items() if name not in own),
        frozenset((name, value) for name, value in labels.items() if name in own),
    )


def _samples(text: str, content_type: str) -> Iterable[Sample]:
    parse = plain.text_string_to_metric_families
    if content_type.startswith("application/openmetrics-text"):
        parse = openmetrics.text_string_to_metric_families
    try:
        return [sample for family in parse(text) for sample in family.samples]
    except Exception as error:  # the parsers promise nothing about what they raise over foreign text
        raise ValueError(f"the answer is not in a Prometheus text format ({describe(error)[:80]})") from error


def _fetch(url: str, clock: Callable[[], float], timeout: float) -> _Page:
    request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4"})  # noqa: S310  # checked_url
    with _opener(url).open(request, timeout=timeout) as response:
        data = _body(response, clock, clock() + timeout)
        return _Page(data.decode(), response.headers.get("Content-Type", ""))


def _opener(url: str) -> urllib.request.OpenerDirector:
    host = urlsplit(url).hostname or ""
    if _is_local(host):  # a proxy, which http_proxy may name for all addresses, cannot reach this machine
        return urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener()


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _body(response: http.client.HTTPResponse, clock: Callable[[], float], deadline: float) -> bytes:
    """All of it: a body that was cut short would look like counters that fell."""
    data = bytearray()
    while chunk := response.read1(CHUNK):
        data += chunk
        if len(data) > MOST_BYTES:
            raise ValueError(f"the answer has more than {MOST_BYTES >> 20} MiB")
        if clock() > deadline:  # the timeout of a socket starts anew with each byte
            raise TimeoutError("the answer takes too long")
    if response.length:
        raise http.client.IncompleteRead(bytes(data), response.length)
    return bytes(data)


def _plainly(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, BaseException) else error
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    return getattr(cause, "strerror", None) or describe(cause)
