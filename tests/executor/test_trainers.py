"""What trainers and savers of others look at on a placed module."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import placer
from placer.errors import CaptureError, PlacerError
from tests.models import KeywordModel, TiedTransformer

SPEC = {"devices": ["cpu:0", "cpu:1"]}


def test_forward_has_the_signature_of_the_original() -> None:
    model, x = KeywordModel(), torch.randn(4, 6)
    placed = placer.compile(model, SPEC, (x,))
    wanted = inspect.signature(model.forward)
    for module in (placed, copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))):
        assert inspect.signature(module.forward) == wanted
        assert module.forward.__self__ is module
        torch.testing.assert_close(module.forward(x, twice=True), model(x, twice=True))
    assert placer.PlacedModule.forward.__name__ == "forward"


def test_an_instances_forward_may_be_wrapped() -> None:
    """As mixed precision of accelerate does."""
    model, x = KeywordModel(), torch.randn(4, 6)
    placed = placer.compile(model, SPEC, (x,))
    original = placed.forward
    placed.forward = lambda *args, **kwargs: {"wrapped": original(*args, **kwargs)["logits"]}
    torch.testing.assert_close(placed(x)["wrapped"], model(x)["logits"])


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    placed = placer.compile(TiedTransformer(), SPEC, (torch.randint(17, (2, 6)),))
    save_model(placed, str(tmp_path / "model.safetensors"))
    other = TiedTransformer()
    load_model(other, tmp_path / "model.safetensors")
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, placed.state_dict()[name]), name


@pytest.mark.parametrize("around", [False, True])
def test_weights_stay_where_they_were_placed(around: bool) -> None:
    """Trainers call ``to`` on what they train, or on a module around it."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4)
    placed, plain = placer.compile(model, SPEC, (x,)), copy.deepcopy(model).double()
    with pytest.warns(UserWarning, match="stays on the devices of its plan: nothing was moved"):
        (nn.ModuleDict({"inside": placed}) if around else placed).to("meta", torch.float64)
    torch.testing.assert_close(placed(x.double()), plain(x.double()))
    placed.to("cpu").float()


@pytest.mark.parametrize("call", ["forward", "step", "wrapped"])
def test_compiling_a_placed_module_is_refused_at_once(call: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(4, 4)
    placed = placer.compile(model, SPEC, (x,))
    function: Any = {
        "forward": placed,
        "step": lambda x: placed.step(x, loss_fn=Tensor.sum),
        "wrapped": lambda x: placed(x) + 1,
    }[call]
    with pytest.raises(PlacerError, match="uncompiled"):
        torch.compile(function, backend="eager")(x)
    torch.testing.assert_close(placed(x), model(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [True, False])
def test_exporting_says_to_export_the_plain_model(strict: bool) -> None:
    """In strict mode, torch may wrap the error in one of its own; before 2.15 it may not make ours."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(4, 4)
    placed = placer.compile(model, SPEC, (x,))
    with pytest.raises((PlacerError, torch._dynamo.exc.Unsupported)) as raised:
        torch.export.export(placed, (x,), strict=strict)
    said = ("torch.export", "export the plain model", "model.load_state_dict(placed.state_dict())")
    is_ours = isinstance(raised.value, PlacerError)
    if strict and not is_ours and Version(torch.__version__) < Version("2.15"):
        said = ("refuse_compile",)  # in the lines that torch shows
    for text in said:
        assert text in str(raised.value)
    model.load_state_dict(placed.state_dict())
    exported = torch.export.export(model, (x,), strict=strict)
    torch.testing.assert_close(exported.module()(x), placed(x))
    torch._dynamo.reset()


def test_compile_as_a_method_is_refused() -> None:
    placed = placer.compile(nn.Linear(4, 4), {"devices": ["cpu"]}, (torch.zeros(2, 4),))
    with pytest.raises(PlacerError, match="uncompiled"):
        placed.compile()


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_model_says_where_its_own_is(inside: bool) -> None:
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    model = nn.Sequential(compiled) if inside else compiled
    with pytest.raises(CaptureError, match=r"pass the module .*\._orig_mod") as raised:
        placer.make_plan(model, SPEC, (torch.zeros(2, 4),))
    assert raised.value.where == ("0" if inside else "the model")
    placer.make_plan(compiled._orig_mod, SPEC, (torch.zeros(2, 4),))


def test_trainer_of_transformers_saves_tied_weights_and_evaluates(tmp_path: Path) -> None:
    """As a plain model of its class; and back by ``from_pretrained`` and a resume."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(16, (4, 8))]
    batch = {name: torch.stack([row[name] for row in data[:2]]) for name in data[0]}
    placed = placer.compile(model, SPEC, kwargs=batch, run_on="cpu")

    evaluations = itertools.count()

    def right(seen: Any) -> dict[str, float]:
        found = float((seen.predictions.argmax(-1) == seen.label_ids).mean())
        return {"right": found, "earliness": -next(evaluations)}

    def trainer(steps: int, model: nn.Module = placed, **options: Any) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=2, use_cpu=True, report_to=[],
            per_device_train_batch_size=2, disable_tqdm=True, **options,
        )  # fmt: skip
        return transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=data,
            compute_metrics=right,
        )

    trainer(2).train()
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-2")
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, placed.state_dict()[name]), name
    resumed = trainer(3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 3
    expected = copy.deepcopy(model)
    expected.load_state_dict(placed.state_dict())
    found = [trainer(1, each).evaluate() for each in (placed, expected)]
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-5)
    assert found[0]["eval_right"] == found[1]["eval_right"]
    best = trainer(
        4, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True,
        metric_for_best_model="earliness", learning_rate=10.0,
    )  # fmt: skip
    best.train()
    assert best.state.best_global_step == 2
    saved = transformers.GPT2LMHeadModel.from_pretrained(best.state.best_model_checkpoint)
    assert torch.equal(saved.lm_head.weight, placed.lm_head.weight)
    expected.load_state_dict(placed.state_dict())
    with torch.no_grad():
        ids = batch["input_ids"][:, :3]
        asked = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
        assert torch.equal(placed.generate(ids, **asked), expected.generate(ids, **asked))
