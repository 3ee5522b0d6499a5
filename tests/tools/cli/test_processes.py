"""The processes of a node: how they are started, signalled and waited for; whole runs are in
tests/e2e.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from messages import assert_mentions, refused

from titanlite.runtime.errors import EXIT_LOST, LAUNCHER, LISTENER
from titanlite.tools.cli import processes


@pytest.fixture
def signals(monkeypatch):
    """Requests without the handlers of this process being replaced."""
    monkeypatch.setattr(processes.signal, "signal", lambda number, handler: None)
    return processes.Signals()


def python(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


ONE = processes.Group(num_nodes=1, node=0, per_node=1, address="127.0.0.1", port=0)
TWO = ONE._replace(per_node=2)
SLEEP = "import time; time.sleep(60)"
IGNORE = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEP}"


def test_signals_within_a_second_are_one_request(signals):
    signals.receive(signal.SIGTERM)
    signals.receive(signal.SIGTERM)
    assert signals.requests == 1
    signals.first -= 2
    signals.receive(signal.SIGTERM)
    assert signals.requests == 2


def test_a_request_ends_all_processes_and_a_second_one_kills(signals):
    started = {rank: python(code) for rank, code in enumerate((SLEEP, IGNORE))}
    started[1].stdout.read(1)
    signals.requests = 1
    timer = threading.Timer(1.0, lambda: setattr(signals, "requests", 2))
    timer.start()
    assert processes.wait(started, signals) == 128 + signal.SIGKILL
    assert [process.returncode for process in started.values()] == [
        -signal.SIGTERM,
        -signal.SIGKILL,
    ]


def test_the_failure_of_one_ends_the_others_and_is_the_result(signals, monkeypatch, capsys):
    monkeypatch.setattr(processes, "GRACE", 0.5)
    started = {0: python(IGNORE), 1: python(SLEEP), 2: python("")}
    started[0].stdout.read(1)
    started[2].wait()
    started[3] = python("raise SystemExit(7)")
    assert processes.wait(started, signals) == 7
    assert_mentions(capsys.readouterr().err, "rank 3", "exit code 7")
    assert [process.returncode for process in started.values()] == [
        -signal.SIGKILL,
        -signal.SIGTERM,
        0,
        7,
    ]


def test_a_frozen_process_is_killed_soon_after_the_watchdog_has_ended_the_others(signals):
    started = {0: python(IGNORE), 1: python("raise SystemExit(124)")}
    started[0].stdout.read(1)
    before = time.monotonic()
    assert processes.wait(started, signals) == 124
    assert started[0].returncode == -signal.SIGKILL
    assert time.monotonic() < before + processes.GRACE / 2


def test_a_process_that_has_stopped_ends_no_other(signals):
    """The others may still be saving."""
    started = {
        0: python("raise SystemExit(75)"),
        1: python("import time; time.sleep(1); raise SystemExit(75)"),
    }
    assert processes.wait(started, signals) == 75


def test_each_process_gets_its_rank_and_the_first_the_socket(signals, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "17")  # of another launcher
    monkeypatch.setenv(LISTENER, "17")
    code = (
        "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + "
        "os.environ.get('RANK', 'alone'), 'w'))"
    )
    group = processes.Group(num_nodes=2, node=0, per_node=2, address="127.0.0.1", port=0)
    assert processes.run(["-c", code, f"{tmp_path}/"], {"GIVEN": "x"}, group, signals) == 0
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert [first[name] for name in processes.RANK_VARIABLES[:5]] == [
        "0",
        "0",
        "4",
        "2",
        "127.0.0.1",
    ]
    assert [second[name] for name in processes.RANK_VARIABLES[:5]] == [
        "1",
        "1",
        "4",
        "2",
        "127.0.0.1",
    ]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"
    assert first["GIVEN"] == second["GIVEN"] == "x"
    assert first[LAUNCHER] == second[LAUNCHER] == str(os.getpid())
    assert LISTENER in first
    assert LISTENER not in second
    assert processes.run(["-c", code, f"{tmp_path}/"], {}, ONE, signals) == 0
    alone = json.loads((tmp_path / "alone").read_text())
    assert not {LISTENER, *processes.RANK_VARIABLES} & alone.keys()


def test_processes_that_were_started_end_if_the_next_cannot_be(signals, monkeypatch):
    started, start = [], processes.start

    def second_fails(*arguments):
        if started:
            raise OSError("no process left")
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(processes, "start", second_fails)
    with pytest.raises(OSError, match="no process left"):
        processes.run(["-c", SLEEP], {}, TWO, signals)
    assert started[0].wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("limit", "node", "needed"),
    [(16, 0, 72), (71, 0, 72), (72, 0, 72), (67, 1, 68), (68, 1, 68), (-1, 0, 72)],
)
def test_too_few_open_files_are_refused(monkeypatch, signals, limit, node, needed):
    """In a run of two nodes only node 0 serves the store."""
    group = ONE._replace(num_nodes=2, node=node)
    monkeypatch.setattr(processes.resource, "getrlimit", lambda kind: (limit, limit))
    if limit >= needed or limit == -1:
        assert processes.run(["-c", ""], {}, group, signals) == 0
    else:
        with refused(f"ulimit -Hn = {limit}", f"at least {needed}"):
            processes.run(["-c", ""], {}, group, signals)
    # One process communicates with none
    assert processes.run(["-c", ""], {}, ONE, signals) == 0


def test_an_address_at_which_one_cannot_listen():
    with refused("MASTER_ADDR = '192.0.2.1'", "environment", "node 0"):
        processes.listen("192.0.2.1", 0)  # reserved for documents: no machine has it
    for name in ("no such host", "a..b"):
        with refused(f"MASTER_ADDR = '{name}'", "environment", "node 0"):
            processes.listen(name, 0)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        refused("MASTER_PORT", "in use", "free port"),
    ):
        processes.listen("127.0.0.1", taken.getsockname()[1])


def test_a_name_that_other_nodes_cannot_reach_is_refused(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    with refused("MASTER_ADDR = 'node-0'", "loopback address 127.0.1.1", "IP address"):
        processes.listen("node-0", 29500)


@pytest.mark.parametrize(
    ("codes", "expected", "message"),
    [
        ({0: 0, 1: 0}, 0, ()),
        ({0: 75, 1: 75}, 75, ()),
        ({0: 75, 1: 0}, 75, ()),
        ({0: 0, 1: 2}, 2, ()),
        ({0: 124, 1: -signal.SIGKILL}, 124, ()),
        ({0: 1, 1: -signal.SIGKILL}, 137, ("rank 1", "SIGKILL")),
        ({0: 75, 3: 1}, 1, ("rank 3", "exit code 1")),
        ({0: -signal.SIGTERM, 3: 1}, 1, ("rank 3", "exit code 1")),
        ({3: 1, 0: 2}, 1, ("rank 3", "exit code 1")),  # the first that ended
        # The first process with a reason of its own
        ({0: EXIT_LOST, 3: 1}, 1, ("rank 3", "exit code 1")),
        # a process of another node
        ({0: EXIT_LOST, 1: EXIT_LOST}, EXIT_LOST, ("rank 0", f"exit code {EXIT_LOST}")),
        ({0: EXIT_LOST, 1: 2}, 2, ()),
        ({0: -signal.SIGTERM}, 143, ("rank 0", "SIGTERM")),
    ],
)
def test_exit_codes_of_the_processes_become_one(codes, expected, message, capsys):
    assert processes.explain(codes, stopped=False) == expected
    error = capsys.readouterr().err
    assert_mentions(error, *message)
    assert bool(error) == bool(message)


def test_processes_that_a_forwarded_signal_ends_early_were_stopped(capsys):
    """While they import torch they handle nothing; there is nothing to save yet, and the run may
    start again.
    """
    assert processes.explain({0: -signal.SIGTERM, 1: -signal.SIGTERM}, stopped=True) == 75
    assert processes.explain({0: -signal.SIGTERM, 1: 75}, stopped=True) == 75
    assert capsys.readouterr().err == ""
    assert processes.explain({0: -signal.SIGKILL, 1: -signal.SIGTERM}, stopped=True) == 137
