"""What the processes of a job run in tests of faults."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from captured import captured_once
from distributed_cases import hook_with, make_spec
from oracle import refusal
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.nn import functional as F

import placer

D = torch.float64
X = torch.randn(8, 1, 8, 8, dtype=D, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 10


def train_with_checkpoints(
    folder: Path,
    *,
    stages: int,
    replicas: int,
    steps: int,
    kill: tuple[int, int] | None = None,
    signal_number: int = signal.SIGKILL,
) -> dict[str, Tensor]:
    """Train the ConvNet with dropout, a checkpoint after every second step; this rank's weights.

    ``kill``: a rank that gets the signal in the middle of a step, the first time it comes there.
    """
    torch.manual_seed(0)
    placed = placer.compile(models.ConvNet().double(), make_spec(stages, replicas, 2), (X,))
    assert isinstance(placed, placer.PlacedModule)
    optimizer = torch.optim.Adam(placed.parameters(), lr=0.01)
    first = placer.load(placed, optimizer, folder / "last", missing_ok=True).get("steps", 0)
    (folder / f"started.{dist.get_rank()}.{first}").touch()

    for step in range(first, steps):
        optimizer.zero_grad()
        module = next(m for m in placed.children() if list(m.parameters(recurse=False)))
        if kill == (dist.get_rank(), step) and not (folder / "killed").exists():
            module.register_forward_hook(lambda *_: _end_here(folder, signal_number))
        placed.step(X, target=Y, loss_fn=F.cross_entropy)
        optimizer.step()
        if step % 2:
            placer.save(placed, optimizer, folder / "last", extra={"steps": step + 1})
    return dict(placed.state_dict())


def train_and_write(folder: Path) -> None:
    """A program for ``torchrun``: rank 1 kills itself in step 3; its weights after step 5 are kept."""
    torch.set_num_threads(1)
    state = train_with_checkpoints(folder, stages=2, replicas=1, steps=5, kill=(1, 3))
    torch.save(state, folder / f"weights.{dist.get_rank()}")
    dist.destroy_process_group()


def _end_here(folder: Path, signal_number: int) -> None:
    (folder / "killed").touch()
    os.kill(os.getpid(), signal_number)


def lose_a_rank(folder: Path, rank: int, signal_number: int) -> tuple[str, str]:
    """This rank's error if ``rank`` gets a signal in a step."""
    replicas = dist.get_world_size() // 2
    try:
        train_with_checkpoints(
            folder,
            stages=2,
            replicas=replicas,
            steps=4,
            kill=(rank, 2),
            signal_number=signal_number,
        )
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was lost")


def die_in_save(folder: Path) -> str:
    """The others' error if rank 1 is killed while it writes a second checkpoint."""
    torch.manual_seed(0)
    placed = placer.compile(models.ConvNet().double(), make_spec(2, 1, 2), (X,))
    optimizer = torch.optim.Adam(placed.parameters(), lr=0.01)
    placed.step(X, target=Y, loss_fn=F.cross_entropy)
    optimizer.step()
    placer.save(placed, optimizer, folder / "last", extra={"steps": 1})
    optimizer.step()
    write = FileSystemWriter.write_data
    if dist.get_rank() == 1:

        def write_and_die(*args: Any) -> Any:
            write(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        FileSystemWriter.write_data = write_and_die
    try:
        placer.save(placed, optimizer, folder / "last", extra={"steps": 2})
    except placer.PlacerError as error:
        return type(error).__name__
    raise AssertionError("rank 1 still saves")


def start_late(seconds: float) -> bool:
    """Rank 1 reaches ``compile``, and the first step, later than the others."""
    x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    time.sleep(seconds * dist.get_rank())
    placed = placer.compile(model, make_spec(2, 1, 2), (x,))
    time.sleep(seconds * dist.get_rank())
    loss = placed.step(x, loss_fn=lambda y: y.square().mean())
    return torch.allclose(loss, model(x).square().mean())


@captured_once()
def call_unlike_the_others(spec: placer.PlacementSpec, folder: Path) -> dict[str, str]:
    """The messages, in a fresh job, if rank 1 is called differently; a refused step ends a module."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 4)
    odd = dist.get_rank() == 1
    placed: Any = None

    def step(x: Tensor = x, **options: Any) -> Tensor:
        loss: Tensor = placed.step(x, loss_fn=lambda y: y.square().mean(), **options)
        return loss

    def save(name: str = "last") -> None:
        placer.save(placed, None, folder / name)

    calls: dict[str, Callable[[], object]] = {
        "rows": lambda: step(x[: 5 if odd else 6]),
        "shapes": lambda: step(x.double() if odd else x),
        "own_rows": lambda: step(own_rows=odd),
        "reduction": lambda: step(reduction="sum" if odd else "mean"),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16, enabled=odd)(step)(),
        "mode": lambda: (placed.train(not odd), step()),
        "method": lambda: placed.eval()(x) if odd else step(),
        "norm": lambda: placed.clip_grad_norm_(2.0 if odd else 1.0),
        "save": lambda: save() if odd else step(),
        "path": lambda: save(f"rank_{dist.get_rank()}"),
        "no graph": lambda: placed.step(x, loss_fn=lambda y: y.square().mean().detach()),
        "no rows anywhere": lambda: step(x[:0], own_rows=True),
    }
    found = {}
    for name, call in calls.items():
        torch.manual_seed(0)
        placed = placer.compile(model, spec, x)
        step()
        found[name] = refusal(call)
        if name in ("norm", "path", "no graph"):
            step()
        if name == "save" and odd:  # goes on, and learns that the other rank has closed the module
            with suppress(placer.PlacerError):
                step()
    placed = placer.compile(model, spec, x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(x + 1 if odd else x)
    found["values"] = " ".join(str(warning.message) for warning in caught)
    return found


class ReadsMaskTwice(nn.Module):
    """All stages read a mask; only the first one reads the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x) * mask) * mask
        return found


@captured_once()
def give_other_values(spec: placer.PlacementSpec) -> dict[str, str]:
    """The messages if the last rank gets other values of the inputs and the target."""
    torch.manual_seed(0)
    x, mask, y = torch.randn(6, 4), torch.rand(6, 1), torch.randint(3, (6,))
    other_y = (y + 1) % 3
    model, placed = ReadsMaskTwice(), None
    odd = dist.get_rank() == dist.get_world_size() - 1

    def step(
        other: tuple[Tensor, ...], for_all: tuple[Tensor, ...] = (x, mask, y), **options: Any
    ) -> None:
        *args, target = other if odd else for_all
        placed.step(*args, target=target, loss_fn=F.cross_entropy, **options)

    calls: dict[str, Callable[[], object]] = {
        "mask": lambda: step((x, mask + 1, y)),
        "mask of an inference": lambda: placed.eval()(x, mask + odd),
        "batch": lambda: step((x + 1, mask, other_y)),
        "batch of own rows": lambda: step((x + 1, mask, other_y), own_rows=True),
        "augmentation": lambda: step((x + 1, mask, y)),
        "stand-in for the input": lambda: step((torch.zeros(6, 4), mask, y), (x, mask, other_y)),
        "stand-in for the target": lambda: step((x + 1, mask, y), (x, mask, torch.zeros_like(y))),
        "target": lambda: step((x, mask, other_y)),
    }
    found = {}
    for name, call in calls.items():
        placed = placer.compile(model, spec, (x, mask))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
                found[name] = " ".join(str(warning.message) for warning in caught)
            except placer.PlacerError as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def miss_weights_on_one_rank(folder: Path) -> tuple[str, str]:
    """The error of compile if only rank 1 lacks the file; the next compile works."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x, spec = torch.randn(8, 4), make_spec(2, 1, 1)
    path = folder / f"weights_{dist.get_rank()}.pt"
    found = "none", ""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    try:
        placer.compile(empty, spec, x, weights=path)
    except placer.PlacerError as error:
        found = type(error).__name__, str(error)
    placed = placer.compile(empty, spec, x, weights=folder / "weights_0.pt")
    placed.step(x, loss_fn=lambda y: y.square().mean())
    return found


class Unreducible:
    def __reduce__(self) -> Any:
        raise ValueError("cannot be reduced")


def _to_float(*given: Any) -> Tensor:
    result: Tensor = given[-1].float()
    return result


def _is_data(given: Sequence[Any]) -> bool:
    """Hooks that are put on later are recorded before they run."""
    return not any(isinstance(x, FakeTensor) for x in given)


def _interrupt(*given: Any) -> None:
    if _is_data(given):
        raise KeyboardInterrupt


def _raise_from_itself(*given: Any) -> None:
    if _is_data(given):
        error = ValueError("its own cause")
        raise error from error


def _raise_from_another(*given: Any) -> None:
    if not _is_data(given):
        return
    try:
        {}["rate"]
    except KeyError as error:
        raise ValueError("needs a rate") from error


def _divide(*_: Any) -> None:
    1 / 0  # noqa: B018


def raise_oddly(what: str, folder: Path) -> tuple[str, str]:
    """This rank's error if one of two ranks does ``what``; the program's own communication continues."""
    x = torch.randn(8, 4, dtype=D)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    placed = placer.compile(
        model, make_spec(2, 1, 2, "1F1B", layers={"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}), x
    )
    hooks: dict[str, tuple[str, Callable[..., Any]]] = {
        "dtype": ("0", _to_float),
        "result": ("2", _to_float),
        "cycle": ("2", _raise_from_itself),
        "chained": ("2", _raise_from_another),
        "interrupt": ("2", _interrupt),
    }
    path, hook = hooks.get(what, ("", _divide))
    if path and dist.get_rank() == int(path) // 2:
        placed.get_submodule(path).register_forward_hook(hook)
    if what == "backward" and dist.get_rank() == 1:
        placed.get_submodule("2").register_forward_hook(
            lambda _, inputs, output: hook_with(output, _raise_from_itself)
        )
    if what == "state" and dist.get_rank() == 1:
        placed.register_state_dict_post_hook(_divide)
    extra = {"value": Unreducible()} if dist.get_rank() == 1 else {}
    found = "none", ""
    try:
        if what in ("extra", "state"):
            placer.save(placed, None, folder / "last", extra=extra if what == "extra" else None)
        elif what == "result":
            placed.eval()(x)
        else:
            placed.step(x, loss_fn=lambda y: y.square().mean())
    except (placer.PlacerError, KeyboardInterrupt) as error:
        found = type(error).__name__, str(error)
    dist.barrier()
    return found


KEPT: list[object] = []  # what a program holds on to for as long as its process lives


def fail_and_go_on(rank: int, fault: str, *, keep: bool) -> list[str]:
    """What every rank raised when ``rank`` failed, told to all over the program's own group.

    ``keep``: the program keeps the error, with its traceback, and the failed module.
    """
    torch.manual_seed(0)
    layers = UsesFragile(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), UsesFragile()
    spec = make_spec(2, 2, 2, "1F1B")
    if fault == "norm":  # one whose backward talks to the other replicas itself
        spec = make_spec(2, 2, 1, "1F1B", batch_norm="sync")
    x, y = torch.randn(8, 4, dtype=D, requires_grad=True), torch.randn(8, 2, dtype=D)
    placed = placer.compile(nn.Sequential(*layers).double(), spec, (x,))
    failing = dist.get_rank() == rank
    Fragile.broken = failing and fault != "loss"
    try:
        placed.step(x, target=None if failing and fault == "loss" else y, loss_fn=F.mse_loss)
        said = "no error"
    except placer.PlacerError as error:
        said = f"{type(error).__name__}: {error}"
        if keep:
            KEPT.extend((placed, error))
    finally:
        Fragile.broken = False
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found


class Fragile(torch.autograd.Function):
    """The identity; its backward raises while ``broken``."""

    broken = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if Fragile.broken:
            _boom()
        return grads[0]


class UsesFragile(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Fragile.apply(x)


class Block(nn.Module):
    """Layers with nodes between them that keep nothing for backward: a sum, views, transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.odd = nn.Linear(4, 4), nn.Tanh(), UsesFragile()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.odd(self.act(self.first(x)))).view(-1, 2, 2).flatten(1)


def fail_in_backward(schedule: str, fault: str, rank: int, anomaly: bool) -> list[str]:
    """The layer and the place in this rank's error if ``fault`` happens in a backward of ``rank``."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=D)
    layers = {str(i): f"cpu:{i // 2}" for i in range(4)}
    spec = make_spec(2, 1, 2, schedule, layers=layers)
    placed = placer.compile(nn.Sequential(*(Block() for _ in range(4))).double(), spec, x)
    here = dist.get_rank() == rank
    if here:
        block: Any = placed.get_submodule(str(2 * rank))
        if fault == "tensor":
            block.first.register_forward_hook(_hook_output)
        elif fault == "overwritten":  # an error of torch's own, in its kernels
            block.last.register_forward_hook(_overwrite)

    def loss_fn(y: Tensor) -> Tensor:
        return (Fragile.apply(y) if fault == "loss" else y).square().mean()

    Fragile.broken = here and fault in ("function", "loss")
    os.environ["PLACER_ANOMALY"] = str(int(anomaly))
    try:
        with warnings.catch_warnings(record=True):  # anomaly mode tells the traceback, too
            placed.step(x, loss_fn=loss_fn)
    except placer.PlacerError as error:
        return [getattr(error, "layer", ""), str(error)]
    finally:
        Fragile.broken = False
        del os.environ["PLACER_ANOMALY"]
    return ["", "no error"]


def _boom(*_: Any) -> None:
    raise ArithmeticError("boom")


def _hook_output(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    output.register_hook(_boom)


def _overwrite(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
    with torch.no_grad():
        inputs[0].mul_(2.0)


def leave_the_job(folder: Path) -> list[str]:
    """The message of each use after the program destroyed the process group, or made another one."""
    x = torch.randn(4, 3)
    placed = placer.compile(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), make_spec(2, 1, 1), x)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    uses: list[Callable[[], object]] = [
        lambda: placed.step(x, loss_fn=lambda y: y.square().mean()),
        lambda: placed.eval()(x),
        lambda: placer.save(placed, None, folder / "last"),
        lambda: placer.load(placed, None, folder / "last"),
        lambda: placed.clip_grad_norm_(1.0),
    ]
    found = []
    dist.destroy_process_group()
    for again in (False, True):
        if again:
            store = f"file://{folder / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        assert not hasattr(placed, "2")
        for use in uses:
            try:
                use()
                found.append("no error")
            except placer.PeerError as error:
                found.append(str(error))
    return found


def hang(where: str, rank: int) -> tuple[str, str]:
    """The error of the other ranks if ``rank`` sleeps forever."""
    here = dist.get_rank() == rank
    x = torch.randn(4, 3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))

    def initialize(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)
        if here and where == "compile":
            time.sleep(1e6)

    try:
        placed = placer.compile(model, make_spec(3, 1, 3), x, initialize=initialize)
        if here and where == "data loader":
            time.sleep(1e6)
        if here and where == "layer":
            child = next(iter(placed.children()))
            child.register_forward_hook(lambda *_: time.sleep(1e6))
        placed.step(x, loss_fn=lambda y: y.square().mean())
    except placer.PlacerError as error:
        return type(error).__name__, str(error)
    return "none", ""


def fail_by_hand(where: str, rank: int) -> None:
    """``rank`` fails in ``compile`` or in its first micro-batch; the others look up the reason later."""
    here = int(os.environ["RANK"]) == rank
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    spec: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}
    if here and where == "compile":
        spec["devices"] = [{"name": name, "memory": 64} for name in spec["devices"]]
    placed = placer.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), spec, x)

    def hook(_: nn.Module, __: Any, output: Tensor) -> None:
        if not here:
            time.sleep(0.5)  # has something to do when the connection closes
        elif not isinstance(output, FakeTensor):  # else it is recorded
            time.sleep(0.1)
            _boom()

    next(iter(placed.children())).register_forward_hook(hook)
    assert isinstance(placed, placer.PlacedModule)
    placed.step(x, loss_fn=lambda y: y.square().mean())


class _Killed(nn.Linear):
    """Kills a rank in its forward, as the kernel does when memory runs out."""

    def __init__(self, rank: int) -> None:
        super().__init__(4, 4)
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if int(os.environ["RANK"]) == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def kill_while_planning(rank: int) -> None:
    """``rank`` is killed while it captures the model."""
    devices = [f"cpu:{index}" for index in range(int(os.environ["WORLD_SIZE"]))]
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in devices], _Killed(rank))
    placer.compile(model, {"devices": devices}, torch.randn(4, 4))


def fail_to_compile_and_go_on(folder: Path) -> None:
    """A program for ``torchrun``: rank 1 has another spec, and keeps running after the error."""
    rank = int(os.environ["RANK"])
    memory = {"memory": 64} if rank == 1 else {}
    spec = {"devices": [{"name": name, **memory} for name in ("cpu:0", "cpu:1")]}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    try:
        placer.compile(model, spec, torch.randn(4, 4))
    except placer.PlacerError as error:
        (folder / f"said.{rank}").write_text(f"{type(error).__name__}: {error}")
    end = time.monotonic() + 30.0
    while not (folder / f"said.{1 - rank}").exists():
        assert time.monotonic() < end, f"rank {1 - rank} is left waiting"
        time.sleep(0.05)


def refuse_own_rows() -> tuple[str, str]:
    """The error of every rank if only replica 1 refuses the rows that it was given."""
    x = torch.randn(4, 5 if dist.get_rank() // 2 else 3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    placed = placer.compile(model, make_spec(2, 2, 1), torch.randn(4, 3))
    try:
        placed.step(x, loss_fn=lambda y: y.square().mean(), own_rows=True)
    except placer.PlacerError as error:
        return type(error).__name__, str(error)
    return "none", ""


def end_of_another_spec(what: str) -> tuple[str, str]:
    """The error of rank 0 if rank 1 ends silently, or because of a spec that fails there."""
    x = torch.randn(4, 4)
    spec: dict[str, Any] = {"devices": ["cpu:0", "cpu:1"]}
    if dist.get_rank() == 1 and what == "no word":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and what == "too many devices":
        spec["devices"] += ["cpu:2"]
    elif dist.get_rank() == 1:
        spec["devices"] = [{"name": name, "memory": 64} for name in spec["devices"]]
    try:
        placer.compile(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), spec, (x,))
    except placer.PlacerError as error:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return type(error).__name__, str(error)
    raise AssertionError("rank 1 has joined")


def compile_for_more_processes() -> str:
    """What is wrong with a plan for four processes, in a job of two."""
    try:
        placer.compile(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()), make_spec(2, 2, 1), torch.randn(4, 4)
        )
    except placer.PlacerError as error:
        return error.problem
    return "no error"
