"""Ranks that have waited too long find out which one hangs, in the job's store."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store

from placer.executor.distributed.failures import hang_detector
from placer.executor.distributed.failures.hang_detector import HangDetector

RANKS = range(3)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "_MIN_SECONDS", 0.6)


def _calls(store: Store | None, limit: float = 7.0) -> list[HangDetector]:
    seconds = timedelta(seconds=limit)
    return [
        HangDetector("test", rank, len(RANKS), find_store=lambda: store, limit=seconds)
        for rank in RANKS
    ]


def _say(call: HangDetector, *, method: str = "", late: float = 0.0) -> dict[str, str]:
    time.sleep(late)
    call.report_timeout(method)
    return call.wait_for_reports(stop=lambda: False)


def test_the_rank_that_does_not_answer_is_named_with_its_process() -> None:
    first, _, third = _calls(HashStore())
    assert not third.any_timeout()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(_say, (first, third)))
    assert third.any_timeout()
    for told in found:
        assert told["where"].startswith(f"rank 1 (process {os.getpid()} on ")
        assert told["problem"].startswith("does not answer; ranks 0, 2 waited longer than 7 s")


def test_a_call_that_one_rank_has_not_come_to_is_named() -> None:
    """Known to the rank that waited for it in vain, and told by the other one too."""
    first, _, third = _calls(HashStore())
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(_say, first)
        other = pool.submit(_say, third, method="placer.save")
    for told in (waiting.result(), other.result()):
        assert told["problem"].startswith("has not come to placer.save; ranks 0, 2 waited")
        assert "before placer.save" in told["remedy"]


def test_ranks_whose_wait_began_later_are_not_taken_for_one_that_hangs() -> None:
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(_say, c, late=0.2 * i) for i, c in enumerate(_calls(HashStore()))]
    for rank, told in enumerate(found):
        assert told.result()["where"] == f"rank {rank}"
        assert told.result()["problem"].startswith("all ranks have waited for each other")


def test_a_store_that_is_gone_names_nobody_by_process() -> None:
    first, *_ = _calls(None)
    assert not first.any_timeout()
    told = first.wait_for_reports(stop=lambda: True)
    assert told["where"] == "ranks 1, 2"
