"""A model's chat template: from a checked conversation to the text that the model was trained to go on from.

A template is code that came with the model. It runs in the sandbox of Transformers, and has no bound on its time but
that its loops run over what it is given.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from jinja2 import TemplateError, TemplateSyntaxError

from ...errors import InvalidRequest, ModelError
from .chat_messages import Json, PlainChat
from .fast_tokenizer import HuggingFaceTokenizer

MAX_SHOWN = 200
"""Characters of a template's own error message that a client is shown."""
_PROBE = "octavoprobe"
_CODE = re.compile(r"\{[{%](.*?)[%}]\}", re.DOTALL)
_LITERAL = re.compile(r"'([^'\\]*)'|\"([^\"\\]*)\"")


class ChatTemplate:
    """The template of ``tokenizer``, or ``replacement`` in its place. May be used from any thread.

    :raises ModelError: when ``replacement`` is no valid template.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, replacement: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._replacement = replacement
        self._plain_text = self._text_of(tools=None)
        self._tools_text = self._text_of(tools=[])
        parameters = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {*parameters, *tokenizer.special_tokens_map, "messages", "conversations"}
        literals = set(_literals(self.text))
        self.roles = frozenset(filter(str.isidentifier, literals))
        """What its code spells out, and could be the name of a role."""
        self.words = frozenset(literals.union(*(re.findall(r"\w+", code) for code in _code(self.text))))
        """Every word of its code: strings that mean something to it."""
        self.takes_tools = any(re.search(r"\btools\b", _LITERAL.sub("", code)) for code in _code(self._tools_text))
        """Whether it has a place for tools."""
        self.takes_parts = self._takes_parts()
        """Whether it shows contents only where they are lists of parts."""

    @property
    def exists(self) -> bool:
        """Whether the model has one."""
        return bool(self._plain_text)

    @property
    def text(self) -> str:
        """All of its source, with that of the one for tools if it is another."""
        return "\n".join(dict.fromkeys((self._plain_text, self._tools_text)))

    def check(self, chat: PlainChat) -> None:
        """:raises InvalidRequest: when there is no template, or none that knows what ``chat`` has beside messages."""
        if not self.exists:
            raise InvalidRequest("this model has no chat template; send a text prompt")
        if chat.tools and not self.takes_tools:
            raise InvalidRequest("the model's chat template has no tools: send none, or serve a template that has them")
        if clashes := sorted(self._reserved & chat.options.keys()):
            raise InvalidRequest(f"template_options must not set {', '.join(clashes)}")

    def render(self, chat: PlainChat) -> str:
        """The conversation as text.

        :raises InvalidRequest: for whatever the template raises, since it is about the messages.
        """
        try:
            return self._apply(chat)
        except TemplateError as error:  # its author's words, or what is missing in the messages
            told = f"the chat template does not accept these messages: {str(error)[:MAX_SHOWN]}"
            raise InvalidRequest(told) from error
        except Exception as error:  # such messages may quote the whole conversation
            told = "go on with the last message" if chat.continues_last else "write these messages"
            raise InvalidRequest(f"the chat template cannot {told} ({type(error).__name__})") from error

    def _apply(self, chat: PlainChat) -> str:
        rendered = self._tokenizer.apply_chat_template(
            chat.messages,  # type: ignore[arg-type]  # values may be any JSON, whatever the library's annotation says
            chat.tools or None,  # type: ignore[arg-type]  # the same
            chat_template=self._replacement,
            add_generation_prompt=chat.opens_turn and not chat.continues_last,
            continue_final_message=chat.continues_last,
            tokenize=False,
            **chat.options,
        )
        return str(rendered)

    def _text_of(self, tools: list[dict[str, object]] | None) -> str:
        """The source that is used with or without tools; empty when there is none."""
        if self._replacement is None and self._tokenizer.chat_template is None:
            return ""
        try:
            return self._tokenizer.get_chat_template(self._replacement, tools)
        except ValueError:  # several templates, and none for this case
            return ""

    def _takes_parts(self) -> bool:
        if not self.exists or self._shows(_PROBE):
            return False
        return self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Json) -> bool:
        """Whether a content of this form gets into the text."""
        try:
            return _PROBE in self._apply(PlainChat([{"role": "user", "content": content}], [], {}))
        except TemplateSyntaxError as error:
            if self._replacement is None:
                return False
            raise ModelError(f"the chat template is no valid Jinja: line {error.lineno}: {error.message}") from error
        except Exception:  # noqa: BLE001  # foreign code; what it does not accept here it may accept of others
            return False


def _code(source: str) -> list[str]:
    """What stands between the braces."""
    return _CODE.findall(source)


def _literals(source: str) -> Iterator[str]:
    for code in _code(source):
        yield from (single or double for single, double in _LITERAL.findall(code))
