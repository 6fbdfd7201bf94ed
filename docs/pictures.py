"""Makes the pictures of plans in docs/page with Chromium: ``python docs/pictures.py``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

UNET = "examples/unet3d.py:unet3d"
FOUR = "auto --input 2x1x256x256x192 --precision bf16 --kind rtx3060-12gb -d cuda:0,cuda:1,cuda:2,cuda:3"


def spec(count: int, kind: str, memory: str | None = None, **fields: Any) -> dict[str, Any]:
    named = [{"name": f"cuda:{i}", "kind": kind, "memory": memory} for i in range(count)]
    return {"devices": named, **fields}


HALVES = {
    **dict.fromkeys(("encoder", "bottleneck"), "cuda:0"),
    **dict.fromkeys(("upsample", "decoder", "head"), "cuda:1"),
}
GRID = {"stages": 8, "replicas": 8, "microbatches": 8, "schedule": "1F1B"}

# Name -> command, spec, size in pixels, and whether it is dark.
PICTURES: dict[str, tuple[str, dict[str, Any] | None, str, bool]] = {
    "four-devices": (FOUR, None, "1120,1140", False),
    "two-devices": (
        "plan --input 1x1x192x224x160",
        spec(2, "rtx3060-12gb", layers=HALVES),
        "1120,1140",
        False,
    ),
    "misfit-phone": (
        "plan --input 1x1x208x240x192",
        spec(2, "h100", "9GiB", layers=HALVES),
        "500,1150",
        True,
    ),
    "eight-by-eight": (
        "plan --processes --input 64x1x96x96x96",
        spec(8, "a100", "6GiB", **GRID),
        "1120,1700",
        False,
    ),
}


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no Chromium on this machine")
    for name, (command, given, size, dark) in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            page, file = Path(folder) / "plan.html", Path(folder) / "spec.json"
            file.write_text(json.dumps(given), encoding="utf-8")
            verb, *options = command.split()
            wanted = [UNET, *([str(file)] if given else []), *options, "--html", str(page)]
            placer = [sys.executable, "-m", "placer", verb, *wanted]
            subprocess.run(placer, cwd=root, stdout=subprocess.DEVNULL, check=False)
            flags = [
                *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *("--virtual-time-budget=2000", f"--window-size={size}"),
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--user-data-dir={folder}/profile",
                f"--screenshot={folder}/page.png",
            ]
            subprocess.run([browser, *flags, page.as_uri()], stderr=subprocess.DEVNULL, check=True)
            picture = Image.open(f"{folder}/page.png").convert("RGB").quantize(192)
            picture.save(root / "docs" / "page" / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
