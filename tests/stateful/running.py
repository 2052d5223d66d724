"""Runs a Hypothesis machine on one of the metadata stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.conformance.backends import Backend, MemoryBackend, etcd_backend, oxia_backend, sqlite_backend

STORES = ["memory", "memory-each-alone", "sqlite", "etcd", "oxia"]


def run_on(
    machine: type[RuleBasedStateMachine],
    name: str,
    request: pytest.FixtureRequest,
    *,
    examples: int,
    in_memory: int,
    steps: int,
) -> None:
    """Each example gets an empty store from `machine.backend_factory(directory)`."""
    if name in ("etcd", "oxia"):
        address = request.getfixturevalue(f"{name}_address")

    def factory(directory: Path) -> Backend:
        if name == "sqlite":
            return sqlite_backend(directory)
        if name == "etcd":
            return etcd_backend(address)
        if name == "oxia":
            return oxia_backend(address)
        return MemoryBackend(name, conditions_abort=name == "memory")

    run_state_machine_as_test(
        type("MachineOn", (machine,), {"backend_factory": staticmethod(factory)}),
        settings=settings(
            max_examples=in_memory if name.startswith("memory") else examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
