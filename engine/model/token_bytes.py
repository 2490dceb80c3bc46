"""The bytes that a token stands for, which text cannot say of tokens that are a part of a character."""

from __future__ import annotations

from collections.abc import Mapping

from .fast_tokenizer import FastBackend

_SAMPLE = "a \u20ac\n\u00e9"


class TokenBytes:
    """Bytes of single tokens, as they are in the middle of a text. May be used from any thread."""

    def __init__(self, backend: FastBackend, added: Mapping[int, str], byte_of: Mapping[int, int]) -> None:
        """``added``: text of the tokens that are no part of the model, special ones and others. ``byte_of``: id -> byte
        for tokenizers with byte fallback.
        """
        self._backend = backend
        self._added = added
        self._byte_of = byte_of
        self._alphabet = _byte_alphabet()
        if not self._is_byte_level():
            self._alphabet = {}

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; of special ones, of their name; none of an id that the tokenizer does not know."""
        if token_id in self._added:
            return self._added[token_id].encode()
        if token_id in self._byte_of:
            return bytes((self._byte_of[token_id],))
        name = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if name is None:
            return b""
        if self._alphabet:
            return self._spelled(name)
        return self._text_inside(token_id).encode()

    def _spelled(self, name: str) -> bytes:
        """What a name in that alphabet spells; one that has other characters is not in it, and means itself."""
        if not self._alphabet.keys() >= set(name):
            return name.encode()
        return bytes(self._alphabet[character] for character in name)

    def _text_inside(self, token_id: int) -> str:
        """What the token adds to a text: at the beginning of one, decoders leave spaces out."""
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def _is_byte_level(self) -> bool:
        """Whether the names of tokens spell bytes in the alphabet of GPT-2."""
        ids = self._backend.encode(_SAMPLE, add_special_tokens=False).ids
        names = "".join(self._backend.id_to_token(token) or "" for token in ids)
        return self._spelled(names).lstrip() == _SAMPLE.encode()


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, as in byte-level BPE: printable bytes are their own character, the others follow from U+0100.

    https://github.com/openai/gpt-2/blob/master/src/encoder.py
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
