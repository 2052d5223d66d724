"""One group on one broker: the newest of its record that is known here, and who waits for it to change.

`LiveGroup` owns the record's compare-and-put. Everything that happens to a group is a function of a group:
what came while a put was under way is applied to the newest state one after the other, and written by one
put. A hundred members that join at once are a few writes.

**Why an answer is right.** What changed the group is answered after its put, and the put names the version it
was made from. What changed nothing is answered from memory, except a refusal: that waits for a read that
began after the question came, because the member may have joined by another broker a moment ago.

**Applied again.** After a conflict, or when the outcome of a put is not known, the same functions are applied
to what is there then. They are made for that: a member that joins with an id that it has joins again.

**A put without an answer** may land later. What it was made from is written once more before anybody is
answered from it: that decides whether the put counts. It could expel a member that was told meanwhile that
all is well; or make a member this broker's to time, without its knowledge.

**Who waits.** A question without an answer waits, and is asked again whenever the group has changed, by
whoever changed it. Nothing is owned by waiting: when this broker dies, the member asks another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from dray.errors import (
    CoordinatorAway,
    CorruptStore,
    DrayError,
    GroupError,
    GroupFull,
    IncompatibleStore,
    MetadataError,
    OutcomeUnknown,
    RebalanceInProgress,
    TooLarge,
    Unavailable,
    VersionConflict,
)
from dray.groups.group import Dying, Group, Outcome
from dray.groups.record import decode, encode, group_key
from dray.metadata.store import Expect, MetadataStore

log = logging.getLogger(__name__)

# Each was foiled by another broker's change or by a lost answer. Brokers that write one group at the same
# moment take turns, so this many in a row are an outage.
ATTEMPTS = 16
# Versions of own puts that the watch may tell of later. One is told within a moment; a burst is a few dozen.
REMEMBERED_VERSIONS = 256
# The store repeats reads itself within its call timeout: whatever comes here has lasted seconds already.
PAUSE_S = 0.5

A = TypeVar("A")
Apply: TypeAlias = Callable[[Group | None], Outcome[Any]]
AskAgain: TypeAlias = Callable[[Group | None], Any]


@dataclass(slots=True, eq=False)
class _Asked:
    """A question on its way, or waiting."""

    apply: Apply
    again: AskAgain | None  # None where `apply` always answers
    came: int  # how many reads had begun
    wants_fresh: bool
    answer: asyncio.Future[Any]


class LiveGroup:
    """`prepare` runs before questions are put to a group, and again whenever that was read anew.

    `bury` removes what belongs to a group that was deleted, before its record goes. `changed` is called when
    the group has changed.
    """

    def __init__(
        self,
        store: MetadataStore,
        domain: int,
        group_id: str,
        *,
        prepare: Callable[[Group | None], Awaitable[None]],
        bury: Callable[[str], Awaitable[None]],
        changed: Callable[[LiveGroup], None],
    ) -> None:
        self.group_id = group_id
        self.group: Group | None = None
        self.waiting: Counter[str] = Counter()  # requests that have no answer yet, by member
        self.is_followed = False  # whether changes are read as they are told, and not when somebody asks
        self._store = store
        self._domain = domain
        self._key = group_key(group_id)
        self._prepare = prepare
        self._bury = bury
        self._changed = changed
        self._version: int | None = None
        self._is_behind = True  # it was written by somebody else since it was read, or it never was read
        self._reads = 0  # that have begun
        self._last_read = 0  # the number of the last that ended well
        self._own: deque[int] = deque(maxlen=REMEMBERED_VERSIONS)
        self._told: list[int | None] | None = None  # while a put is under way, what the watch told
        self._doubt: tuple[int | None] | None = None  # the version that a put without an answer was made from
        self._is_wanted = False  # to be read though nobody asked for anything
        self._conflicts = 0  # in a row
        self._singly = 0  # so many questions are too large together: one of them may be
        self._asked: list[_Asked] = []
        self._waiters: dict[_Asked, None] = {}
        self._worker: asyncio.Task[None] | None = None
        self._is_stopped = False

    @property
    def is_known(self) -> bool:
        """Whether this broker may answer from `group`: it is as new as the watch, and nothing that was asked
        before is about to change it."""
        is_newest = not self._is_behind and self._last_read == self._reads
        return is_newest and not self._is_in_doubt and not self._asked and not isinstance(self.group, Dying)

    @property
    def is_idle(self) -> bool:
        return self._worker is None and not self._asked and not self._waiters

    def ask(
        self, apply: Callable[[Group | None], Outcome[A]], *, wants_fresh: bool = False
    ) -> asyncio.Future[A]:
        """Put a question to the group, behind all that were put before.

        Raises `GroupError`, and `MetadataError` for a record that is damaged. With `wants_fresh` it is put to
        a group at least as new as this call, whatever the answer.
        """
        return self._put_question(_Asked(apply, None, self._reads, wants_fresh, _future()))

    async def ask_and_wait(
        self,
        apply: Callable[[Group | None], Outcome[A]],
        again: Callable[[Group | None], A | GroupError | None],
        member_id: str,
        gone: asyncio.Future[None],
    ) -> A:
        """The same for one whose answer may have to wait. When `gone` is done, nobody waits any more."""
        asked = _Asked(apply, again, self._reads, False, _future())
        question = self._put_question(asked)
        try:
            with self.hearing(member_id):
                await asyncio.wait({question, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not question.done():
                raise CoordinatorAway("the member has gone")
            answer: A = question.result()
            return answer
        finally:
            if not question.cancel():
                question.exception()  # or it would be reported that nobody looked at it
            self._waiters.pop(asked, None)

    @contextmanager
    def hearing(self, member_id: str) -> Iterator[None]:
        """While a request of this member is here, it is not silent."""
        self.waiting[member_id] += 1
        try:
            yield
        finally:
            self.waiting[member_id] -= 1
            if not self.waiting[member_id]:
                del self.waiting[member_id]

    def told(self, version: int | None) -> None:
        """The watch told of a write. What this broker wrote itself it knows."""
        if self._told is not None:
            self._told.append(version)
        elif version != self._version and version not in self._own:
            self.missed()

    def missed(self) -> None:
        """Others may have written it. It is read at once if somebody waits for that, else when asked for."""
        self._is_behind = True
        if self._has_work():
            self._work()

    def read_again(self) -> None:
        """Read it though nobody may have asked for anything."""
        self._is_behind = self._is_wanted = True
        self._work()

    def stop(self) -> None:
        """Send away all who wait, and whoever comes."""
        self._is_stopped = True
        self._refuse([*self._asked, *self._waiters], CoordinatorAway("this broker stops"))
        self._asked.clear()
        self._waiters.clear()
        if self._worker is not None:
            self._worker.cancel()

    def _put_question(self, asked: _Asked) -> asyncio.Future[Any]:
        if self._is_stopped:
            raise CoordinatorAway("this broker stops")
        self._asked.append(asked)
        self._work()
        return asked.answer

    def _work(self) -> None:
        if self._worker is None and not self._is_stopped:
            self._worker = asyncio.create_task(self._run(), name=f"group {self.group_id}")

    async def _run(self) -> None:
        try:
            while self._has_work():
                try:
                    await self._step()
                    continue
                except (CorruptStore, IncompatibleStore) as error:
                    log.error("group %r cannot be read: %s", self.group_id, error)
                    failure: DrayError = error
                except MetadataError as error:
                    log.warning("group %r: %s", self.group_id, error)
                    failure = CoordinatorAway(f"the metadata store: {error}")
                self._refuse(self._asked, failure)
                self._asked.clear()
                self._conflicts = 0
                await asyncio.sleep(PAUSE_S)
        except Exception as error:  # a mistake in here: nobody is left waiting for it
            self._refuse([*self._asked, *self._waiters], error)
            self._asked.clear()
            self._waiters.clear()
            raise
        finally:
            self._worker = None

    def _has_work(self) -> bool:
        if self._asked or isinstance(self.group, Dying) or (self._is_in_doubt and self.group is not None):
            return True
        is_wanted = self._is_wanted or self.is_followed or self._doubt is not None
        return self._is_behind and (is_wanted or bool(self._waiters))

    @property
    def _is_in_doubt(self) -> bool:
        return self._doubt == (self._version,)

    async def _step(self) -> None:
        """Answer what has been asked so far, or find out why it cannot be answered yet."""
        if self._is_behind:
            await self._read()
        if isinstance(self.group, Dying):
            await self._remove()
            return
        must_write = self._is_in_doubt and self.group is not None
        if not self._asked and not must_write:
            return
        await self._prepare(self.group)
        batch = self._asked[:1] if self._singly else list(self._asked)
        group: Group | None = self.group
        answers: list[object] = []
        for asked in batch:
            outcome: Outcome[Any] = Outcome(group, None)
            if not asked.answer.done():
                try:
                    outcome = asked.apply(group)
                except Exception as error:  # a mistake in there: whoever asked is told, the others go on
                    _answer(asked, error)
            group = outcome.group
            answers.append(outcome.answer)
        if group is self.group and not must_write:
            if any(self._is_too_old(asked, answer) for asked, answer in zip(batch, answers, strict=True)):
                self._is_behind = True
                return
        elif not await self._write(group, batch):
            return
        self._singly = max(0, self._singly - len(batch))
        del self._asked[: len(batch)]
        for asked, answer in zip(batch, answers, strict=True):
            if answer is None and asked.again is not None:
                self._waiters[asked] = None
            else:
                _answer(asked, answer)
        self._taken()

    def _is_too_old(self, asked: _Asked, answer: object) -> bool:
        is_refusal = isinstance(answer, GroupError) and not isinstance(answer, RebalanceInProgress)
        return (is_refusal or asked.wants_fresh) and self._last_read <= asked.came

    async def _read(self) -> None:
        self._reads += 1
        number = self._reads
        is_wanted, self._is_wanted = self._is_wanted, False
        self._is_behind = False  # first: what is told from here on may be newer than what is read
        try:
            await self._store.barrier(self._domain)
            record = await self._store.get(self._domain, self._key)
            version = None if record is None else record.version
            if version != self._version:
                self.group = None if record is None else decode(self._key, record.value)
                self._version = version
        except BaseException:
            self._is_behind = True
            self._is_wanted |= is_wanted
            raise
        self._last_read = number
        if not self._is_in_doubt:
            self._doubt = None
        self._taken()

    async def _write(self, group: Group | None, batch: Sequence[_Asked]) -> bool:
        """Whether it was written. If not, somebody was faster, or nobody knows: read, and apply again."""
        assert group is not None, "a group ends by dying"
        self._told = []
        try:
            version = await self._store.put(
                self._domain,
                self._key,
                encode(self.group_id, group),
                Expect.ABSENT if self._version is None else self._version,
            )
        except (VersionConflict, OutcomeUnknown) as error:
            if isinstance(error, OutcomeUnknown):
                self._doubt = (self._version,)
            self._is_behind = True
            self._conflicts += 1
            if self._conflicts > ATTEMPTS:
                raise Unavailable(f"others were faster {ATTEMPTS} times in a row") from error
            return False
        except TooLarge as error:
            self._singly = len(batch) if len(batch) > 1 else 0
            if not self._singly:
                self._refuse(batch, GroupFull(f"the group's record would be too large: {error}"))
                del self._asked[: len(batch)]
            return False
        else:
            self.group, self._version = group, version
            self._own.append(version)
            self._doubt = None
            self._conflicts = 0
            return True
        finally:
            told, self._told = self._told, None
            if any(each not in self._own for each in told):
                self._is_behind = True

    async def _remove(self) -> None:
        """Finish what deleting the group has begun."""
        await self._bury(self.group_id)
        assert self._version is not None
        try:
            await self._store.delete(self._domain, self._key, self._version)
        except (VersionConflict, OutcomeUnknown):
            self._is_behind = True
            return
        self.group, self._version = None, None
        if not self._is_in_doubt:
            self._doubt = None
        self._taken()

    def _taken(self) -> None:
        """Ask those who wait again: the group may be another."""
        for asked in list(self._waiters):
            assert asked.again is not None
            answer = None if asked.answer.done() else asked.again(self.group)
            if asked.answer.done() or answer is not None:
                del self._waiters[asked]
                _answer(asked, answer)
        self._changed(self)

    @staticmethod
    def _refuse(asked: Iterable[_Asked], error: Exception) -> None:
        for each in asked:
            _answer(each, error)


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def _answer(asked: _Asked, answer: object) -> None:
    if asked.answer.done():
        return  # whoever asked has gone
    if isinstance(answer, Exception):
        asked.answer.set_exception(answer)
    else:
        asked.answer.set_result(answer)
