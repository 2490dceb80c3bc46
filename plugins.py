"""Plug-ins: from a name in a configuration to a class, by the entry points of what is installed.

Nothing is imported before its name is asked for, and nothing is remembered between two calls: what is installed is read
anew each time (milliseconds), so a group has no state. ``package.module:Class`` works wherever a name does.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from .errors import ContractBroken, PluginError, PluginImportFailed, UnknownPlugin


class Versioned(Protocol):
    """What the base class of every plug-in group has."""

    api_version: ClassVar[tuple[int, int]]
    """Major and minor version of the contract that a class was written for."""


T = TypeVar("T", bound=Versioned)


class PluginReport(NamedTuple):
    """One line of ``octavo plugins``."""

    group: str
    name: str
    distribution: str
    """``unknown`` where its metadata does not say."""
    version: str
    """Of the distribution; ``unknown`` where its metadata does not say."""
    target: str
    """``package.module:Class``."""
    error: str | None
    """Why it cannot be used; ``None``: it can."""


class Plugin(NamedTuple, Generic[T]):
    """A class that passed the checks of its group, and where it came from."""

    name: str
    distribution: str | None
    """Name and version; ``None`` when it was given as ``package.module:Class``."""
    cls: type[T]


@dataclass(frozen=True, slots=True)
class PluginGroup(Generic[T]):
    """The plug-ins of one kind: the entry points of a group, all extending one base class."""

    name: str
    """Entry-point group, such as ``octavo.eviction_policies``."""
    base: type[T]
    """Plug-ins are concrete subclasses of it, written for the same major ``api_version``."""

    def resolve(self, spec: str) -> type[T]:
        """The class that ``spec`` names, imported and checked. Errors as of :meth:`find`."""
        return self.find(spec).cls

    def find(self, spec: str) -> Plugin[T]:
        """Import and check the plug-in that ``spec`` names: an entry point or ``package.module:Class``.

        :raises UnknownPlugin: no installed distribution offers the name; the message lists those that exist.
        :raises PluginError: two distributions offer the name; the message names both.
        :raises PluginImportFailed: it could not be imported; the message names its distribution, the cause is chained.
        :raises ContractBroken: it is no concrete subclass of the base or was written for another major version.
        """
        if ":" in spec:
            if not all(spec.split(":")):
                raise UnknownPlugin(f"{spec!r} is no plug-in; give a name or package.module:Class")
            return Plugin(spec, None, self._load(EntryPoint(name=spec, value=spec, group=self.name)))
        found = self._entries(spec)
        if not found:
            raise UnknownPlugin(self._unknown(spec))
        if len(found) > 1:
            raise PluginError(_ambiguous(found))
        return Plugin(spec, _origin(found[0]), self._load(found[0]))

    def names(self) -> list[str]:
        """What is installed, in order of name, whether it can be used or not: nothing is imported."""
        return sorted({entry.name for entry in entry_points(group=self.name)})

    def report(self) -> list[PluginReport]:
        """Import everything in the group and say what is usable, in order of name. Raises nothing."""
        entries = self._entries()
        return [self._report(entry, [other for other in entries if other.name == entry.name]) for entry in entries]

    def _report(self, entry: EntryPoint, namesakes: list[EntryPoint]) -> PluginReport:
        error = _ambiguous(namesakes) if len(namesakes) > 1 else None
        if error is None:
            try:
                self._load(entry)
            except PluginError as failure:
                error = str(failure)
        return PluginReport(self.name, entry.name, *_distribution(entry.dist), entry.value, error)

    def _entries(self, name: str | None = None) -> list[EntryPoint]:
        """Each offer once, or each of ``name``. Where an offer comes from is the slow part to find out: it is in the
        metadata of the distribution, which is parsed anew for each. ``importlib`` itself skips a distribution that it
        meets on the path a second time.
        """
        offers = entry_points(group=self.name)
        found = {(e.name, _origin(e), e.value): e for e in offers if name is None or e.name == name}
        return [found[key] for key in sorted(found)]

    def _load(self, entry: EntryPoint) -> type[T]:
        where = f"plug-in {entry.name!r} of {self.name} ({entry.value}{_from(entry)})"
        try:
            candidate: object = entry.load()
        except Exception as error:  # an import runs foreign code, which may raise anything
            mend = "Check the name" if entry.dist is None else "Reinstall its distribution with all its dependencies"
            raise PluginImportFailed(
                f"{where} could not be imported: {type(error).__name__}: {error}. {mend}, or choose another plug-in."
            ) from error
        return self._checked(candidate, where)

    def _checked(self, candidate: object, where: str) -> type[T]:
        base = self.base
        if not isinstance(candidate, type) or not issubclass(candidate, base):
            wanted = f"{base.__module__}.{base.__qualname__}"
            raise ContractBroken(f"{where} must be a subclass of {wanted}, not {candidate!r}")
        if inspect.isabstract(candidate):
            missing: Iterable[str] = getattr(candidate, "__abstractmethods__", ())
            raise ContractBroken(f"{where} does not implement {', '.join(sorted(missing))}")
        theirs: object = candidate.api_version
        if not isinstance(theirs, tuple) or theirs[:1] != base.api_version[:1]:
            raise ContractBroken(
                f"{where} was written for api_version {theirs!r}; this Octavo has {base.api_version!r}, and the first "
                "numbers must agree. Install a release of it that fits."
            )
        return candidate

    def _unknown(self, spec: str) -> str:
        entries = self._entries()
        near = difflib.get_close_matches(spec, [entry.name for entry in entries], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = ", ".join(f"{entry.name} ({_origin(entry)})" for entry in entries) or "nothing"
        return f"no plug-in {spec!r} in {self.name}.{hint} Installed: {known}. Or give package.module:Class."


def _ambiguous(entries: Iterable[EntryPoint]) -> str:
    offers = list(entries)
    listed = " and ".join(f"{_origin(entry)} ({entry.value})" for entry in offers)
    return (
        f"plug-in {offers[0].name!r} of {offers[0].group} is offered more than once, by {listed}. Uninstall one, "
        "or give package.module:Class instead of the name."
    )


def _from(entry: EntryPoint) -> str:
    return "" if entry.dist is None else f" from {_origin(entry)}"


def _origin(entry: EntryPoint) -> str:
    return " ".join(_distribution(entry.dist))


def _distribution(dist: Distribution | None) -> tuple[str, str]:
    """Name and version; metadata may be damaged (interrupted installs), and listing plug-ins must not fail on that."""
    metadata = None
    with contextlib.suppress(OSError):
        metadata = None if dist is None else dist.metadata
    if metadata is None:
        return "unknown", "unknown"
    name, version = (str(metadata[field]) if field in metadata else "" for field in ("Name", "Version"))
    return name or "unknown", version or "unknown"
