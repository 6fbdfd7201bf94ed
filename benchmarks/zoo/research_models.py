"""Research models, from the packages of their authors or of people who reimplemented them.

``pip install denoising-diffusion-pytorch vit-pytorch x-transformers neuraloperator pytorchvideo``
installs all of them. If a package is missing, only its models fail, by name. Nearly all models reshape with
einops, which has caches for the whole process.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.subject import Call, Subject, positional

PACKAGES = (
    "denoising-diffusion-pytorch",
    "vit-pytorch",
    "x-transformers",
    "neuraloperator",
    "pytorchvideo",
)


def subjects() -> Iterator[Subject]:
    """Diffusion, vision transformers, language models, neural operators and video."""
    yield from _diffusion()
    yield from _vision_transformers()
    yield from _language_models()
    yield from _neural_operators()
    yield from _video()


def _make(path: str, **options: Any) -> nn.Module:
    """The result of calling ``path`` ("package.module:name") with ``options``."""
    module, _, name = path.partition(":")
    model: nn.Module = getattr(importlib.import_module(module), name)(**options)
    return model


def _subject(name: str, path: str, call: Callable[[bool], Call], **options: Any) -> Subject:
    return Subject(name=name, build=functools.partial(_make, path, **options), call=call)


def _diffusion() -> Iterator[Subject]:
    package = "denoising_diffusion_pytorch"
    image, timed = (2, 3, 32, 32), _with_times((2, 3, 32, 32))
    for name, options in (
        ("DDPM Unet", {}),
        ("DDPM Unet, self-conditioned", {"self_condition": True}),
        ("DDPM Unet, learned sinusoids", {"learned_sinusoidal_cond": True, "dropout": 0.1}),
    ):
        yield _subject(name, f"{package}:Unet", timed, dim=16, dim_mults=(1, 2, 4), **options)
    yield _subject(
        "Unet1D",
        f"{package}:Unet1D",
        _with_times((2, 3, 32)),
        dim=16,
        dim_mults=(1, 2, 4),
        channels=3,
    )
    karras = {
        "dim": 16,
        "dim_max": 32,
        "num_downsamples": 2,
        "num_blocks_per_stage": 1,
        "channels": 4,
    }
    yield _subject(
        "KarrasUnet",
        f"{package}:KarrasUnet",
        _with_times((2, 4, 32, 32)),
        image_size=32,
        attn_dim_head=16,
        **karras,
    )
    yield _subject(
        "KarrasUnet, classes",
        f"{package}:KarrasUnet",
        _with_times((2, 4, 32, 32), class_labels=lambda: torch.tensor([1, 3])),
        image_size=32,
        attn_dim_head=16,
        num_classes=5,
        **karras,
    )
    yield _subject(
        "KarrasUnet1D", f"{package}:KarrasUnet1D", _with_times((2, 4, 32)), seq_len=32, **karras
    )
    for name, factorized in (("KarrasUnet3D", False), ("KarrasUnet3D, factorized", True)):
        yield _subject(
            name,
            f"{package}:KarrasUnet3D",
            _with_times((2, 4, 4, 16, 16)),
            image_size=16,
            frames=4,
            attn_dim_head=8,
            factorize_space_time_attn=factorized,
            **karras,
        )
    yield Subject(name="GaussianDiffusion", build=_gaussian_diffusion, call=_uniform(image))


def _gaussian_diffusion() -> nn.Module:
    """The loss of a training step: times and noise are drawn in ``forward``."""
    package = "denoising_diffusion_pytorch"
    unet = _make(f"{package}:Unet", dim=16, dim_mults=(1, 2))
    return _make(f"{package}:GaussianDiffusion", model=unet, image_size=32, timesteps=20)


def _with_times(shape: tuple[int, ...], **makers: Callable[[], Any]) -> Callable[[bool], Call]:
    """Noisy samples and their times between zero and one."""

    def call(training: bool) -> Call:
        return (torch.randn(shape), torch.rand(shape[0])), {n: make() for n, make in makers.items()}

    return call


def _uniform(shape: tuple[int, ...]) -> Callable[[bool], Call]:
    def call(training: bool) -> Call:
        return (torch.rand(shape),), {}

    return call


_VIT = {"dim": 32, "heads": 2, "dim_head": 16, "mlp_dim": 64}


def _vision_transformers() -> Iterator[Subject]:
    images = positional((2, 3, 32, 32))
    sized = {"image_size": 32, "patch_size": 8, "num_classes": 5, **_VIT}
    for path in ("vit:ViT", "simple_vit:SimpleViT", "deepvit:DeepViT", "parallel_vit:ViT"):
        name = "parallel ViT" if path == "parallel_vit:ViT" else path.partition(":")[2]
        yield _subject(name, f"vit_pytorch.{path}", images, depth=4, **sized)
    yield _subject("CaiT", "vit_pytorch.cait:CaiT", images, depth=4, cls_depth=2, **sized)
    yield Subject(name="MAE", build=functools.partial(_masked, "mae:MAE"), call=images)
    yield Subject(name="SimMIM", build=functools.partial(_masked, "simmim:SimMIM"), call=images)
    yield _subject(
        "MaxViT",
        "vit_pytorch.max_vit:MaxViT",
        positional((2, 3, 64, 64)),
        num_classes=5,
        dim=16,
        depth=(1, 1),
        dim_head=8,
        window_size=4,
    )
    video = {
        "image_size": 32,
        "image_patch_size": 8,
        "frames": 4,
        "frame_patch_size": 2,
        "num_classes": 5,
        "spatial_depth": 2,
        "temporal_depth": 2,
        **_VIT,
    }
    for variant in ("factorized_encoder", "factorized_self_attention"):
        yield _subject(
            f"ViViT, {variant.replace('_', ' ')}",
            "vit_pytorch.vivit:ViViT",
            positional((2, 3, 4, 32, 32)),
            variant=variant,
            **video,
        )
    yield _subject(
        "CvT",
        "vit_pytorch.cvt:CvT",
        positional((2, 3, 64, 64)),
        num_classes=5,
        s1_emb_dim=16,
        s2_emb_dim=32,
        s2_heads=2,
        s3_emb_dim=48,
        s3_heads=2,
        s3_depth=3,
    )
    yield _subject(
        "NesT",
        "vit_pytorch.nest:NesT",
        images,
        image_size=32,
        patch_size=4,
        num_classes=5,
        dim=16,
        heads=2,
        num_hierarchies=2,
        block_repeats=(2, 2),
        dim_head=8,
    )
    yield _subject(
        "MobileViT",
        "vit_pytorch.mobile_vit:MobileViT",
        positional((2, 3, 64, 64)),
        image_size=(64, 64),
        dims=[16, 24, 32],
        channels=[8, 8, 16, 16, 16, 16, 24, 24, 32, 32, 64],
        num_classes=5,
    )
    yield _subject(
        "PiT",
        "vit_pytorch.pit:PiT",
        images,
        depth=(2, 2),
        **sized,
    )
    yield _subject(
        "CrossFormer",
        "vit_pytorch.crossformer:CrossFormer",
        positional((2, 3, 64, 64)),
        num_classes=5,
        dim=(32, 32, 64, 64),
        depth=(1, 1, 2, 1),
        global_window_size=(8, 4, 2, 1),
        local_window_size=2,
    )
    yield _subject(
        "CrossViT",
        "vit_pytorch.cross_vit:CrossViT",
        images,
        image_size=32,
        num_classes=5,
        sm_dim=16,
        lg_dim=32,
        sm_patch_size=4,
        lg_patch_size=8,
        lg_enc_depth=2,
        depth=2,
        **{
            f"{side}_{name}": size
            for side in ("sm_enc", "lg_enc", "cross_attn")
            for name, size in (("heads", 2), ("dim_head", 8))
        },
        sm_enc_mlp_dim=32,
        lg_enc_mlp_dim=64,
    )
    yield _subject(
        "TwinsSVT",
        "vit_pytorch.twins_svt:TwinsSVT",
        positional((2, 3, 64, 64)),
        num_classes=5,
        s1_emb_dim=16,
        s1_local_patch_size=4,
        s1_global_k=4,
        s2_emb_dim=16,
        s2_local_patch_size=4,
        s2_global_k=4,
        s3_emb_dim=32,
        s3_local_patch_size=2,
        s3_global_k=2,
        s3_depth=2,
        s4_emb_dim=32,
        s4_local_patch_size=1,
        s4_global_k=1,
        s4_depth=1,
    )


def _masked(path: str) -> nn.Module:
    """Pretraining that masks patches, drawn in ``forward``."""
    sized = {"image_size": 32, "patch_size": 8, "num_classes": 5, **_VIT}
    # Not vit_pytorch.ViT: in 1.26.11 these two expect its position embedding to be of rank three.
    encoder = _make("vit_pytorch.deepvit:DeepViT", depth=3, **sized)
    options: dict[str, Any] = {"masking_ratio": 0.5}
    if path == "mae:MAE":
        options |= {
            "decoder_dim": 16,
            "decoder_depth": 2,
            "decoder_heads": 2,
            "decoder_dim_head": 8,
        }
    return _make(f"vit_pytorch.{path}", encoder=encoder, **options)


_DECODERS: dict[str, dict[str, Any]] = {
    "absolute positions": {},
    "rotary positions": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_glu": True},
    "ALiBi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "T5's relative positions": {"rel_pos_bias": True},
    "grouped queries, flash": {"attn_kv_heads": 1, "attn_flash": True, "rotary_pos_emb": True},
    "memory keys, talking heads": {"attn_num_mem_kv": 2, "attn_pre_talking_heads": True},
    "residual attention, gates": {"residual_attn": True, "gate_residual": True, "macaron": True},
    "hyper connections": {"num_residual_streams": 2},
    "token shift, sandwich": {"shift_tokens": 1, "sandwich_coef": 1},
}


def _language_models() -> Iterator[Subject]:
    for name, options in _DECODERS.items():
        build = functools.partial(_wrapped_layers, "Decoder", **options)
        yield Subject(name=f"x-transformers decoder, {name}", build=build, call=_tokens)
    build = functools.partial(_wrapped_layers, "Encoder")
    yield Subject(name="x-transformers encoder", build=build, call=_masked_tokens)
    yield Subject(name="x-transformers GPT with loss", build=_autoregressive, call=_tokens)
    yield _subject(
        "XTransformer (encoder, decoder)",
        "x_transformers:XTransformer",
        _two_texts,
        dim=32,
        enc_num_tokens=31,
        enc_depth=2,
        enc_heads=2,
        enc_max_seq_len=8,
        dec_num_tokens=31,
        dec_depth=2,
        dec_heads=2,
        dec_max_seq_len=8,
        tie_token_emb=True,
    )
    yield Subject(name="x-transformers ViT", build=_image_layers, call=positional((2, 3, 32, 32)))


def _wrapped_layers(kind: str, **options: Any) -> nn.Module:
    options = {"dim": 32, "depth": 3, "heads": 2, "attn_dim_head": 16, **options}
    layers = _make(f"x_transformers:{kind}", **options)
    return _make(
        "x_transformers:TransformerWrapper", num_tokens=31, max_seq_len=8, attn_layers=layers
    )


def _autoregressive() -> nn.Module:
    net = _wrapped_layers("Decoder", rotary_pos_emb=True)
    return _make("x_transformers:AutoregressiveWrapper", net=net)


def _image_layers() -> nn.Module:
    layers = _make("x_transformers:Encoder", dim=32, depth=3, heads=2, attn_dim_head=16)
    return _make(
        "x_transformers:ViTransformerWrapper",
        image_size=32,
        patch_size=8,
        num_classes=5,
        attn_layers=layers,
    )


def _tokens(training: bool) -> Call:
    return (torch.randint(31, (2, 8)),), {}


def _masked_tokens(training: bool) -> Call:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    return (torch.randint(31, (2, 8)),), {"mask": mask}


def _two_texts(training: bool) -> Call:
    return (torch.randint(31, (2, 8)), torch.randint(31, (2, 8))), {}


def _neural_operators() -> Iterator[Subject]:
    fno = {"in_channels": 2, "out_channels": 1, "hidden_channels": 8, "n_layers": 4}
    for name, kind, options in (
        ("FNO", "FNO", {}),
        ("FNO, padded domain", "FNO", {"domain_padding": 0.25}),
        ("FNO, group norm", "FNO", {"norm": "group_norm"}),
        ("TFNO", "TFNO", {"rank": 0.5}),
        ("TFNO, reconstructed", "TFNO", {"rank": 0.5, "implementation": "reconstructed"}),
    ):
        shape = (2, 2, 16, 16)
        yield _subject(
            name, f"neuralop.models:{kind}", positional(shape), n_modes=(6, 6), **{**fno, **options}
        )
    yield _subject(
        "FNO in 3D", "neuralop.models:FNO", positional((2, 2, 8, 8, 8)), n_modes=(4, 4, 4), **fno
    )
    yield _subject(
        "UNO",
        "neuralop.models:UNO",
        positional((2, 2, 16, 16)),
        in_channels=2,
        out_channels=1,
        hidden_channels=8,
        lifting_channels=16,
        projection_channels=16,
        n_layers=4,
        uno_out_channels=[8, 12, 12, 8],
        uno_n_modes=[[6, 6], [4, 4], [4, 4], [6, 6]],
        channel_mlp_skip="linear",
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [1.0, 1.0], [2.0, 2.0]],
    )


def _video() -> Iterator[Subject]:
    yield _subject(
        "SlowFast",
        "pytorchvideo.models.slowfast:create_slowfast",
        _two_speeds,
        model_depth=18,
        model_num_class=5,
        slowfast_channel_reduction_ratio=(4,),
        stem_dim_outs=(16, 4),
        head_pool_kernel_sizes=((4, 2, 2), (16, 2, 2)),
    )
    yield _subject(
        "X3D",
        "pytorchvideo.models.x3d:create_x3d",
        positional((2, 3, 4, 64, 64)),
        input_clip_length=4,
        input_crop_size=64,
        model_num_class=5,
    )
    yield _subject(
        "CSN",
        "pytorchvideo.models.csn:create_csn",
        positional((2, 3, 4, 64, 64)),
        model_depth=50,
        model_num_class=5,
        stem_dim_out=16,
        head_pool_kernel_size=(1, 2, 2),
    )


def _two_speeds(training: bool) -> Call:
    """The same clip at 4 and at 16 frames."""
    clip = torch.randn(2, 3, 16, 64, 64)
    return ([clip[:, :, ::4].contiguous(), clip],), {}
