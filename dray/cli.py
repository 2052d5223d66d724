"""`drayd`: arguments and settings in, an exit code and a few lines out.

0 it worked; 1 it did not, and one line on stderr says why and what to do; 2 the arguments or a setting
cannot be used, and nothing was opened; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from dray import __version__, logs
from dray.config import SETTINGS, Given, Setting, Settings, load_settings
from dray.errors import (
    AccessDenied,
    ConfigError,
    CorruptStore,
    DrayError,
    IncompatibleStore,
    InvalidRequest,
    NoSuchNamespace,
    OutcomeUnknown,
    QueryFailed,
    StoreFull,
    Unavailable,
    UnknownPartition,
    UnknownTopic,
)
from dray.index import show as index_show
from dray.metadata.check import Finding, check_store
from dray.metadata.cluster import Cluster, open_cluster, read_cluster
from dray.metadata.keys import CLUSTER_DOMAIN
from dray.metadata.opening import SqliteUrl, open_store, parse_metadata_url, redact
from dray.metadata.store import MetadataStore
from dray.topics.catalog import check_name
from dray.topics.record import decode_topic, topic_key
from dray.wal.inspect import as_json, as_table, inspect_object, read_object
from dray.workers import run_workers

# How long the end of a broker waits for threads that have nothing left to do.
THREADS_S = 0.5

Command: TypeAlias = Callable[[Settings, argparse.Namespace], Coroutine[Any, Any, int] | int]

EXAMPLES = """\
examples:
  drayd broker
      serve Kafka clients on 127.0.0.1:9092, with everything under ./data
  drayd broker --listen 0.0.0.0:9092 --advertise broker1:9092 --zone euw1-az1 \\
      --metadata oxia://oxia:6648/default --objects s3://bucket/dray --workers 4
      four brokers of one zone on one host, on ports 9092 to 9095
  drayd admin metadata check
      try the embedded store in ./data
  drayd admin cluster init --data /var/lib/dray --set metadata.domains=64
      create a cluster in that directory
  drayd admin cluster show --metadata etcd://10.0.0.1:2379,10.0.0.2:2379/dray --json
      say what is known about a cluster in etcd
  DRAY_METADATA=oxia://127.0.0.1:6648/default drayd admin metadata check
      every setting can come from the environment as well
  drayd admin wal inspect wal/v1/zone=a/domain=7/date=2026/01/31/….wo --objects s3://bucket/dray
      show what a WAL object holds, and whether it is whole
  drayd admin index show orders 0
      show which objects hold the offsets of partition 0 of topic orders
  drayd admin fsck
      see whether index, objects and tables agree
  drayd compactor --once
      make tables of all that topics have, now
  drayd compactor --master spark://spark:7077 --conf spark.executor.memory=4g --interval 30
      keep tables up to date, on a Spark cluster
  drayd sql "SELECT offset, timestamp, CAST(value AS STRING) FROM dray.kafka.orders"
      ask the table of topic orders, which drayd compactor made

Settings come from --config FILE, then DRAY_… variables, then the command line; the last one counts.
"""

# Python's own are 700, 10 and 10: made for programs that are short-lived or small.
GC_THRESHOLDS = (20_000, 20, 50)

HINTS: Mapping[type[DrayError], str] = {
    Unavailable: "check that the metadata URL and its options are right and the store is running",
    OutcomeUnknown: "the store went away in the middle; try again",
    StoreFull: "free space in the metadata store, then try again",
    AccessDenied: "check the user, the password and their rights in the metadata URL",
    NoSuchNamespace: "create the namespace or correct the metadata URL",
    IncompatibleStore: "nothing was changed; use the version and settings of the cluster",
    CorruptStore: "nothing was changed; check that the metadata URL points to Dray's own store",
    InvalidRequest: "correct the metadata URL",
}


def main(argv: Sequence[str] | None = None) -> int:
    given: list[Given] = []
    arguments = build_parser(given).parse_args(argv)
    command: Command = arguments.command
    try:
        settings = load_settings(getattr(arguments, "config", None), given)
        if command is _broker and settings.workers > 1:
            return run_workers(settings, list(sys.argv[1:] if argv is None else argv))
        if command is _broker:
            code = _run_fast(_broker(settings, arguments))
            _leave_hanging_threads(code)
            return code
        work = command(settings, arguments)
        return work if isinstance(work, int) else asyncio.run(work)
    except ConfigError as error:
        return _fail(2, str(error))
    except DrayError as error:
        return _fail(1, str(error), HINTS.get(type(error), ""))
    except KeyboardInterrupt:
        return 130


def build_parser(given: list[Given]) -> argparse.ArgumentParser:
    """The parser; settings on the command line go to `given`, in order, whatever level they stand on."""
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = common.add_argument_group("settings")
    group.add_argument(
        "--config", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="YAML file of settings"
    )
    group.add_argument(
        "--set", action=_Collect, const=given, metavar="KEY=VALUE", help="any setting by its name; repeatable"
    )
    _add_options(group, given, None)

    def add(
        under: argparse._SubParsersAction[argparse.ArgumentParser], name: str, doc: str
    ) -> argparse.ArgumentParser:
        return under.add_parser(name, help=doc, description=doc, parents=[common], allow_abbrev=False)

    root = argparse.ArgumentParser(
        prog="drayd",
        description="Dray: Kafka-compatible streaming on object storage.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[common],
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"drayd {__version__}")
    modes = root.add_subparsers(required=True, metavar="MODE")
    broker = add(modes, "broker", "Serve Kafka clients.")
    _add_options(broker.add_argument_group("broker settings"), given, "broker")
    broker.set_defaults(command=_broker)
    admin = add(modes, "admin", "Look at a cluster and take care of it.").add_subparsers(
        required=True, metavar="AREA"
    )

    cluster = add(admin, "cluster", "The cluster as a whole.").add_subparsers(required=True, metavar="ACTION")
    show = add(cluster, "show", "Say what is known about the cluster. Creates nothing.")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(command=_cluster_show)
    init = add(cluster, "init", "Create the cluster. Does nothing if it exists.")
    init.set_defaults(command=_cluster_init)

    metadata = add(admin, "metadata", "The metadata store.").add_subparsers(required=True, metavar="ACTION")
    check = add(
        metadata,
        "check",
        "Try every primitive of the store and say how fast it answers. Creates the cluster if need be.",
    )
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(command=_metadata_check)

    wal = add(admin, "wal", "WAL objects.").add_subparsers(required=True, metavar="ACTION")
    inspect = add(wal, "inspect", "Show what a WAL object holds, and whether it is whole. Changes nothing.")
    inspect.add_argument(
        "object", metavar="OBJECT", help="a file, a URL (file:///… or s3://…), or a key in the object store"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(command=_wal_inspect)

    index = add(admin, "index", "Offset indexes.").add_subparsers(required=True, metavar="ACTION")
    entries = add(index, "show", "Show which objects hold a partition's offsets. Changes nothing.")
    entries.add_argument("topic", nargs="?", metavar="TOPIC", help="the topic's name")
    entries.add_argument("partition", nargs="?", type=int, metavar="PARTITION", help="its partition")
    entries.add_argument(
        "--stream", type=_stream_id, metavar="HEX", help="instead of both: the id of the stream, hexadecimal"
    )
    entries.add_argument(
        "--limit", type=_count, default=100, metavar="N", help="show at most so many entries. Default: 100"
    )
    entries.add_argument("--json", action="store_true", help="print JSON")
    entries.set_defaults(command=_index_show)

    fsck = add(
        admin,
        "fsck",
        "See whether index, objects and tables agree. Changes nothing; exits with 1 if something is wrong.",
    )
    fsck.add_argument("--json", action="store_true", help="print JSON")
    fsck.set_defaults(command=_fsck)

    compactor = add(
        modes,
        "compactor",
        "Make tables of topics, on Spark, until it is told to stop; or once. Any number may run.",
    )
    compactor.add_argument("--once", action="store_true", help="compact all that is there, then end")
    compactor.add_argument(
        "--interval", type=_seconds, metavar="S", help="seconds between two rounds, as compaction.interval.ms"
    )
    compactor.add_argument("--json", action="store_true", help="with --once, print what was done as JSON")
    _add_options(compactor.add_argument_group("compactor settings"), given, "compactor")
    compactor.set_defaults(command=_compactor)

    sql = add(
        modes,
        "sql",
        "Ask the tables that topics are: SELECT * FROM dray.kafka.orders. Statements are separated by ';'.",
    )
    sql.add_argument("query", nargs="?", metavar="QUERY", help="what to ask, in Spark's SQL")
    sql.add_argument("-f", "--file", type=Path, metavar="FILE", help="read the query from a file; - is stdin")
    sql.add_argument("--json", action="store_true", help="print each row as one JSON object on a line")
    sql.add_argument(
        "--limit", type=_count, default=100, metavar="N", help="show at most so many rows. Default: 100"
    )
    _add_options(sql.add_argument_group("sql settings"), given, "sql")
    sql.set_defaults(command=_sql)
    return root


def _add_options(group: argparse._ArgumentGroup, given: list[Given], command: str | None) -> None:
    """The settings that have an option of their own, those of all commands or those of one."""
    for setting in SETTINGS.values():
        if setting.flag is not None and _has_option(setting, command):
            default = (setting.default or "").format(data="<data>", absolute_data="<data>")
            doc = f"{setting.doc} Default: {default}" if default else setting.doc
            group.add_argument(
                setting.option,
                action=_Collect,
                const=given,
                metavar=setting.flag,
                help=doc.replace("%", "%%"),
            )


def _has_option(setting: Setting, command: str | None) -> bool:
    if setting.only is None or command is None:
        return setting.only == command
    return command in setting.only.split()


class _Collect(argparse.Action):
    """Append to the list in `const`: a subparser's namespace would replace what stood before it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        text = str(values)
        name = next((each.name for each in SETTINGS.values() if each.option == option_string), "")
        if option_string == "--set":
            name, equals, text = text.partition("=")
            if not equals:
                raise argparse.ArgumentError(self, f"{redact(name)!r} has no '='; write key=value")
        self.const.append(Given(name, text, option_string or ""))


async def _broker(settings: Settings, arguments: argparse.Namespace) -> int:
    # Here, because Kafka's message classes take a second to load that no other command needs.
    from dray.broker import open_broker

    logs.set_up(settings.log_format, settings.log_level)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        async with open_broker(settings):
            # What is loaded now stays; looking through it, and through the caches, again and again for
            # cycles would stop everybody for many milliseconds each time.
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            await stopping.wait()
    except OSError as error:
        return _fail(1, f"cannot listen on {settings.listen}: {error.strerror or error}")
    return 0


async def _compactor(settings: Settings, arguments: argparse.Namespace) -> int:
    from compactor.command import compact_for_ever, compact_once, tell  # Arrow and Spark take their time

    logs.set_up(settings.log_format, settings.log_level)
    stopping = asyncio.current_task()
    assert stopping is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.cancel)
    began = time.monotonic()
    try:
        if not arguments.once:
            interval_ms = settings.compaction_interval_ms
            await compact_for_ever(settings, arguments.interval or interval_ms / 1000)
        counts = await compact_once(settings)
    except asyncio.CancelledError:
        stopping.uncancel()
        return 130 if arguments.once else 0
    seconds = time.monotonic() - began
    print(
        json.dumps({**asdict(counts), "seconds": round(seconds, 3)})
        if arguments.json
        else tell(counts, seconds)
    )
    if counts.waiting_tasks or counts.failures:
        return _fail(
            1,
            f"{counts.waiting_tasks} tasks are unfinished, {counts.failures} things failed",
            "the log above says which; nothing is lost, run it again",
        )
    return 0


def _run_fast(work: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:  # where it does not exist
        return asyncio.run(work)
    return uvloop.run(work)


def _leave_hanging_threads(code: int) -> None:
    """End here if a call to a store still hangs in a thread: Python would wait for it."""
    deadline_s = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.daemon:
            continue
        thread.join(max(deadline_s - time.monotonic(), 0.0))
        if thread.is_alive():
            logging.shutdown()
            os._exit(code)


async def _cluster_show(settings: Settings, arguments: argparse.Namespace) -> int:
    cluster = None
    if _may_exist(settings):
        async with _opened(settings) as store:
            cluster = await read_cluster(store)
    if cluster is None:
        return _no_cluster(settings)
    if arguments.json:
        print(json.dumps({"metadata": redact(settings.metadata), **asdict(cluster)}))
    else:
        _print_cluster(settings, cluster)
    return 0


async def _cluster_init(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _opened(settings) as store:
        cluster = await open_cluster(store, settings.metadata_domains)
    _print_cluster(settings, cluster)
    return 0


async def _metadata_check(settings: Settings, arguments: argparse.Namespace) -> int:
    async with _opened(settings) as store:
        cluster = await open_cluster(store, settings.metadata_domains)
        findings = await check_store(store, cluster.num_domains, settings.metadata_timeout_ms / 1000)
    if arguments.json:
        rows = [_as_json(finding) for finding in findings]
        answer = {"metadata": redact(settings.metadata), "cluster_id": cluster.cluster_id, "primitives": rows}
        print(json.dumps(answer))
    else:
        _print_cluster(settings, cluster)
        _print_findings(findings)
    problems = [f"{finding.primitive}: {finding.problem}" for finding in findings if finding.problem]
    if problems:
        return _fail(1, f"the store breaks the contract: {'; '.join(problems)}", "do not run Dray on it")
    return 0


async def _index_show(settings: Settings, arguments: argparse.Namespace) -> int:
    if (arguments.stream is None) != (arguments.partition is not None):
        return _fail(2, "name a topic and a partition, or a stream", "drayd admin index show orders 0")
    if _may_exist(settings):
        async with _opened(settings) as store:
            cluster = await read_cluster(store)
            if cluster is not None:
                stream_id = arguments.stream
                if stream_id is None:
                    stream_id = await _stream_of_partition(store, arguments.topic, arguments.partition)
                shown = await index_show.read_index(store, stream_id, cluster.num_domains, arguments.limit)
                as_text = (
                    json.dumps(index_show.as_json(shown)) if arguments.json else index_show.as_table(shown)
                )
                print(as_text)
                return 0
    return _no_cluster(settings)


async def _fsck(settings: Settings, arguments: argparse.Namespace) -> int:
    from compactor import fsck
    from compactor.catalog import open_catalog
    from dray.objectstore.opening import open_object_store

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{done} of {of} partitions", end="\n" if done == of else "", file=sys.stderr)

    if not _may_exist(settings):
        return _no_cluster(settings)
    async with _opened(settings) as store:
        cluster = await read_cluster(store)
        if cluster is None:
            return _no_cluster(settings)
        objects = await open_object_store(settings.objects)
        tables = None
        try:
            if settings.catalog != "none":
                tables = await asyncio.to_thread(open_catalog, settings.catalog, settings.objects)
            namespace = settings.table_namespace
            report = await fsck.run_twice(
                lambda: fsck.Fsck(cluster, store, objects, tables, namespace, progress)
            )
        finally:
            if tables is not None:
                tables.close()
            await objects.close()
    print(json.dumps(fsck.as_json(report)) if arguments.json else fsck.as_table(report))
    problems = report.problems
    return _fail(1, f"{len(problems)} problems", f"the first is {problems[0].where}") if problems else 0


async def _stream_of_partition(store: MetadataStore, topic: str, partition: int) -> int:
    check_name(topic)
    found = await store.get(CLUSTER_DOMAIN, topic_key(topic))
    record = None if found is None else decode_topic(found.key, found.value)
    if record is None or not record.visible:
        raise UnknownTopic(topic)
    if not 0 <= partition < len(record.streams):
        raise UnknownPartition(topic, partition, len(record.streams))
    return record.streams[partition]


def _sql(settings: Settings, arguments: argparse.Namespace) -> int:
    """Not on an event loop: Spark has its own way to be interrupted."""
    from dray.sql_command import run_sql

    if (arguments.query is None) == (arguments.file is None):
        return _fail(2, "give a query, or a file with -f", 'drayd sql "SHOW TABLES IN dray.kafka"')
    try:
        text = arguments.query if arguments.file is None else _read_text(arguments.file)
    except (OSError, UnicodeDecodeError) as error:
        return _fail(
            2, f"-f {arguments.file}: {getattr(error, 'strerror', None) or 'it must be text in UTF-8'}"
        )
    is_terminal = sys.stderr.isatty()

    def note(text: str) -> None:
        if is_terminal or text.endswith("\n"):
            sys.stderr.write(text)
            sys.stderr.flush()

    def clear() -> None:
        if is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    try:
        run_sql(
            settings,
            text,
            limit=arguments.limit,
            as_json=arguments.json,
            out=sys.stdout,
            note=note,
            clear=clear,
        )
    except QueryFailed as error:
        clear()
        return _fail(1, str(error), error.hint)
    except BrokenPipeError:  # whoever reads has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is left is written at exit
    return 0


def _read_text(path: Path) -> str:
    return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")


async def _wal_inspect(settings: Settings, arguments: argparse.Namespace) -> int:
    name = redact(arguments.object)
    try:
        found = inspect_object(await read_object(arguments.object, settings.objects))
    except OSError as error:
        return _fail(1, f"{name}: {error.strerror}")
    if arguments.json:
        print(json.dumps({"object": name, **as_json(found)}))
    else:
        print("\n".join(as_table(found)))
    if found.problems:
        more = len(found.problems) - 1
        return _fail(1, f"{name}: {found.problems[0]}", f"and {more} more" if more else "")
    return 0


def _stream_id(text: str) -> int:
    try:
        number = int(text, 16)
    except ValueError:
        number = -1
    if not 0 <= number < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r} is not a stream id: 1 to 16 hexadecimal digits")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.1 <= number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return number


def _no_cluster(settings: Settings) -> int:
    return _fail(
        1, f"there is no cluster at {redact(settings.metadata)}", "drayd admin cluster init creates it"
    )


def _may_exist(settings: Settings) -> bool:
    """False if only opening would create the store: an embedded one comes into being when it is opened."""
    url = parse_metadata_url(settings.metadata)
    return not isinstance(url, SqliteUrl) or url.path.exists()


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[MetadataStore]:
    store = await open_store(settings.metadata, settings.metadata_timeout_ms / 1000)
    try:
        yield store
    finally:
        await store.close()


def _print_cluster(settings: Settings, cluster: Cluster) -> None:
    created = datetime.fromtimestamp(cluster.created_at_ms / 1000, UTC).isoformat(timespec="seconds")
    print(f"metadata     {redact(settings.metadata)}")
    print(f"cluster id   {cluster.cluster_id}")
    print(f"domains      {cluster.num_domains}")
    print(f"incarnation  {cluster.incarnation}")
    print(f"created      {created}")


def _print_findings(findings: Sequence[Finding]) -> None:
    print(f"\n{'primitive':<14}{'calls':>6}{'median ms':>11}{'worst ms':>10}  ok")
    for finding in findings:
        calls = len(finding.elapsed_ms)
        verdict = "no" if finding.problem else "yes"
        print(
            f"{finding.primitive:<14}{calls:>6}{finding.median_ms:>11.2f}{finding.worst_ms:>10.2f}  {verdict}"
        )


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "primitive": finding.primitive,
        "calls": len(finding.elapsed_ms),
        "median_ms": round(finding.median_ms, 3),
        "worst_ms": round(finding.worst_ms, 3),
        "ok": finding.problem is None,
        "problem": finding.problem,
    }


def _fail(code: int, problem: str, hint: str = "") -> int:
    line = " ".join(problem.split()) + (f" ({hint})" if hint else "")
    print(f"drayd: {line}", file=sys.stderr)
    return code
