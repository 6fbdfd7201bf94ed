"""A checkpoint of one placement loads under another, resumes bit for bit, and survives a kill."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from checkpoint_cases import IDS, make_optimizer, train
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import placer
from placer.checkpoint import checkpoint
from placer.checkpoint import folder as folders
from placer.executor.module import runtime_of
from placer.executor.places.place import Place


def _place(stages: int, replicas: int = 1, microbatches: int = 2) -> placer.PlacedModule:
    torch.manual_seed(stages + 10 * replicas)  # other weights each time: they must be loaded
    spec = {
        "devices": [f"cpu:{i}" for i in range(stages)],
        "replicas": replicas,
        "microbatches": microbatches,
    }
    return placer.compile(models.TiedTransformer(depth=1).double(), spec, (IDS,))


def _same_state(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    assert one.state_dict().keys() == expected.keys()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "make", [make_optimizer, lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9)]
)
def test_resume_is_bit_identical(tmp_path: Path, make: Callable[[nn.Module], Optimizer]) -> None:
    """Dropout is on, so the generators must go on too; replicas read the loaded weights."""
    placed = _place(2, replicas=2)
    optimizer = make(placed)
    train(placed, optimizer, 2)
    placer.save(placed, optimizer, tmp_path / "last", extra={"step": 2})
    expected = train(placed, optimizer, 3)

    again = _place(3, replicas=2)
    train(again, optimizer := make(again), 1)  # what was there before is replaced
    assert placer.load(again, optimizer, tmp_path / "last") == {"step": 2}
    assert train(again, optimizer, 3) == expected
    _same_state(again, placed)


def test_placed_to_plain_and_back(tmp_path: Path) -> None:
    placed = _place(3, replicas=2).eval()  # no dropout: the micro-batches then change nothing
    optimizer = make_optimizer(placed)
    train(placed, optimizer, 2)
    placer.save(placed, optimizer, tmp_path / "placed")
    plain = models.TiedTransformer(depth=1).double().eval()
    plain_optimizer = make_optimizer(plain)
    placer.load(plain, plain_optimizer, tmp_path / "placed")
    _same_state(plain, placed)
    assert plain.out.weight is plain.tokens.weight
    torch.testing.assert_close(
        train(plain, plain_optimizer, 2), train(placed, optimizer, 2), rtol=1e-10, atol=0
    )
    assert plain_optimizer.param_groups[0]["weight_decay"] == 0.0

    placer.save(plain, plain_optimizer, tmp_path / "plain")
    back = _place(2)
    placer.load(back, None, tmp_path / "plain")  # the weights alone
    _same_state(back, plain)


class _Versioned(nn.Linear):
    """A module with state that is no tensor."""

    version = 1

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


def test_buffers_and_extra_state_and_schedulers(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = nn.Sequential(_Versioned(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = Adam(model.parameters(), lr=torch.tensor(0.1))
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, optimizer, scheduler = make()
    model[0].version = 2
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    extra = {"scheduler": scheduler.state_dict(), "losses": [1.5, torch.tensor(2.0)]}
    placer.save(model, optimizer, tmp_path / "c", extra=extra)
    other, other_optimizer, other_scheduler = make()
    loaded = placer.load(other, other_optimizer, str(tmp_path / "c"))
    other_scheduler.load_state_dict(loaded["scheduler"])
    assert other[0].version == 2
    _same_extra = loaded["losses"] == extra["losses"]
    assert _same_extra and other_scheduler.last_epoch == 1
    for one, two in zip(
        model[1:].state_dict().values(), other[1:].state_dict().values(), strict=True
    ):
        assert torch.equal(one, two)
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class Killed(BaseException):
    """Stands for a kill: nothing in placer may catch it."""


MOMENTS = {
    "before the table of contents": (checkpoint, "write_entries", 0),
    "before the last one is moved": (folders, "_move", 0),
    "between the renames": (folders, "_move", 1),
    "before the last one is deleted": (folders, "_delete", 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_save_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    model = nn.Linear(2, 2)
    optimizer = Adam(model.parameters())
    first = model.weight.detach().clone()
    placer.save(model, optimizer, tmp_path / "c", extra={"save": 1})
    with torch.no_grad():
        model.weight.add_(1)
    home, name, allowed = MOMENTS[moment]
    original = getattr(home, name)
    calls = 0

    def killed(*values: Any, **options: Any) -> Any:
        nonlocal calls
        if calls < allowed:
            calls += 1
            return original(*values, **options)
        if name == "write_entries":  # the tensors are on the disk, the table is not
            original(*values, **options)
            (values[1] / ".metadata").unlink()
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(home, name, killed)
        placer.save(model, optimizer, tmp_path / "c", extra={"save": 2})
    found = nn.Linear(2, 2)
    second = moment == "before the last one is deleted"
    loaded = placer.load(found, None, tmp_path / "c", missing_ok=True)
    assert loaded == {"save": 2 if second else 1}
    assert torch.equal(found.weight, model.weight if second else first)
    # The next save clears up and is whole.
    placer.save(model, optimizer, tmp_path / "c")
    placer.load(found, None, tmp_path / "c")
    assert torch.equal(found.weight, model.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_errors_say_what_does_not_go_together(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = SGD(model[0].parameters(), lr=0.1)
    placer.save(model, optimizer, tmp_path / "good")
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(placer.PlacerError) as caught:
        placer.load(other, Adam(other.parameters()), tmp_path / "good")
    for part in (
        "0.weight has shape (4, 3), the model's is (5, 3)",
        "1.bias is not in the model",
        "1.weight was saved without an optimizer",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(before[n], t) for n, t in other.state_dict().items())
    wider = nn.Sequential(*model, nn.Linear(2, 2))
    with pytest.raises(placer.PlacerError, match=r"2\.weight is missing"):
        placer.load(wider, None, tmp_path / "good")
    with pytest.raises(placer.PlacerError, match=r"did you mean .*good"):
        placer.load(model, None, tmp_path / "goood")
    (tmp_path / "other").mkdir()
    with pytest.raises(placer.PlacerError, match=r"is not a checkpoint of placer\.save"):
        placer.load(model, None, tmp_path / "other")
    with pytest.raises(placer.PlacerError, match="exists and is not a checkpoint"):
        placer.save(model, None, tmp_path / "other")
    with pytest.raises(placer.PlacerError, match="extra: cannot be read back as data"):
        placer.save(model, None, tmp_path / "good", extra={"f": Path("x")})
    with pytest.raises(placer.PlacerError, match=r"group 0: a parameter of shape \(2, 2\)"):
        placer.save(model, SGD(nn.Linear(2, 2).parameters(), lr=0.1), tmp_path / "good")
    groups = [{"params": [model[0].weight], "lr": 0.1}, {"params": [model[0].bias], "lr": 0.2}]
    placer.save(model, SGD(groups), tmp_path / "good")
    alike = copy.deepcopy(model).requires_grad_(False)
    for parameter in alike.parameters():
        parameter.zero_()
    with pytest.raises(placer.PlacerError, match="saved in groups with different options"):
        placer.load(alike, SGD(alike[0].parameters(), lr=0.1), tmp_path / "good")
    assert not any(parameter.any() for parameter in alike.parameters())  # nothing was loaded
    data = next((tmp_path / "good").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(placer.PlacerError, match="the file ends at byte 100, this entry at byte"):
        placer.load(model, None, tmp_path / "good")


def test_an_empty_parameter_of_the_optimizer_has_nothing_to_save(tmp_path: Path) -> None:
    """A rank whose stages have no parameters gives its optimizer one, for optimizers want one."""
    model = nn.Linear(2, 2)
    optimizer = SGD([nn.Parameter(torch.empty(0)), *model.parameters()], lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    placer.save(model, optimizer, tmp_path / "last")
    again = nn.Linear(2, 2)
    other = SGD([nn.Parameter(torch.empty(0)), *again.parameters()], lr=0.5, momentum=0.9)
    placer.load(again, other, tmp_path / "last")
    _same_state(again, model)
    assert other.param_groups[0]["lr"] == 0.1
    momenta = [other.state[p]["momentum_buffer"] for p in again.parameters()]
    expected = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    assert all(map(torch.equal, momenta, expected))


def test_tensors_of_several_gpus_are_copied_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP can copy ahead on a stream, but then waits for that of the current device alone.

    There is no GPU here, so the test is that no stream is asked for where there seems to be one.
    """

    def refuse(*_: Any) -> Any:
        raise AssertionError("copies ahead")

    model = nn.Linear(2, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", refuse)
    placer.save(model, None, tmp_path / "last")
    monkeypatch.undo()
    again = nn.Linear(2, 2)
    placer.load(again, None, tmp_path / "last")
    _same_state(again, model)


def test_random_states_of_all_replicas_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are on the first replica's devices, and the others draw random numbers on theirs."""
    placed = _place(1, replicas=2)
    runtime_of(placed).replicas[1].shards = ((Place("cuda:1", torch.device("cuda:1")),),)
    states = {torch.device("cuda:1"): torch.tensor([7], dtype=torch.uint8)}
    restored: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, d: restored.append((s.item(), d)))
    placer.save(placed, None, tmp_path / "last")
    placer.load(placed, None, tmp_path / "last")
    assert restored == [(7, torch.device("cuda:1"))]
