"""A placed model is a plain nn.Module: what people do with modules works on it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from oracle import assert_close
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import placer
from placer import CaptureError, PlacedModule, PlacementSpec, PlacerError, PlanError

D = torch.float64


def _data(rows: int = 9) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 1, 8, 8, dtype=D), torch.randint(0, 10, (rows,))


@functools.cache
def _compiled() -> tuple[PlacedModule, nn.Module]:
    torch.manual_seed(0)
    model = models.ConvNet(p=0.0).double()
    spec = PlacementSpec(devices=["cpu:0", "cpu:1"], replicas=2, microbatches=2)
    return placer.compile(model, spec, _data()[0]), model


@pytest.fixture
def pair() -> tuple[PlacedModule, nn.Module]:
    """A placed model and the plain one it came from, without dropout: both see the whole batch."""
    placed, model = _compiled()
    return copy.deepcopy(placed), copy.deepcopy(model)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_trains_alike(name: str, pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, plain = pair
    x, y = _data()
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (placed, plain)]
    for _ in range(4):
        for module, optimizer in zip((placed, plain), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
    for (key, a), b in zip(placed.named_parameters(), plain.parameters(), strict=True):
        # Adam divides by the root of squares: rounding of tiny gradients is amplified.
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda m, key=key: f"{key}: {m}")


def test_lbfgs_with_its_closure(pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, plain = pair
    x, y = _data()
    losses = []
    for module in (placed, plain):
        optimizer = torch.optim.LBFGS(module.parameters(), max_iter=4)

        def closure(module: nn.Module = module, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            return loss

        losses.append([optimizer.step(closure).item() for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_state_dict_goes_both_ways(pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, plain = pair
    other = models.ConvNet(p=0.0).double()
    x, _ = _data()
    assert not torch.equal(placed(x), other(x))
    assert placed.load_state_dict(other.state_dict()) == nn.modules.module._IncompatibleKeys([], [])
    assert_close(placed(x), other(x), "after loading the original's state_dict")
    plain.load_state_dict(placed.state_dict())
    assert_close(plain(x), other(x), "the original after loading the placed one's")
    with pytest.raises(RuntimeError, match="fc9"):
        placed.load_state_dict({**other.state_dict(), "fc9.weight": torch.zeros(1)})


def test_a_shallow_copy_has_attributes_of_its_own(pair: tuple[PlacedModule, nn.Module]) -> None:
    for module in pair:
        twin = copy.copy(module)
        twin.training, twin.note = False, 1
        assert module.training and not hasattr(module, "note")
        assert next(twin.parameters()) is next(module.parameters())


def test_deepcopy_is_independent(pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, _ = pair
    x, _ = _data()
    before = placed(x).detach().clone()
    twin = copy.deepcopy(placed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    assert not torch.allclose(twin(x), before)
    assert_close(placed(x), before, "the original after its copy changed")
    twin(x).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in placed.parameters())


def test_pickled_and_loaded_it_trains_on(pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, plain = pair
    x, y = _data()
    placed.note = "mine"
    placed.eval()
    twin = pickle.loads(pickle.dumps(placed))
    assert twin.note == "mine" and twin.plan == placed.plan and not twin.training
    assert list(twin.state_dict()) == list(plain.state_dict())
    assert_close(twin(x), plain.eval()(x), "outputs after loading")
    for module in (twin.train(), plain.train()):
        nn.functional.cross_entropy(module(x), y).backward()
    for (name, found), expected in zip(twin.named_parameters(), plain.parameters(), strict=True):
        assert_close(found.grad, expected.grad, name)
    assert all(p.grad is None for p in placed.parameters())


class Adapter(nn.Module):
    """A layer with a trained correction of low rank, as LoRA injects it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=D)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def _adapt(module: Any) -> None:
    torch.manual_seed(2)
    module.fc1 = Adapter(module.fc1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "adapter": _adapt,
    "pruned": lambda module: prune.l1_unstructured(module.fc1, "weight", 0.5),
    "other layer": lambda module: setattr(module, "fc1", nn.Sequential(module.fc1, nn.Tanh())),
    "cast": lambda module: module.float(),
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_was_changed_is_not_pickled(
    pair: tuple[PlacedModule, nn.Module], change: str
) -> None:
    placed, _ = pair
    CHANGES[change](placed)
    with pytest.raises(PlacerError, match="changed after it was placed"):
        pickle.dumps(placed)


def test_a_pickled_module_whose_code_changed_is_refused(
    pair: tuple[PlacedModule, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = pickle.dumps(pair[0])
    forward = models.ConvNet.forward
    monkeypatch.setattr(models.ConvNet, "forward", lambda self, x: forward(self, x).relu())
    with pytest.raises(PlanError, match="another model"):
        pickle.loads(pickled)


def test_weights_written_through_data_reach_every_replica(
    pair: tuple[PlacedModule, nn.Module],
) -> None:
    """Such writes do not move a tensor's version: averages of weights are swapped in and out this way."""
    placed, plain = pair
    x, _ = _data()
    with torch.no_grad():
        placed(x)
        for module in pair:
            for parameter in module.parameters():
                parameter.data.mul_(3)
        assert_close(placed(x), plain(x), "after writes")
        for module in pair:
            weights = nn.utils.parameters_to_vector(module.parameters())
            nn.utils.vector_to_parameters(weights / 2, module.parameters())
        assert_close(placed(x), plain(x), "after new data")


def test_no_grad_and_inference_mode(pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, plain = pair
    x, _ = _data()
    with torch.no_grad():
        assert not placed(x).requires_grad
        assert_close(placed(x), plain(x), "under no_grad")
    with torch.inference_mode():
        assert_close(placed(x), plain(x), "under inference_mode")
    for _ in range(2):  # the second time, copies that were made anew in inference mode serve
        placed(x).sum().backward()
        plain(x).sum().backward()
        assert_close(placed.conv1.weight.grad, plain.conv1.weight.grad, "gradient afterwards")
        with torch.inference_mode():
            assert_close(placed(x), plain(x), "under inference_mode, after a backward")


def test_batches_of_other_sizes(pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, plain = pair
    x, _ = _data(30)
    for rows in (1, 2, 3, 5, 30):  # fewer rows than cuts, too
        assert_close(placed(x[:rows]), plain(x[:rows]), f"{rows} rows")


@pytest.mark.parametrize(
    ("loss_fn", "found"),
    [(lambda output, target: None, "NoneType"), (lambda output, target: output, "a tensor of")],
    ids=["nothing", "no scalar"],
)
def test_step_refuses_a_loss_that_is_no_number(
    pair: tuple[PlacedModule, nn.Module], loss_fn: Any, found: str
) -> None:
    x, y = _data()
    with pytest.raises(PlacerError, match=f"loss_fn: returned {found}.*not a scalar"):
        pair[0].step(x, target=y, loss_fn=loss_fn)


def test_checkpointed_as_a_whole(pair: tuple[PlacedModule, nn.Module]) -> None:
    """The program of eval mode is captured in the first call, the recomputation finds it."""
    placed, plain = (module.eval() for module in pair)
    x = _data()[0]
    checkpoint(placed, x, use_reentrant=False).sum().backward()
    plain(x).sum().backward()
    for (name, ours), theirs in zip(placed.named_parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, name)


def test_layers_of_a_sequential_by_their_index() -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.ones(4, 4)
    x = x.double()
    placed = placer.compile(plain, {"devices": ["cpu:0", "cpu:1"], "microbatches": 2}, x)
    assert placed[0] is placed.get_submodule("0") and placed[-1] is placed.get_submodule("2")
    assert [type(layer) for layer in placed] == [nn.Linear, nn.Tanh, nn.Linear]
    for model in (placed, plain):
        torch.manual_seed(1)
        model[2] = nn.Linear(4, 3).double()
        model[0].requires_grad_(False)
    placed.step(x, loss_fn=lambda out: out.square().mean())
    plain(x).square().mean().backward()
    assert_close(placed[2].weight.grad, plain[2].weight.grad, "gradient")
    assert placed[0].weight.grad is None
    with pytest.raises(TypeError, match="'Encoder' object is not subscriptable"):
        placer.compile(Encoder(), {"devices": ["cpu:0"]}, torch.randn(2, 3))[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).relu()


def test_gradient_hooks_of_parameters_are_kept() -> None:
    torch.manual_seed(0)
    model = models.ConvNet(p=0.0).double()
    accumulated = []
    model.fc2.weight.register_hook(lambda gradient: gradient * 2)
    model.fc2.bias.register_post_accumulate_grad_hook(accumulated.append)
    x, y = _data()
    placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, x)
    for module in (placed, model):
        F.cross_entropy(module(x), y).backward()
    assert_close(placed.fc2.weight.grad, model.fc2.weight.grad, "gradient")
    assert accumulated[0] is placed.fc2.bias and accumulated[1] is model.fc2.bias


def test_placed_under_inference_mode_it_can_be_trained() -> None:
    torch.manual_seed(0)
    model, (x, y) = models.ConvNet(p=0.0).double(), _data()
    with torch.inference_mode():
        placed = placer.compile(model, {"devices": ["cpu:0", "cpu:1"]}, x)
        assert_close(placed(x), model(x), "output")
    loss = placed.step(x, target=y, loss_fn=F.cross_entropy)
    assert_close(loss, F.cross_entropy(model(x), y).detach(), "loss")


@pytest.mark.parametrize("inside", [False, True])
def test_a_placed_module_is_not_placed_again(
    pair: tuple[PlacedModule, nn.Module], inside: bool
) -> None:
    placed, _ = pair
    x, _ = _data()
    model = nn.Sequential(placed) if inside else placed
    with pytest.raises(CaptureError, match=rf"{'0' if inside else 'the model'}: is placed already"):
        placer.compile(model, {"devices": ["cpu:0"]}, x)


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [(None, "NoneType, not a function"), (nn.MSELoss, r"the class MSELoss(.|\n)*MSELoss\(\)")],
)
def test_a_loss_that_is_no_function(
    pair: tuple[PlacedModule, nn.Module], loss_fn: Any, said: str
) -> None:
    placed, _ = pair
    x, y = _data()
    with pytest.raises(PlacerError, match=said):
        placed.step(x, target=y, loss_fn=loss_fn)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace")
def test_what_a_placed_model_cannot_do_is_said(pair: tuple[PlacedModule, nn.Module]) -> None:
    placed, plain = pair
    x, y = _data()
    encoder = Encoder().double()
    other = placer.compile(encoder, {"devices": ["cpu:0"]}, torch.randn(2, 3).double())
    with pytest.raises(AttributeError, match=r"'encoed'$"):
        _ = other.encoed
    with pytest.raises(placer.PlacerError, match=r"requires a gradient(.|\n)*detach"):
        placed.step(x, target=y, loss_fn=lambda out, y: F.cross_entropy(out, y).detach())
    with pytest.raises(placer.PlacerError, match=r"torch.jit.trace: .* as one graph"):
        torch.jit.trace(placed, x)
    with torch.no_grad(), pytest.raises(placer.PlacerError, match="no_grad"):
        placed.step(x, target=y, loss_fn=F.cross_entropy)
    with pytest.raises(placer.PlacerError, match="spec: is a NoneType"):
        placer.compile(plain, None, (x,))  # type: ignore[arg-type]
    for device, said in (("gpu", "not a torch device"), ("meta", "nothing can run on meta")):
        with pytest.raises(placer.DeviceError, match=said):
            placer.compile(plain, placed.plan, (x,), run_on=device)


def test_a_call_unlike_the_captured_one_is_one_clear_error(
    pair: tuple[PlacedModule, nn.Module],
) -> None:
    placed, _ = pair
    with pytest.raises(placer.CaptureError, match="mask"):
        placed(_data()[0], mask=torch.ones(3))
