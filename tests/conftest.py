"""What every test gets: a refusal takes one line. With --long, also `long` tests, and new examples
of properties. SIGTERM ends a run of tests as Ctrl-C does, so that jobs and folders go with it."""

import faulthandler
import os
import signal
import sys
from typing import Any

import pytest

from mpissd.common.errors import ConfigError

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the tests of GPUs need none
    pass
else:
    # An example may take as long as a busy machine needs. Without --long the same commit has the
    # same examples, so that it passes everywhere or nowhere; --long draws new ones and prints how
    # to repeat one that fails. CI asks for the same ones with it. Both set `derandomize`: when
    # Hypothesis detects CI, its default settings have it on.
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("explore", untimed, derandomize=False, print_blob=True)
    settings.register_profile("same", untimed, derandomize=True)
    settings.load_profile("same")

LONG_S = 1800.0  # of a `long` test, after which it shows where it is; others: faulthandler_timeout
_STDERR = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def refusals_take_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test in whose process a ConfigError of several lines is made."""

    def checked(error: ConfigError, message: object) -> None:
        assert "\n" not in str(message), message
        super(ConfigError, error).__init__(message)

    monkeypatch.setattr(ConfigError, "__init__", checked)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target and a draft that is often accepted, and often not."""
    from tests.tiny_pair import tiny_pair

    return tiny_pair(tmp_path_factory.mktemp("pair"), noise=0.1)


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GPU whose kernels run on the processor."""
    from tests.emulator.launcher import EmulatedGpu

    return EmulatedGpu(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of bytes, a few merges and a chat template."""
    from mpissd.engine.text.tokenizer import load_tokenizer
    from tests.text import tiny

    return load_tokenizer(str(tiny.write(tmp_path_factory.mktemp("words") / "tiny")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also what is exhaustive, as CI does")


def pytest_configure(config: pytest.Config) -> None:
    asked = config.getoption("--hypothesis-profile", "none: Hypothesis is not installed")
    if config.getoption("--long") and not asked:
        settings.load_profile("explore")
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno())  # before a test's output is captured
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives a `long` test its own time instead of pytest's."""
    if item.get_closest_marker("long"):
        timeout_s = float(os.environ.get("LONG_TEST_S", LONG_S))
        faulthandler.dump_traceback_later(timeout_s, file=item.config.stash[_STDERR])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="exhaustive: pytest --long, as in CI")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)
