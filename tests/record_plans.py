"""Hypothesis strategies: any batches that a broker may have stored."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.naive_records import CODECS, Plan

INT64 = st.integers(-(2**63), 2**63 - 1)
# None, now, out of order, beyond the years 1 to 9999, anything.
TIMESTAMPS = st.one_of(
    st.just(-1),
    st.integers(1_700_000_000_000, 1_700_000_100_000),
    st.sampled_from([0, 253_402_300_799_999, 253_402_300_800_000, -62_135_596_800_000, -62_135_596_800_001]),
    INT64,
)
CONTENTS = st.one_of(
    st.none(),
    st.just(b""),
    st.binary(max_size=40),
    st.sampled_from([63, 64, 8_191, 8_192, 2**20]).map(lambda size: b"v" * size),
)
HEADERS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(["a", "b", ""]), st.text(max_size=5)), st.none() | st.binary(max_size=9)
    ),
    max_size=4,
).map(tuple)
PRODUCERS = st.one_of(
    st.just((-1, -1, -1)),
    st.tuples(
        st.sampled_from([0, 1, 2**63 - 1]),
        st.sampled_from([0, 1, 2**15 - 1]),
        st.sampled_from([0, 5, 2**31 - 2, 2**31 - 1]),
    ),
)


@st.composite
def plans(draw: st.DrawFn) -> list[Plan]:
    found = []
    for _ in range(draw(st.integers(1, 6))):
        records = draw(
            st.lists(st.tuples(TIMESTAMPS, st.none() | st.binary(max_size=9), CONTENTS, HEADERS), min_size=1)
        )
        found.append(
            Plan(
                records,
                draw(st.sampled_from(sorted(CODECS))),
                base_timestamp=draw(st.just(records[0][0]) | INT64),
                producer=draw(PRODUCERS),
                append_time=draw(st.none() | TIMESTAMPS),
                gap=draw(st.sampled_from([0, 0, 0, 1, 1_000, 2**40])),
            )
        )
    return found
