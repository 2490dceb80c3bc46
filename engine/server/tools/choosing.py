"""Which tool format a model needs: the one that is named, or the one that its chat template shows."""

from __future__ import annotations

from typing import Final

from ....plugins import PluginGroup
from .base import ToolFormat

TOOL_FORMATS: Final = PluginGroup("octavo.tool_formats", ToolFormat)


def choose_format(name: str | None, chat_template: str | None) -> ToolFormat | None:
    """A tool format; ``None``: no name is given, and none of those installed fits the template.

    ``name``: of a plug-in in ``octavo.tool_formats``, or ``package.module:Class``. Without one, the formats of other
    distributions are asked before our own, each in order of name; those that cannot be imported are passed over.

    :raises PluginError: when the named format cannot be had.
    """
    if name is not None:
        return TOOL_FORMATS.resolve(name)()
    if chat_template is None:
        return None
    usable = [found for found in TOOL_FORMATS.report() if found.error is None]
    for found in sorted(usable, key=lambda each: each.distribution == "octavo"):
        candidate = TOOL_FORMATS.resolve(found.name)()
        if candidate.matches(chat_template):
            return candidate
    return None
