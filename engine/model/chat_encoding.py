"""From a conversation to token ids: the template writes it, and nothing that a user wrote becomes a special token."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping

from ..request import Chat
from .chat_messages import PlainChat, plain_chat
from .chat_template import ChatTemplate
from .fast_tokenizer import FastBackend, HuggingFaceTokenizer, encoded
from .forgery import Forgeries, Marks, marked, pieces, rewritten, strings, unused_marks


class ChatEncoder:
    """Encodes conversations with one tokenizer and one template. May be used from any thread."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, special: Mapping[int, str], template: str | None) -> None:
        """``special``: the text of each special token. ``template``: used in place of the model's own.

        :raises ModelError: when ``template`` is no valid template.
        """
        self._backend = tokenizer.backend_tokenizer
        self._blind = copy.deepcopy(self._backend)
        """The same tokenizer, blind for special tokens."""
        self._blind.encode_special_tokens = True
        self._template = ChatTemplate(tokenizer, template)
        self._forgeries = Forgeries(self._backend, special, tokenizer.unk_token_id)

    @property
    def template(self) -> str:
        """The source of its template; empty when there is none."""
        return self._template.text

    def encode(self, chat: Chat) -> list[int]:
        """Ids of ``chat``; those of its text as it is, unless a string of it spells a special token.

        Special tokens that a user's string spells on its own are encoded as plain text. So are those that strings make
        together with what the template puts beside them, which shows when the strings are kept apart.

        :raises InvalidRequest: when it is malformed or not to the template's liking.
        """
        plain = plain_chat(chat, self._template.roles, as_parts=self._template.takes_parts)
        self._template.check(plain)
        texts = strings(plain)
        forged = {text: spans for text in texts if (spans := self._forgeries.spans(text))}
        risky = {text for text in texts if self._may_join(text)}
        if not forged and not risky:
            return encoded(self._backend, self._template.render(plain), add_special_tokens=False).ids
        marks = unused_marks([*texts, self._template.text])
        kept = {text: marked(text, spans, marks) for text, spans in forged.items()}
        ids = self._encode_marked(rewritten(plain, kept), marks)
        if not risky:
            return ids
        apart = {text: self._set_apart(text, kept.get(text, text), marks) for text in risky}
        ids_apart = self._encode_marked(rewritten(plain, kept | apart), marks)
        return ids if self._forgeries.specials(ids) == self._forgeries.specials(ids_apart) else ids_apart

    def _may_join(self, text: str) -> bool:
        """Whether ``text`` may make a special token together with its neighbours."""
        known = self._forgeries
        return known.begins_inside(text) or known.ends_inside(text) or self._is_middle(text)

    def _is_middle(self, text: str) -> bool:
        """Whether ``text`` may be the middle of a special token. Words that mean something to the template are not
        looked at, since it may compare them.
        """
        return text not in self._template.words and self._forgeries.is_inside(text)

    def _set_apart(self, text: str, written: str, marks: Marks) -> str:
        """``written``, which stands for ``text``, kept from its neighbours where that matters."""
        before = marks.between if self._forgeries.begins_inside(text) else ""
        after = marks.between if self._forgeries.ends_inside(text) or self._is_middle(text) else ""
        return before + written + after

    def _encode_marked(self, chat: PlainChat, marks: Marks) -> list[int]:
        """Ids of a conversation with marks: what stands between two is plain text."""

        @functools.cache  # whoever forges one token a thousand times shall not cost much
        def encode(piece: str, *, is_plain: bool, first: bool) -> list[int]:
            return _encode_inside(self._blind if is_plain else self._backend, piece, first=first)

        ids: list[int] = []
        for i, piece in enumerate(pieces(self._template.render(chat), marks)):
            if piece:
                ids += encode(piece, is_plain=i % 2 == 1, first=not ids)
        return ids


def _encode_inside(backend: FastBackend, piece: str, *, first: bool) -> list[int]:
    """Ids of a piece of a longer text. Some tokenizers put a space before a text: after a line break they do not."""
    if not first:
        line_break = backend.encode("\n", add_special_tokens=False).ids
        ids = encoded(backend, "\n" + piece, add_special_tokens=False).ids
        if ids[: len(line_break)] == line_break:
            return ids[len(line_break) :]
    return encoded(backend, piece, add_special_tokens=False).ids
