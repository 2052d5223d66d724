"""The scripts of committed offsets, for `golden/groups/`."""

from __future__ import annotations

from tests.integration.group_script import (
    OF_T,
    OF_U,
    Script,
    alone,
    commit,
    consumer,
    delete_offsets,
    describe,
    enter,
    fetch,
    fetch_alone,
    join,
    joins,
    leave,
    scenario,
    sync,
)


@scenario()
async def offsets_of_members(s: Script) -> None:
    """A member of a classic group commits, and who is none does not."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await a(commit("g", {"t": {0: 1}}, "nobody", 1))
    await alone(a, "g")
    await a(commit("g", {"t": {0: 10, 1: (11, 3, "text")}}, a, 1))
    await a(fetch({"g": {"t": [0, 1]}}))
    await a(commit("g", {"t": {0: 12}}, a, 0))
    await a(commit("g", {"t": {0: 12}}, a, 2))
    await a(commit("g", {"t": {0: 12}}, "nobody", 1))
    await a(commit("g", {"t": {0: 12}}, "", 1))
    await a(commit("g", {"t": {0: 12}}, "", -1))
    await a(commit("g", {"t": {0: 12}}, a, -1))
    await a(commit("g", {"t": {0: 12}}))
    await b(join("g"))
    await b(commit("g", {"t": {0: 12}}, b, 1))
    s.says("offsets may go back")
    await a(commit("g", {"t": {0: 9}}, a, 1))
    await a(fetch({"g": None}))
    s.says("while members join it is allowed, and then not until they are assigned")
    b_joins = await b.starts(join("g", b))
    await s.is_in("g", "PreparingRebalance", 2)
    await a(commit("g", {"t": {0: 13}}, a, 1))
    await a(join("g", a))
    await b_joins()
    await a(commit("g", {"t": {0: 14}}, a, 2))
    await a(commit("g", {"t": {0: 14}}, a, 1))
    await a(sync("g", a, 2, [(a, b"one"), (b, b"two")]))
    await a(commit("g", {"t": {0: 15}}, a, 2))
    await a(fetch({"g": None}))
    s.says("the group is empty")
    await a(leave("g", a, b))
    await a(commit("g", {"t": {0: 16}}, a, 2))
    await a(commit("g", {"t": {0: 17}}))
    await a(fetch({"g": None}))


@scenario()
async def offsets_without_members(s: Script) -> None:
    """Offsets of a group that has no members: any client may commit them."""
    await s.topic("t", 2)
    a = await s.connect("a")
    await a(commit("g", {"t": {0: (5, 7, "m"), 1: (6, -1, None)}}))
    await a(fetch({"g": None}))
    await a(describe("g"))
    await a(commit("g", {"t": {0: 6}}, "nobody", -1))
    await a(commit("g", {"t": {0: 6}}, "nobody", 0))
    await a(commit("g", {"t": {0: 6}}, "", 0))
    s.says("a group that there is not yet")
    await a(commit("h", {"t": {0: 6}}, "", 5))
    await a(commit("h", {"t": {0: 6}}, "nobody", -1))
    await a(fetch({"h": None}))
    s.says("a member may come later, and finds them")
    await alone(a, "g")
    await a(fetch({"g": None}))


@scenario()
async def offsets_errors(s: Script) -> None:
    """Topics that are unknown, metadata that is too large, offsets that are negative."""
    await s.topic("t", 2)
    a = await s.connect("a")
    await a(commit("g", {"t": {0: 1, 2: 1, -1: 1}, "unknown": {0: 1}}))
    await a(commit("g", {"t": {0: (2, -1, "x" * 4096), 1: (2, -1, "x" * 4097)}}))
    await a(commit("g", {"t": {0: -1, 1: -5}}))
    await a(commit("g", {}))
    await a(commit("g", {"t": {}}))
    await a(fetch({"g": {"t": [0, 1, 2, -1], "unknown": [0]}}))
    await a(commit("g", {"t": {0: 1}, "unknown": {0: 1}}, version=2))


@scenario()
async def offsets_of_no_group_id(s: Script) -> None:
    """For offsets alone, a group may have no name."""
    await s.topic("t")
    a = await s.connect("a")
    await a(commit("", {"t": {0: 1}}))
    await a(commit("", {"t": {0: 2}}, "nobody", 1))
    await a(fetch({"": {"t": [0]}}))
    await a(delete_offsets("", {"t": [0]}))


@scenario()
async def offsets_fetch(s: Script) -> None:
    """OffsetFetch of some, all and none, of several groups, and of stable ones."""
    await s.topic("t", 2)
    await s.topic("u")
    a = await s.connect("a")
    await a(fetch({"g": {"t": [0]}}))
    await a(fetch({"g": None}))
    await a(commit("g", {"t": {0: (5, 7, "m")}, "u": {0: 6}}))
    await a(commit("h", {"t": {1: 8}}))
    await a(fetch({"g": {"t": [0]}}))
    await a(fetch({"g": {"t": [0, 1]}}))
    await a(fetch({"g": None}))
    await a(fetch({"g": {}}))
    await a(fetch({"g": {"t": []}}))
    await a(fetch({"g": {"u": [0]}, "h": None, "none": {"t": [0]}, "none of it": None}))
    await a(fetch({}))
    await a(fetch({"g": {"t": [0, 1]}}, stable=True))
    await a(fetch({"g": None}, stable=True))
    s.says("of a member that there is not")
    await a(fetch({"g": {"t": [0]}}, member="nobody", epoch=1))
    await a(fetch({"g": None}, member="nobody", epoch=1))
    await a(fetch({"none": {"t": [0]}}, member="nobody", epoch=1))
    await a(fetch({"g": {"t": [0]}}, version=8))


@scenario()
async def offsets_fetch_old(s: Script) -> None:
    """OffsetFetch of one group, as it was before version 8."""
    await s.topic("t", 2)
    a = await s.connect("a")
    for version in range(1, 8):
        if version == 1:
            await a(fetch_alone("g", {"t": [0]}, version))
            await a(commit("g", {"t": {0: (5, 7, "m")}}))
        await a(fetch_alone("g", {"t": [0, 1]}, version))
    for version in range(2, 8):
        await a(fetch_alone("g", None, version))
    await a(fetch_alone("none", None, 2))
    await a(fetch_alone("none", {"t": [0]}, 7, stable=True))
    await a(fetch_alone("g", {"unknown": [0]}, 1))
    await a(fetch_alone("", {"t": [0]}, 1))
    await a(fetch_alone("", {"t": [0]}, 7))


@scenario()
async def offsets_commit_old(s: Script) -> None:
    """OffsetCommit in its older versions."""
    await s.topic("t")
    a = await s.connect("a")
    await alone(a, "g")
    for version in range(2, 9):
        await a(commit("g", {"t": {0: 10 + version}}, a, 1, version=version))
        await a(fetch_alone("g", None, 7))


@scenario()
async def offsets_delete(s: Script) -> None:
    """OffsetDelete: not of topics that a member of the group is subscribed to."""
    await s.topic("t", 2)
    await s.topic("u")
    await s.topic("v")
    a = await s.connect("a")
    await a(delete_offsets("g", {"t": [0]}))
    await a(commit("g", {"t": {0: 5, 1: 5}, "u": {0: 5}}))
    await alone(a, "g", {"range": OF_T})
    await a(delete_offsets("g", {"t": [0, 7], "u": [0, 1], "v": [0], "unknown": [0]}))
    await a(fetch({"g": None}))
    await a(delete_offsets("g", {}))
    s.says("the subscription cannot be read")
    b = await s.connect("b")
    await b(commit("h", {"t": {0: 5}}))
    await alone(b, "h", {"range": b"\xff"})
    await b(delete_offsets("h", {"t": [0]}))
    s.says("not a consumer at all")
    c = await s.connect("c")
    await c(commit("i", {"t": {0: 5}}))
    await (await enter(c, "i", kind="connect"))()
    await c(delete_offsets("i", {"t": [0]}))
    s.says("while members join")
    d, e = await s.connect("d", "e")
    await d(commit("j", {"t": {0: 5}, "u": {0: 5}}))
    await (await enter(d, "j", {"range": OF_T}))()
    await d(delete_offsets("j", {"t": [0], "u": [0]}))
    await d(sync("j", d, 1, [(d, b"all")]))
    await enter(e, "j", {"range": OF_U})
    await s.is_in("j", "PreparingRebalance", 2)
    await d(delete_offsets("j", {"t": [0], "u": [0]}))
    s.says("the group is empty")
    await a(leave("g", a))
    await a(delete_offsets("g", {"t": [0], "unknown": [0]}))
    await a(fetch({"g": None}))
    await a(delete_offsets("g", {"t": [1]}))
    await a(fetch({"g": None}))


@scenario()
async def offsets_delete_consumer(s: Script) -> None:
    """OffsetDelete of a group of the consumer protocol."""
    await s.topic("t", 2)
    await s.topic("u")
    a = await s.connect("a")
    await a(commit("g", {"t": {0: 5, 1: 5}, "u": {0: 5}}))
    await a(joins("g", "A"))
    await a(delete_offsets("g", {"t": [0], "u": [0]}))
    await a(fetch({"g": None}))
    await a(consumer("g", "A", -1))
    await a(delete_offsets("g", {"t": [0]}))
    await a(fetch({"g": None}))


@scenario()
async def offsets_of_deleted_topics(s: Script) -> None:
    """The offsets of a deleted topic are gone, also when there is a topic of its name again."""
    await s.topic("t")
    await s.topic("u")
    a = await s.connect("a")
    await a(commit("g", {"t": {0: 5}, "u": {0: 6}}))
    await s.drop_topic("t")
    await a.until(fetch({"g": {"t": [0]}}), groups__0__topics__0__partitions__0__committed_offset=-1)
    await a(fetch({"g": None}))
    await a(commit("g", {"t": {0: 7}}))
    await s.topic("t")
    await a(fetch({"g": {"t": [0]}}))
