"""Options of several commands, and a signal that unwinds a command."""

from __future__ import annotations

import argparse
import os
import signal

import pytest
from messages import assert_mentions

from titanlite.runtime.errors import ConfigError
from titanlite.tools.cli import launch
from titanlite.tools.cli.options import StrictParser, at_least
from titanlite.tools.cli.stops import STOPS, Stopped, stoppable


def test_numbers_have_bounds():
    port = at_least(int, 0, 65535)
    assert port("0") == 0
    assert at_least(float, 0.5)("0.75") == 0.75
    for text, expected in (("65536", "at most 65535"), ("-1", "at least 0"), ("x", "a number")):
        with pytest.raises(argparse.ArgumentTypeError, match=expected):
            port(text)


def test_an_unknown_option_is_a_config_error_with_the_nearest_one():
    parser = StrictParser(prog="x")
    parser.add_argument("--number", type=int, default=3)
    assert parser.parse_args(["--number=4"]).number == 4
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(["--numbr=4", "--other"])
    assert len(caught.value.problems) == 2
    assert_mentions(str(caught.value), "--numbr=4", "did you mean --number?", "--other")
    with pytest.raises(ConfigError, match="invalid int value"):
        parser.parse_args(["--number=x"])
    with pytest.raises(ConfigError, match=r"option --n=4; did you mean --number\?"):
        parser.parse_args(["--n=4"])


def test_a_subcommand_suggests_its_own_options():
    parser = StrictParser(prog="x")
    parser.add_argument("--lost", action="store_true")
    commands = parser.add_subparsers(dest="command", required=True)
    keep = commands.add_parser("prune")
    keep.add_argument("run")
    keep.add_argument("--keep", type=int, required=True)
    for words, expected in (
        (["prune", "a", "--keep=1", "--kep", "3"], ["option --kep; did you mean --keep?"]),
        (["prune", "a", "--kep", "3"], ["required: --keep", "option --kep; did you mean --keep?"]),
        (["prune", "a", "b", "--keep=1"], ["unexpected argument 'b'"]),
    ):
        with pytest.raises(ConfigError) as caught:
            parser.parse_args(words)
        assert len(caught.value.problems) == len(expected)
        assert_mentions(str(caught.value), *expected)


def test_words_of_a_config_are_left_and_options_are_not():
    parser = StrictParser(prog="x")
    parser.add_argument("--gpus", type=int)
    options, rest = parser.parse_beside_config(["debug", "--gpus=2", "--training.steps=3"])
    assert (options.gpus, rest) == (2, ["debug", "--training.steps=3"])
    with pytest.raises(ConfigError, match="unknown option --gps; did you mean --gpus"):
        parser.parse_beside_config(["debug", "--gps", "2"])


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
