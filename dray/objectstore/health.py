"""Whether an object store can be relied on just now, judged by how its recent calls ended (K-HEALTH-01).

Pure: told of outcomes, given a clock. A broker that is not `HEALTHY` refuses produce and fetch requests
(K-HEALTH-02, 03), and then makes no calls that could show the store's return; so failures are also forgotten
by time, and `ObjectStore.check` is there for whoever wants to know sooner (K-HEALTH-04).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

# Fewer failures are bad luck. The same number of successes in a row ends the trouble.
ENOUGH = 3
# One cut connection fails everything under way at once. Trouble is what lasts longer than that.
LASTING_S = 1.0
# Longer than an attempt may take, so that one timeout after another adds up.
FORGOTTEN_AFTER_S = 30.0


class Health(enum.Enum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"  # calls fail and succeed by turns
    UNAVAILABLE = "unavailable"  # calls fail, one after another


class HealthTracker:
    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._failures = _Failures()  # since `ENOUGH` successes in a row
        self._in_a_row = _Failures()  # since any success
        self._successes = 0  # in a row

    def succeeded(self) -> None:
        """A call was answered, be it by "there is no such object"."""
        self._in_a_row = _Failures()
        self._successes += 1
        if self._successes >= ENOUGH:
            self._failures = _Failures()

    def failed(self, began_s: float) -> None:
        """An attempt that began then was not answered, or with an error that is the store's fault."""
        now_s = self._clock_s()
        if now_s - self._failures.last_s >= FORGOTTEN_AFTER_S:
            self._failures, self._in_a_row = _Failures(), _Failures()
        self._failures.add(began_s, now_s)
        self._in_a_row.add(began_s, now_s)
        self._successes = 0

    @property
    def state(self) -> Health:
        if self._clock_s() - self._failures.last_s >= FORGOTTEN_AFTER_S:
            return Health.HEALTHY
        if self._in_a_row.matter():
            return Health.UNAVAILABLE
        return Health.DEGRADED if self._failures.matter() else Health.HEALTHY


class _Failures:
    """How many, and over what time."""

    def __init__(self) -> None:
        self.count = 0
        self.began_s = float("inf")
        self.last_s = float("-inf")

    def add(self, began_s: float, now_s: float) -> None:
        self.count += 1
        self.began_s = min(self.began_s, began_s)
        self.last_s = now_s

    def matter(self) -> bool:
        return self.count >= ENOUGH and self.last_s - self.began_s >= LASTING_S
