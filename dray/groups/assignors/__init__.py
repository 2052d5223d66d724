"""The server-side assignors of consumer groups (KIP-848): who gets which partition in the next epoch.

An assignor is a pure function of the values it is given: neither the order of a mapping nor a hash seed
matters. `partitions` names every topic that a member subscribes to. Each partition of these goes to one of
its subscribers; every member is in the result, with an empty assignment if need be. How members get from what
they hold to their target is the matter of the group.
"""

from __future__ import annotations

from collections.abc import Mapping

from dray.groups.assignors.range import range_
from dray.groups.assignors.subscriber import Assign, Assignment, Subscriber
from dray.groups.assignors.uniform import uniform

__all__ = ["ASSIGNORS", "Assign", "Assignment", "Subscriber", "range_", "uniform"]

# By the name under which a member asks for it. The first is the default.
ASSIGNORS: Mapping[str, Assign] = {"uniform": uniform, "range": range_}
