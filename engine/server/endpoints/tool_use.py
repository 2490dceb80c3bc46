"""Tool calls of one chat: what the model is told, what it is held to, and how its answer is read."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...output_format import OutputFormat
from ..call import Call
from ..errors import invalid
from ..tools.base import SpecialTokenId, Tool, ToolFormat, ToolReader, no_special_tokens
from ..wire.chat import ChatForm, ChatTool, ChosenTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the tools of a request are used."""

    notation: ToolFormat
    tools: Sequence[Tool]
    told: Sequence[Mapping[str, object]]
    """The tools as the chat template has them."""
    forced: OutputFormat | None
    """What the answer must look like, if it must be a call."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether calls can be seen only if special tokens are left in the text."""
        return self.notation.has_special_tokens

    def reader(self) -> ToolReader:
        """Finds calls in the text of one sample."""
        return self.notation.reader(self.tools, lambda: uuid.uuid4().hex)


def tool_use(call: Call, form: ChatForm) -> ToolUse | None:
    """How ``form`` wants tools used; ``None``: not at all. With ``tool_choice`` ``none`` the model hears of none.

    :raises ApiError: 400 when the tools contradict each other, or nobody knows how the model writes calls.
    """
    offered = offered_tools(form)
    if not offered:
        return None
    notation = call.service.tool_format
    if notation is None:
        raise invalid(
            "this model's chat template has no tools, or none in a notation that is known: send none, or start the "
            "server with a --chat-template or a --tool-format that fits",
            "tools",
        )
    tools = [Tool(tool.function.name, tool.function.parameters, tool.function.strict is True) for tool in offered]
    return ToolUse(notation, tools, told_tools(offered), _forced(call, form, notation, tools))


def offered_tools(form: ChatForm) -> Sequence[ChatTool]:
    """The tools that the model is to hear of; with ``tool_choice`` ``none`` it hears of none.

    :raises ApiError: 400 when they contradict each other.
    """
    offered = form.tools or []
    _check(form, [tool.function.name for tool in offered])
    return () if form.tool_choice == "none" else offered


def told_tools(offered: Sequence[ChatTool]) -> Sequence[Mapping[str, object]]:
    """``offered`` as the chat template has them."""
    return [_told(tool) for tool in offered]


def _check(form: ChatForm, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise invalid("two tools have the same name", "tools")
    if form.tool_choice == "required" and not names:
        raise invalid("there are no tools that could be required", "tool_choice")
    if isinstance(form.tool_choice, ChosenTool) and form.tool_choice.function.name not in names:
        raise invalid(f"there is no tool {form.tool_choice.function.name!r}", "tool_choice")


def _told(tool: ChatTool) -> Mapping[str, object]:
    """A tool as models have seen it in training: with what it does and takes, and nothing about decoding."""
    function: dict[str, object] = msgspec.to_builtins(tool.function)
    function.pop("strict", None)
    return {"type": tool.type, "function": function}


def _forced(call: Call, form: ChatForm, notation: ToolFormat, tools: Sequence[Tool]) -> OutputFormat | None:
    if form.tool_choice != "required" and not isinstance(form.tool_choice, ChosenTool):
        return None
    codec = call.engine.codec
    special: SpecialTokenId = no_special_tokens if codec is None else codec.special_token_id
    chosen = form.tool_choice.function.name if isinstance(form.tool_choice, ChosenTool) else None
    parallel = form.parallel_tool_calls is not False
    return notation.output_format(tools, chosen, parallel=parallel, special_token_id=special)
