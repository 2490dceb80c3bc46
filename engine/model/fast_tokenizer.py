"""The parts of the ``tokenizers`` and ``transformers`` libraries that are used, as protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

Tools: TypeAlias = "list[dict[str, object] | Callable[..., object]]"


class FastEncoding(Protocol):
    """The part of ``tokenizers.Encoding`` that is used."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class SpecialToken(Protocol):
    """The part of ``tokenizers.AddedToken`` that is used."""

    content: str
    special: bool


class FastBackend(Protocol):
    """The part of ``tokenizers.Tokenizer`` that is used."""

    encode_special_tokens: bool

    def encode(self, sequence: str, *, add_special_tokens: bool = True) -> FastEncoding: ...
    def encode_batch(self, texts: Sequence[str], /, *, add_special_tokens: bool = True) -> Sequence[FastEncoding]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, token_id: int, /) -> str | None: ...
    def token_to_id(self, token: str, /) -> int | None: ...
    def get_added_tokens_decoder(self) -> Mapping[int, SpecialToken]: ...
    def no_truncation(self) -> None: ...
    def no_padding(self) -> None: ...


class HuggingFaceTokenizer(Protocol):
    """The part of a fast ``transformers`` tokenizer that is used."""

    @property
    def backend_tokenizer(self) -> FastBackend: ...
    @property
    def chat_template(self) -> object: ...
    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...
    @property
    def unk_token_id(self) -> int | None: ...
    def get_chat_template(
        self, chat_template: str | None = None, tools: list[dict[str, object]] | None = None
    ) -> str: ...
    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        tools: Tools | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
    ) -> object: ...


def encoded(backend: FastBackend, text: str, *, add_special_tokens: bool = True) -> FastEncoding:
    """``backend.encode(text)``, but other threads go on meanwhile: of ``tokenizers``' two calls for it, only the one
    for several texts lets go of the interpreter.
    """
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
