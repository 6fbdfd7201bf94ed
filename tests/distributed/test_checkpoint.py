"""Checkpoints of real processes: across placements, bit for bit, and errors on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoint_cases as cases
import pytest
import torch
from jobs import Job

import placer


def test_resume_is_bit_identical(job_of: Callable[[int], Job], tmp_path: Path) -> None:
    """With dropout: the generators of every rank go on."""
    expected = job_of(2).run(cases.save_and_go_on, (1, 2), tmp_path / "c", dropout=True)
    found = job_of(2).run(cases.load_and_go_on, (1, 2), tmp_path / "c", dropout=True)
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"]
        assert one["state"].keys() == other["state"].keys()
        assert all(torch.equal(t, other["state"][n]) for n, t in one["state"].items())


def test_one_checkpoint_under_other_placements(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    path = tmp_path / "c"
    saved = job_of(4).run(cases.save_and_go_on, (2, 2), path, dropout=False)
    expected = saved[0]["losses"]
    results = [job_of(2).run(cases.load_and_go_on, (1, 2), path, dropout=False)]
    plain = cases.make_plain(1).eval()
    optimizer = cases.make_optimizer(plain)
    assert placer.load(plain, optimizer, path) == {"steps": 2}
    results.append([{"losses": cases.train(plain, optimizer, 2), "state": plain.state_dict()}])
    state = {name: tensor for rank in saved for name, tensor in rank["state"].items()}
    assert state.keys() == plain.state_dict().keys()
    for ranks in results:
        for rank in ranks:
            assert rank["losses"] == pytest.approx(expected, rel=1e-10)
            for name, tensor in rank["state"].items():
                torch.testing.assert_close(tensor, state[name], rtol=1e-9, atol=1e-12)
    job_of(4).run(
        cases.load_and_go_on, (2, 2), _saved_by_plain(tmp_path, plain, optimizer), dropout=True
    )


def _saved_by_plain(folder: Path, plain: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    placer.save(plain, optimizer, folder / "plain", extra={"steps": 2})
    return folder / "plain"


@pytest.mark.matrix(0)
def test_copies_that_have_gone_apart_are_named(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    """Each rank clips by the norm of its own part: the tied weights of two stages go apart."""
    results = job_of(2).run(cases.clip_apart, (2, 1), tmp_path)
    assert results[0][0] == []  # clipped as the whole, and nothing is said
    (warning,) = results[0][1]
    assert "tokens.weight: ranks 0 and 1)" in warning and "placed.clip_grad_norm_" in warning
    assert results[1] == ([], [])


def test_errors_are_the_same_on_all_ranks(job_of: Callable[[int], Job], tmp_path: Path) -> None:
    results = job_of(2).run(cases.errors, (2, 1), tmp_path)
    assert all(messages == results[0] for messages in results)
    wrong, missing, code = results[0]
    assert "weight is not in the model" in wrong and "blocks.0.mlp.0.bias is missing" in wrong
    assert "… and " in wrong and " more" in wrong
    assert "no such checkpoint" in missing
    assert "extra: cannot be read back as data" in code


@pytest.mark.matrix(0)
def test_a_damaged_checkpoint_changes_nothing_on_any_rank(
    job_of: Callable[[int], Job], tmp_path: Path
) -> None:
    results = job_of(2).run(cases.load_damaged, (2, 1), tmp_path)
    for (weight, table, short), loaded in results:
        assert "__1_0.distcp, " in weight and "have the checksum" in weight
        assert "contents.json" in table and "is damaged" in table
        assert "__0_0.distcp, " in short and "the file ends at byte 3000" in short
        assert loaded
