"""The object store tier: one object for each block in S3, GCS, Azure or a folder. Extra ``object-store``.

For blocks that engines on several machines share and that must be cheap to keep rather than quick to read. The tier
neither counts nor evicts: give the bucket a rule that deletes what is old. Trust is as with the Redis tier: whoever can
write there can delete and plant; what is planted fails the record's checksum, or its MAC if the engines have a key.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import ClassVar, Self, TypeVar
from urllib.parse import unquote, urlsplit

import anyio
import anyio.to_thread
import msgspec
import obstore
from obstore.exceptions import BaseError, UnknownConfigurationKeyError
from obstore.store import ObjectStore, from_url

from ...errors import CorruptBlock, InvalidRequest, StorageError
from ...telemetry.logging import Logger, get_logger
from ..base import Listed, Meta, Options, Record, Stored, Tier, TierGeometry, TierStats
from ..meta_codec import ABOUT_BYTES
from ..naming import BlockName, Shelf
from ..options import PositiveFloat, PositiveInt, Text, read_options
from .format import FIXED_BYTES, about_end, about_in, framed, place_of

_GLANCE = 4096
"""Bytes that a listing reads of each object; enough for what is known about blocks of 900 tokens."""
_PAGE = 500
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_LOCAL = frozenset({"file", "memory"})

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class ObjectStoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the object store tier."""

    url: Text
    """``s3://bucket/path``, ``gs://bucket/path``, ``az://account/container/path``, ``file:///folder``, ``memory:///``.
    A folder is made readable for its owner only if it is not there; on a local disk the disk tier is the better one."""
    prefix: Text = "octavo"
    """What all paths begin with, below the path of ``url``."""
    options: dict[str, str] = {}
    """Settings of the store as :func:`obstore.store.from_url` takes them for ``config``: region, endpoint, keys. By
    default they come from the environment."""
    allow_http: bool = False
    """Whether an endpoint may be without TLS."""
    timeout: PositiveFloat = 30.0
    """Seconds for one request to a remote store, and for all its repetitions together."""
    concurrency: PositiveInt = 16
    """Requests at a time."""
    strict: bool = False
    """True: a store that cannot be used is an error of ``open``. False: it is a warning, and is tried again with each
    call."""


class ObjectStoreTier(Tier):
    """Keeps each block in an object of its own. ``put`` always writes, so that what is known about the block is stored
    with it; ``touch`` does nothing, since that would mean writing the block again.
    """

    persistent: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    def __init__(
        self,
        options: ObjectStoreOptions,
        geometry: TierGeometry,
        *,
        store: ObjectStore | None = None,
        logger: Logger | None = None,
    ) -> None:
        """``store``: used instead of one made from ``options.url``.

        :raises InvalidRequest: for a URL, prefix or setting that cannot be used.
        """
        if not _PREFIX.fullmatch(options.prefix) or ".." in options.prefix.split("/"):
            raise InvalidRequest(f"option 'prefix' of object store tier must match {_PREFIX.pattern} without '..'")
        self._options = options
        self._record_bytes = geometry.record_bytes
        self._logger = get_logger(__name__) if logger is None else logger
        self._store = _store(options) if store is None and urlsplit(options.url).scheme != "file" else store
        self._open = False
        self._requests = anyio.Semaphore(options.concurrency)
        self._declined = 0
        self._corrupt = 0
        self._problem = ""

    @classmethod
    def create(cls, options: Options, geometry: TierGeometry) -> Self:
        """See :class:`ObjectStoreOptions`."""
        return cls(read_options(ObjectStoreOptions, options, "object store tier"), geometry)

    async def open(self) -> None:
        """Ask the store for an object that is not there. See ``ObjectStoreOptions.strict`` for one that fails.

        :raises StorageError: only if ``strict``, or when the folder of a ``file`` URL cannot be made.
        """
        if self._store is None:
            self._store = await anyio.to_thread.run_sync(_folder_store, self._options)
        self._open = True
        try:
            await self._head(f"{self._options.prefix}/probe")
        except StorageError as error:
            if self._options.strict:
                self._open = False
                raise
            self._logger.warning("object_store_unreachable", prefix=self._options.prefix, problem=str(error))

    async def put(self, shelf: Shelf, records: Sequence[Record]) -> list[bool]:
        """Write every block; one that cannot be written while others can is declined."""
        store = self._opened()

        async def write(record: Record) -> bool:
            if len(record.data) != self._record_bytes:
                return False
            path = self._path(shelf, record.head.name)
            await obstore.put_async(store, path, framed(record), use_multipart=False)
            return True

        kept = [answer is True for answer in await self._each(records, write)]
        self._declined += kept.count(False)
        return kept

    async def get(self, shelf: Shelf, names: Sequence[BlockName]) -> list[Stored | None]:
        """What is there. What is there but broken is deleted and counted."""
        self._opened()

        async def read(name: BlockName) -> Stored | None:
            try:
                return await self._read(self._path(shelf, name), name)
            except CorruptBlock:
                self._corrupt += 1
                await self._remove(self._path(shelf, name))
                return None

        return await self._each(names, read)

    async def contains(self, shelf: Shelf, names: Sequence[BlockName]) -> list[bool]:
        """Whether there is an object for each."""
        self._opened()
        answers = await self._each(names, lambda name: self._head(self._path(shelf, name)))
        return [answer is True for answer in answers]

    async def delete(self, shelf: Shelf, names: Sequence[BlockName]) -> int:
        """Delete the objects of ``names``.

        :raises StorageError: when one could not be deleted.
        """
        self._opened()
        return await self._delete_all([self._path(shelf, name) for name in dict.fromkeys(names)])

    async def erase(self, tenant: bytes) -> int:
        """Delete every object of the tenant. Versions and copies that the store keeps on its own account are its
        matter.

        :raises StorageError: when one could not be deleted.
        """
        self._opened()
        return sum([await self._delete_all(page) async for page in self._paths(tenant.hex())])

    async def listing(self, shelf: Shelf | None = None) -> AsyncIterator[Listed]:
        """A list of all objects and a look into each, which takes long with many. Broken ones are left out."""
        self._opened()
        found: list[Listed] = []
        where = "" if shelf is None else f"{shelf.tenant.hex()}/{shelf.namespace.hex()}"
        async for page in self._paths(where):
            found += [listed for listed in await self._each(page, self._listed) if listed is not None]
        for listed in sorted(found, key=lambda each: each.head.start):
            yield listed

    async def touch(self, shelf: Shelf, metas: Mapping[BlockName, Meta]) -> None:
        """See the class."""
        self._opened()

    async def flush(self) -> None:
        """The store has acknowledged everything that was put; how durable it is there is the store's matter."""
        self._opened()

    async def close(self) -> None:
        """There is nothing to give back."""
        self._open = False

    def stats(self) -> TierStats:
        """Declined and corrupt blocks are counted; how many there are is the store's matter."""
        return TierStats(
            declined=self._declined, corrupt=self._corrupt, healthy=not self._problem, problem=self._problem
        )

    async def _read(self, path: str, name: BlockName) -> Stored | None:
        try:
            result = await obstore.get_async(self._opened(), path)
            if result.meta["size"] > FIXED_BYTES + ABOUT_BYTES + self._record_bytes:
                raise CorruptBlock(f"an object has {result.meta['size']} bytes")
            data = memoryview(await result.bytes_async())
        except FileNotFoundError:
            return None
        about, end = about_in(data, name)
        if len(data) - end != self._record_bytes:
            raise CorruptBlock(f"a stored block has {len(data) - end} bytes instead of {self._record_bytes}")
        return Stored(data[end:], about.meta)

    async def _listed(self, path: str) -> Listed | None:
        place = place_of(path)
        if place is None:
            return None
        shelf, name = place
        try:
            data = memoryview(await obstore.get_range_async(self._opened(), path, start=0, end=_GLANCE))
            if about_end(data) > len(data):
                more = about_end(data)
                data = memoryview(await obstore.get_range_async(self._opened(), path, start=0, end=more))
            return Listed(shelf, *about_in(data, name)[0])
        except (FileNotFoundError, CorruptBlock):
            return None

    async def _head(self, path: str) -> bool:
        try:
            await self._call(lambda: obstore.head_async(self._opened(), path))
        except FileNotFoundError:
            return False
        return True

    async def _remove(self, path: str) -> bool:
        """Whether it was there."""
        there = await self._head(path)
        if there:
            try:
                await self._call(lambda: obstore.delete_async(self._opened(), path))
            except FileNotFoundError:
                return False
        return there

    async def _delete_all(self, paths: Sequence[str]) -> int:
        answers = await self._each(paths, self._remove)
        if None in answers:
            raise StorageError(f"the object store cannot be used: {self._problem}")
        return answers.count(True)

    async def _paths(self, where: str) -> AsyncIterator[list[str]]:
        """Paths of all objects below a folder, a page at a time."""
        pages = obstore.list(self._opened(), f"{self._options.prefix}/{where}", chunk_size=_PAGE)
        while True:
            page = await self._call(lambda: anext(pages, None))
            if page is None:
                return
            yield [meta["path"] for meta in page]

    def _path(self, shelf: Shelf, name: BlockName) -> str:
        digits = name.hex()
        return f"{self._options.prefix}/{shelf.tenant.hex()}/{shelf.namespace.hex()}/{digits[:2]}/{digits}"

    async def _each(
        self, items: Sequence[_Item], work: Callable[[_Item], Awaitable[_Answer | None]]
    ) -> list[_Answer | None]:
        """The answers for ``items``, asked at the same time; ``None`` for those that failed.

        :raises StorageError: when all failed.
        """
        answers: list[_Answer | None] = [None] * len(items)
        errors: list[StorageError] = []

        async def one(at: int, item: _Item) -> None:
            try:
                async with self._requests:
                    answers[at] = await self._call(lambda: work(item))
            except StorageError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for at, item in enumerate(items):
                tasks.start_soon(one, at, item)
        if items and len(errors) == len(items):
            raise errors[0]
        return answers

    async def _call(self, request: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """:raises StorageError: for whatever is wrong, except that there is no such object."""
        try:
            answer = await request()
        except FileNotFoundError:
            raise
        except BaseException as error:
            if not _of_the_store(error):
                raise
            self._problem = _first_line(error)
            raise StorageError(f"the object store cannot be used: {self._problem}") from error
        self._problem = ""
        return answer

    def _opened(self) -> ObjectStore:
        if self._store is None or not self._open:
            raise StorageError("the object store tier is not open")
        return self._store


def _store(options: ObjectStoreOptions) -> ObjectStore:
    """:raises InvalidRequest: when there can be no such store; the message never repeats a setting's value."""
    remote = urlsplit(options.url).scheme not in _LOCAL
    if options.options and not remote:
        raise InvalidRequest("option 'options' of object store tier is for remote stores; this URL takes none")
    limit = timedelta(seconds=options.timeout)
    try:
        if not remote:
            return from_url(options.url)
        return from_url(  # type: ignore[call-overload,no-any-return]  # settings come as text, not as its typed dictionaries
            options.url,
            config=dict(options.options),
            client_options={"timeout": limit, "connect_timeout": limit, "allow_http": options.allow_http},
            retry_config={"max_retries": 3, "retry_timeout": limit},
        )
    except UnknownConfigurationKeyError as error:
        raise InvalidRequest(f"option 'options' of object store tier: {_first_line(error)}") from None
    except BaseException as error:
        if not _of_the_store(error):
            raise
        raise InvalidRequest(
            f"options 'url' and 'options' of object store tier describe no store ({type(error).__name__})"
        ) from None


def _folder_store(options: ObjectStoreOptions) -> ObjectStore:
    folder = Path(unquote(urlsplit(options.url).path))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the folder of the object store tier cannot be made: {error}") from error
    return _store(options)


def _of_the_store(error: BaseException) -> bool:
    """Whether the library raised it. Its panics, which some wrong settings cause, are no ``Exception``."""
    return isinstance(error, (BaseError, OSError, ValueError)) or type(error).__module__ == "pyo3_runtime"


def _first_line(error: BaseException) -> str:
    """The library's messages end in a dump of its own structures."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
