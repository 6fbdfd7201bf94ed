"""The class of every operation, and the resulting seconds of nodes and stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import placer
from placer.cost import CostTable, Work, estimate_costs
from placer.cost.operations import Operation
from placer.machine.catalogue import CATALOGUE
from placer.machine.rates import CLASSES, DTYPES, Rate, Rates
from placer.partition.stage_cost.score import stage_seconds, unit_seconds
from placer.partition.stage_cost.tables import build_tables
from placer.program import flatten_call, lower

H100 = CATALOGUE["h100"]


def _costs(model: nn.Module, *args: Tensor, precision: str = "fp32") -> CostTable:
    program = lower(model, args)
    leaves = flatten_call(program.call, args, {})
    return estimate_costs(program, leaves, precision=precision, kernels="cuda")


def _names(costs: CostTable, way: str) -> list[str]:
    last = len(costs.names)  # the loss
    return [operation.name for node, operation in costs.work.operations()[way] if node != last]


def _x(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("kernels", ["cuda", "cpu"])
def test_a_recurrent_layer_has_the_flops_of_its_products(kernels: str) -> None:
    program = lower(nn.LSTM(8, 16), (_x(5, 3, 8),))
    leaves = flatten_call(program.call, (_x(5, 3, 8),), {})
    costs = estimate_costs(program, leaves, kernels=kernels)
    forward = sum(node.forward_flops for node in costs.nodes)
    assert forward == 5 * 3 * 2 * (4 * 16) * (8 + 16)
    assert sum(node.backward_flops for node in costs.nodes) == 2 * forward


@pytest.mark.parametrize(
    ("layer", "x", "forward", "backward"),
    [
        (nn.Conv3d(1, 8, 3), _x(1, 1, 8, 8, 8), "convolution", ["convolution_weight"]),
        (nn.ConvTranspose2d(8, 4, 2, 2), _x(1, 8, 4, 4), "transposed_convolution",
         ["transposed_convolution_weight"]),
        (nn.Conv2d(8, 8, 3, groups=8), _x(1, 8, 9, 9), "depthwise_convolution",
         ["depthwise_convolution"]),
        (nn.Linear(8, 8), _x(4, 8), "product", ["product"]),
        (nn.BatchNorm2d(8), _x(2, 8, 4, 4), "batch_norm", ["batch_norm_backward"]),
        (nn.InstanceNorm3d(8, affine=True), _x(2, 8, 4, 4, 4), "batch_norm", ["batch_norm_backward"]),
        (nn.GroupNorm(2, 8), _x(3, 8, 4, 4), "group_norm", ["group_norm_backward"]),
        (nn.LayerNorm(8), _x(2, 8), "layer_norm", ["layer_norm_backward"]),
        (nn.RMSNorm(8), _x(2, 8), "layer_norm", ["layer_norm_backward"]),
        (nn.GRUCell(8, 8), _x(2, 8), "recurrent", ["recurrent"]),
        (nn.Embedding(9, 4), torch.empty(2, 3, dtype=torch.long, device="meta"), "gather", ["gather"]),
        (nn.PReLU(), _x(2, 4), "pointwise", ["pointwise"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)  # fmt: skip
def test_classes(layer: nn.Module, x: Tensor, forward: str, backward: list[str]) -> None:
    costs = _costs(layer, x)
    assert forward in _names(costs, "forward")
    assert set(backward) <= set(_names(costs, "backward"))
    assert not {name for name in _names(costs, "backward") if name.endswith("_input")}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_both_gradients_have_the_flops_of_the_forward(layer: type[nn.Module], groups: int) -> None:
    model = nn.Sequential(nn.PReLU(), layer(16, 32 if groups < 16 else 16, 3, groups=groups))
    found = _costs(model, _x(2, 16, 12, 12)).work.operations()
    (forward,) = (o.flops for _, o in found["forward"] if "convolution" in o.name)
    assert forward > 0
    assert [o.flops for _, o in found["backward"] if "convolution" in o.name] == [forward] * 2


def test_views_take_no_time_and_a_lookup_reads_only_its_rows() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(1000, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.words(tokens).transpose(0, 1).unsqueeze(0)[..., :2].detach()

    costs = _costs(Views(), torch.empty(2, 3, dtype=torch.long, device="meta"))
    (lookup,) = (o for node, o in costs.work.operations()["forward"] if node < len(costs.names))
    assert lookup == Operation("gather", "float32", 0, 2 * 6 * 4 * 4 + 6 * 8, 0)


@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")  # torch 2.11
def test_autocast_products_are_half_and_uneven_ones_are_apart() -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 13))
    found = _costs(model, _x(8, 16), precision="bf16").work.operations()["forward"]
    products = [o for _, o in found if "product" in o.name]
    assert [(o.name, o.dtype) for o in products] == [
        ("product", "half"), ("unaligned_product", "half"),
    ]  # fmt: skip
    assert {o.name for _, o in found if o.name == "copy"} == {"copy"}  # of weights


def _work() -> Work:
    product = Operation("product", "float32", 4 * 10**9, 10**6, 64)
    copy = Operation("copy", "half", 0, 10**9, 0)
    return Work(["a", "b"], [[product, copy], [copy], []], [[product, product], [], [copy]])


def _kind(**launch: float) -> object:
    table = {
        (name, dtype): Rate(overhead=1e-6, flops=1e12, bandwidth=1e11, launch=launch.get(name, 0.0))
        for name in CLASSES
        for dtype in DTYPES
    }
    return replace(H100, rates=Rates(table))


def test_seconds_of_nodes_are_the_sums_of_their_operations() -> None:
    seconds = _work().seconds(_kind(product=0.5))
    a, copy = 1e-6 + 4e-3 + 1e-5, 1e-6 + 1e-2
    assert seconds.forward.device == pytest.approx([a + copy, copy, 0])
    assert seconds.backward.device == pytest.approx([2 * a, 0, copy])
    assert seconds.forward.host == pytest.approx([0.5, 0, 0])
    assert seconds.backward.host == pytest.approx([1, 0, 0])
    for kind in CATALOGUE.values():
        found = _work().seconds(kind)
        for node, o in _work().operations()["forward"]:
            least = kind.rates[o.name, o.dtype].seconds(o.flops, o.nbytes, o.width)
            assert found.forward.device[node] >= least


def test_a_stage_of_a_process_takes_the_longer_of_device_and_host() -> None:
    """The solver's sum over nodes is never more; without its own process it is equal."""
    costs = _costs(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), _x(32, 64))
    n = len(costs.names)
    tables = build_tables(costs, range(n), range(n + 1))
    for scale in (0.0, 1.0, 100.0):
        table = {k: replace(r, launch=scale * 1e-6) for k, r in H100.rates.table.items()}
        kind = replace(H100, rates=Rates(table))
        forward, backward = stage_seconds(tables, kind, own_host=True)
        seconds = costs.work.seconds(kind)
        by_unit = unit_seconds(costs, kind, training=True, own_host=True)
        alone, by_node = stage_seconds(tables, kind), unit_seconds(costs, kind, training=True)
        for a in range(n):
            for b in range(a + 1, n + 1):
                nodes = [*range(a, b), *([n] if b == n else [])]
                expected = max(
                    seconds.forward.device[nodes].sum(), seconds.forward.host[nodes].sum()
                )
                assert forward[a, b - 1] == pytest.approx(expected)
                assert by_node[nodes].sum() == pytest.approx(sum(t[a, b - 1] for t in alone))
                took = forward[a, b - 1] + backward[a, b - 1]
                assert by_unit[nodes].sum() <= took * (1 + 1e-9)
        assert by_unit.sum() == pytest.approx(forward[0, n - 1] + backward[0, n - 1])


def test_the_step_of_a_plan_has_the_optimizer_and_every_launch() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)), _x(4, 256)
    one = {"devices": [{"name": "cuda:0", "kind": "h100"}], "optimizer": "sgd"}
    plan = placer.make_plan(model, {**one, "optimizer": "adam"}, (x,))
    sgd, adam = placer.make_plan(model, one, (x,)).step_seconds, plan.step_seconds
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    rate = H100.rates["optimizer", "float32"]
    assert adam - sgd == pytest.approx((19 - 3) * nbytes / rate.bandwidth)
    assert plan.optimizer_seconds == pytest.approx(rate.seconds(0, 19 * nbytes))
    costs = _costs(model, x)
    seconds = costs.work.seconds(H100)
    launches = seconds.forward.host.sum() + seconds.backward.host.sum()
    assert sgd == pytest.approx(launches + rate.seconds(0, 3 * nbytes), rel=1e-3)  # and the input
    cut = placer.make_plan(model, {**one, "microbatches": 4}, (x,)).step_seconds
    assert cut > 4 * launches
    assert np.isfinite(cut)
