"""A signal unwinds a command, prints the advice, and gives the exit code."""

from __future__ import annotations

import os
import signal

import pytest

from titanlite.tools.cli import launch
from titanlite.tools.cli.stops import STOPS, Stopped, stoppable


@pytest.fixture
def default_action(number):
    """The signal as a terminal's process has it: nohup ignores SIGHUP."""
    before = signal.signal(number, signal.SIG_DFL)
    yield
    signal.signal(number, before)


@pytest.mark.usefixtures("default_action")
@pytest.mark.parametrize("number", STOPS)
def test_a_signal_raises_and_is_handled_as_before_afterwards(capsys, number):
    before, unwound = signal.getsignal(number), []
    with pytest.raises(Stopped) as caught, stoppable("repeat it"):
        try:
            os.kill(os.getpid(), number)
        finally:
            unwound.append(True)
    assert caught.value.code == 128 + number
    assert capsys.readouterr().err == "repeat it\n"
    assert unwound
    assert signal.getsignal(number) == before


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also if the tests were started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_prints_the_advice_and_an_error_does_not(capsys):
    with pytest.raises(KeyboardInterrupt), stoppable("repeat it"):
        os.kill(os.getpid(), signal.SIGINT)
    assert capsys.readouterr().err == "repeat it\n"
    with pytest.raises(ValueError, match="wrong"), stoppable("repeat it"):
        raise ValueError("wrong")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_that_is_ignored_stays_ignored(number):
    """As SIGHUP under nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stoppable("repeat it"):
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) == signal.SIG_IGN
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_the_launcher_says_that_the_preparation_was_stopped(arguments, monkeypatch, capsys):
    monkeypatch.setattr(launch, "prepare", lambda *a, **k: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped):
        launch.launch(arguments)
    assert (
        "stopped while the data was prepared; the same command goes on" in capsys.readouterr().err
    )
