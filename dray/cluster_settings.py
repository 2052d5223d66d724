"""Settings that are altered while brokers run, for all of them at once: Kafka's cluster-wide broker configs.

One record, `configs/brokers` in the cluster's domain, holds what was altered. Every broker follows it by a
watch, so a change holds everywhere as soon as the watches tell; on the broker that made it, at once. What was
altered counts more than what a broker was started with.

Only what means something at run time can be altered (`DYNAMIC_SETTINGS`): what stands in for topic configs,
and how topics are created. All else is fixed when a broker starts. A broker has no altered settings of its
own: those would have to be known to it alone, and brokers here are alike.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dray.altering import Alteration
from dray.config import SETTINGS
from dray.errors import BadRequest, CorruptStore, IncompatibleStore, InvalidTopicConfig, MetadataError
from dray.metadata.amend import amend
from dray.metadata.directory import Directory, Found
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.store import Expectation, MetadataStore
from dray.topics.configs import (
    BLANK,
    TOPIC_CONFIGS,
    ConfigRow,
    ConfigSource,
    ConfigType,
    Parsed,
    Synonym,
    as_topic_configs,
    parse_configs,
    shortest,
)

log = logging.getLogger(__name__)

CONFIGS = "configs"
BROKERS = "brokers"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class DynamicSetting:
    name: str
    type: ConfigType
    default: str
    # The value as it is used. Raises ValueError, whose text says what would be right.
    parse: Callable[[str], Parsed]
    doc: str


def _of_topics() -> list[DynamicSetting]:
    return [
        DynamicSetting(
            config.setting,
            config.type,
            config.default,
            config.parse,
            f"For topics that do not set {config.name}. {config.doc}",
        )
        for config in TOPIC_CONFIGS.values()
        if config.setting is not None
    ]


def _of_brokers(name: str, kind: ConfigType) -> DynamicSetting:
    setting = SETTINGS[name]
    assert setting.default is not None

    def parse(text: str) -> Parsed:
        value = setting.parse(text.strip(BLANK))
        assert isinstance(value, bool | int)
        return value

    return DynamicSetting(name, kind, setting.default, parse, setting.doc)


DYNAMIC_SETTINGS: Mapping[str, DynamicSetting] = MappingProxyType(
    {
        setting.name: setting
        for setting in [
            *_of_topics(),
            _of_brokers("auto.create.topics.enable", ConfigType.BOOLEAN),
            _of_brokers("num.partitions", ConfigType.INT),
        ]
    }
)
# With their defaults.
LIST_SETTINGS: Mapping[str, str] = MappingProxyType(
    {each.name: each.default for each in DYNAMIC_SETTINGS.values() if each.type is ConfigType.LIST}
)


class ClusterSettings:
    """See the module's text. Whoever makes it runs it.

    `given` is what the broker was started with, as far as it is not the default.
    """

    def __init__(self, store: MetadataStore, given: Mapping[str, str]) -> None:
        self.given = {name: text for name, text in given.items() if name in DYNAMIC_SETTINGS}
        self.altered: Mapping[str, str] = {}  # what is usable of it
        self._store = store
        self._directory = Directory(store, CLUSTER_DOMAIN, CONFIGS, decode)
        self._directory.subscribe(self._take)
        self._subscribers: list[Callable[[], None]] = []
        # Changes of one broker wait for each other, so that only other brokers can foil an attempt.
        self._altering = asyncio.Lock()

    async def run(self) -> None:
        """Follow until cancelled or the store is closed."""
        await self._directory.run()

    async def loaded(self) -> None:
        """Return when all is known that was altered before. Raises what `run` raised if it never will be."""
        await self._directory.loaded()

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after each change. It must not raise."""
        self._subscribers.append(callback)

    @property
    def auto_create_topics(self) -> bool:
        return bool(self._value("auto.create.topics.enable"))

    @property
    def num_partitions(self) -> int:
        value = self._value("num.partitions")
        assert isinstance(value, int)
        return value

    @property
    def topic_defaults(self) -> dict[str, str]:
        """What stands in for topic configs, by their names."""
        return as_topic_configs({**self.given, **self.altered})

    async def alter(self, alter: Alteration, *, validate_only: bool = False) -> None:
        """Store what `alter` makes of what is altered. Holds on this broker when it returns.

        Raises `BadRequest` for what cannot be altered or not to this, and what `alter` raises.
        """

        def decide(current: Mapping[str, str] | None) -> Mapping[str, str] | None:
            wanted = _checked(alter(current or {}))
            return None if validate_only or wanted == (current or {}) else wanted

        async def put(altered: Mapping[str, str], expect: Expectation) -> None:
            await self._store.put(CLUSTER_DOMAIN, f"{CONFIGS}/{BROKERS}", encode(altered), expect)
            # It is done. If the store is away now, the watch brings it when it is back.
            try:
                await self._directory.refresh(BROKERS)
            except MetadataError as error:
                log.warning("altered settings will hold here once the store tells of them: %s", error)

        async with self._altering:
            await amend("the settings of all brokers", self._read, decide, put, lambda a, b: a == b)

    def describe(self) -> list[ConfigRow]:
        """Every setting that can be altered, and where it comes from."""
        return [self._row(setting) for setting in DYNAMIC_SETTINGS.values()]

    def describe_altered(self) -> list[ConfigRow]:
        """Those that are altered, as Kafka tells them where no broker is named: nothing but that."""
        rows = []
        for name, text in sorted(self.altered.items()):
            setting = DYNAMIC_SETTINGS[name]
            synonym = Synonym(name, text, ConfigSource.CLUSTER)
            rows.append(ConfigRow(name, text, ConfigSource.CLUSTER, setting.type, (synonym,), setting.doc))
        return rows

    async def _read(self) -> Found[Mapping[str, str]] | None:
        """Not from the view, which leaves out what this Dray cannot read: that must not be overwritten."""
        await self._store.barrier(CLUSTER_DOMAIN)
        key = f"{CONFIGS}/{BROKERS}"
        record = await self._store.get(CLUSTER_DOMAIN, key)
        return None if record is None else Found(decode(key, record.value), record.version)

    def _take(self, segment: str) -> None:
        if segment != BROKERS:
            return
        found = self._directory.get(BROKERS)
        self.altered = {} if found is None else _usable(found.value)
        for callback in self._subscribers:
            callback()

    def _value(self, name: str) -> Parsed:
        setting = DYNAMIC_SETTINGS[name]
        return setting.parse(self.altered.get(name, self.given.get(name, setting.default)))

    def _row(self, setting: DynamicSetting) -> ConfigRow:
        name = setting.name
        synonyms = [Synonym(name, setting.default, ConfigSource.DEFAULT)]
        if name in self.given:
            synonyms.insert(0, Synonym(name, self.given[name], ConfigSource.BROKER))
        if name in self.altered:
            synonyms.insert(0, Synonym(name, self.altered[name], ConfigSource.CLUSTER))
        first = synonyms[0]
        return ConfigRow(name, first.value, first.source, setting.type, tuple(synonyms), setting.doc)


def encode(altered: Mapping[str, str]) -> bytes:
    record = {"format": FORMAT, "configs": dict(sorted(altered.items()))}
    return json.dumps(record, separators=(",", ":")).encode()


def decode(key: str, value: bytes) -> Mapping[str, str]:
    """Raises `IncompatibleStore` for a newer format, `CorruptStore` for what nobody can have written."""
    try:
        record = json.loads(value)
    except ValueError:
        raise CorruptStore(f"{key}: not JSON: {value[:80]!r}") from None
    version = record.get("format") if isinstance(record, dict) else None
    if type(version) is not int or version < 1:
        raise CorruptStore(f"{key}: no usable format: {value[:80]!r}")
    if version > FORMAT:
        raise IncompatibleStore(f"{key} has format {version}, and this Dray knows those up to {FORMAT}")
    configs = record.get("configs")
    if not isinstance(configs, dict) or not all(isinstance(text, str) for text in configs.values()):
        raise CorruptStore(f"{key}: no usable configs: {value[:200]!r}")
    return configs


def _checked(wanted: Mapping[str, str]) -> dict[str, str]:
    """As it is stored, each value in its shortest form. Kafka refuses all of these with INVALID_REQUEST."""
    fixed = sorted(name for name in wanted if name in SETTINGS and name not in DYNAMIC_SETTINGS)
    if fixed:
        raise BadRequest(f"Cannot update these configs dynamically: {', '.join(fixed)}")
    unknown = sorted(wanted.keys() - DYNAMIC_SETTINGS.keys())
    if unknown:
        raise BadRequest(f"there is no setting {unknown[0][:200]!r} that can be altered")
    altered = {name: _parse(name, text) for name, text in wanted.items()}
    try:
        parse_configs({}, as_topic_configs(altered))
    except InvalidTopicConfig as error:
        raise BadRequest(f"as defaults of topics these contradict each other: {error}") from None
    return altered


def _parse(name: str, text: str) -> str:
    try:
        return shortest(DYNAMIC_SETTINGS[name].parse(text))
    except ValueError as error:
        said = text if len(text) <= 200 else text[:200] + "…"
        raise BadRequest(f"setting {name}: {said!r} is not usable: {error}") from None


def _usable(altered: Mapping[str, str]) -> dict[str, str]:
    """A broker of another version may have taken what this one cannot use. The rest holds all the same."""
    usable: dict[str, str] = {}
    for name, text in altered.items():
        try:
            usable = _checked({**usable, name: text})
        except BadRequest as error:
            log.warning("an altered setting is not used here: %s", error)
    return usable
