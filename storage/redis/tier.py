"""The Redis tier: blocks in a Redis or Valkey server that engines on several machines share. Extra ``redis``.

Trust: whoever can write to the server can delete blocks and plant others. Planted blocks that are not the very block
asked for are found by the record's checksum; against forged checksums give all engines that share the server one key,
which makes the checksum a MAC. Nothing that comes back is unpickled. Keys hold digests only, no tokens and no salts.

Layout: ``prefix:tenant:namespace:name`` (digests in hex) says what the block is; its record lies in pieces of at most
``value_bytes`` under that key with ``:value_bytes.number`` behind it. A block is there when all of these are. All keys
expire after ``ttl_seconds`` without use.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self, TypeVar

import msgspec
from redis.exceptions import OutOfMemoryError, ResponseError

from ...errors import CorruptBlock, InvalidRequest, StorageError
from ...telemetry.logging import Logger, get_logger
from ..base import Listed, Meta, Options, Record, Stored, Tier, TierGeometry, TierStats
from ..meta_codec import ABOUT_BYTES, About, pack_about, unpack_about
from ..naming import NAME_BYTES, BlockName, Shelf
from ..options import PositiveFloat, PositiveInt, Text, read_options
from .link import Command, RedisLink, check_url, checked, shown

_BATCH_BYTES = 2 << 20
"""Most bytes that are copied and sent without letting others on the loop run."""
_PREFIX = re.compile(r"[A-Za-z0-9_.:{}-]+")
_HEX = 2 * NAME_BYTES

_Item = TypeVar("_Item")


class RedisOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the Redis tier."""

    url: Text
    """``redis://[user:password@]host[:port][/db]``, ``rediss://...`` (TLS, certificates checked), or
    ``unix:///path/to/socket``."""
    ttl_seconds: PositiveInt = 7 * 86400
    """A block that nobody used for so long expires."""
    prefix: Text = "octavo"
    """What all keys begin with."""
    value_bytes: PositiveInt = 1 << 20
    """Records are cut into values of at most so many bytes. Engines share blocks only if they agree on it."""
    timeout: PositiveFloat = 5.0
    """Seconds for connecting and for each answer."""
    strict: bool = False
    """True: a server that cannot be reached is an error of ``open``. False: it is a warning, and is tried again with
    each call."""


class _Keys(NamedTuple):
    about: bytes
    pieces: tuple[bytes, ...]


class RedisTier(Tier):
    """Keeps blocks in a Redis server. What the server's ``maxmemory`` refuses is declined; it evicts as it is set up to
    (``allkeys-lru`` suits). What it holds altogether is not known here, so ``stats`` counts no blocks.
    """

    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(self, options: RedisOptions, geometry: TierGeometry, *, logger: Logger | None = None) -> None:
        """:raises InvalidRequest: for a URL or prefix that cannot be used."""
        check_url(options.url)
        if not _PREFIX.fullmatch(options.prefix):
            raise InvalidRequest(f"option 'prefix' of Redis tier must match {_PREFIX.pattern}")
        self._options = options
        self._record_bytes = geometry.record_bytes
        self._logger = get_logger(__name__) if logger is None else logger
        self._link: RedisLink | None = None
        self._declined = 0
        self._corrupt = 0

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        """See :class:`RedisOptions`."""
        return cls(read_options(RedisOptions, options, "Redis tier"), geometry)

    async def open(self) -> None:
        """Connect. See ``RedisOptions.strict`` for a server that cannot be reached.

        :raises StorageError: only if ``strict``.
        """
        link = RedisLink(self._options.url, self._options.timeout)
        self._link = link
        try:
            checked((await link.run([("PING",)]))[0])
        except StorageError as error:
            if self._options.strict:
                await self.close()
                raise
            self._logger.warning("redis_unreachable", server=shown(self._options.url), problem=str(error))

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Blocks that are there get their ``meta`` and a new time to live; the others are sent."""
        self._opened()
        fit = [len(record.data) == self._record_bytes for record in records]
        sent: list[bool] = []
        for batch in _batches([record for record, yes in zip(records, fit, strict=True) if yes], self._record_bytes):
            there = await self.contains(shelf, [record.head.name for record in batch])
            sent += await self._send(shelf, batch, there)
        results = iter(sent)
        kept = [yes and next(results) for yes in fit]
        self._declined += kept.count(False)
        return kept

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """What is there, with a new time to live. What is there but broken is deleted and counted. Pieces alone are
        left: somebody may be putting the block just now.
        """
        self._opened()
        stored: list[Stored | None] = []
        for batch in _batches(names, self._record_bytes):
            stored += await self._fetch(shelf, batch)
        return stored

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """Whether all keys of a block exist."""
        link = self._opened()
        keys = [self._keys(shelf, name) for name in names]
        counts = await link.run([("EXISTS", each.about, *each.pieces) for each in keys])
        return [checked(count) == 1 + len(each.pieces) for count, each in zip(counts, keys, strict=True)]

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Delete all keys of ``names``."""
        link = self._opened()
        keys = [self._keys(shelf, name) for name in dict.fromkeys(names)]
        gone = await link.run([("DEL", each.about) for each in keys])
        for answer in await link.run([("DEL", *each.pieces) for each in keys]):
            checked(answer)
        return sum(checked(count) == 1 for count in gone)

    async def erase(self, tenant: bytes) -> int:
        """Delete every key of the tenant. Copies that the server has made (replicas, dump and log files) follow in its
        own time.
        """
        link = self._opened()
        erased: set[bytes] = set()
        async for keys in link.scan(f"{self._options.prefix}:{tenant.hex()}:*"):
            for answer in await link.run([("UNLINK", key) for key in keys]):
                checked(answer)
            erased.update(key for key in keys if self._place(key) is not None)
        return len(erased)

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """A search through all keys of the server, which takes seconds with millions of them. Broken ones are left
        out.
        """
        link = self._opened()
        any_digest = "?" * _HEX
        where = f"{any_digest}:{any_digest}" if shelf is None else f"{shelf.tenant.hex()}:{shelf.namespace.hex()}"
        found: dict[bytes, Listed] = {}
        async for keys in link.scan(f"{self._options.prefix}:{where}:{any_digest}"):
            answers = await link.run([("GETRANGE", key, 0, ABOUT_BYTES) for key in keys])
            for key, answer in zip(keys, answers, strict=True):
                listed = self._listed(key, answer)
                if listed is not None:
                    found[key] = listed
        for listed in sorted(found.values(), key=lambda each: each.head.start):
            yield listed

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """Rewrite what is known about blocks that are there."""
        link = self._opened()
        keys = {name: self._keys(shelf, name) for name in metas}
        answers = await link.run([("GETRANGE", each.about, 0, ABOUT_BYTES) for each in keys.values()])
        writes: list[Command] = []
        for (name, each), answer in zip(keys.items(), answers, strict=True):
            known = _about(answer, name)
            if known is not None:
                packed = pack_about(known.head, metas[name])
                writes += [("SET", each.about, packed, "XX", "EX", self._options.ttl_seconds), *self._renewed(each)]
        await link.run(writes)

    async def flush(self) -> None:
        """The server has acknowledged everything that was put; how durable it is there is the server's matter."""
        self._opened()

    async def close(self) -> None:
        """Disconnect."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    def stats(self) -> TierStats:
        """Declined and corrupt blocks are counted; how many there are is the server's matter."""
        problem = "" if self._link is None else self._link.problem
        return TierStats(declined=self._declined, corrupt=self._corrupt, healthy=not problem, problem=problem)

    async def _send(self, shelf: Shelf, batch: Sequence[Record], there: Sequence[bool]) -> list[bool]:
        commands: list[Command] = []
        ends: list[int] = []
        for record, known in zip(batch, there, strict=True):
            keys = self._keys(shelf, record.head.name)
            commands += self._renewed(keys) if known else self._values(keys, record)
            about = pack_about(record.head, record.meta)
            commands.append(("SET", keys.about, about, "EX", self._options.ttl_seconds))
            ends.append(len(commands))
        answers = await self._opened().run(commands)
        starts = [0, *ends]
        taken = [not _refused(answers[start:end]) for start, end in zip(starts, ends, strict=False)]
        pairs = zip(batch, taken, there, strict=True)
        parts = [record.head.name for record, yes, known in pairs if not yes and not known]
        if parts:
            await self.delete(shelf, parts)
        return [yes or known for yes, known in zip(taken, there, strict=True)]

    async def _fetch(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        commands: list[Command] = []
        for name in names:
            keys = self._keys(shelf, name)
            # whether it is there comes first: a block that is being put meanwhile must not look like a broken one
            commands += [("EXPIRE", keys.about, self._options.ttl_seconds), ("GETRANGE", keys.about, 0, ABOUT_BYTES)]
            commands += [("GETRANGE", key, 0, self._options.value_bytes) for key in keys.pieces]
            commands += self._renewed(keys)
        answers = iter(await self._opened().run(commands))
        stored: list[Stored | None] = []
        broken: list[BlockName] = []
        for name in names:
            count = len(self._keys(shelf, name).pieces)
            is_there, about, pieces, _ = next(answers), next(answers), _next(answers, count), _next(answers, count)
            item = self._stored(name, about, pieces)
            stored.append(item)
            if item is None and checked(is_there):
                broken.append(name)
        if broken:
            self._corrupt += len(broken)
            await self.delete(shelf, broken)
        return stored

    def _stored(self, name: BlockName, about: object, pieces: Sequence[object]) -> Stored | None:
        known = _about(about, name)
        parts = [part for part in map(_value, pieces) if part is not None]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if known is None or len(data) != self._record_bytes:
            return None
        return Stored(memoryview(data), known.meta)

    def _listed(self, key: bytes, answer: object) -> Listed | None:
        place = self._place(key)
        if place is None:
            return None
        shelf, name = place
        known = _about(answer, name)
        return None if known is None else Listed(shelf, known.head, known.meta)

    def _place(self, key: bytes) -> tuple[Shelf, BlockName] | None:
        """Which block the key is about; ``None``: it is a piece of a record or none of ours."""
        parts = key.removeprefix(self._options.prefix.encode() + b":").split(b":")
        if [len(part) for part in parts] != [_HEX] * 3:
            return None
        try:
            tenant, namespace, name = (bytes.fromhex(part.decode("ascii")) for part in parts)
        except ValueError:
            return None
        return Shelf(namespace, tenant), name

    def _keys(self, shelf: Shelf, name: BlockName) -> _Keys:
        about = f"{self._options.prefix}:{shelf.tenant.hex()}:{shelf.namespace.hex()}:{name.hex()}"
        size = self._options.value_bytes
        count = -(-self._record_bytes // size)
        return _Keys(about.encode(), tuple(f"{about}:{size}.{at}".encode() for at in range(count)))

    def _values(self, keys: _Keys, record: Record) -> list[Command]:
        """The record's bytes, copied: a call that is cancelled may leave them in a connection's buffer."""
        size, ttl = self._options.value_bytes, self._options.ttl_seconds
        return [
            ("SET", key, bytes(record.data[at * size : (at + 1) * size]), "EX", ttl)
            for at, key in enumerate(keys.pieces)
        ]

    def _renewed(self, keys: _Keys) -> list[Command]:
        return [("EXPIRE", key, self._options.ttl_seconds) for key in keys.pieces]

    def _opened(self) -> RedisLink:
        if self._link is None:
            raise StorageError("the Redis tier is not open")
        return self._link


def _batches(items: Sequence[_Item], record_bytes: int) -> Iterator[Sequence[_Item]]:
    step = max(_BATCH_BYTES // record_bytes, 1)
    return (items[at : at + step] for at in range(0, len(items), step))


def _next(answers: Iterator[object], count: int) -> list[object]:
    return [next(answers) for _ in range(count)]


def _value(answer: object) -> bytes | None:
    """The bytes of a key; ``None`` where there is a key of another type.

    :raises StorageError: when the answer is another error.
    """
    if isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE"):
        return None
    value = checked(answer)
    return value if isinstance(value, bytes) else None


def _about(answer: object, name: BlockName) -> About | None:
    value = _value(answer)
    if not value:
        return None
    try:
        return unpack_about(value, name)
    except CorruptBlock:
        return None


def _refused(answers: Sequence[object]) -> bool:
    """Whether the server had no memory for one of the values.

    :raises StorageError: when it refused for another reason.
    """
    if any(isinstance(answer, OutOfMemoryError) for answer in answers):
        return True
    for answer in answers:
        checked(answer)
    return False
