"""OutputFormat: what a text has to look like. Held to while it is drawn, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InvalidRequest

MAX_DEFINITION = 2**16
"""Characters."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A JSON schema, a regular expression or a grammar that the generated text keeps to. Needs the extra ``guided``.

    Made by the class methods. Whether the definition is any good is found out when a request with it comes in; one
    that compiles may still prove too complex to follow in the middle of a text, which ends that request alone.

    :raises InvalidRequest: when it is no text of at most ``MAX_DEFINITION`` characters.
    """

    kind: Literal["json_schema", "regex", "grammar"]
    definition: str

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "grammar"):
            raise InvalidRequest(f"an output format is a json_schema, regex or grammar, not {self.kind!r:.40}")
        if not isinstance(self.definition, str):
            raise InvalidRequest(f"a {self.kind} must be text, not {type(self.definition).__name__}")
        if len(self.definition) > MAX_DEFINITION:
            raise InvalidRequest(
                f"the {self.kind} has {len(self.definition)} characters; at most {MAX_DEFINITION} are possible"
            )
        try:
            self.definition.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the {self.kind} holds a lone surrogate at character {error.start}") from error

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | bool | str) -> OutputFormat:
        """JSON of this schema (an object, or its text). Keywords that cannot be held to are refused.

        Properties come in the order of the schema; spaces between values are the model's, at most 64 in a row.

        :raises InvalidRequest: when it cannot be written as JSON.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            definition = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the JSON schema cannot be written as JSON: {error}") from error
        return cls("json_schema", definition)

    @classmethod
    def json_object(cls) -> OutputFormat:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> OutputFormat:
        """The whole text matches ``pattern`` (syntax of Rust's ``regex``: no look-around, no back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> OutputFormat:
        """One of these texts.

        :raises InvalidRequest: when there is none.
        """
        if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise InvalidRequest("a choice needs at least one text")
        return cls("grammar", "start: " + " | ".join(json.dumps(choice) for choice in choices))

    @classmethod
    def grammar(cls, lark: str) -> OutputFormat:
        """A grammar in llguidance's dialect of Lark, which can embed JSON schemas (``%json {...}``)."""
        return cls("grammar", lark)
