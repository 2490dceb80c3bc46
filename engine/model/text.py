"""Text in and out: the codec protocol (what a tokenizer must offer) and the Hugging Face implementation."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ...errors import InvalidRequest, ModelError
from ..request import ChatMessage


class TextCodec(Protocol):
    """Turns text into token ids and back. Must be safe to call from any thread."""

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, as the model's tokenizer makes them (it decides on a leading BOS).

        A special token written out in ``text`` becomes that token: raw prompts are trusted, messages are not.

        :raises InvalidRequest: when ``text`` cannot be encoded as UTF-8 (lone surrogates).
        """

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation through the model's chat template, ready for the assistant's turn.

        Special tokens written out in a message's content are encoded as plain text: a user cannot forge a turn.

        :raises InvalidRequest: when the model has no chat template or a message is malformed.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; incomplete characters become U+FFFD. Ids outside the tokenizer decode to nothing."""

    def special_token_id(self, text: str) -> int | None:
        """The id when ``text`` is exactly one special token, else ``None``."""


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
    def unk_token_id(self) -> int | None: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> object: ...


class HuggingFaceCodec:
    """A :class:`TextCodec` over a fast tokenizer of ``transformers``.

    The tokenizer belongs to the codec from here on: it is shared by threads, so nobody may change its settings.

    ``decode`` differs from the tokenizer's own in two ways, which make the text of a growing output grow too. Spaces
    before punctuation are left as the tokens have them (no ``clean_up_tokenization_spaces``). And in tokenizers with
    byte fallback, a stray byte becomes U+FFFD without spoiling the good characters next to it.

    :raises ModelError: for a slow (pure Python) tokenizer.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        if not getattr(tokenizer, "is_fast", False):
            kind = type(tokenizer).__name__
            raise ModelError(
                f"{kind} is not a fast tokenizer; save the model with a tokenizer.json (tokenizers library)"
            )
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        self._plain = copy.deepcopy(self._backend)
        """The same tokenizer, blind for special tokens."""
        self._plain.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self._special_text = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_ids = {text: token_id for token_id, text in self._special_text.items()}
        self._byte_of = _byte_tokens(self._backend)
        self._id_of_byte = {byte: token_id for token_id, byte in self._byte_of.items()}

    def encode(self, text: str) -> list[int]:
        """See :meth:`TextCodec.encode`."""
        return self._backend.encode(_checked(text, "prompt")).ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """See :meth:`TextCodec.encode_chat`.

        Equals ``apply_chat_template(messages, add_generation_prompt=True)`` unless a message spells out a special
        token. The template alone decides on BOS and other special tokens; nothing is added to what it writes.
        """
        conversation = _checked_messages(messages)
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("this model has no chat template; send a text prompt")
        forged = [self._special_spans(message) for message in conversation]
        if not any(forged):
            return self._backend.encode(self._render(conversation), add_special_tokens=False).ids
        marks = _unused_characters(value for message in conversation for value in message.values())
        marked = [_mark(message, spans, marks) for message, spans in zip(conversation, forged, strict=True)]
        return self._encode_marked(self._render(marked), marks)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See :meth:`TextCodec.decode`."""
        known = [token for token in ids if 0 <= token < 2**32]
        if not self._byte_of.keys().isdisjoint(known):
            known = list(self._with_whole_characters(known, skip_special_tokens))
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def special_token_id(self, text: str) -> int | None:
        """See :meth:`TextCodec.special_token_id`."""
        return self._special_ids.get(text)

    def _render(self, conversation: list[dict[str, str]]) -> str:
        """The conversation as text. A template is foreign code: whatever it raises is about the messages."""
        try:
            rendered = self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise InvalidRequest(f"the chat template does not accept these messages: {error}") from error
        return str(rendered)

    def _special_spans(self, message: Mapping[str, str]) -> dict[str, list[tuple[int, int]]]:
        """Where the values of a message spell special tokens: key -> (start, end) in characters."""
        spans = {key: self._spans(value) for key, value in message.items()}
        if spans["role"]:
            raise InvalidRequest("a message's role must not contain special tokens")
        return {key: found for key, found in spans.items() if found}

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """The tokenizer itself says where it sees a special token: it may normalise the text first."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return [(start, end) for token, (start, end) in found if self._is_forged(token, text[start:end])]

    def _is_forged(self, token: int, text: str) -> bool:
        """Whether ``text`` became a special token by being its name, and not as a word that the vocabulary lacks."""
        return token in self._special_text and (
            token != self._tokenizer.unk_token_id or text == self._special_text[token]
        )

    def _encode_marked(self, rendered: str, marks: tuple[str, str]) -> list[int]:
        """Encode a rendered conversation; what stands between marks (or was parted by a stray one) is plain text."""
        start, end = marks
        pieces = re.split(f"{start}([^{start}{end}]*){end}|[{start}{end}]", rendered)
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            if piece:
                ids += _encode_inside(self._plain if i % 2 else self._backend, piece, first=not ids)
        return ids

    def _with_whole_characters(self, ids: Iterable[int], skip_special_tokens: bool) -> Iterator[int]:
        """Byte-fallback ids replaced so that each run of them is valid UTF-8: stray bytes become those of U+FFFD.

        (The decoder of the ``tokenizers`` library turns all characters of a run with a stray byte into U+FFFD.)
        """
        run = bytearray()
        for token in ids:
            if token in self._byte_of:
                run.append(self._byte_of[token])
            elif self._has_text(token, skip_special_tokens):
                yield from self._mended(run)
                yield token
                run.clear()
        yield from self._mended(run)

    def _has_text(self, token: int, skip_special_tokens: bool) -> bool:
        if skip_special_tokens and token in self._special_text:
            return False
        return self._backend.id_to_token(token) is not None

    def _mended(self, run: bytearray) -> Iterator[int]:
        return (self._id_of_byte[byte] for byte in run.decode("utf-8", "replace").encode())


def _byte_tokens(backend: FastBackend) -> dict[int, int]:
    """Id -> byte for tokenizers whose decoder joins byte tokens to characters (byte fallback), else empty."""
    found = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    byte_of = {token: byte for byte, token in found.items() if token is not None}
    if len(byte_of) < len(found):
        return {}
    euro = [token for byte in "€".encode() if (token := found[byte]) is not None]
    return byte_of if backend.decode(euro) == "€" else {}


def _encode_inside(backend: FastBackend, piece: str, *, first: bool) -> list[int]:
    """Ids of a piece of a longer text. Some tokenizers put a space before a text: after a line break they do not."""
    if not first:
        line_break = backend.encode("\n", add_special_tokens=False).ids
        ids = backend.encode("\n" + piece, add_special_tokens=False).ids
        if ids[: len(line_break)] == line_break:
            return ids[len(line_break) :]
    return backend.encode(piece, add_special_tokens=False).ids


def _mark(
    message: Mapping[str, str], spans: Mapping[str, Sequence[tuple[int, int]]], marks: tuple[str, str]
) -> dict[str, str]:
    """The message with a mark before and after each span."""
    marked = dict(message)
    for key, found in spans.items():
        for start, end in reversed(found):
            value = marked[key]
            marked[key] = value[:start] + marks[0] + value[start:end] + marks[1] + value[end:]
    return marked


def _unused_characters(texts: Iterable[str]) -> tuple[str, str]:
    """Two private-use characters that occur in none of the texts."""
    used = set().union(*texts)
    free = [chr(point) for point in range(0xE000, 0xF900) if chr(point) not in used][:2]
    if len(free) < 2:
        raise InvalidRequest("the messages use every private-use character and a special token; remove either")
    return free[0], free[1]


def _checked_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    if not messages:
        raise InvalidRequest("a conversation needs at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise InvalidRequest(f"message {i} must be an object with role and content")
        for key, value in message.items():
            if not isinstance(value, str):
                raise InvalidRequest(f"{key} of message {i} must be a string, not {type(value).__name__}")
            _checked(value, f"{key} of message {i}")
    return [dict(message) for message in messages]


def _checked(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} holds a lone surrogate at character {error.start}; send valid Unicode") from error
    return text
