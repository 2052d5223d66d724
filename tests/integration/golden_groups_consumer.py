"""The scripts of groups of the consumer protocol (KIP-848), and of conversions, for `golden/groups/`.

Clients choose their member ids, so that these are the scripts' own. Most use the assignor `range`: who gets
which partition follows from its rules, where `uniform` only promises a balance.
"""

from __future__ import annotations

from tests.integration.group_script import (
    Connection,
    Script,
    Told,
    alone,
    commit,
    consumer,
    delete_groups,
    describe,
    describe_consumers,
    enter,
    fetch,
    heartbeat,
    join,
    joins,
    leave,
    list_groups,
    pair,
    scenario,
    sync,
)

# Long enough for what is to happen before, short enough to be waited for.
SOON_MS = 2500
COUNTS_ON = "epochs and generations of a group never go back, also when it becomes one of the other protocol"
MATCHED_AT_ONCE = "Kafka matches later than the member joins, and then counts one epoch more"
NOT_MIXED = "members of both protocols are never in one group: it is converted when it is empty"


async def consuming(s: Script, a: Connection, b: Connection, group: str = "g") -> None:
    """Two members of epoch 2, `A` with the partitions 0 and 1 of `t`, `B` with 2 and 3."""
    await a(joins(group, "A"))
    await b(joins(group, "B"))
    await a(consumer(group, "A", 1))
    await a(consumer(group, "A", 1, owned={"t": [0, 1]}))
    await b(consumer(group, "B", 2, owned={}))
    await b(consumer(group, "B", 2, owned={"t": [2, 3]}))
    s.says("A has 0 and 1, B has 2 and 3")


@scenario()
async def consumer_first_join(s: Script) -> None:
    """A member joins with epoch 0, is assigned partitions, has them, beats, and leaves with epoch -1."""
    await s.topic("t", 3)
    a = await s.connect("a")
    await a(joins("g", "A"))
    await a(describe_consumers("g"))
    await a(consumer("g", "A", 1, owned={}))
    await a(consumer("g", "A", 1, owned={"t": [0]}))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2]}))
    s.says("null: as before")
    await a(consumer("g", "A", 1))
    await a(describe_consumers("g"))
    await a(consumer("g", "A", -1))
    await a(describe_consumers("g"))
    await a(consumer("g", "A", 1))
    s.says("the next one")
    await a(joins("g", "B"))
    await a(describe_consumers("g"))


@scenario()
async def consumer_version_0(s: Script) -> None:
    """In version 0 the broker chooses the member id, if the client has none."""
    await s.topic("t", 2)
    a = await s.connect("a")
    await a(joins("g", "", version=0))
    await a(consumer("g", a, 1, owned={"t": [0, 1]}, version=0))
    await a(describe_consumers("g", version=0))
    await a(consumer("g", a, -1, version=0))
    s.says("its own is good too; in version 1 it must have one")
    await a(joins("g", "A", version=0))
    await a(joins("g", ""))


@scenario()
async def consumer_two_members(s: Script) -> None:
    """The first member gives up partitions before the second gets them, each at its own epoch."""
    await s.topic("t", 4)
    a, b = await s.connect("a", "b")
    await a(joins("g", "A"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2, 3]}))
    s.says("B gets nothing that A still has")
    await b(joins("g", "B"))
    await b(consumer("g", "B", 2, owned={}))
    await a(describe_consumers("g"))
    s.says("A is told what it keeps, and stays at its epoch until it has given up the rest")
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2, 3]}))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2, 3]}))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2]}))
    await a(consumer("g", "A", 1))
    await a(describe_consumers("g"))
    await b(consumer("g", "B", 2, owned={}))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await a(describe_consumers("g"))
    s.says("then B gets it")
    await b(consumer("g", "B", 2, owned={}))
    await b(consumer("g", "B", 2, owned={"t": [2, 3]}))
    await a(consumer("g", "A", 2))
    await a(describe_consumers("g"))
    s.says("B goes")
    await b(consumer("g", "B", -1))
    await a(consumer("g", "A", 2))
    await a(consumer("g", "A", 3, owned={"t": [0, 1, 2, 3]}))
    await a(describe_consumers("g"))


@scenario()
async def consumer_second_while_revoking(s: Script) -> None:
    """A third member comes while the first has still to give up what the second waits for."""
    await s.topic("t", 6)
    a, b, c = await s.connect("a", "b", "c")
    await a(joins("g", "A"))
    await b(joins("g", "B"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2, 3, 4, 5]}))
    await c(joins("g", "C"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2, 3, 4, 5]}))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2]}))
    await b(consumer("g", "B", 2, owned={}))
    await c(consumer("g", "C", 3, owned={}))
    await a(describe_consumers("g"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await b(consumer("g", "B", 3, owned={"t": [3]}))
    await c(consumer("g", "C", 3, owned={"t": [4, 5]}))
    await a(describe_consumers("g"))


@scenario()
async def consumer_uniform(s: Script) -> None:
    """The default assignor: as many partitions for each as for the others, and few that move."""
    await s.topic("t", 5)
    a, b, c = await s.connect("a", "b", "c")
    await a(joins("g", "A", server_assignor=None))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2, 3, 4]}))
    await a(describe_consumers("g"))
    await b(joins("g", "B", server_assignor="uniform"))
    await a(describe_consumers("g"))
    await c(joins("g", "C", server_assignor=None))
    await a(describe_consumers("g"))


@scenario()
async def consumer_range(s: Script) -> None:
    """Partitions of the same number go to the same member, of all topics that both read."""
    await s.topic("t", 3)
    await s.topic("u", 3)
    await s.topic("v", 2)
    a, b = await s.connect("a", "b")
    await a(joins("g", "A", ("t", "u", "v")))
    await b(joins("g", "B", ("u", "t")))
    await a(describe_consumers("g"))


@scenario()
async def consumer_range_static(s: Script) -> None:
    """Static members come before the others, by their names, and then those by their ids."""
    await s.topic("t", 3)
    a, b, c = await s.connect("a", "b", "c")
    await a(joins("g", "A"))
    await b(joins("g", "B", instance_id="two"))
    await c(joins("g", "C", instance_id="one"))
    await a(describe_consumers("g"))


@scenario()
async def consumer_assignors(s: Script) -> None:
    """The assignor is the one that most members ask for; one that there is not is refused."""
    await s.topic("t", 2)
    a, b, c = await s.connect("a", "b", "c")
    await a(joins("g", "A", server_assignor="nonsense"))
    await a(joins("g", "A", server_assignor=""))
    await a(joins("g", "A", server_assignor="range"))
    await a(describe_consumers("g"))
    await b(joins("g", "B", server_assignor="uniform"))
    await c(joins("g", "C", server_assignor="uniform"))
    await a(describe_consumers("g"))
    await c(consumer("g", "C", 3, server_assignor="range"))
    await a(describe_consumers("g"))
    await c(consumer("g", "C", 4, server_assignor="nonsense"))


@scenario()
async def consumer_epochs(s: Script) -> None:
    """A member with another epoch than its own is fenced, unless it may not have heard of its new one."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await a(joins("g", "A"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await a(consumer("g", "A", 2, owned={"t": [0, 1]}))
    await a(consumer("g", "A", 2))
    await b(joins("g", "B"))
    await a(consumer("g", "A", 1))
    await a(consumer("g", "A", 1, owned={"t": [0]}))
    s.says("the answer was lost: the epoch before, with no more than it has")
    await a(consumer("g", "A", 1, owned={"t": [0]}))
    await a(consumer("g", "A", 1, owned={}))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await a(consumer("g", "A", 1))
    s.says("two epochs before")
    await b(consumer("g", "B", 2, owned={}))
    await b(consumer("g", "B", 2, ("t", "unknown")))
    await a(consumer("g", "A", 2, owned={"t": [0]}))
    await a(consumer("g", "A", 1, owned={"t": [0]}))
    s.says("fenced members are still members, and join again with epoch 0")
    await a(describe_consumers("g"))
    await a(joins("g", "A"))
    await a(describe_consumers("g"))


@scenario()
async def consumer_unknown_members(s: Script) -> None:
    """Heartbeats of members and groups that there are not."""
    await s.topic("t")
    a = await s.connect("a")
    await a(consumer("g", "A", 1))
    await a(consumer("g", "A", -1))
    await a(consumer("g", "A", -2, instance_id="one"))
    await a(joins("g", "A"))
    await a(consumer("g", "B", 1))
    await a(consumer("g", "B", -1))
    await a(consumer("g", "B", 1, instance_id="one"))
    await a(consumer("g", "B", -2, instance_id="one"))
    await a(consumer("g", "A", -2, instance_id="one"))
    await a(consumer("g", "A", -2))
    s.says("an id as the classic protocol has it")
    await a(heartbeat("g", "A", 1))


@scenario()
async def consumer_rejoin(s: Script) -> None:
    """A member that joins again with epoch 0 is told all that it has."""
    await s.topic("t", 2)
    a = await s.connect("a")
    await a(joins("g", "A"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await a(joins("g", "A"))
    await a(describe_consumers("g"))
    s.says("with another subscription")
    await a(joins("g", "A", ("unknown",)))
    await a(describe_consumers("g"))


@scenario()
async def consumer_invalid(s: Script) -> None:
    """Requests that lack what they need, or have what they must not."""
    await s.topic("t")
    a = await s.connect("a")
    await a(joins("", "A"))
    await a(joins("g", "A", instance_id=""))
    await a(joins("g", "A", rack_id=""))
    await a(joins("g", "A", rebalance_ms=None))
    await a(joins("g", "A", owned=None))
    await a(joins("g", "A", owned={"t": [0]}))
    await a(joins("g", "A", None))
    await a(joins("g", "A", None, version=0))
    await a(joins("g", "A", None, subscribed_topic_regex="("))
    await a(joins("g", "A", None, subscribed_topic_regex="(?=a)b"))
    await a(joins("g", "A", None, subscribed_topic_regex=r"(a)\1"))
    await a(consumer("g", "A", -3))
    await a(consumer("g", "A", -2))
    await a(consumer("g", "", 1))
    await a(consumer("g", "", -1))
    await a(consumer("g", "", -1, version=0))
    await a(consumer("", "A", 1))
    s.says("nothing came of it")
    await a(describe_consumers("g"))
    s.says("of a member")
    await a(joins("g", "A"))
    await a(consumer("g", "A", 1, subscribed_topic_regex="["))
    await a(consumer("g", "A", 1, owned={"t": [0, 5]}))
    await a(consumer("g", "A", 1, owned={"unknown": [0]}))
    await a(consumer("g", "A", 1, rack_id=""))
    await a(consumer("g", "A", 1, instance_id="one"))
    await a(describe_consumers("g"))


@scenario()
async def consumer_odd(s: Script) -> None:
    """What looks wrong, and is allowed."""
    await s.topic("t")
    a = await s.connect("a")
    s.says("no time to give up partitions")
    await a(joins("g", "A", rebalance_ms=0))
    await a(joins("h", "A", rebalance_ms=-5))
    s.says("an expression that is empty")
    await a(joins("i", "A", [], subscribed_topic_regex=""))
    await a(joins("j", "A", None, subscribed_topic_regex=""))
    await a(describe_consumers("i", "j"))
    s.says("a rack")
    await a(joins("k", "A", rack_id="r"))
    await a(describe_consumers("k"))
    await a(consumer("k", "A", 1, rack_id="s"))
    await a(describe_consumers("k"))


@scenario()
async def consumer_subscription(s: Script) -> None:
    """Members subscribe to other topics, to none, and to topics that there are not yet."""
    await s.topic("t", 2)
    a = await s.connect("a")
    await a(joins("g", "A", ()))
    await a(describe_consumers("g"))
    await a(consumer("g", "A", 1, ("later",)))
    await a(consumer("g", "A", 2, ("t", "later")))
    await a(consumer("g", "A", 3, owned={"t": [0, 1]}))
    s.says("the same again")
    await a(consumer("g", "A", 3, ("later", "t")))
    s.says("a topic more")
    await s.topic("later")
    await a.until(consumer("g", "A", 3), member_epoch=4)
    await a(consumer("g", "A", 4, owned={"t": [0, 1], "later": [0]}))
    s.says("a partition more")
    await s.grow("t", 3)
    await a.until(consumer("g", "A", 4), member_epoch=5)
    await a(consumer("g", "A", 5, owned={"t": [0, 1, 2], "later": [0]}))
    await a(describe_consumers("g"))
    s.says("a topic less")
    await s.drop_topic("later")
    await a.until(consumer("g", "A", 5, owned={"t": [0, 1, 2]}), member_epoch=6)
    await a(describe_consumers("g"))
    s.says("none at all")
    await a(consumer("g", "A", 6, ()))
    await a(consumer("g", "A", 6, owned={}))
    await a(describe_consumers("g"))


@scenario()
async def consumer_regex(s: Script) -> None:
    """A subscription by a regular expression, that the broker matches with the names of all topics."""
    await s.topic("t1", 2)
    await s.topic("u1", 1)
    a, b = await s.connect("a", "b")
    of_t = r"consumer-regex\.t.*"
    await a(
        joins("g", "A", None, subscribed_topic_regex=of_t),
        dray={"assignment.topic_partitions": [{"topic_id": "<t1>", "partitions": ["0", "1"]}]},
        because=MATCHED_AT_ONCE,
    )
    e = await s.is_assigned(a, "g", "A")
    s.says("A has what matches, since epoch e")
    await a(consumer("g", "A", e, owned={"t1": [0, 1]}))
    await a(describe_consumers("g"))
    s.says("another member with the same")
    await b(joins("g", "B", None, subscribed_topic_regex=of_t))
    await a(describe_consumers("g"))
    await b(consumer("g", "B", -1))
    s.says("names as well")
    await a(consumer("g", "A", e))
    await a(consumer("g", "A", e + 2, ("u1",)))
    await a(describe_consumers("g"))
    s.says("names alone: an empty expression is none")
    await a(consumer("g", "A", e + 3, subscribed_topic_regex=""))
    await a(consumer("g", "A", e + 3, owned={"u1": [0]}))
    await a(describe_consumers("g"))
    await a(consumer("g", "A", e + 4, subscribed_topic_regex="["))


@scenario()
async def consumer_regex_whole_name(s: Script) -> None:
    """The expression must match all of a name."""
    await s.topic("t", 1)
    await s.topic("tt", 1)
    a = await s.connect("a")
    await a(
        joins("g", "A", None, subscribed_topic_regex=r"consumer-regex-whole-name\.t"),
        dray={"assignment.topic_partitions": [{"topic_id": "<t>", "partitions": ["0"]}]},
        because=MATCHED_AT_ONCE,
    )
    await s.is_assigned(a, "g", "A")
    await a(describe_consumers("g"))


@scenario()
async def consumer_regex_later_topic(s: Script) -> None:
    """A topic that matches and comes later is assigned too."""
    await s.topic("t", 1)
    a = await s.connect("a")
    await a(
        joins("g", "A", None, subscribed_topic_regex=r"consumer-regex-later-topic\..*"),
        dray={"assignment.topic_partitions": [{"topic_id": "<t>", "partitions": ["0"]}]},
        because=MATCHED_AT_ONCE,
    )
    e = await s.is_assigned(a, "g", "A")
    s.says("A has what matches, since epoch e")
    await s.topic("u", 1)
    await a.until(consumer("g", "A", e), member_epoch=e + 1)


@scenario()
async def consumer_static(s: Script) -> None:
    """A static member leaves with epoch -2 and comes back to what it had, under another member id."""
    await s.topic("t", 4)
    a, b, c = await s.connect("a", "b", "c")
    await a(joins("g", "A", instance_id="one"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1, 2, 3]}, instance_id="one"))
    await c(joins("g", "C", instance_id="two"))
    await a(consumer("g", "A", 1, instance_id="one"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}, instance_id="one"))
    await c(consumer("g", "C", 2, owned={}, instance_id="two"))
    await c(consumer("g", "C", 2, owned={"t": [2, 3]}, instance_id="two"))
    s.says("its place is taken")
    await b(joins("g", "B", instance_id="one"))
    await b(consumer("g", "B", 2, instance_id="one"))
    await b(consumer("g", "B", -2, instance_id="one"))
    await b(consumer("g", "B", -1, instance_id="one"))
    s.says("it goes for a while")
    await a(consumer("g", "A", -2, instance_id="one"))
    await a(describe_consumers("g"))
    await a(consumer("g", "A", 2, instance_id="one"))
    await c(consumer("g", "C", 2, instance_id="two"))
    s.says("and is back")
    await b(joins("g", "B", instance_id="one"))
    await b(consumer("g", "B", 2, owned={"t": [0, 1]}, instance_id="one"))
    await c(consumer("g", "C", 2, instance_id="two"))
    await b(describe_consumers("g"))
    s.says("the former is fenced")
    await a(consumer("g", "A", 2, instance_id="one"))
    await a(consumer("g", "A", -1, instance_id="one"))
    await a(consumer("g", "A", -2, instance_id="one"))
    await a(consumer("g", "A", 2))
    s.says("back with another subscription")
    await b(consumer("g", "B", -2, instance_id="one"))
    await a(joins("g", "A", ("t", "unknown"), instance_id="one"))
    await a(describe_consumers("g"))
    s.says("for ever")
    await a(consumer("g", "A", -1, instance_id="one"))
    await c(consumer("g", "C", 2, instance_id="two"))
    await a(describe_consumers("g"))


@scenario()
async def consumer_static_same_member(s: Script) -> None:
    """A static member joins again under the id that it has, without having left or after it."""
    await s.topic("t", 2)
    a = await s.connect("a")
    await a(joins("g", "A", instance_id="one"))
    await a(
        joins("g", "A", instance_id="one"),
        dray={
            "error_code": "none",
            "error_message": "null",
            "member_id": '"A"',
            "member_epoch": "1",
            "heartbeat_interval": "5000",
            "assignment": {"topic_partitions": [{"topic_id": "<t>", "partitions": ["0", "1"]}]},
        },
        because="the answer to the first may have been lost",
    )
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}, instance_id="one"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await a(consumer("g", "A", -2, instance_id="one"))
    await a(joins("g", "A", instance_id="one"))
    await a(describe_consumers("g"))
    s.says("it leaves without its name")
    await a(consumer("g", "A", -1))
    await a(describe_consumers("g"))


@scenario()
async def consumer_max_size(s: Script) -> None:
    """No more than group.consumer.max.size members, which is 3 here."""
    await s.topic("t")
    a, b = await s.connect("a", "b")
    for name in ("A", "B", "C"):
        await a(joins("g", name))
    await b(joins("g", "D"))
    await b(joins("g", "D", instance_id="four"))
    await a(joins("g", "C"))
    await a(consumer("g", "C", -1))
    await b(joins("g", "D"))


@scenario(
    group_consumer_session_timeout_ms="3000",
    group_consumer_heartbeat_interval_ms="1000",
)
async def consumer_session_timeout(s: Script) -> None:
    """A member that says nothing is expelled, static or not, and the others get what it had."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await a(joins("g", "A"))
    await b(joins("g", "B"))
    await b.until(consumer("g", "B", 2), member_epoch=3)
    await b(describe_consumers("g"))
    await a(consumer("g", "A", 1))
    s.says("a static one that went for a while")
    await a(joins("g", "A", instance_id="one"))
    await b(consumer("g", "B", 3, owned={"t": [1]}))
    await a(consumer("g", "A", -2, instance_id="one"))
    await b.until(consumer("g", "B", 4), member_epoch=5)
    await b(describe_consumers("g"))


@scenario()
async def consumer_rebalance_timeout(s: Script) -> None:
    """A member that does not give up partitions within its rebalance timeout is expelled, though it beats."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await a(joins("g", "A", rebalance_ms=SOON_MS))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await b(joins("g", "B", rebalance_ms=SOON_MS))
    await a(consumer("g", "A", 1))
    await a.until(consumer("g", "A", 1), error_code="unknown_member_id")
    await b(consumer("g", "B", 2))
    await b(describe_consumers("g"))


@scenario()
async def consumer_offsets(s: Script) -> None:
    """Members commit and fetch with their member epoch; another one is stale."""
    await s.topic("t", 4)
    a, b = await s.connect("a", "b")
    await a(commit("g", {"t": {0: 1}}, "A", 1))
    await consuming(s, a, b)
    await a(commit("g", {"t": {0: 5}}, "A", 2))
    await a(commit("g", {"t": {0: 6}}, "A", 1))
    await a(commit("g", {"t": {0: 6}}, "A", 3))
    await a(commit("g", {"t": {0: 6}}, "nobody", 2))
    await a(commit("g", {"t": {0: 6}}))
    await a(commit("g", {"t": {0: 6}}, "", 2))
    await a(commit("g", {"t": {2: 6}}, "A", 2))
    s.says("what is committed")
    await a(fetch({"g": {"t": [0, 1]}}, member="A", epoch=2))
    await a(fetch({"g": None}, member="A", epoch=2))
    await a(fetch({"g": {"t": [0]}}, member="A", epoch=1))
    await a(fetch({"g": {"t": [0]}}, member="A", epoch=3))
    await a(fetch({"g": None}, member="A", epoch=3))
    await a(fetch({"g": {"t": [0]}}, member="nobody", epoch=2))
    await a(fetch({"g": {"t": [0]}}, member="", epoch=-1))
    await a(fetch({"g": {"t": [0]}}, member="A", epoch=-1))
    await a(fetch({"g": {"t": [0]}}))
    s.says("the group is empty")
    await a(consumer("g", "A", -1))
    await b(consumer("g", "B", -1))
    await a(commit("g", {"t": {0: 9}}, "A", 2))
    await a(commit("g", {"t": {0: 9}}))
    await a(commit("g", {"t": {0: 9}}, "", 2))
    await a(fetch({"g": {"t": [0]}}))


@scenario()
async def consumer_offsets_before_epochs(s: Script) -> None:
    """Before version 9 of OffsetCommit there were no member epochs, and a member cannot commit."""
    await s.topic("t", 1)
    a = await s.connect("a")
    await a(joins("g", "A"))
    await a(commit("g", {"t": {0: 7}}, "A", 1, version=8))
    await a(commit("g", {"t": {0: 7}}, "A", 2, version=8))
    await a(commit("g", {"t": {0: 7}}, "nobody", 1, version=8))
    await a(fetch({"g": None}, version=8))


@scenario()
async def consumer_offsets_between_epochs(s: Script) -> None:
    """A member that is to give up partitions commits with the epoch that it has."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await a(joins("g", "A"))
    await a(consumer("g", "A", 1, owned={"t": [0, 1]}))
    await b(joins("g", "B"))
    await a(commit("g", {"t": {1: 5}}, "A", 1))
    await a(consumer("g", "A", 1))
    await a(commit("g", {"t": {1: 6}}, "A", 1))
    await a(consumer("g", "A", 1, owned={"t": [0]}))
    await a(commit("g", {"t": {0: 7}}, "A", 1))
    await a(commit("g", {"t": {0: 7}}, "A", 2))
    await b(fetch({"g": {"t": [1]}}, member="B", epoch=2, stable=True))


@scenario()
async def consumer_groups(s: Script) -> None:
    """Describing, listing and deleting groups of the consumer protocol."""
    await s.topic("t", 4)
    a, b, c = await s.connect("a", "b", "c")
    await a(describe_consumers("g", ""))
    await a(describe_consumers())
    await consuming(s, a, b)
    await a(describe_consumers("g", operations=True))
    await a(list_groups())
    await a(list_groups(version=4))
    await a(list_groups(types=["consumer"]))
    await a(list_groups(types=["Consumer"], states=["stable"]))
    await a(list_groups(states=["Assigning", "Reconciling"]))
    await a(list_groups(types=["classic"]))
    await a(delete_groups("g"))
    s.says("Reconciling")
    await c(joins("g", "C"))
    await a(describe_consumers("g"))
    await a(list_groups(states=["Reconciling"]))
    await a(delete_groups("g"))
    s.says("Empty")
    for name in ("A", "B", "C"):
        await a(consumer("g", name, -1))
    await a(describe_consumers("g"))
    await a(list_groups(states=["Empty"]))
    await a(delete_groups("g"))
    await a(describe_consumers("g"))
    s.says("it starts again")
    await a(joins("g", "A"))


@scenario()
async def conversion_to_consumer(s: Script) -> None:
    """An empty classic group becomes one of the consumer protocol with the first member of that kind."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await alone(a, "g")
    await a(commit("g", {"t": {0: 5}}, a, 1))
    await b(joins("g", "B"))
    await b(describe_consumers("g"))
    await b(consumer("g", "B", 1))
    await b(consumer("g", "B", -1))
    await b(commit("g", {"t": {0: 6}}, "B", 1))
    await a(leave("g", a))
    await a(list_groups())
    s.says("now it is empty")
    await b(joins("g", "B"), dray={"member_epoch": "3"}, because=COUNTS_ON)
    await b(list_groups())
    await b(fetch({"g": None}))
    await a(heartbeat("g", a, 1))


@scenario()
async def conversion_to_classic(s: Script) -> None:
    """An empty group of the consumer protocol becomes a classic one with the first member of that kind."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await b(joins("g", "B"))
    await b(commit("g", {"t": {0: 5}}, "B", 1))
    s.says("not while it has members")
    await a(join("g", kind="connect"))
    await a(join("g", kind="connect", instance="one"))
    await a(join("g", kind="connect", version=3))
    await a(join("g", protocols={}))
    await b(consumer("g", "B", -1))
    s.says("now it is empty")
    await a(join("g"))
    again = await a(join("g", a), dray={"generation_id": "3"}, because=COUNTS_ON)
    generation = Told(again.generation_id, "its generation")
    await a(sync("g", a, generation, [(a, b"all")]))
    await a(heartbeat("g", a, generation))
    await a(list_groups())
    await a(fetch({"g": None}))
    await a(describe_consumers("g"))


@scenario()
async def conversion_mixed(s: Script) -> None:
    """A classic member joins a group that has members of the consumer protocol."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await b(joins("g", "B"))
    await a(
        join("g", version=3),
        dray={
            "error_code": "inconsistent_group_protocol",
            "generation_id": "-1",
            "protocol_name": '""',
            "member_id": '""',
        },
        because=NOT_MIXED,
    )


@scenario()
async def conversion_and_back(s: Script) -> None:
    """From one protocol to the other and back, with a group that has gone through some generations."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await pair(s, a, b, "g")
    await a(leave("g", a, b))
    c, d = await s.connect("c", "d")
    await c(joins("g", "C"), dray={"member_epoch": "4"}, because=COUNTS_ON)
    await c(
        describe_consumers("g"),
        dray={
            "groups.0.group_epoch": "4",
            "groups.0.assignment_epoch": "4",
            "groups.0.members.0.member_epoch": "4",
        },
        because=COUNTS_ON,
    )
    await c(consumer("g", "C", -1))
    d_joins = await enter(d, "g")
    await d_joins(dray={"generation_id": "6"}, because=COUNTS_ON)


@scenario()
async def conversion_other_apis(s: Script) -> None:
    """The APIs of one protocol, about a group of the other."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await b(joins("consumer", "B"))
    await b(describe("consumer"))
    await b(describe("consumer", version=5))
    await b(heartbeat("consumer", "B", 1))
    await b(sync("consumer", "B", 1))
    await b(leave("consumer", "nobody"))
    await alone(a, "classic")
    await a(describe_consumers("classic"))
    await a(describe_consumers("consumer", "classic", "none"))
    await a(consumer("classic", a, 1))
    await a(consumer("classic", "nobody", -1))
    await a(joins("classic", "B"))
    await a(joins("classic", "B", instance_id="one"))
    await a(list_groups(types=["classic", "consumer"]))
    s.says("and when they are empty")
    await b(consumer("consumer", "B", -1))
    await b(describe("consumer"))
    await b(heartbeat("consumer", "B", 1))
    await a(leave("classic", a))
    await a(describe_consumers("classic"))
    await a(consumer("classic", "nobody", 1))
    await a(consumer("classic", "nobody", -1))
    await a(describe("classic"))
    await a(list_groups())


@scenario()
async def consumer_leave_group(s: Script) -> None:
    """LeaveGroup, which tools use, also takes out members of the consumer protocol."""
    await s.topic("t", 2)
    a, b = await s.connect("a", "b")
    await a(joins("g", "A"))
    await b(joins("g", "B", instance_id="two"))
    await a(leave("g", "A", "nobody"))
    await a(consumer("g", "A", 1))
    await a(leave("g", ("wrong", "two"), ("", "unknown")))
    await a(leave("g", ("", "two")))
    await a(describe_consumers("g"))
