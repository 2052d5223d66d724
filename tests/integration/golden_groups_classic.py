"""The scripts of classic groups, for `golden/groups/`."""

from __future__ import annotations

from tests.integration.group_script import (
    OF_T,
    OF_U,
    Script,
    Subscription,
    alone,
    commit,
    delete_groups,
    describe,
    enter,
    heartbeat,
    join,
    joined_by,
    leave,
    leave_alone,
    list_groups,
    pair,
    scenario,
    sync,
)

# Long enough for what is to happen before, short enough to be waited for.
SOON_MS = 2500
OF_TU = Subscription(("t", "u"))


@scenario()
async def classic_first_join(s: Script) -> None:
    """A member is told its id, joins, is assigned what it says, and beats."""
    a = await s.connect("a")
    await a(join("g"))
    await a(join("g", a, {"range": OF_T, "roundrobin": OF_U}))
    await a(heartbeat("g", a, 1))
    await a(sync("g", a, 1, [(a, b"all")]))
    await a(sync("g", a, 1))
    await a(heartbeat("g", a, 1))
    await a(describe("g"))
    await a(leave("g", a))
    await a(heartbeat("g", a, 1))
    await a(describe("g"))
    s.says("the next generation counts on")
    b = await s.connect("b")
    await (await enter(b, "g"))()


@scenario()
async def classic_old_versions(s: Script) -> None:
    """Before version 4 of JoinGroup a new member joins at once, without being told its id first."""
    a, b, c = await s.connect("a", "b", "c")
    for group, member, version in (("g0", a, 0), ("g2", b, 2), ("g3", c, 3)):
        await member(join(group, version=version))
        await member(sync(group, member, 1, [(member, b"all")], version=min(version, 2)))
        await member(heartbeat(group, member, 1, version=min(version, 2)))
        await member(leave_alone(group, member, version=min(version, 2)))
        await member(leave_alone(group, member, version=min(version, 2)))
    s.says("since version 4 it is told its id")
    d, e, f = await s.connect("d", "e", "f")
    await d(join("g4", version=4))
    await d(join("g4", d, version=4))
    await d(sync("g4", d, 1, [(d, b"all")], version=3))
    s.says("static members are not, and versions from 5 on have them")
    await e(join("g5", instance="e", version=5))
    await e(sync("g5", e, 1, [(e, b"all")], instance="e", version=3))
    await e(heartbeat("g5", e, 1, instance="e", version=3))
    await f(join("g7", version=7))
    await f(join("g7", f, version=7))
    await f(sync("g7", f, 1, [(f, b"all")], version=5))


@scenario()
async def classic_two_members(s: Script) -> None:
    """A second member makes the first join again: the leader is told the members, the other is not."""
    a, b = await s.connect("a", "b")
    of_a, of_b = {"range": OF_T, "sticky": OF_TU}, {"sticky": OF_U, "roundrobin": OF_T}
    await alone(a, "g", of_a)
    b_joins = await enter(b, "g", of_b)
    await a.until(heartbeat("g", a, 1), error_code="rebalance_in_progress")
    await a(describe("g"))
    a_joins = await a.starts(join("g", a, of_a))
    await a_joins()
    await b_joins()
    s.says("the one protocol that both know; who does not lead waits for who does")
    b_syncs = await b.starts(sync("g", b, 2, protocol="sticky"))
    await a(describe("g"))
    await a(sync("g", a, 2, [(a, b"one"), (b, b"two")], protocol="sticky"))
    await b_syncs()
    await a(heartbeat("g", a, 2))
    await b(heartbeat("g", b, 2))
    await b(heartbeat("g", b, 1))
    await a(describe("g"))


@scenario()
async def classic_protocol_vote(s: Script) -> None:
    """Of the protocols that all know, the one that most members prefer is taken."""
    a, b, c = await s.connect("a", "b", "c")
    for_range = {"range": OF_T, "sticky": OF_U, "mine": OF_T}
    for_sticky = {"unknown": OF_T, "sticky": OF_U, "range": OF_T}
    await alone(a, "g", for_range)
    b_joins = await enter(b, "g", for_sticky)
    await s.is_in("g", "PreparingRebalance", 2)
    c_joins = await enter(c, "g", for_sticky)
    await s.is_in("g", "PreparingRebalance", 3)
    await a(join("g", a, for_range))
    await b_joins()
    await c_joins()


@scenario()
async def classic_protocol_mismatch(s: Script) -> None:
    """Who has no protocol in common with all others cannot join them, nor who is of another type."""
    a, b = await s.connect("a", "b")
    await b(join("g", protocols={}))
    await b(join("g", kind=""))
    await alone(a, "g")
    await b(join("g", protocols={"roundrobin": OF_T}))
    await b(join("g", kind="connect"))
    await b(join("g", protocols={}))
    await b(join("g", kind=""))
    await b(join("g", protocols={"roundrobin": OF_T}, instance="b"))
    await b(join("g", kind="connect", version=3))
    await a(join("g", a, {"roundrobin": OF_T}))
    await a(heartbeat("g", a, 1))
    await a(join("g", a, kind="connect"))
    s.says("in an empty group all is open again")
    await a(leave("g", a))
    await (await enter(b, "g", {"roundrobin": OF_T}, kind="connect"))()
    await b(describe("g"))


@scenario()
async def classic_leave(s: Script) -> None:
    """Members leave one by one, together, and twice."""
    a, b, c = await s.connect("a", "b", "c")
    await a(leave("g", "nobody"))
    await pair(s, a, b, "g")
    await a(leave("g", "nobody"))
    await a(leave("g"))
    await a(leave_alone("g", "nobody"))
    s.says("one may take another out")
    await a(leave("g", b, "nobody"))
    await b(heartbeat("g", b, 2))
    await a(heartbeat("g", a, 2))
    await a(join("g", a))
    await a(sync("g", a, 3, [(a, b"all")]))
    s.says("who was only told an id has it no more")
    await c(join("g"))
    await a(leave("g", c))
    await c(join("g", c))
    s.says("all together")
    await joined_by(s, a, b, "g")
    await a(leave("g", a, b, a))
    await a(describe("g"))
    await a(leave("g", a))


@scenario()
async def classic_leader_leaves(s: Script) -> None:
    """Another member becomes the leader; one that waits for the leader's assignment joins again."""
    a, b = await s.connect("a", "b")
    await alone(a, "g")
    await joined_by(s, a, b, "g")
    b_syncs = await b.starts(sync("g", b, 2))
    await a(leave("g", a))
    await b_syncs()
    await b(join("g", b))
    await b(describe("g"))


@scenario()
async def classic_session_timeout(s: Script) -> None:
    """A member that says nothing is expelled, and the others join again."""
    a, b = await s.connect("a", "b")
    await alone(a, "g", session_ms=SOON_MS)
    b_joins = await enter(b, "g")
    await s.is_in("g", "PreparingRebalance", 2)
    a_joins = await a.starts(join("g", a, session_ms=SOON_MS))
    await a_joins()
    await b_joins()
    await a(sync("g", a, 2, [(a, b"one"), (b, b"two")]))
    await b(sync("g", b, 2))
    s.says("the leader is silent")
    await b.until(heartbeat("g", b, 2), error_code="rebalance_in_progress")
    await a(heartbeat("g", a, 2))
    await b(join("g", b))
    await a(join("g", a))
    s.says("alone and silent")
    await b(sync("g", b, 3, [(b, b"all")]))
    await b(join("g", b, session_ms=500))
    await s.is_in("g", "Empty")
    await b(describe("g"))


@scenario()
async def classic_rebalance_timeout(s: Script) -> None:
    """Who does not join again in time is left out, however alive it is. A static member is not."""
    a, b, c = await s.connect("a", "b", "c")
    await pair(s, a, b, "g", rebalance_ms=SOON_MS)
    c_joins = await enter(c, "g", rebalance_ms=SOON_MS)
    await s.is_in("g", "PreparingRebalance", 3)
    await b(heartbeat("g", b, 2))
    a_joins = await a.starts(join("g", a, rebalance_ms=SOON_MS))
    await a_joins()
    await c_joins()
    await b(heartbeat("g", b, 2))
    await b(join("g", b))
    s.says("the leader does not join again")
    await a(sync("g", a, 3, [(a, b"one"), (c, b"two")]))
    await c(sync("g", c, 3))
    c_joins = await c.starts(join("g", c, {"range": OF_U}, rebalance_ms=SOON_MS))
    await c_joins()
    await a(heartbeat("g", a, 3))


@scenario()
async def classic_rebalance_timeout_static(s: Script) -> None:
    """A static member that does not join again in time stays; its session must end for it to go."""
    a, b = await s.connect("a", "b")
    await a(join("g", instance="a", rebalance_ms=SOON_MS))
    await a(sync("g", a, 1, [(a, b"all")], instance="a"))
    b_joins = await enter(b, "g", rebalance_ms=SOON_MS)
    await b_joins()
    await b(describe("g"))
    s.says("the leader is told of the one that does not answer, too")
    await a(heartbeat("g", a, 1, instance="a"))
    await a(heartbeat("g", a, 2, instance="a"))


@scenario()
async def classic_sync_timeout(s: Script) -> None:
    """Who joined and does not ask for its assignment in time is left out."""
    a, b = await s.connect("a", "b")
    await alone(a, "g", rebalance_ms=SOON_MS)
    await joined_by(s, a, b, "g", rebalance_ms=SOON_MS)
    await a(sync("g", a, 2, [(a, b"one"), (b, b"two")]))
    await a(heartbeat("g", a, 2))
    await a.until(heartbeat("g", a, 2), error_code="rebalance_in_progress")
    await b(heartbeat("g", b, 2))
    await a(join("g", a))


@scenario()
async def classic_rejoin_completing(s: Script) -> None:
    """Who joins again with nothing new, before the leader has assigned, is told the same generation."""
    a, b = await s.connect("a", "b")
    await alone(a, "g")
    await joined_by(s, a, b, "g")
    await b(join("g", b))
    await a(join("g", a))
    s.says("with something new there is another generation")
    b_joins = await b.starts(join("g", b, {"range": OF_U}))
    await s.is_in("g", "PreparingRebalance")
    await a(sync("g", a, 2, [(a, b"one"), (b, b"two")]))
    await a(heartbeat("g", a, 2))
    await a(join("g", a))
    await b_joins()


@scenario()
async def classic_rejoin_stable(s: Script) -> None:
    """In a stable group the leader's joining is a rebalance; another's only if it has something new."""
    a, b = await s.connect("a", "b")
    await pair(s, a, b, "g")
    await b(join("g", b))
    a_joins = await a.starts(join("g", a))
    await b.until(heartbeat("g", b, 2), error_code="rebalance_in_progress")
    b_joins = await b.starts(join("g", b))
    await a_joins()
    await b_joins()
    await a(sync("g", a, 3, [(a, b"one"), (b, b"two")]))
    await b(sync("g", b, 3))
    b_joins = await b.starts(join("g", b, {"range": OF_U}))
    await a.until(heartbeat("g", a, 3), error_code="rebalance_in_progress")
    await a(join("g", a))
    await b_joins()


@scenario()
async def classic_sync_errors(s: Script) -> None:
    """SyncGroup of members that are none, of other generations, and at other times."""
    a, b = await s.connect("a", "b")
    await a(sync("g", "nobody", 1))
    await alone(a, "g")
    await b(join("g"))
    await b(sync("g", b, 1))
    await a(sync("g", "nobody", 1))
    await a(sync("g", a, 2))
    await a(sync("g", a, 0))
    await a(sync("g", a, 1, kind="connect"))
    await a(sync("g", a, 1, protocol="roundrobin"))
    await a(sync("g", a, 1, kind=None, protocol="range"))
    await a(sync("g", a, 1, kind=None, protocol=None))
    await a(sync("g", a, 1, kind=None, protocol=None, version=4))
    await a(sync("g", a, 1, [(a, b"other")]))
    s.says("while members join")
    b_joins = await b.starts(join("g", b))
    await s.is_in("g", "PreparingRebalance")
    await a(sync("g", a, 1))
    s.says("the leader leaves a member out of the assignment, and has one that is none")
    await a(join("g", a))
    await b_joins()
    await a(sync("g", a, 2, [(a, b"all"), ("nobody", b"x")]))
    await b(sync("g", b, 2))
    await a(leave("g", a, b))
    await a(sync("g", a, 2))


@scenario()
async def classic_heartbeat_errors(s: Script) -> None:
    """Heartbeats of members that are none, of other generations, and at other times."""
    a, b = await s.connect("a", "b")
    await a(heartbeat("g", "nobody", 1))
    await a(heartbeat("", "nobody", 1))
    await alone(a, "g")
    await a(heartbeat("g", "nobody", 1))
    await a(heartbeat("g", "", 1))
    await a(heartbeat("g", a, 0))
    await a(heartbeat("g", a, 2))
    await a(heartbeat("g", a, -1))
    await b(join("g"))
    await b(heartbeat("g", b, 1))
    b_joins = await b.starts(join("g", b))
    await s.is_in("g", "PreparingRebalance")
    await a(heartbeat("g", a, 0))
    await a(heartbeat("g", a, 1))
    await a(join("g", a))
    await b_joins()
    await b(heartbeat("g", b, 1))
    await b(heartbeat("g", b, 2))
    await a(leave("g", a, b))
    await a(heartbeat("g", a, 2))


@scenario()
async def classic_join_errors(s: Script) -> None:
    """Members that nobody told their ids, sessions that are too short or too long, no group id."""
    a, b = await s.connect("a", "b")
    await a(join("g", "nobody"))
    await a(join("g", session_ms=499))
    await a(join("g", session_ms=1_800_001))
    await a(join("g", session_ms=0, rebalance_ms=0))
    await a(join("", session_ms=0))
    await a(join(""))
    await a(join("g", version=3, session_ms=499))
    await a(describe("g"))
    await alone(a, "g")
    await b(join("g", "nobody"))
    await b(join("g", "nobody", instance="b"))
    await b(join("g", a, instance="b"))
    s.says("an id that was told for another group")
    await b(join("h"))
    await b(join("g", b))


@scenario()
async def classic_empty_group_id(s: Script) -> None:
    """The group id is empty."""
    a = await s.connect("a")
    await a(join(""))
    await a(sync("", "nobody", 1))
    await a(heartbeat("", "nobody", 1))
    await a(leave("", "nobody"))
    await a(describe(""))
    await a(delete_groups(""))


@scenario()
async def classic_max_size(s: Script) -> None:
    """No more than group.max.size members, which is 3 here."""
    a, b, c, d = await s.connect("a", "b", "c", "d")
    await alone(a, "g")
    b_joins = await enter(b, "g")
    await s.is_in("g", "PreparingRebalance", 2)
    c_joins = await enter(c, "g")
    await s.is_in("g", "PreparingRebalance", 3)
    await a(join("g", a))
    await b_joins()
    await c_joins()
    await d(join("g"))
    await d(join("g", d))
    await d(join("g", version=3))
    await d(join("g", instance="d"))
    s.says("a place is free")
    await c(leave("g", c))
    await d(join("g"))
    s.says("those who were told their ids, and did not join yet")
    w, x, y, z = await s.connect("w", "x", "y", "z")
    await w(join("h"))
    await x(join("h"))
    await y(join("h"))
    await z(
        join("h"),
        dray={"error_code": "group_max_size_reached", "member_id": '""'},
        because="who is told an id has a place, so that there are never more ids than places",
    )
    await (await s.connect("v"))(join("h", instance="v"))


@scenario()
async def classic_max_size_while_joining(s: Script) -> None:
    """While members join, a new one may take the place of one that has not joined again."""
    a, b, c, d = await s.connect("a", "b", "c", "d")
    await alone(a, "g")
    await enter(b, "g")
    await s.is_in("g", "PreparingRebalance", 2)
    await enter(c, "g")
    await s.is_in("g", "PreparingRebalance", 3)
    await d.starts(join("g", version=3))
    await s.is_in("g", "PreparingRebalance", 4)
    await a(join("g", a))


@scenario()
async def classic_waits_for_new_ids(s: Script) -> None:
    """A generation waits for those who were told an id, until their sessions end."""
    a, b, c = await s.connect("a", "b", "c")
    await alone(a, "g")
    await b(join("g", session_ms=SOON_MS))
    c_joins = await enter(c, "g")
    await s.is_in("g", "PreparingRebalance", 2)
    a_joins = await a.starts(join("g", a))
    await a_joins()
    await c_joins()
    await b(join("g", b))


@scenario(group_initial_rebalance_delay_ms="3000")
async def classic_initial_delay(s: Script) -> None:
    """The first generation of a group waits for members that come soon after the first."""
    a, b = await s.connect("a", "b")
    a_joins = await enter(a, "g")
    await s.has_joined("g", a)
    b_joins = await enter(b, "g")
    await a_joins()
    await b_joins()


@scenario()
async def classic_static_restart(s: Script) -> None:
    """A static member that comes back gets a new id and the same assignment, and nobody else notices."""
    a, b = await s.connect("a", "b")
    await a(join("g", instance="one"))
    await a(sync("g", a, 1, [(a, b"all")], instance="one"))
    b_joins = await b.starts(join("g", instance="two"))
    await s.is_in("g", "PreparingRebalance", 2)
    await a(join("g", a, instance="one"))
    await b_joins()
    await a(sync("g", a, 2, [(a, b"one's"), (b, b"two's")], instance="one"))
    await b(sync("g", b, 2, instance="two"))
    s.says("the follower")
    c, d = await s.connect("c", "d")
    await c(join("g", instance="two"))
    await c(sync("g", c, 2, instance="two"))
    await c(heartbeat("g", c, 2, instance="two"))
    s.says("the leader")
    await d(join("g", instance="one"))
    await d(sync("g", d, 2, [(d, b"ignored")], instance="one"))
    await d(heartbeat("g", d, 2, instance="one"))
    await d(describe("g"))
    s.says("the leader, as an older client, that does not know of skipping the assignment")
    e = await s.connect("e")
    await e(join("g", instance="one", version=8))
    await e(sync("g", e, 2, instance="one"))
    await c(heartbeat("g", c, 2, instance="two"))


@scenario()
async def classic_static_restart_changed(s: Script) -> None:
    """A static member that comes back with something new is a rebalance only if another protocol wins."""
    a, b, c = await s.connect("a", "b", "c")
    both = {"range": OF_T, "roundrobin": OF_T}
    await a(join("g", protocols=both, instance="one"))
    await a(sync("g", a, 1, [(a, b"all")], instance="one"))
    b_joins = await b.starts(join("g", protocols=both, instance="two"))
    await s.is_in("g", "PreparingRebalance", 2)
    await a(join("g", a, both, instance="one"))
    await b_joins()
    await a(sync("g", a, 2, [(a, b"one's"), (b, b"two's")], instance="one"))
    await b(sync("g", b, 2, instance="two"))
    s.says("other metadata, the same protocol")
    await c(join("g", instance="two", protocols={"range": OF_U, "roundrobin": OF_T}))
    await a(heartbeat("g", a, 2, instance="one"))
    await c(sync("g", c, 2, instance="two"))
    await a(describe("g"))
    s.says("range is no more known to all")
    d = await s.connect("d")
    d_joins = await d.starts(join("g", instance="two", protocols={"roundrobin": OF_T}))
    await a.until(heartbeat("g", a, 2, instance="one"), error_code="rebalance_in_progress")
    await c(heartbeat("g", c, 2, instance="two"))
    await a(join("g", a, both, instance="one"))
    await d_joins()


@scenario()
async def classic_static_restart_completing(s: Script) -> None:
    """A static member that comes back before the leader has assigned makes all join again."""
    a, b, c = await s.connect("a", "b", "c")
    await a(join("g", instance="one"))
    await a(sync("g", a, 1, [(a, b"all")], instance="one"))
    b_joins = await b.starts(join("g", instance="two"))
    await s.is_in("g", "PreparingRebalance", 2)
    await a(join("g", a, instance="one"))
    await b_joins()
    b_syncs = await b.starts(sync("g", b, 2, instance="two"))
    c_joins = await c.starts(join("g", instance="two"))
    await b_syncs()
    await a(heartbeat("g", a, 2, instance="one"))
    await a(join("g", a, instance="one"))
    await c_joins()


@scenario()
async def classic_static_replaced_while_joining(s: Script) -> None:
    """A static member that waits in JoinGroup is fenced by another of its name."""
    a, b, c = await s.connect("a", "b", "c")
    await a(join("g", instance="one"))
    await a(sync("g", a, 1, [(a, b"all")], instance="one"))
    b_joins = await b.starts(join("g", instance="two"))
    await s.is_in("g", "PreparingRebalance", 2)
    c_joins = await c.starts(join("g", instance="two"))
    await b_joins()
    await a(join("g", a, instance="one"))
    await c_joins()


@scenario()
async def classic_static_fenced(s: Script) -> None:
    """The id that a static member had before it came back is worth nothing."""
    await s.topic("t")
    a, b = await s.connect("a", "b")
    await a(join("g", instance="one"))
    await a(sync("g", a, 1, [(a, b"all")], instance="one"))
    await b(join("g", instance="one"))
    await b(sync("g", b, 1, instance="one"))
    s.says("with the instance id it is fenced")
    await a(heartbeat("g", a, 1, instance="one"))
    await a(sync("g", a, 1, instance="one"))
    await a(commit("g", {"t": {0: 5}}, a, 1, instance="one"))
    await a(leave("g", (a, "one")))
    await a(join("g", a, instance="one"))
    s.says("without it nobody knows the id")
    await a(heartbeat("g", a, 1))
    await a(sync("g", a, 1))
    await a(commit("g", {"t": {0: 5}}, a, 1))
    await a(leave("g", a))
    await a(join("g", a))
    s.says("an instance that there is not")
    await b(heartbeat("g", b, 1, instance="two"))
    await b(sync("g", b, 1, instance="two"))
    await b(commit("g", {"t": {0: 5}}, b, 1, instance="two"))
    await b(leave("g", (b, "two")))
    s.says("the one that it is")
    await b(commit("g", {"t": {0: 5}}, b, 1, instance="one"))
    await b(commit("g", {"t": {0: 6}}, b, 1))
    await b(heartbeat("g", b, 1))


@scenario()
async def classic_static_leave(s: Script) -> None:
    """A static member is taken out by its name alone, or with its id."""
    a, b = await s.connect("a", "b")
    await a(join("g", instance="one"))
    await a(sync("g", a, 1, [(a, b"all")], instance="one"))
    await a(leave("g", ("", "two")))
    await a(leave("g", ("wrong", "one")))
    await a(leave("g", ("", "one"), ("", "one")))
    await a(heartbeat("g", a, 1, instance="one"))
    await b(join("g", instance="one"))
    await b(leave("g", (b, "one")))
    await b(describe("g"))


@scenario()
async def classic_static_session_timeout(s: Script) -> None:
    """The session of a static member ends as any other's, and its name is free."""
    a, b = await s.connect("a", "b")
    await a(join("g", instance="one", session_ms=500))
    await s.is_in("g", "Empty")
    await a(heartbeat("g", a, 1, instance="one"))
    await a(join("g", a, instance="one"))
    await b(join("g", instance="one"))


@scenario()
async def groups_describe(s: Script) -> None:
    """DescribeGroups in all states of a classic group, and of groups that there are not."""
    a, b = await s.connect("a", "b")
    await a(describe("g", version=5))
    await a(describe("g", version=6))
    await a(describe("", version=5))
    await a(describe())
    s.says("Stable")
    await alone(a, "g")
    await a(describe("g"))
    await a(describe("g", operations=True))
    await a(describe("g", version=0))
    s.says("PreparingRebalance")
    b_joins = await b.starts(join("g", protocols={"range": OF_U}, instance="b"))
    await s.is_in("g", "PreparingRebalance", 2)
    await a(describe("g", version=3))
    await a(describe("g", "h"))
    await a(describe("g", "g"), dray={"groups": lambda groups: groups[:1]}, because="each is described once")
    await a(join("g", a, {"range": OF_T}))
    await b_joins()
    s.says("CompletingRebalance")
    await a(describe("g"))
    s.says("Empty")
    await a(leave("g", a, ("", "b")))
    await a(describe("g"))
    s.says("deleted")
    await a(delete_groups("g"))
    await a(describe("g"))


@scenario()
async def groups_list(s: Script) -> None:
    """ListGroups with filters."""
    await s.topic("t")
    a, b, c, d, e = await s.connect("a", "b", "c", "d", "e")
    await a(join("empty"))
    await a(join("empty", a))
    await a(leave("empty", a))
    await a(commit("simple", {"t": {0: 1}}))
    await alone(b, "stable")
    await (await enter(c, "completing", kind="connect"))()
    await alone(d, "preparing")
    await enter(e, "preparing")
    await s.is_in("preparing", "PreparingRebalance", 2)
    await a(list_groups())
    await a(list_groups(version=3))
    await a(list_groups(version=4, states=["Stable"]))
    await a(list_groups(states=["Stable", "Empty"]))
    await a(list_groups(states=["preparingrebalance"]))
    await a(list_groups(states=["CompletingRebalance"], types=["classic"]))
    await a(list_groups(states=["Dead"]))
    await a(list_groups(states=["nonsense"]))
    await a(list_groups(states=["Stable", "nonsense"]))
    await a(list_groups(states=[""]))
    await a(list_groups(types=["Classic"]))
    await a(list_groups(types=["classic"]))
    await a(list_groups(types=["consumer"]))
    await a(list_groups(types=["nonsense"]))
    await a(list_groups(types=["classic", "nonsense"]))


@scenario()
async def groups_delete(s: Script) -> None:
    """DeleteGroups: only of empty groups."""
    await s.topic("t")
    a, b = await s.connect("a", "b")
    await a(delete_groups("g"))
    await a(delete_groups())
    await a(join("g"))
    s.says("told an id only")
    await a(delete_groups("g"))
    await a(join("g"))
    await a(join("g", a))
    s.says("CompletingRebalance")
    await a(delete_groups("g"))
    await a(sync("g", a, 1, [(a, b"all")]))
    s.says("Stable")
    await a(delete_groups("g"))
    await enter(b, "g")
    await s.is_in("g", "PreparingRebalance", 2)
    s.says("PreparingRebalance")
    await a(delete_groups("g"))
    await a(leave("g", a, b))
    s.says("Empty, and one that is none, and twice")
    await a(delete_groups("g", "h", "g"))
    await a(delete_groups("g"))
    s.says("a group of offsets alone")
    await a(commit("h", {"t": {0: 1}}))
    await a(delete_groups("h"))
    await a(describe("h"))
    s.says("a deleted group starts again")
    c = await s.connect("c")
    await (await enter(c, "g"))()
