"""`python -m dray.topics.docs > docs/topic-configs.md`: the reference of topic configs, from their table."""

from __future__ import annotations

import sys

from dray.topics.configs import TOPIC_CONFIGS

HEAD = """\
# Topic configs

Made from `dray/topics/configs.py` by `python -m dray.topics.docs`. Names, types and defaults are Kafka's.

One rule for all: what Kafka refuses is refused, and so is a value that asks for what Dray cannot do. What
Dray does not act on is checked, stored and shown, so that tools work; it changes nothing today.

A topic gets its configs when it is created, and they can be altered at any time (AlterConfigs,
IncrementalAlterConfigs); all brokers follow. What a topic does not set is the broker setting, where there is
one. Those can be altered for all brokers at once while they run, as can `num.partitions` and
`auto.create.topics.enable`: resource type BROKER with an empty name, or
`kafka-configs.sh --alter --entity-type brokers --entity-default`. Of them, `message.max.bytes` alone can also
be given to a broker when it starts.

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
