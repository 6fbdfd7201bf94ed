"""Bad usage: one clear error on stderr, exit code 2, nothing on stdout, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from placer.importing import user_location

Run = Callable[..., Any]
PLAN = ("plan", "net.py:Net", "fits.json")
X = ("--input", "8x64")

CASES = [
    # MODEL
    (("plan", "net.py:Nett", "fits.json", *X), "did you mean net.py:Net?"),
    (("plan", "nett.py:Net", "fits.json", *X), "did you mean 'net.py'?"),
    (("plan", "net.py", "fits.json", *X), "net.py has Block, Net, Leaves, Words, Scenes"),
    (("plan", "torchvision.models.resnet18", "fits.json", *X), "mean torchvision.models:resnet18?"),
    (("plan", "torchvision.modls:resnet18", "fits.json", *X), "did you mean torchvision.models?"),
    (("plan", "nosuchpackage:f", "fits.json", *X), "no module named 'nosuchpackage'"),
    (("plan", "net.py:not_a_model", "fits.json", *X), "not a torch.nn.Module"),
    (("plan", "net.py:ready", "fits.json", *X, "-m", "width=2"), "takes no --model-arg"),
    (("plan", "broken.py:f", "fits.json", *X), "importing broken.py raised RuntimeError: no lic"),
    (("plan", "broken.py:f", "fits.json", *X), "your own code: fix it there (broken.py:f)"),
    (("plan", "typo.py:f", "fits.json", *X), "typo.py:1: is not Python"),
    (("plan", "typo.py:f", "fits.json", *X), "fix that line (typo.py:f)"),
    (("plan", "lacks.py:f", "fits.json", *X), "install 'nosuchpackage' for "),
    (("plan", "leaves.py:f", "fits.json", *X), "importing leaves.py called sys.exit(3)"),
    # the user's own code
    (("plan", "net.py:leaving", "fits.json", *X), "the model's constructor called sys.exit()"),
    (("plan", "net.py:Leaves", "fits.json", *X), "called sys.exit('no data set')"),
    ((*PLAN, "--input", "net.py:leaving"), "the example input called sys.exit()"),
    ((*PLAN, *X, "-m", "boom=true"), "raised ValueError: the width must be even"),
    ((*PLAN, *X, "-m", "wdth=8"), "did you mean 'width'?"),
    ((*PLAN, *X, "-m", "width"), "is not key=value"),
    ((*PLAN, *X, "-m", "width=8", "-m", "width=9"), "is given twice"),
    ((*PLAN, "--input", "8x63"), "forward fails on these inputs"),
    ((*PLAN, "--input", "y=8x64"), "forward has no argument 'y'\n  -> it takes (x, scale=None"),
    # --input
    (PLAN, "an example input is needed"),
    ((*PLAN, "--input", "8y64"), "is not a shape"),
    ((*PLAN, "--input", "99999999999x99999999999"), "more bytes than a tensor can have"),
    ((*PLAN, "--input", "8x64:flot32"), "did you mean 'float32'?"),
    ((*PLAN, "--input", "8x64:int64<none"), "is not a bound"),
    ((*PLAN, "--input", "=8x64"), "is not an input"),
    ((*PLAN, "--input", "net.py:two_scene"), "did you mean net.py:two_scenes?"),
    ((*PLAN, "--input", "net.py:no_scenes"), "raised OSError: the disk is asleep"),
    ((*PLAN, "--input", "net.py:numbered"), "names no argument of forward"),
    ((*PLAN, *X, "--input", "net.py:two_scenes"), "makes all arguments of forward"),
    (
        ("verify", "net.py:Scenes", "halves.json", "--input", "net.py:far_scenes"),
        "needs its values",
    ),
    # --loss and --target
    (
        (*PLAN, *X, "--loss", "mse"),
        "--loss mse: 'mse' is not a known loss; did you mean 'mse_loss'?",
    ),
    ((*PLAN, *X, "--target", "8x2"), "--target: is given without a loss\n  -> give --loss too"),
    ((*PLAN, *X, "--loss", "mse_loss", "--target", "8y2"), "--target: '8y2': '8y2' is not a shape"),
    ((*PLAN, *X, "--loss", "mse_loss", "--target", "4x2"), "has 4 rows, and the batch has 8"),
    # files
    (("plan", "net.py:Net", "fit.json", *X), "did you mean 'fits.json'?"),
    (
        ("plan", "net.py:Net", "not.json", *X),
        "not.json:1:22: is not JSON: expected ',' or ']'",
    ),
    (("plan", "net.py:Net", "unknown_key.json", *X), "did you mean 'replicas'?"),
    (("plan", "net.py:Net", "wrong.json", *X), "error: wrong.json:1:36: /layers/hed: no layer"),
    (("simulate", "net.py:Net", "nothing.json", *X), "error: nothing.json: no such file"),
    (("report", "fits.json"), "is a placement spec, not a plan"),
    (("explain", "fits.json"), "-o plan.json; --explain explains it"),
    (("explain", "not.json"), "make a plan of a spec: placer plan MODEL not.json"),
    ((*PLAN, *X, "-o", "no/where.json"), "cannot be written"),
    (("auto", "net.py:Net", *X, "-d", "cpu:0=1GiB", "-o", "spec.toml"), "write spec.json"),
    # options
    (("auto", "net.py:Net", *X), "no device was given"),
    (("auto", "net.py:Net", *X, "-d", "cuda:0=16Gx"), "is not a size"),
    (("auto", "net.py:Net", *X, "-d", "cda:0"), "did you mean 'cuda:0'?"),
    (("auto", "net.py:Net", *X, "-d", "cuda:0"), "write --device cuda:0=16GiB, or give --kind:"),
    (("auto", "net.py:Net", *X, "-d", "cuda:0:16GiB"), "did you mean cuda:0=16GiB?"),
    (("verify", "net.py:Net", "fits.json", *X, "--run-on", "gpu"), "did you mean 'cuda'?"),
    (("check", "net.py:Net", "fits.json", "--memory", "16GB"), "error: --memory: cannot be given"),
    (("check", "net.py:Net", "fits.json", "--loss", "net.py:no_los"), "has no callable 'no_los'"),
    (("check", "net.py:Net", "fits.json", "--no-training"), "error: --training: cannot be given"),
    (("auto", "net.py:Net", *X, "-d", "cuda:0", "--objective", "fast"), "throughput, memory"),
    (("auto", "net.py:Net", *X, "-d", "cuda:0", "--kind", "h1000"), "did you mean 'h100'?"),
    ((*PLAN, *X, "--kind", "RTX 4090"), "did you mean 'rtx4090'?"),
    (("auto", "net.py:Net", *X, "-d", "cuda:0", "--microbatches", "two"), "is not a count"),
    (("profile", "net.py:Net", *X, "--precision", "fp31"), "did you mean 'fp32'?"),
    (("check", "net.py:Net", *X, "--optimizer", "adma"), "did you mean 'adam'?"),
    # usage
    (("plann",), "Did you mean 'plan'"),
    (("plan", "net.py:Net"), "Missing argument 'SPEC'"),
    (("schema", "--jsn"), "No such option"),
    ((*PLAN, *X, "--microbatches", "2"), 'write it there, or try it with "placer what-if --micro'),
]


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[" ".join(c[0][:5]) for c in CASES])
def test_bad_usage(placer: Run, arguments: tuple[str, ...], message: str) -> None:
    result = placer(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    if "-o" not in arguments:
        assert result.stdout == ""


def test_a_model_of_torchs_layers_has_no_line_of_its_own(placer: Run) -> None:
    """The error does not name a line of placer's caller either."""
    result = placer("plan", "net.py:layers", "fits.json", "--input", "8x63")
    assert "\nerror: 0: forward fails on these inputs (8x63): " in "\n" + result.stderr
    assert ".py:" not in result.stderr


def test_the_users_line_is_named(placer: Run, folder: Path) -> None:
    result = placer(*PLAN, *X, "-m", "boom=1")
    line = next(
        i
        for i, text in enumerate((folder / "net.py").read_text().splitlines(), 1)
        if "raise ValueError" in text
    )
    assert f"net.py:{line}" in result.stderr


def test_a_line_of_pythons_library_is_not_the_users() -> None:
    with pytest.raises(ValueError, match="Expecting") as raised:
        json.loads("{")
    assert user_location(raised.value).startswith(f"{__file__}:")


def test_all_problems_of_auto_at_once(placer: Run) -> None:
    result = placer("auto", "net.py:Net", *X, "-d", "cda:0", "--objective", "fast")
    assert "2 problems" in result.stderr
    unknown = placer("auto", "net.py:Net", *X, "-d", "cuda:6", "-d", "cuda:7").stderr
    assert "the memory of cuda:6, cuda:7 is not known" in unknown
    assert unknown.count("one of rtx") == 1 and "write --device cuda:6=16GiB" in unknown


def _error(result: Any) -> dict[str, Any]:
    """The only JSON object on stdout; the text is on stderr as usual."""
    assert "error: " in result.stderr
    found = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code
    error: dict[str, Any] = found["error"]
    return error


def test_errors_are_json_where_output_is(placer: Run) -> None:
    error = _error(placer("plan", "net.py:Nett", "fits.json", *X, "--json"))
    assert error["kind"] == "ModelError"
    assert (error["place"], error["remedy"]) == ("net.py:Nett", "did you mean net.py:Net?")
    assert "has no callable 'Nett'" in error["problem"]
    error = _error(placer("plan", "net.py:Net", "unknown_key.json", *X, "--json"))
    assert error["kind"] == "SpecError"
    assert [problem["place"] for problem in error["problems"]] == ["/replica"]
    result = placer("verify", "net.py:Net", "tiny.json", *X, "--json")
    assert result.exit_code == 3
    error = _error(result)
    assert error["kind"] == "BudgetError"
    assert error["missing_bytes"] > 0 and error["tried"]
    assert _error(placer("plan", "net.py:Leaves", "fits.json", *X, "--json"))["problem"]


def test_wrong_options_are_json_where_output_is(placer: Run) -> None:
    result = placer("plan", "net.py:Net", "fits.json", "--inpt", "8x64", "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found["error"]["kind"] == "UsageError"
    assert "--inpt" in found["error"]["problem"]


def test_an_interrupt_is_one_line_and_exit_code_130(
    placer: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from placer.cli import loaded_model

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loaded_model, "lower_call", interrupted)
    result = placer(*PLAN, *X)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in result.stderr and "Aborted" not in result.stderr
    result = placer(*PLAN, *X, "--json")
    assert json.loads(result.stdout)["exit_code"] == 130


@pytest.mark.parametrize("command", [("auto", *X), ("fit", "--input", "{rows}x64")])
def test_a_missing_kind_is_told_before_the_model_is_recorded(
    placer: Run, command: tuple[str, ...]
) -> None:
    name, *inputs = command
    result = placer(name, "net.py:Net", *inputs, "-d", "cuda:0=1GiB")
    assert result.exit_code == 2 and "--kind" in result.stderr
    assert (
        "recording" not in result.stderr and "looking for" not in result.stderr.split("error:")[0]
    )


def test_model_and_spec_in_the_wrong_order(placer: Run) -> None:
    result = placer("plan", "fits.json", "net.py:Net", *X)
    assert result.exit_code == 2
    assert "is this the model? On the command line, it comes before the file" in result.stderr


@pytest.mark.parametrize(("layer", "sizes"), [("Linear", "64, 2"), ("LayerNorm", "64")])
def test_double_of_a_model_that_makes_float32_itself(
    placer: Run, folder: Path, layer: str, sizes: str
) -> None:
    text = f"import torch\n\nclass {layer}(torch.nn.{layer}):\n    def forward(self, x):\n"
    text += "        return super().forward(torch.zeros(8, 64))\n\n"
    text += f"def net():\n    return {layer}({sizes})\n"
    (folder / "mixed.py").write_text(text, encoding="utf-8")
    result = placer("verify", "mixed.py:net", "fits.json", *X, "--double")
    assert result.exit_code == 2 and "leave out --double" in result.stderr
