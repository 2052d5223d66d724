"""`python -m dray.topics.docs > docs/topic-configs.md`: the reference of topic configs, from their table."""

from __future__ import annotations

import sys

from dray.topics.configs import TOPIC_CONFIGS

HEAD = """\
# Topic configs

Made from `dray/topics/configs.py` by `python -m dray.topics.docs`. Names, types and defaults are Kafka's.
What Dray does not act on is checked and stored, so that tools work; it changes nothing today.

| config | type | default | broker setting | acted on | |
|---|---|---|---|---|---|
"""


def page() -> str:
    rows = [
        f"| `{config.name}` | {config.type.value} | {f'`{config.default}`' if config.default else ''}"
        f" | {f'`{config.setting}`' if config.setting else ''} | {'yes' if config.effective else 'no'}"
        f" | {config.doc} |\n"
        for config in TOPIC_CONFIGS.values()
    ]
    return HEAD + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(page())
