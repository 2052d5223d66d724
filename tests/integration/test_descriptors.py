"""A broker that may open few files: clients that take connections do not take what the stores need."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

from tests.integration.rdkafka import Sender, create_topic, read_values
from tests.integration.waiting import eventually
from tests.servers.dray import DrayBroker, answers_api_versions

LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
runpy.run_module("dray", run_name="__main__")
"""


def test_connections_leave_files_for_the_stores(tmp_path: Path) -> None:
    broker = DrayBroker(tmp_path, program=("-c", LIMITED))
    broker.start()
    try:
        topic = create_topic(broker.address)
        sender = Sender(broker.address)
        sender.send(topic, b"first")
        sender.flush()
        with ExitStack() as held:
            for _ in range(300):
                held.enter_context(socket.create_connection(("127.0.0.1", broker.port), 10))
            eventually(lambda: "max.connections is reached" in broker.log_text())
            values = [b"%d" % number for number in range(100)]
            for value in values:
                sender.send(topic, value)
                sender.flush()  # each an object of its own
        assert not sender.failed
        eventually(lambda: answers_api_versions(broker.port))
        assert list(read_values(broker.address, topic).values()) == [b"first", *values]
        assert "max.connections is 100 here" in broker.log_text()
    finally:
        broker.kill()
