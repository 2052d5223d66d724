"""The assignors: by hand for small groups, by their rules for any. Kafka's own are compared elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.groups.assignors import ASSIGNORS, Assign, Assignment, Subscriber, range_, uniform

A, B, C = (UUID(int=number) for number in (0xA, 0xB, 0xC))

Group = tuple[dict[str, Subscriber], dict[UUID, int]]


def member(
    *topics: UUID, had: Mapping[UUID, set[int]] | None = None, instance: str | None = None
) -> Subscriber:
    assigned = {topic: frozenset(partitions) for topic, partitions in (had or {}).items()}
    return Subscriber(frozenset(topics), assigned, instance)


def counts(assignments: Mapping[str, Assignment]) -> dict[str, int]:
    return {name: sum(map(len, one.values())) for name, one in assignments.items()}


def kept(members: Mapping[str, Subscriber], after: Mapping[str, Assignment]) -> int:
    """Partitions that stay with the member that had them."""
    return sum(
        len(had & after[name].get(topic, frozenset()))
        for name, one in members.items()
        for topic, had in one.assigned.items()
    )


def again(members: Mapping[str, Subscriber], after: Mapping[str, Assignment]) -> dict[str, Subscriber]:
    return {name: Subscriber(one.topics, after[name], one.instance_id) for name, one in members.items()}


class TestUniform:
    def test_a_new_group_is_cut_in_equal_runs(self) -> None:
        assert uniform({"m1": member(A), "m2": member(A)}, {A: 4}) == {"m1": {A: {0, 1}}, "m2": {A: {2, 3}}}

    def test_what_is_over_goes_to_the_last(self) -> None:
        group = {name: member(A, B) for name in ("m1", "m2", "m3")}
        assert uniform(group, {A: 3, B: 2}) == {
            "m1": {A: {0}},
            "m2": {A: {1, 2}},
            "m3": {B: {0, 1}},
        }

    def test_who_has_more_keeps_more(self) -> None:
        """With three partitions for two members, who gets two is decided by who has two."""
        group = {"m1": member(A, had={A: {0, 2}}), "m2": member(A)}
        assert uniform(group, {A: 3}) == {"m1": {A: {0, 2}}, "m2": {A: {1}}}

    def test_a_join_takes_only_what_the_new_member_gets(self) -> None:
        group = {"m1": member(A, had={A: {0, 1, 2}}), "m2": member(A, had={A: {3, 4, 5}}), "m0": member(A)}
        assert uniform(group, {A: 6}) == {"m0": {A: {2, 5}}, "m1": {A: {0, 1}}, "m2": {A: {3, 4}}}

    def test_a_leave_moves_only_what_the_member_had(self) -> None:
        group = {"m1": member(A, had={A: {0, 1}}), "m3": member(A, had={A: {4, 5}})}
        assert uniform(group, {A: 6}) == {"m1": {A: {0, 1, 2}}, "m3": {A: {3, 4, 5}}}

    def test_partitions_that_are_new_move_nothing(self) -> None:
        group = {"m1": member(A, had={A: {0, 2}}), "m2": member(A, had={A: {1}})}
        assert uniform(group, {A: 4}) == {"m1": {A: {0, 2}}, "m2": {A: {1, 3}}}

    def test_a_topic_no_longer_subscribed_to_is_given_up(self) -> None:
        group = {"m1": member(A, had={A: {0}, B: {0}}), "m2": member(A, had={A: {1}})}
        assert uniform(group, {A: 2, B: 1}) == {"m1": {A: {0}}, "m2": {A: {1}}}

    def test_more_members_than_partitions_leave_some_without(self) -> None:
        assert uniform({"m1": member(A), "m2": member(A), "m3": member(A)}, {A: 1}) == {
            "m1": {},
            "m2": {},
            "m3": {A: {0}},
        }

    def test_a_topic_goes_to_those_that_subscribe_to_it(self) -> None:
        """The one that takes all of B gets none of A."""
        assert uniform({"m1": member(A, B), "m2": member(A)}, {A: 2, B: 3}) == {
            "m1": {B: {0, 1, 2}},
            "m2": {A: {0, 1}},
        }

    def test_a_member_with_another_subscription_takes_over_from_the_most_loaded(self) -> None:
        group = {
            "m1": member(A, B, had={A: {0, 1, 2}, B: {0}}),
            "m2": member(A, B, had={A: {3, 4, 5}}),
            "m3": member(A),
        }
        assert uniform(group, {A: 6, B: 1}) == {
            "m1": {A: {0}, B: {0}},
            "m2": {A: {3, 4, 5}},
            "m3": {A: {1, 2}},
        }

    def test_a_member_with_nothing_to_give_hands_its_turn_on(self) -> None:
        """Of A the third and the second give one each, the first has none. The third then stands in its turn:
        the second gives the next, the third the one after. Taken from Kafka."""
        group = {
            "m1": member(A, B, C, had={B: {0}, C: {0, 1, 2, 3, 4, 5}}),
            "m2": member(A, C, had={A: {0, 1, 2, 3}, C: {6, 7, 8}}),
            "m3": member(A, B, C, had={A: {4, 5, 6, 7, 8, 9, 10}}),
            "m4": member(A, B, C),
        }
        assert uniform(group, {A: 11, B: 1, C: 9}) == {
            "m1": {B: {0}, C: {0, 1, 2, 3, 4}},
            "m2": {A: {0, 1}, C: {6, 7, 8}},
            "m3": {A: {4, 5, 6, 7, 8}},
            "m4": {A: {2, 3, 9, 10}, C: {5}},
        }

    def test_the_half_of_a_topic_id_is_a_signed_number(self) -> None:
        """Between topics alike in all else Kafka takes the one with the negative id first."""
        negative = UUID(int=1 << 127)
        group = {"m1": member(A, negative), "m2": member(A, negative), "m3": member(C)}
        assert uniform(group, {A: 1, negative: 1, C: 1})["m1"] == {negative: {0}}


class TestRange:
    def test_each_topic_is_cut_in_runs_the_longer_first(self) -> None:
        group = {name: member(A, B) for name in ("m1", "m2", "m3")}
        assert range_(group, {A: 7, B: 2}) == {
            "m1": {A: {0, 1, 2}, B: {0}},
            "m2": {A: {3, 4}, B: {1}},
            "m3": {A: {5, 6}},
        }

    def test_only_subscribers_are_in_the_line(self) -> None:
        group = {"m1": member(A), "m2": member(A, B), "m3": member(B)}
        assert range_(group, {A: 3, B: 3}) == {
            "m1": {A: {0, 1}},
            "m2": {A: {2}, B: {0, 1}},
            "m3": {B: {2}},
        }

    def test_what_a_member_had_plays_no_part(self) -> None:
        group = {"m1": member(A, had={A: {2, 3}}), "m2": member(A, had={A: {0, 1}})}
        assert range_(group, {A: 4}) == {"m1": {A: {0, 1}}, "m2": {A: {2, 3}}}

    def test_static_members_come_first_by_instance_id(self) -> None:
        group = {
            "m1": member(A),
            "m2": member(A, instance="i2"),
            "m3": member(A, instance="i1"),
            "m0": member(A),
        }
        assert range_(group, {A: 4}) == {"m3": {A: {0}}, "m2": {A: {1}}, "m0": {A: {2}}, "m1": {A: {3}}}

    def test_a_static_member_keeps_its_place_under_a_new_member_id(self) -> None:
        before = range_({"x": member(A, instance="i1"), "y": member(A, instance="i2")}, {A: 3})
        after = range_({"z": member(A, instance="i1"), "y": member(A, instance="i2")}, {A: 3})
        assert after["z"] == before["x"]
        assert after["y"] == before["y"]

    def test_ids_are_in_the_order_of_java(self) -> None:
        """U+1F600 is D83D DE00 in UTF-16: before U+FFEE."""
        group = {"\uffee": member(A), "\N{GRINNING FACE}": member(A)}
        assert range_(group, {A: 2}) == {"\N{GRINNING FACE}": {A: {0}}, "\uffee": {A: {1}}}


@pytest.mark.parametrize("assign", ASSIGNORS.values(), ids=list(ASSIGNORS))
class TestAny:
    def test_nobody_gets_nothing(self, assign: Assign) -> None:
        assert assign({}, {A: 3}) == {}

    def test_without_topics_every_member_is_there(self, assign: Assign) -> None:
        assert assign({"m1": member(), "m2": member(had={A: {0}})}, {A: 3}) == {"m1": {}, "m2": {}}

    def test_what_cannot_be_is_not_kept(self, assign: Assign) -> None:
        """Partitions beyond the topic, and one that two claim."""
        group = {"m1": member(A, had={A: {0, 7}, B: {1}}), "m2": member(A, had={A: {0, 1}})}
        assert assign(group, {A: 2}) == {"m1": {A: {0}}, "m2": {A: {1}}}

    def test_hash_seeds_play_no_part(self, assign: Assign) -> None:
        program = f"""
from uuid import UUID
from dray.groups.assignors import {assign.__name__} as assign, Subscriber
topics = [UUID(int=7**40 * number) for number in range(1, 6)]
members = {{f"m{{n}}": Subscriber(frozenset(topics[n % 3 :]), {{}}) for n in range(9)}}
result = assign({{name: members[name] for name in set(members)}}, dict.fromkeys(topics, 5))
for name in sorted(result):
    print(name, [(topic, sorted(result[name][topic])) for topic in sorted(result[name])])
"""
        said = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert len(said) == 1


@st.composite
def groups(draw: st.DrawFn, same_topics: bool = False) -> Group:
    """Any group, with any targets before: of topics no longer subscribed to, too."""
    topics = [UUID(int=number) for number in draw(st.sets(st.integers(1, 2**128 - 1), max_size=4))]
    partitions = {topic: draw(st.integers(1, 10)) for topic in topics}
    names = sorted(draw(st.sets(st.text(max_size=3), min_size=1, max_size=6)))
    subscription = st.sets(st.sampled_from(topics)) if topics else st.just(set())
    common = draw(subscription)
    subscribed = {name: frozenset(common if same_topics else draw(subscription)) for name in names}
    had: dict[str, dict[UUID, set[int]]] = {name: {} for name in names}
    for topic, count in partitions.items():
        for partition in range(count):
            owner = draw(st.sampled_from([None, *names]))
            if owner is not None:
                had[owner].setdefault(topic, set()).add(partition)
    statics = draw(st.sets(st.sampled_from(names)))
    members = {
        name: member(*subscribed[name], had=had[name], instance=f"i{name}" if name in statics else None)
        for name in names
    }
    return members, partitions


@given(group=groups(), assign=st.sampled_from(list(ASSIGNORS.values())))
def test_each_partition_goes_to_one_subscriber(group: Group, assign: Assign) -> None:
    members, partitions = group
    result = assign(members, partitions)
    assert result.keys() == members.keys()
    given_out = Counter(
        (topic, partition)
        for one in result.values()
        for topic, numbers in one.items()
        for partition in numbers
    )
    wanted = {topic for one in members.values() for topic in one.topics}
    assert given_out == {(topic, number): 1 for topic in wanted for number in range(partitions[topic])}
    for name, one in result.items():
        assert one.keys() <= members[name].topics
        assert all(one.values()), "no topic without partitions"


@given(group=groups(), assign=st.sampled_from(list(ASSIGNORS.values())), data=st.data())
def test_the_order_of_what_is_given_plays_no_part(group: Group, assign: Assign, data: st.DataObject) -> None:
    members, partitions = group
    shuffled = {
        name: Subscriber(
            one.topics,
            {topic: one.assigned[topic] for topic in data.draw(st.permutations(sorted(one.assigned)))},
            one.instance_id,
        )
        for name, one in data.draw(st.permutations(sorted(members.items(), key=lambda item: item[0])))
    }
    topics = dict(data.draw(st.permutations(sorted(partitions.items()))))
    assert assign(shuffled, topics) == assign(members, partitions)


@given(group=groups(), assign=st.sampled_from(list(ASSIGNORS.values())))
def test_to_assign_again_changes_nothing(group: Group, assign: Assign) -> None:
    members, partitions = group
    result = assign(members, partitions)
    assert assign(again(members, result), partitions) == result


@given(group=groups(same_topics=True))
def test_uniform_levels_with_the_fewest_moves(group: Group) -> None:
    """Counts are at most one apart; each keeps all it had up to its count."""
    members, partitions = group
    result = uniform(members, partitions)
    after = counts(result)
    share, larger = divmod(sum(after.values()), len(after))
    assert Counter(after.values()) == Counter({share: len(after) - larger, share + 1: larger})
    before = [
        sum(len(had) for topic, had in one.assigned.items() if topic in one.topics)
        for one in members.values()
    ]
    more = sum(count > share for count in before)
    assert kept(members, result) == sum(min(count, share) for count in before) + min(more, larger)


@given(group=groups(same_topics=True))
def test_a_join_moves_what_the_new_member_gets_and_no_more(group: Group) -> None:
    members, partitions = group
    settled = again(members, uniform(members, partitions))
    topics = next(iter(members.values())).topics
    joined = {**settled, "new member": Subscriber(topics, {})}
    result = uniform(joined, partitions)
    total = sum(counts(result).values())
    assert counts(result)["new member"] == total // len(joined)
    assert kept(joined, result) == total - total // len(joined)


@given(group=groups())
def test_uniform_leaves_no_move_that_would_balance(group: Group) -> None:
    members, partitions = group
    result = uniform(members, partitions)
    loads = counts(result)
    for owner, one in result.items():
        for topic in one:
            takers = [name for name, other in members.items() if topic in other.topics]
            assert loads[owner] - min(loads[name] for name in takers) <= 1


@given(group=groups(same_topics=True))
def test_range_gives_one_run_and_keeps_equal_topics_together(group: Group) -> None:
    members, partitions = group
    for one in range_(members, partitions).values():
        for topic, numbers in one.items():
            assert max(numbers) - min(numbers) == len(numbers) - 1
            for other in one:
                if partitions[other] == partitions[topic]:
                    assert one[other] == numbers
