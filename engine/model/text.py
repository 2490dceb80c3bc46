"""Text in and out: the codec protocol (what a tokenizer must offer) and the Hugging Face implementation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ...errors import ModelError
from ..request import Chat
from .chat_encoding import ChatEncoder
from .chat_messages import encodable
from .fast_tokenizer import FastBackend, HuggingFaceTokenizer, encoded
from .token_bytes import TokenBytes


class TextCodec(Protocol):
    """Turns text into token ids and back. Must be safe to call from any thread."""

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, as the model's tokenizer makes them (it decides on a leading BOS).

        A special token written out in ``text`` becomes that token: raw prompts are trusted, messages are not.

        :raises InvalidRequest: when ``text`` cannot be encoded as UTF-8 (lone surrogates).
        """

    def encode_chat(self, chat: Chat) -> list[int]:
        """Ids of a conversation through the model's chat template.

        Special tokens that are written out in it, wherever that is but in the role, are encoded as plain text: a user
        cannot forge a turn. Added tokens that the tokenizer does not call special are words like others.

        :raises InvalidRequest: when the model has no chat template, the conversation is malformed, or the template has
            no place for its tools.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; incomplete characters become U+FFFD. Ids outside the tokenizer decode to nothing."""

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the middle of a text, in UTF-8, which it may begin or end within a character.

        Special tokens give their name, ids outside the tokenizer nothing.
        """

    def special_token_id(self, text: str) -> int | None:
        """The id when ``text`` is exactly one special token, else ``None``."""


class TextModel(NamedTuple):
    """A model without its weights."""

    codec: TextCodec | None
    """``None`` when it comes without a tokenizer."""
    vocab_size: int
    """Ids below this may appear in a prompt."""
    max_context: int
    """Most tokens, as its configuration says; where positions are worked out in another way it may be fewer."""


class HuggingFaceCodec:
    """A :class:`TextCodec` over a fast tokenizer of ``transformers``.

    The tokenizer belongs to the codec from here on: it is shared by threads, so nobody may change its settings.

    ``decode`` differs from the tokenizer's own in two ways, which make the text of a growing output grow too. Spaces
    before punctuation are left as the tokens have them (no ``clean_up_tokenization_spaces``). And in tokenizers with
    byte fallback, a stray byte becomes U+FFFD without spoiling the good characters next to it.

    :raises ModelError: for a slow (pure Python) tokenizer, or a ``chat_template`` that is no valid template.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, chat_template: str | None = None) -> None:
        """``chat_template``: Jinja, used in place of the model's own."""
        if not getattr(tokenizer, "is_fast", False):
            kind = type(tokenizer).__name__
            raise ModelError(
                f"{kind} is not a fast tokenizer; save the model with a tokenizer.json (tokenizers library)"
            )
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        added = self._backend.get_added_tokens_decoder()
        self._special_text = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_ids = {text: token_id for token_id, text in self._special_text.items()}
        self._byte_of = _byte_tokens(self._backend)
        self._id_of_byte = {byte: token_id for token_id, byte in self._byte_of.items()}
        self._bytes = TokenBytes(self._backend, {i: token.content for i, token in added.items()}, self._byte_of)
        self._chats = ChatEncoder(tokenizer, self._special_text, chat_template)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template: it shows what notations the model knows. ``None``: there is none."""
        return self._chats.template or None

    def encode(self, text: str) -> list[int]:
        """See :meth:`TextCodec.encode`."""
        return encoded(self._backend, encodable(text, "prompt")).ids

    def encode_chat(self, chat: Chat) -> list[int]:
        """See :meth:`TextCodec.encode_chat`.

        Equals ``apply_chat_template`` unless the conversation spells out a special token. The template alone decides on
        BOS and other special tokens; nothing is added to what it writes.
        """
        return self._chats.encode(chat)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See :meth:`TextCodec.decode`."""
        known = [token for token in ids if 0 <= token < 2**32]
        if not self._byte_of.keys().isdisjoint(known):
            known = list(self._with_whole_characters(known, skip_special_tokens))
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """See :meth:`TextCodec.token_bytes`."""
        return self._bytes.of(token_id)

    def special_token_id(self, text: str) -> int | None:
        """See :meth:`TextCodec.special_token_id`."""
        return self._special_ids.get(text)

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
