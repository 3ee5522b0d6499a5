"""Requests: what one rank is asked for, all ranks do after the same step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist

from titanlite.distributed.signals import Agreed, RequestFile, Requests
from titanlite.runtime.errors import LAUNCHER


def ask(number: int) -> list[Agreed]:
    """Agreements of a rank: nothing, a save wanted by rank 1, a failure of rank 0, a profile wanted
    by rank 0, a signal to rank 1, and after it."""
    requests, rank = Requests(Path("absent"), 0), dist.get_rank()
    found = [requests.agree(), requests.agree(save=rank == 1), requests.agree(trouble=rank == 0)]
    requests.profile_file.pending = rank == 0
    found.append(requests.agree())
    requests.profiled()
    if rank == 1:
        os.kill(os.getpid(), number)
    found += [requests.agree(), requests.agree()]
    requests.restore()
    return found


def test_what_one_rank_wants_all_agree_on(pool):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for found in pool.run(2, ask, number):
            stop = Agreed(1, 0, 0, 0)
            assert found == [
                Agreed(0, 0, 0, 0),
                Agreed(0, 1, 0, 0),
                Agreed(0, 0, 1, 0),
                Agreed(0, 0, 0, 1),
                stop,
                stop,
            ]


def look_for_file(path: Path) -> list[bool]:
    """What this rank sees: at once, and twice a second later, with the file and without."""
    request, rank, found = RequestFile(path), dist.get_rank(), []
    for there, later in ((True, 0.0), (True, 2.0), (False, 2.0)):
        if rank == 0 and there:
            path.touch()
        request.looked_at -= later
        found.append(request.is_pending())
        request.fulfilled()
    return [*found, path.exists()]


def test_a_file_is_seen_by_rank_0_which_removes_it(pool, tmp_path):
    """At most once a second."""
    zero, one = pool.run(2, look_for_file, tmp_path / "SAVE")
    assert zero == [False, True, False, False]
    assert one[:3] == [False, False, False]


def signal_twice(later: float) -> bool:
    """Whether a second signal, so many seconds after the first, has its default effect."""
    requests = Requests(Path("absent"), 0)
    os.kill(os.getpid(), signal.SIGTERM)
    requests.signalled -= later
    killed = []
    kill, os.kill = os.kill, lambda pid, number: killed.append((pid, number))
    try:
        requests.handle(signal.SIGTERM, None)
    finally:
        os.kill = kill
    default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    requests.restore()
    return default and killed == [(os.getpid(), signal.SIGTERM)]


def test_a_second_signal_ends_at_once_but_not_within_a_second(pool):
    """Schedulers signal every process, and the launcher passes its own signal on: both are one
    request.
    """
    assert pool.run(1, signal_twice, 0.0) == [False]
    assert pool.run(1, signal_twice, 2.0) == [True]


def restore_handlers() -> bool:
    before = signal.getsignal(signal.SIGUSR1)
    requests = Requests(Path("absent"), 0)
    during = signal.getsignal(signal.SIGUSR1)
    requests.restore()
    return during == requests.handle and signal.getsignal(signal.SIGUSR1) == before


def test_handlers_are_given_back(pool):
    assert pool.run(1, restore_handlers) == [True]


def stops_at_once(variable: str, value: int | None, parent: int) -> bool:
    """Whether a run stops whose launcher is said by this variable, and whose parent had this number
    at first. `None`, 0: those of the process that really started this one.
    """
    os.environ[variable] = str(value or os.getppid())
    requests = Requests(Path("absent"), parent or os.getppid())
    requests.restore()
    return requests.agree().stop


def test_a_launcher_that_was_killed_while_this_process_started_stops_the_run(pool):
    """Its number is another than that of the parent, which is init's by then."""
    assert pool.run(1, stops_at_once, LAUNCHER, 1 << 22, 0) == [True]
    assert pool.run(1, stops_at_once, LAUNCHER, None, 1 << 22) == [False]
    assert pool.run(1, stops_at_once, "TORCHELASTIC_RUN_ID", None, 1 << 22) == [True]
    assert pool.run(1, stops_at_once, "TORCHELASTIC_RUN_ID", None, 0) == [False]
    assert pool.run(1, stops_at_once, "ANOTHER", None, 1 << 22) == [False]


def signal_in_set_up(path: str) -> None:
    """A signal before the first agreement; stderr goes to a file."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    requests = Requests(Path("absent"), 0)
    os.kill(os.getpid(), signal.SIGTERM)
    requests.restore()


def test_a_signal_is_answered_at_once_by_one_rank(pool, tmp_path):
    pool.run(2, signal_in_set_up, str(tmp_path / "errors"))
    [answer] = (tmp_path / "errors").read_text().splitlines()
    assert answer.startswith("stopping after the current step")
    assert "compiling" in answer
