"""GenAiHistograms: the server histograms of the OpenTelemetry conventions for generative AI, as a second sink.

Only for who hands in a meter provider: Prometheus gets the same times from :mod:`.exposition`, with finer buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opentelemetry.metrics import Histogram, MeterProvider

from .. import names

DURATION: Final = "gen_ai.server.request.duration"
TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"  # noqa: S105  # a name
TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"  # noqa: S105  # a name

DURATION_BOUNDS: Final = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TOKEN_BOUNDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class GenAiHistograms:
    """Records what requests took, in seconds."""

    def __init__(self, provider: MeterProvider, model: str) -> None:
        """``model``: the name of the model, in every attribute set; so there are as many as ways to end."""
        meter = provider.get_meter(names.TRACER)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)

        self._duration = histogram(DURATION, "Time of a request in the server.", DURATION_BOUNDS)
        self._first = histogram(TIME_TO_FIRST_TOKEN, "From arrival to the first token.", FIRST_TOKEN_BOUNDS)
        self._token = histogram(TIME_PER_OUTPUT_TOKEN, "Time per token after the first one.", TOKEN_BOUNDS)
        self._model = model

    def first_token(self, operation: str, seconds: float) -> None:
        """The first token came ``seconds`` after the request."""
        self._first.record(seconds, self._attributes(operation))

    def done(self, operation: str, seconds: float, per_token: float | None, error_type: str | None) -> None:
        """A request ended. ``per_token``: ``None`` when it has less than two tokens."""
        attributes = self._attributes(operation)
        if error_type is not None:
            attributes[names.ERROR_TYPE] = error_type
        self._duration.record(seconds, attributes)
        if per_token is not None and error_type is None:  # the convention wants it of successful responses
            self._token.record(per_token, attributes)

    def _attributes(self, operation: str) -> dict[str, str]:
        return {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: self._model,
            names.RESPONSE_MODEL: self._model,
        }
