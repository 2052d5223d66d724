"""`python -m dray.handlers.docs > docs/compatibility.md`: what is served, and where it differs from Kafka."""

from __future__ import annotations

import sys

from dray.handlers.compatibility import DEVIATIONS, EVERYWHERE, KAFKA, NOT_SERVED
from dray.handlers.rejected import REJECTED
from dray.handlers.table import APIS, Api

HEAD = """\
# Compatibility with Apache Kafka

Made from `dray/handlers/table.py` and `dray/handlers/compatibility.py` by `python -m dray.handlers.docs`.

Kafka is 4.2.1, with its defaults. Versions are those that ApiVersions tells clients of. What is not named
here is meant to be equal; as far as `golden/protocol/` goes it was compared with a real Kafka. Topic configs
are in [topic-configs.md](topic-configs.md).
"""


def page() -> str:
    return "\n".join([HEAD, *_served(), "", *_not_served(), "", *_deviations(), ""])


def _served() -> list[str]:
    rows = [
        "## APIs that are served",
        "",
        "| key | API | versions | Kafka 4.2 | |",
        "|---|---|---|---|---|",
    ]
    for key, api in sorted(APIS.items()):
        kafka = KAFKA[key]
        rows.append(
            f"| {key} | {api.name} | {_versions(key, api)}"
            f" | {_range(kafka.min_version, kafka.max_version)} | {_link(key, api)} |"
        )
    return rows


def _versions(key: int, api: Api) -> str:
    told = api.versions(key)
    if not api.is_advertised:
        return f"{_range(api.min_version, api.max_version)}, not advertised"
    if told.min_version == api.min_version:
        return _range(api.min_version, api.max_version)
    return f"{_range(told.min_version, told.max_version)}, served {_range(api.min_version, api.max_version)}"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _link(key: int, api: Api) -> str:
    count = len(DEVIATIONS.get(key, ()))
    return f"[{count} note{'s' if count > 1 else ''}](#{api.name.lower()}-{key})" if count else ""


def _not_served() -> list[str]:
    rows = [
        "## APIs of Kafka that are not served",
        "",
        "| key | API | Kafka 4.2 | why | who asks all the same |",
        "|---|---|---|---|---|",
    ]
    for key, missing in sorted(NOT_SERVED.items()):
        kafka = KAFKA[key]
        gets = "is told UNSUPPORTED_VERSION" if key in REJECTED else "is cut off"
        versions = _range(kafka.min_version, kafka.max_version)
        rows.append(f"| {key} | {kafka.name} | {versions} | {missing.value} | {gets} |")
    return rows


def _deviations() -> list[str]:
    lines = ["## Where Dray differs", "", "### Everywhere", "", *(f"- {each}" for each in EVERYWHERE)]
    for key, api in sorted(APIS.items()):
        notes = DEVIATIONS.get(key, ())
        if notes:
            lines += ["", f"### {api.name} ({key})", "", *(f"- {note}" for note in notes)]
    return lines


if __name__ == "__main__":
    sys.stdout.write(page())
