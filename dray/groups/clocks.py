"""Which of a group's timers run on this broker, and since when. Pure: the caller says what time it is.

A timer is a key: one of the group's (`Timer`) or a member's session (`MemberSession`). It runs for as long as
it is wanted without a break, and is due when it has run for its time. Hearing a member begins its session
anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from dray.groups.group import MemberSession, Timer

Key: TypeAlias = Timer | MemberSession


class Clocks:
    def __init__(self) -> None:
        self._after_s: Mapping[Key, float] = {}
        self._since: dict[Key, float] = {}
        self._sessions: dict[str, MemberSession] = {}

    def want(self, after_s: Mapping[Key, float], now: float) -> None:
        """From now on these, each for so long; those that ran already run on."""
        self._after_s = after_s
        self._since = {key: self._since.get(key, now) for key in after_s}
        self._sessions = {key.member_id: key for key in after_s if isinstance(key, MemberSession)}

    def heard(self, member_id: str, now: float) -> bool:
        """Whether the member's session runs here; it begins anew."""
        key = self._sessions.get(member_id)
        if key is None:
            return False
        self._since[key] = now
        return True

    def restart_sessions(self, now: float) -> None:
        """Members could not be heard: none of them is to blame."""
        for key in self._sessions.values():
            self._since[key] = now

    def due(self, now: float) -> list[Key]:
        return [key for key, since in self._since.items() if now >= since + self._after_s[key]]

    def put_off(self, key: Key, now: float, by_s: float) -> None:
        """Have it due again in a while: it could not be acted on, or is being acted on."""
        if key in self._since:
            self._since[key] = now + by_s - self._after_s[key]

    def next_at(self) -> float | None:
        return min((since + self._after_s[key] for key, since in self._since.items()), default=None)
