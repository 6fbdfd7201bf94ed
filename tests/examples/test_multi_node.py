"""The U-Net over two hosts: network namespaces on this machine, where it lets us make them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "multi_node"


def _namespaces_are_allowed() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    make = "mount -t tmpfs tmpfs /run && ip netns add a && ip netns exec a true"
    command = ["unshare", *user, "--net", "--mount", "sh", "-c", make]
    return subprocess.run(command, capture_output=True).returncode == 0


def _train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("multi_node_train", FOLDER / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.matrix(0)
@pytest.mark.skipif(not _namespaces_are_allowed(), reason="no network namespaces here")
def test_two_hosts_train_as_one_process(tmp_path: Path) -> None:
    """One process per host: the second host starts late, the stages talk over the wire, and the
    rank of the second host is killed in the second epoch; the job goes on from its checkpoint."""
    environment = {**os.environ, "PYTHON": sys.executable, "NPROC": "1", "LATE": "1"}
    options = ["--epochs", "2", "--size", "8", "--double"]
    options += ["--checkpoint", str(tmp_path / "checkpoint"), "--lose-rank-in", "1"]
    ran = subprocess.run(
        [FOLDER / "run.sh", *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("rank 0 on host-a: replica 0, stage 0") == 2  # two starts
    assert ran.stdout.count("rank 1 on host-b: replica 0, stage 1") == 2
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", ran.stdout)]
    expected = _train().train(1, epochs=2, size=8, dtype=torch.float64)
    assert losses == pytest.approx(expected, abs=1e-8)  # as many digits as are printed
    assert len(losses) == 4
    sent = [int(x) for x in re.findall(r"host-. (\d+) bytes", ran.stdout)]
    activations = 4 * 8 * 8 * 8**3 * 8  # batches, rows, channels of the first skip, voxels, bytes
    assert min(sent) > activations
