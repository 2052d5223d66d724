"""Requests with something wrong in them."""

from __future__ import annotations

import random
from collections.abc import Sequence

# Numbers that mean something: null, nothing, the ends of signed and of variable-sized ones; and no UTF-8.
SPLICES = [
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xff\xff\xff\xff\x0f",
    b"\xff\xff\xff\xff\xff\x01",
    b"\xff\xff\xff\xff\x7f",
    b"\x80",
    b"\xfe",
    b"\xff",
    b"\x00",
    b"\x01",
    b"\x7f\xff",
    b"\xff\xfe",
    b"\x80\x80\x80\x80\x00",
    b"\xc3\x28",
]


def mutated(request: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """The same request with something wrong, but mostly still of the same API and version."""
    first = 0 if rng.random() < 0.02 else 8
    data = bytearray(request)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randint(min(first, len(data)), len(data))
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                splice = rng.choice(SPLICES)
                data[at : at + rng.choice((0, len(splice)))] = splice
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randint(1, 8)]
            case 4:
                other = rng.choice(others)
                data[at:] = other[rng.randint(0, len(other)) :]
            case _:
                data[at:at] = data[at : at + rng.randint(1, 64)]
    return bytes(data)
