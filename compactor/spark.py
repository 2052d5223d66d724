"""Runs parts on Spark, or without it: the same files with the same bytes either way.

**One job for many parts.** Parts are packed into bundles of about the same size, one for each task, and each
task gets its own bundle and no other. What a part came to is told when its task ends. A part whose worker
raised is a problem of that part and fails nothing.

**A job that fails** (an executor that is lost each time, out of memory) takes what was not finished with it.
So each of those parts gets a job of its own then: whichever is to blame fails alone, and says what to do.

Executors get our code from the driver, as an archive: it is always the driver's. Python and the packages that
we need are theirs. They keep nothing, so any of them may die at any time.
"""

from __future__ import annotations

import gc
import logging
import pickle
import re
import sys
import tempfile
import zipfile
import zipimport
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from pyspark import SparkContext
from pyspark.accumulators import Accumulator, AccumulatorParam

import compactor
import dray
from compactor.plan import bundle_count, pack
from compactor.work import Done, Work, carry_out
from dray.errors import SparkError, SparkInUse
from dray.spark import check_java, is_local, start_context

log = logging.getLogger(__name__)

# Input of one task, unless a single part has more: work of a second, to which Spark adds a tenth.
BUNDLE_BYTES = 64 * 2**20
# A cluster that gave no executor for so long has none to give, or does not hear us: somebody should know.
QUIET_S = 30.0

_LOST = re.compile(r"ExecutorLost|exited|OutOfMemory|code 137|Cannot allocate")
_MORE_MEMORY = (
    "make compaction.task.bytes smaller, or give executors more memory"
    " (--conf spark.executor.memoryOverhead=2g, --conf spark.executor.cores=1)"
)
_LOOK = "the logs of Spark's executors say more"

Bundle: TypeAlias = Sequence[Work]


class LocalRunner:
    """In this process, one part after the other."""

    slots = 1

    def run(self, works: Sequence[Work], on_done: Callable[[Done], None] | None = None) -> list[Done]:
        results: list[Done] = []
        for work in works:
            results.append(attempt(work))
            if on_done is not None:
                on_done(results[-1])
        return results

    def close(self) -> None:
        pass


class SparkRunner:
    """A Spark that is started once, and again if it died. `run` is for one thread at a time."""

    def __init__(
        self, master: str, conf: Mapping[str, str] | None = None, *, bundle_bytes: int = BUNDLE_BYTES
    ) -> None:
        self._wanted = dict(conf or {})
        self._master = self._wanted.pop("spark.master", master)
        self._bundle_bytes = bundle_bytes
        self._scratch = tempfile.TemporaryDirectory(prefix="dray-compactor-")
        self._context: SparkContext | None = None
        self._results: Accumulator[list[Done]] | None = None  # of this context
        self._told: SimpleQueue[list[Done]] = SimpleQueue()
        self._closing = False

    @property
    def slots(self) -> int:
        """How many parts are worked at side by side."""
        return int(self._started().defaultParallelism)

    def start(self) -> None:
        """Raises `SparkError`. Without it, the first `run` starts Spark."""
        self._started()

    def run(self, works: Sequence[Work], on_done: Callable[[Done], None] | None = None) -> list[Done]:
        """One result for each, in order. `on_done` is called in this thread, as results come in."""
        done: dict[str, Done] = {}

        def take(each: Done) -> None:
            if each.key not in done:
                done[each.key] = each
                if on_done is not None:
                    on_done(each)

        if works:
            try:
                self._run(works, done, take)
            except SparkError as error:
                log.warning("Spark cannot be started: %s", error)
                for work in works:
                    take(Done(work.part.key, problem=str(error)))
        return [done[work.part.key] for work in works]

    def close(self) -> None:
        """Ends what runs, too."""
        self._closing = True
        context, self._context = self._context, None
        if context is not None:
            with suppress(Exception):  # of a Spark that is gone already
                context.cancelAllJobs()
            _stop(context)
        self._scratch.cleanup()

    # --- jobs

    def _run(self, works: Sequence[Work], done: Mapping[str, Done], take: Callable[[Done], None]) -> None:
        sizes = [work.part.input_bytes for work in works]
        bundles = pack(works, sizes, bundle_count(sizes, self.slots, self._bundle_bytes))
        (problem,) = self._carry_out([bundles], take)
        left = [work for work in works if work.part.key not in done]
        if not left:
            return
        log.warning("%d of %d parts are not done: %s", len(left), len(works), problem or "they were lost")
        problems = [problem]
        if len(works) > 1 and not self._closing:
            problems = self._carry_out([[[work]] for work in left], take)
        for work, problem in zip(left, problems, strict=True):
            take(Done(work.part.key, problem=problem or "the result was lost on its way to the driver"))

    def _carry_out(self, jobs: Sequence[Sequence[Bundle]], take: Callable[[Done], None]) -> list[str | None]:
        """Run jobs side by side; what was wrong with each."""
        context = self._started()
        assert self._results is not None
        with ThreadPoolExecutor(min(len(jobs), self.slots), "spark-job") as threads:
            running = [threads.submit(_job, context, self._results, bundles) for bundles in jobs]
            for each in running:
                each.add_done_callback(lambda _: self._told.put([]))
            while not (ended := all(each.done() for each in running)) or not self._told.empty():
                try:
                    told = self._told.get(timeout=0 if ended else QUIET_S)
                except Empty:
                    self._look_for_executors(context)
                else:
                    for done in told:
                        take(done)
        return [_problem(each) for each in running]

    def _look_for_executors(self, context: SparkContext) -> None:
        if is_local(self._master):
            return
        with suppress(Exception):  # a Spark that is gone fails its job
            if context._jsc.sc().getExecutorMemoryStatus().size() <= 1:  # the driver is one of them
                log.warning("%s gives no executors: has it free cores and memory?", self._master)

    # --- Spark

    def _started(self) -> SparkContext:
        if self._context is not None and not _is_alive(self._context):
            log.warning("Spark has died, and is started anew")
            _stop(self._context)
            self._context = None
        if self._context is None:
            if SparkContext._active_spark_context is not None:
                raise SparkInUse("this process has a Spark session already: end it, or use another process")
            check_java()
            launch = {
                "spark.app.name": "dray-compactor",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
            }
            context = start_context(self._master, launch, self._wanted)
            if not is_local(self._master):
                context.addPyFile(str(_archive(Path(self._scratch.name))))
            self._results = context.accumulator([], _Results(self._told))
            self._context = context
        return self._context


def attempt(work: Work) -> Done:
    """What goes wrong with one part is said of that part."""
    try:
        return carry_out(work)
    except MemoryError:
        log.exception("%s", work.part.key)
        return Done(work.part.key, problem=f"out of memory: {_MORE_MEMORY}")
    except Exception as error:
        log.exception("%s", work.part.key)
        # What a thread says that gets no stack.
        more = f"; {_MORE_MEMORY}" if "can't start new thread" in str(error) else ""
        return Done(work.part.key, problem=f"{type(error).__name__}: {error}{more}")


# --- on executors


class _Results(AccumulatorParam[list[Done]]):
    """Hands over what a task has added once that task has succeeded, while others of its job still run."""

    def __init__(self, told: SimpleQueue[list[Done]] | None = None) -> None:
        self._told = told

    def __reduce__(self) -> tuple[Any, ...]:
        return _Results, ()  # the queue stays with the driver

    def zero(self, value: list[Done]) -> list[Done]:
        return []

    def addInPlace(self, value1: list[Done], value2: list[Done]) -> list[Done]:
        if self._told is None:
            return value1 + value2
        self._told.put(value2)
        return value1


def _job(context: SparkContext, results: Accumulator[list[Done]], bundles: Sequence[Bundle]) -> None:
    pickled = [pickle.dumps(bundle) for bundle in bundles]
    # As many partitions as bundles: exactly one for each task.
    context.parallelize(pickled, len(pickled)).foreachPartition(partial(_task, results))


def _task(results: Accumulator[list[Done]], pickled: Iterable[bytes]) -> None:
    _settle()
    for bundle in pickled:
        for work in pickle.loads(bundle):
            results.add([attempt(work)])


@lru_cache(maxsize=1)
def _settle() -> None:
    """Once for each worker process: what Spark does between two tasks shall cost nothing.

    It looks for garbage among all that was imported, and reads the archives on the path anew.
    """
    gc.freeze()
    for importer in sys.path_importer_cache.values():
        if isinstance(importer, zipimport.zipimporter):
            importer.invalidate_caches = _do_nothing  # type: ignore[method-assign]


def _do_nothing() -> None:
    pass


# --- on the driver


def _problem(job: Future[None]) -> str | None:
    """What was wrong with a job, in one line that says what to do."""
    error = job.exception()
    if error is None:
        return None
    log.debug("a job has failed", exc_info=error)
    java = getattr(error, "java_exception", None)
    text = str(java.toString() if java is not None else error)
    problem = re.sub(r"^[\w.$]+: ", "", text.strip().partition("\n")[0])
    if problem.endswith("Traceback (most recent call last):"):
        raised = re.findall(r"^\w[\w.]*(?:Error|Exception): .*", text, re.MULTILINE)
        problem = raised[-1] if raised else problem
    return f"{problem}; {_MORE_MEMORY if _LOST.search(problem) else _LOOK}"


def _archive(directory: Path) -> Path:
    """Our packages, as Python imports them from a file."""
    path = directory / "dray-compactor.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (dray, compactor):
            root = Path(package.__path__[0])
            for file in sorted(root.rglob("*.py")):
                archive.write(file, file.relative_to(root.parent))
    return path


def _is_alive(context: SparkContext) -> bool:
    try:
        return not context._jsc.sc().isStopped()
    except Exception:  # whatever a connection to a JVM that is gone raises
        return False


def _stop(context: SparkContext) -> None:
    """Also where the JVM is gone: then the next context gets a new one."""
    for _ in range(2):  # the first may fail at the JVM, and the second does what is left
        with suppress(Exception):
            context.stop()
    gateway: Any = SparkContext._gateway
    try:
        gateway.jvm.System.currentTimeMillis()
    except Exception:
        with suppress(Exception):
            gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
