"""Settings of all tests: one thread per process, no failures because a test is slow, a sample of matrices."""

import gc
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

collect_ignore = [
    "captured_cases.py"
]  # it has no doctests, and captures models when it is imported

# Before torch is imported; child processes have it too. Some test processes share two cores, where
# torch's own threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every worker and every process that a test starts would compile placer and the tests anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("law", max_examples=200, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(  # the same few examples in every run
    "sample",
    settings.get_profile("law"),
    max_examples=8,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--law``: the whole of every matrix of cases."""
    parser.addoption("--law", action="store_true", help="run the whole of every matrix of cases")


def pytest_configure(config: pytest.Config) -> None:
    """Register ``matrix(n)``, the mark of a test with many cases, of which a fixed sample of n runs.

    ``matrix(0)`` runs with ``--law`` only. So do all but a few of hypothesis' examples.
    """
    settings.load_profile("law" if config.getoption("--law") else "sample")
    if not config.getoption("--law"):
        # Else examples are made of the constants in all files that happen to be imported; it reads them all.
        providers._get_local_constants = lambda: providers._local_constants
    config.addinivalue_line(
        "markers",
        "matrix(n): run n of the cases, with every value of every parameter alike often; --law runs all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without ``--law``, leave out all but the sample of every matrix."""
    if config.getoption("--law"):
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("matrix"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for each in cases.values() for item in _left_out(each)}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    """Python need not look for garbage among all modules and tests again and again: 8 % of the time.

    They are not frozen: placer's own `only_new_garbage` would count them whenever it plans. Nor need torch
    keep the stack of every call of ``manual_seed``, for devices that this machine does not have: 1 to 2 ms.
    """
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    torch = sys.modules.get("torch")  # the process that controls the others does not import it
    for name in ("cuda", "xpu", "mtia") if torch is not None else ():
        module = getattr(torch, name)
        if hasattr(module, "traceback"):
            module.traceback = SimpleNamespace(**{**vars(module.traceback), "format_stack": list})


@pytest.fixture(scope="module")
def one_capture() -> Iterator[None]:
    """`captured.captured_once` for all tests of a module."""
    from captured import captured_once  # a controller need not import torch

    with captured_once():
        yield


@pytest.fixture
def no_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says that a plan does not fit names no changes: to plan each of them takes long."""
    monkeypatch.setattr("placer.search.remedies.try_remedies", lambda *_: [])


def _left_out(cases: list[pytest.Item]) -> list[pytest.Item]:
    """``cases`` without a sample that has every value of every parameter alike often."""
    mark = cases[0].get_closest_marker("matrix")
    assert mark is not None
    used = Counter[tuple[str, int]]()
    # Among equals, far from the last one: multiples of the golden ratio are spread evenly over a circle.
    left = {
        cases[i]: _values(cases[i])
        for i in sorted(range(len(cases)), key=lambda i: i * 0.618034 % 1)
    }
    for _ in range(min(len(cases), int(mark.args[0]))):
        best = min(left, key=lambda item: sum(used[value] for value in left[item]))
        used.update(left.pop(best))
    return list(left)


def _values(item: Any) -> list[tuple[str, int]]:
    """By identity: pytest's own ``callspec.indices`` count the cases, not the values of a parameter."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return [(name, id(value)) for name, value in params.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file run on one worker, since they share captures, and so do all that start jobs."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "jobs" if file.startswith("tests/distributed/") else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None
