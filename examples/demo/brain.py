"""The MNI152 brain template as a segmentation task; the nilearn package contains all data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES = ("other", "grey matter", "white matter")
_TRAINED_SHARE = 0.6  # share of the brain, from the back, that is trained on; the front is held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Brain:
    """The T1 image (float32, zero mean and unit variance inside the brain) and a label per voxel.

    Both are (D, H, W), 1 mm apart; labels are indices into ``CLASSES``.
    """

    image: Tensor
    labels: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.image.shape)


def load_brain() -> Brain:
    """The template at 1 mm. A voxel's label is the likeliest of grey matter, white matter and neither."""
    from nilearn import datasets  # pip install 'placer[examples]'

    template = datasets.load_mni152_template(resolution=1)
    grey = datasets.load_mni152_gm_template(resolution=1)
    white = datasets.load_mni152_wm_template(resolution=1)
    t1, gm, wm = (
        torch.from_numpy(np.asarray(image.get_fdata(), dtype=np.float32))
        for image in (template, grey, white)
    )
    labels = torch.stack([1 - gm - wm, gm, wm]).argmax(0)
    inside = t1[labels > 0]
    return Brain(image=(t1 - inside.mean()) / inside.std(), labels=labels)


def padded_shape(shape: Sequence[int], multiple: int = 16) -> tuple[int, ...]:
    """``shape`` with every size raised to a multiple of ``multiple``.

    >>> padded_shape((197, 233, 189))
    (208, 240, 192)
    """
    return tuple(-(-size // multiple) * multiple for size in shape)


def training_and_held_out_centers(brain: Brain, size: int) -> tuple[Tensor, Tensor]:
    """(n, 3) centers of patches of ``size``: those in the back of the brain, and those in the front.

    The second axis runs from back to front. (Left and right would not work, because the template is
    symmetric.) Patches of the two sets share no voxels. Centers are voxels of grey or white matter.
    """
    half, border = size // 2, int(_TRAINED_SHARE * brain.shape[1])
    room = torch.zeros(brain.shape, dtype=torch.bool)
    room[half:-half, half:-half, half:-half] = True
    centers = torch.nonzero((brain.labels > 0) & room)
    back = centers[:, 1] + half <= border
    front = centers[:, 1] - half >= border
    return centers[back], centers[front]


def cut_patches(brain: Brain, centers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Images (n, 1, size, size, size) and labels (n, size, size, size) around ``centers``."""
    half = size // 2
    windows = [tuple(slice(int(c) - half, int(c) + half) for c in center) for center in centers]
    images = torch.stack([brain.image[window] for window in windows])
    labels = torch.stack([brain.labels[window] for window in windows])
    return images[:, None], labels


def dice_scores(logits: Tensor, labels: Tensor) -> list[float]:
    """Dice per class but the first: 2 |A and B| / (|A| + |B|), over all patches together.

    ``logits`` are (n, classes, D, H, W), ``labels`` (n, D, H, W).
    """
    found = F.one_hot(logits.argmax(1), len(CLASSES)).bool()
    wanted = F.one_hot(labels, len(CLASSES)).bool()
    both = (found & wanted).flatten(0, -2).sum(0)
    total = found.flatten(0, -2).sum(0) + wanted.flatten(0, -2).sum(0)
    return [2 * float(b) / max(float(t), 1.0) for b, t in zip(both[1:], total[1:], strict=True)]
