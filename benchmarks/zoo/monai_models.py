"""MONAI: every network of ``monai.networks.nets`` that runs on random input, in a small size.

Left out are parts that are not networks by themselves (``BertAttention``, ``Pooler``, …,
``TopologyConstruction``), ``Transchex``, which downloads a configuration, and ``HyenaNDUNETR``, which
needs another package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from monai.networks import nets
from torch import nn

from benchmarks.zoo.subject import Call, Subject, positional

_ChannelsStrides = {"channels": (8, 16, 32), "strides": (2, 2)}
_IO = {"in_channels": 1, "out_channels": 2}
_3D = {"spatial_dims": 3, **_IO}
_2D = {"spatial_dims": 2, **_IO}
_KL = {
    "num_res_blocks": (1, 1),
    "channels": (8, 16),
    "attention_levels": (False, True),
    "norm_num_groups": 4,
}
_DIFFUSION = {**_KL, "num_head_channels": 8}
_VIT = {"hidden_size": 32, "mlp_dim": 64, "num_heads": 4}
_VOLUME = (2, 1, 32, 32, 32)
_IMAGE = (2, 1, 64, 64)


def subjects() -> Iterator[Subject]:
    """The networks in the order of the table below; those that take long to judge come last."""
    for name, (build, shape, *more) in sorted(_NETS.items(), key=lambda item: item[0] in _SLOW):
        call = shape if callable(shape) else positional(shape)
        yield Subject(name=name, build=build, call=call, may_be_whole=bool(more))


def _net(cls: Any, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """Builds ``cls`` from new arguments each time, because some networks write to their lists."""
    return lambda: cls(*copy.deepcopy(args), **copy.deepcopy(options))


def _with(make: Callable[[], tuple[Any, ...]]) -> Callable[[bool], Call]:
    return lambda training: (make(), {})


def _dints(search: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        space = nets.TopologySearch if search else nets.TopologyInstance
        options: dict[str, Any] = {"channel_mul": 0.25, "num_blocks": 4, "num_depths": 3}
        if not search:
            options["arch_code"] = None
        return nets.DiNTS(
            dints_space=space(use_downsample=True, spatial_dims=3, device="cpu", **options),
            in_channels=1,
            num_classes=2,
            use_downsample=True,
            spatial_dims=3,
        )

    return build


def _adapter() -> nn.Module:
    from torchvision.models import resnet18

    return nets.NetAdapter(resnet18(), num_classes=3, dim=2, pool=None)


def _vista() -> nn.Module:
    from monai.networks.nets.vista3d import vista3d132

    return vista3d132(encoder_embed_dim=8, in_channels=1)


def _tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 12))


def _timesteps() -> torch.Tensor:
    return torch.randint(0, 100, (2,))


def _segmentation(side: int) -> torch.Tensor:
    return (
        torch.nn.functional.one_hot(torch.randint(0, 3, (2, side, side)), 3).movedim(-1, 1).float()
    )


_SLOW = (
    "AHNet",
    "BasicUNetPlusPlus",
    "DAF3D",
    "DenseNet121",
    "DenseNet169",
    "DenseNet201",
    "DenseNet264",
    "DiNTS (instance)",
    "DiNTS (search)",
    "EfficientNetBN",
    "EfficientNetBNFeatures",
    "FlexibleUNet",
    "HighResNet",
    "HoVerNet",
    "MedNeXt",
    "SENet154",
    "SEResNet101",
    "SEResNet152",
    "SEResNext101",
    "VISTA3D",
    "VNet",
)
_NETS: dict[str, tuple[Any, ...]] = {
    "AHNet": (
        _net(nets.AHNet, spatial_dims=3, out_channels=2, psp_block_num=3),
        (2, 1, 64, 64, 32),
    ),
    "AttentionUnet": (_net(nets.AttentionUnet, **_3D, **_ChannelsStrides), _VOLUME),
    "AutoEncoder": (
        _net(nets.AutoEncoder, **_3D, channels=(8, 16, 32), strides=(2, 2, 2)),
        _VOLUME,
    ),
    "AutoencoderKL": (_net(nets.AutoencoderKL, **_2D, latent_channels=4, **_KL), _IMAGE),
    "BasicUNet": (_net(nets.BasicUNet, **_3D, features=(8, 8, 16, 16, 32, 8)), _VOLUME),
    "BasicUNetPlusPlus": (
        _net(nets.BasicUNetPlusPlus, **_3D, features=(8, 8, 16, 16, 32, 8)),
        _VOLUME,
    ),
    "Classifier": (
        _net(nets.Classifier, in_shape=(1, 64, 64), classes=3, **_ChannelsStrides),
        _IMAGE,
    ),
    "ControlNet": (
        _net(
            nets.ControlNet,
            spatial_dims=2,
            in_channels=1,
            conditioning_embedding_in_channels=1,
            conditioning_embedding_num_channels=(8, 8),
            **_DIFFUSION,
        ),
        _with(lambda: (torch.randn(2, 1, 16, 16), _timesteps(), torch.randn(2, 1, 32, 32))),
    ),
    "Critic": (_net(nets.Critic, in_shape=(1, 64, 64), **_ChannelsStrides), _IMAGE),
    "DAF3D": (_net(nets.DAF3D, in_channels=1, out_channels=2), (2, 1, 32, 32, 32)),
    "DecoderOnlyTransformer": (
        _net(
            nets.DecoderOnlyTransformer,
            num_tokens=50,
            max_seq_len=16,
            attn_layers_dim=32,
            attn_layers_depth=4,
            attn_layers_heads=4,
        ),
        _with(lambda: (_tokens(),)),
    ),
    "DenseNet": (
        _net(nets.DenseNet, **_3D, init_features=8, growth_rate=8, block_config=(2, 2, 2)),
        _VOLUME,
    ),
    "DenseNet121": (_net(nets.DenseNet121, **_2D), _IMAGE),
    "DenseNet169": (_net(nets.DenseNet169, **_2D), _IMAGE),
    "DenseNet201": (_net(nets.DenseNet201, **_2D), _IMAGE),
    "DenseNet264": (_net(nets.DenseNet264, **_2D), _IMAGE),
    "DiffusionModelUNet": (
        _net(nets.DiffusionModelUNet, spatial_dims=2, in_channels=1, out_channels=1, **_DIFFUSION),
        _with(lambda: (torch.randn(2, 1, 16, 16), _timesteps())),
    ),
    "DiNTS (instance)": (_dints(False), _VOLUME),
    "DiNTS (search)": (_dints(True), _VOLUME),
    "Discriminator": (_net(nets.Discriminator, in_shape=(1, 64, 64), **_ChannelsStrides), _IMAGE),
    "DynUNet": (
        _net(
            nets.DynUNet,
            **_3D,
            kernel_size=(3, 3, 3, 3),
            strides=(1, 2, 2, 2),
            upsample_kernel_size=(2, 2, 2),
            filters=(8, 16, 16, 32),
            deep_supervision=True,
            deep_supr_num=2,
        ),
        _VOLUME,
    ),
    "EfficientNetBN": (
        _net(
            nets.EfficientNetBN,
            "efficientnet-b0",
            pretrained=False,
            spatial_dims=2,
            in_channels=1,
            num_classes=3,
        ),
        _IMAGE,
    ),
    "EfficientNetBNFeatures": (
        _net(
            nets.EfficientNetBNFeatures,
            "efficientnet-b0",
            pretrained=False,
            spatial_dims=2,
            in_channels=1,
        ),
        _IMAGE,
    ),
    "FlexibleUNet": (
        _net(nets.FlexibleUNet, in_channels=1, out_channels=2, backbone="efficientnet-b0"),
        _IMAGE,
    ),
    "FullyConnectedNet": (
        _net(nets.FullyConnectedNet, in_channels=16, out_channels=4, hidden_channels=(32, 32, 32)),
        (2, 16),
    ),
    "Generator": (
        _net(
            nets.Generator,
            latent_shape=(16,),
            start_shape=(8, 8, 8),
            channels=(16, 8, 1),
            strides=(2, 2, 1),
        ),
        (2, 16),
    ),
    "GlobalNet": (
        _net(
            nets.GlobalNet,
            image_size=[32, 32, 32],
            spatial_dims=3,
            in_channels=1,
            num_channel_initial=4,
            depth=2,
        ),
        _VOLUME,
    ),
    "HighResBlock": (
        _net(nets.HighResBlock, spatial_dims=3, in_channels=1, out_channels=8),
        _VOLUME,
        "block",
    ),
    "HighResNet": (_net(nets.HighResNet, **_3D), (2, 1, 16, 16, 16)),
    "HoVerNet": (_net(nets.HoVerNet, mode="fast", in_channels=3, out_classes=3), (2, 3, 256, 256)),
    "LocalNet": (
        _net(
            nets.LocalNet,
            spatial_dims=3,
            in_channels=1,
            num_channel_initial=4,
            extract_levels=(0, 1, 2),
        ),
        _VOLUME,
    ),
    "MaskedAutoEncoderViT": (
        _net(
            nets.MaskedAutoEncoderViT,
            in_channels=1,
            img_size=(64, 64),
            patch_size=(16, 16),
            num_layers=4,
            decoder_hidden_size=32,
            decoder_mlp_dim=64,
            decoder_num_layers=2,
            decoder_num_heads=4,
            spatial_dims=2,
            **_VIT,
        ),
        _IMAGE,
    ),
    "MedNeXt": (
        _net(nets.MedNeXt, **_3D, init_filters=4, kernel_size=3, deep_supervision=True),
        _VOLUME,
    ),
    "MILModel": (
        _net(
            nets.MILModel,
            num_classes=3,
            pretrained=False,
            backbone="resnet18",
            mil_mode="att_trans",
        ),
        (2, 3, 3, 64, 64),
    ),
    "MultiScalePatchDiscriminator": (
        _net(
            nets.MultiScalePatchDiscriminator,
            num_d=2,
            num_layers_d=2,
            spatial_dims=2,
            channels=8,
            in_channels=1,
            minimum_size_im=64,
        ),
        _IMAGE,
    ),
    "NaViT": (
        _net(
            nets.NaViT,
            image_size=(32, 32),
            patch_size=8,
            num_classes=3,
            num_layers=4,
            spatial_dims=2,
            **_VIT,
        ),
        _with(
            lambda: ([[torch.randn(1, 32, 32)], [torch.randn(1, 16, 24), torch.randn(1, 8, 8)]],)
        ),
        "lists of images, whose lengths its own code reads from tensors",
    ),
    "NetAdapter": (_adapter, (2, 3, 64, 64)),
    "PatchDiscriminator": (
        _net(nets.PatchDiscriminator, spatial_dims=2, channels=8, in_channels=1),
        _IMAGE,
    ),
    "PatchMerging": (_net(nets.PatchMerging, dim=8, spatial_dims=3), (2, 8, 8, 8, 8), "block"),
    "PatchMergingV2": (_net(nets.PatchMergingV2, dim=8, spatial_dims=3), (2, 8, 8, 8, 8), "block"),
    "Quicknat": (
        _net(nets.Quicknat, num_classes=3, num_channels=1, num_filters=8, se_block=None),
        _IMAGE,
    ),
    "RegUNet": (
        _net(nets.RegUNet, spatial_dims=3, in_channels=1, num_channel_initial=4, depth=2),
        _VOLUME,
    ),
    "Regressor": (
        _net(nets.Regressor, in_shape=(1, 64, 64), out_shape=(2,), **_ChannelsStrides),
        _IMAGE,
    ),
    "ResNet": (
        _net(
            nets.ResNet,
            "basic",
            [1, 1, 1, 1],
            [8, 16, 16, 32],
            n_input_channels=1,
            num_classes=3,
        ),
        _VOLUME,
    ),
    "ResNet10": (_net(nets.resnet10, spatial_dims=3, n_input_channels=1, num_classes=3), _VOLUME),
    "ResNet50": (_net(nets.resnet50, spatial_dims=2, n_input_channels=1, num_classes=3), _IMAGE),
    "ResNetFeatures": (
        _net(nets.ResNetFeatures, "resnet10", pretrained=False, spatial_dims=2, in_channels=1),
        _IMAGE,
    ),
    "ResNetBlock": (_net(nets.ResNetBlock, in_planes=8, planes=8), (2, 8, 8, 8, 8), "block"),
    "ResNetBottleneck": (
        _net(nets.ResNetBottleneck, in_planes=32, planes=8),
        (2, 32, 8, 8, 8),
        "block",
    ),
    "SegResNet": (_net(nets.SegResNet, **_3D), _VOLUME),
    "SegResNetDS": (_net(nets.SegResNetDS, **_3D, init_filters=8, dsdepth=2), _VOLUME),
    "SegResNetDS2": (
        _net(nets.SegResNetDS2, **_3D, init_filters=8, dsdepth=2),
        _VOLUME,
    ),
    "SegResNetVAE": (_net(nets.SegResNetVAE, input_image_size=(32, 32, 32), **_3D), _VOLUME),
    "SENet": (
        _net(
            nets.SENet, 2, 1, "se_bottleneck", [1, 1, 1, 1], groups=1, reduction=16, num_classes=3
        ),
        _IMAGE,
    ),
    **{
        name: (_net(getattr(nets, name), spatial_dims=2, in_channels=1, num_classes=3), _IMAGE)
        for name in (
            "SENet154",
            "SEResNet50",
            "SEResNet101",
            "SEResNet152",
            "SEResNext50",
            "SEResNext101",
        )
    },
    "SPADEAutoencoderKL": (
        _net(
            nets.SPADEAutoencoderKL,
            spatial_dims=2,
            label_nc=3,
            latent_channels=4,
            spade_intermediate_channels=8,
            **_KL,
        ),
        _with(lambda: (torch.randn(2, 1, 32, 32), _segmentation(32))),
    ),
    "SPADEDiffusionModelUNet": (
        _net(
            nets.SPADEDiffusionModelUNet,
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            label_nc=3,
            spade_intermediate_channels=8,
            **_DIFFUSION,
        ),
        lambda training: (
            (torch.randn(2, 1, 16, 16), _timesteps()),
            {"seg": _segmentation(16)},
        ),
    ),
    "SPADENet": (
        _net(
            nets.SPADENet,
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            label_nc=3,
            input_shape=[32, 32],
            channels=[8, 8],
            z_dim=8,
            spade_intermediate_channels=8,
        ),
        _with(lambda: (_segmentation(32), torch.randn(2, 1, 32, 32))),
    ),
    "SwinUNETR": (
        _net(nets.SwinUNETR, spatial_dims=2, in_channels=1, out_channels=2, feature_size=12),
        _IMAGE,
    ),
    "SwinUNETR v2": (
        _net(
            nets.SwinUNETR,
            spatial_dims=2,
            in_channels=1,
            out_channels=2,
            feature_size=12,
            use_v2=True,
        ),
        _IMAGE,
    ),
    "TorchVisionFCModel": (
        _net(nets.TorchVisionFCModel, "resnet18", num_classes=3, dim=2, pool=None),
        (2, 3, 64, 64),
    ),
    "UNETR": (
        _net(
            nets.UNETR, in_channels=1, out_channels=2, img_size=(32, 32, 32), feature_size=8, **_VIT
        ),
        _VOLUME,
    ),
    "UNet": (_net(nets.UNet, **_3D, num_res_units=2, **_ChannelsStrides), _VOLUME),
    "VarAutoEncoder": (
        _net(
            nets.VarAutoEncoder,
            spatial_dims=2,
            in_shape=(1, 64, 64),
            out_channels=1,
            latent_size=4,
            channels=(8, 16, 32),
            strides=(2, 2, 2),
        ),
        _IMAGE,
    ),
    "VarFullyConnectedNet": (
        _net(
            nets.VarFullyConnectedNet,
            in_channels=16,
            out_channels=4,
            latent_size=4,
            encode_channels=(32, 16),
            decode_channels=(16, 32),
        ),
        (2, 16),
    ),
    "VISTA3D": (
        _vista,
        lambda training: (
            (torch.randn(1, 1, 64, 64, 64),),
            {"class_vector": torch.tensor([[1], [2]])},
        ),
    ),
    "ViT": (
        _net(
            nets.ViT,
            in_channels=1,
            img_size=(32, 32, 32),
            patch_size=(8, 8, 8),
            num_layers=4,
            classification=True,
            **_VIT,
        ),
        _VOLUME,
    ),
    "ViTAutoEnc": (
        _net(
            nets.ViTAutoEnc,
            in_channels=1,
            img_size=(32, 32, 32),
            patch_size=(16, 16, 16),
            num_layers=4,
            **_VIT,
        ),
        _VOLUME,
    ),
    "VNet": (_net(nets.VNet, **_3D), _VOLUME),
    "VoxelMorph": (
        _net(nets.VoxelMorph, spatial_dims=2),
        _with(lambda: (torch.randn(2, 1, 64, 64), torch.randn(2, 1, 64, 64))),
    ),
    "VoxelMorphUNet": (
        _net(
            nets.VoxelMorphUNet,
            spatial_dims=3,
            in_channels=2,
            unet_out_channels=8,
            channels=(8, 8, 16, 16),
            final_conv_channels=(8, 8),
        ),
        (2, 2, 32, 32, 32),
    ),
    "VQVAE": (
        _net(
            nets.VQVAE,
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(8, 16),
            num_res_layers=1,
            num_res_channels=(8, 16),
            downsample_parameters=((2, 4, 1, 1), (2, 4, 1, 1)),
            upsample_parameters=((2, 4, 1, 1, 0), (2, 4, 1, 1, 0)),
            num_embeddings=16,
            embedding_dim=8,
        ),
        (2, 1, 32, 32),
    ),
}
