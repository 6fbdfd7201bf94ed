"""accelerate's device_map: read as a spec, and written from one or from a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import placer
from placer.plan.device_map import to_device_map
from placer.program.split_by_hand import DeviceNotes
from placer.spec.device_map import from_device_map


class Net(nn.Module):
    """Has parameters of its own beside its layers, as a vision transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(x * self.scale))


def test_a_map_is_read_as_accelerate_reads_it() -> None:
    spec = from_device_map({"encoder.2": torch.device("cuda", 2), "head": "cuda:1", "": 0})
    assert [device.name for device in spec.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    # The most specific key counts there, the last one here.
    assert list(spec.layers.items()) == [
        ("**", "cuda:0"), ("head", "cuda:1"), ("encoder.2", "cuda:2"),
    ]  # fmt: skip
    assert from_device_map({"": "cpu"}).layers == {"**": "cpu"}


def test_what_is_no_device_in_placer_is_explained() -> None:
    with pytest.raises(placer.SpecError) as caught:
        from_device_map({"a": 0, "b": "cpu", "c": "disk", "d": None, "e/f": "cdua:1", "g": True})
    said = {where: problem for where, problem, _ in caught.value.problems}
    assert set(said) == {"/b", "/c", "/d", "/e~1f", "/g"}
    assert "keeps weights in host memory, and computes on a GPU" in said["/b"]
    assert "keeps weights on disk" in said["/c"]
    assert "did you mean 'cuda:1'" in said["/e~1f"]
    with pytest.raises(placer.SpecError, match="is empty"):
        from_device_map({})


@pytest.mark.parametrize("given", [{"encoder": 0, "head": 1}, {"": 0}, {"encoder.0": "cuda:0"}])
def test_one_in_place_of_a_spec_is_told(given: dict[str, Any]) -> None:
    with pytest.raises(placer.SpecError, match=r"1 problem(.|\n)*device_map(.|\n)*placer import"):
        placer.PlacementSpec.model_validate(given)
    with pytest.raises(placer.SpecError, match="did you mean 'replicas'"):
        placer.PlacementSpec.model_validate({"repicas": 2})


@pytest.mark.matrix(1)
@pytest.mark.parametrize("planned", [True, False])
def test_a_written_map_covers_the_model_for_accelerate(planned: bool) -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling")
    model = Net()
    spec = placer.PlacementSpec(
        devices=["cuda:0", "cuda:1"],  # type: ignore[arg-type]
        layers={"encoder": "cuda:0", "encoder.2": "cuda:1", "head": "cuda:1"},
    )
    if planned:
        found = to_device_map(model, placer.make_plan(model, spec, torch.ones(3, 4)))
        with pytest.warns(UserWarning, match="scale"):  # as of accelerate's own maps
            modeling.check_device_map(model, found)
        assert found == {"scale": 0, "encoder.0": 0, "encoder.2": 1, "head": 1}
        del found["scale"]  # a key of a parameter is no layer
        assert from_device_map(found).layers == {
            "head": "cuda:1", "encoder.0": "cuda:0", "encoder.2": "cuda:1",
        }  # fmt: skip
    else:
        found = to_device_map(model.encoder, spec.with_layers({"**": "cuda:1"}))
        modeling.check_device_map(model.encoder, found)
        assert found == {"": 1}
        with pytest.raises(placer.PlacerError, match=r"where these are: the model's own param"):
            to_device_map(model, spec)


def test_where_a_model_puts_its_own_layers() -> None:
    def build() -> nn.Module:
        model = Net()
        model.encoder[0].to("cuda:1")
        model.encoder[2] = nn.BatchNorm1d(4, device="cuda:3")
        model.head.cuda().to("cpu")
        return model

    notes = DeviceNotes()
    with torch.device("meta"), notes:
        model = build()
    found = {"": None, "encoder.0": "cuda:1", "encoder.2": "cuda:3", "head": "cpu"}
    assert notes.layers_of(model) == found
    with notes:
        model(torch.ones(3, 4, device="meta").to("cuda:1"))
    assert notes.layers_of(model) == {**found, "": "cuda:1"}
