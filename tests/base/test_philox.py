"""Philox against published values, its ways of computing it against each other, its normals."""

from __future__ import annotations

import math

import pytest
import torch

from corefed.base import philox
from corefed.base.philox import Places

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLACES = Places(
    torch.tensor([0, -1, 2**62, -(2**63)]),
    torch.tensor([0, (3 << 32) | 7, -1, 2**63 - 1]),
    torch.tensor([0, 5, 2**40, 1]),
)


WAYS = {"numpy": philox._by_numpy, "tensors": philox._by_tensors}


def signed(words):
    return [word - (1 << 64) if word >> 63 else word for word in words]


@pytest.mark.parametrize("way", WAYS)
def test_words_are_those_of_the_published_generator(way):
    """Counter (1, 0, 0, 0) and key 0, worked out by hand-written Python integers."""
    at = Places(*(torch.zeros(1, dtype=torch.int64) for _ in range(3)))
    assert WAYS[way](at, 1, 1, 0)[0, 0].tolist() == signed(by_integers((1, 0, 0, 0), (0, 0)))


def test_the_integer_reference_gives_the_known_answer():
    """The first known answer of philox4x64-10 in Random123 (Salmon et al. 2011): all zero."""
    assert [f"{word:016x}" for word in by_integers((0, 0, 0, 0), (0, 0))] == [
        "16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b",
    ]  # fmt: skip


def by_integers(counter, key):
    c, k, mask = list(counter), list(key), (1 << 64) - 1
    for round_ in range(10):
        if round_:
            k = [(word + step) & mask for word, step in zip(k, philox.WEYL, strict=True)]
        first, second = c[0] * philox.MULTIPLIERS[0], c[2] * philox.MULTIPLIERS[1]
        c = [
            (second >> 64) ^ c[1] ^ k[0], second & mask, (first >> 64) ^ c[3] ^ k[1], first & mask
        ]  # fmt: skip
    return c


def test_all_ways_give_the_same_bits():
    for calls, blocks, skip in ((1, 1, 0), (3, 5, 0), (2, 4, 1000), (1, 2, 2**33)):
        found = [way(PLACES, calls, blocks, skip) for way in WAYS.values()]
        assert found[0].shape == (4, calls, 4 * blocks)
        assert torch.equal(found[0], found[1])


def test_calls_and_blocks_do_not_overlap():
    found = philox.words(PLACES, 6, 8, torch.device("cpu"))
    assert len(set(found.flatten().tolist())) == found.numel()


@pytest.mark.parametrize("size", [1, 2, 7, 16, 17, 1001])
def test_normals_have_the_asked_shape_and_are_finite(size):
    found = philox.normals(PLACES, 3, size, torch.device("cpu"))
    assert found.shape == (4, 3, size) and bool(found.isfinite().all())


def test_normals_are_standard_normal():
    """Kolmogorov-Smirnov at 1e-4, four moments within 4 standard errors, no pairs alike."""
    stats = pytest.importorskip("scipy.stats")
    n = 200_000
    at = Places(*(value[:1] for value in PLACES))
    x = philox.normals(at, 1, n, torch.device("cpu")).flatten().double()
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-4
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((x**power).mean()) - mean) < 4 * math.sqrt(variance / n)
    half = philox.half_length(n)
    cosines, sines = x[:half], x[half:]
    pairs = cosines[: len(sines)] * sines  # radius shared, product still has mean 0
    assert abs(float(pairs.mean())) < 4 / math.sqrt(len(sines))
    assert abs(float((x[1:] * x[:-1]).mean())) < 4 / math.sqrt(n)


@CUDA
@pytest.mark.parametrize("size", [1, 7, 16, 1001, 79_510])
@pytest.mark.parametrize("triton", [True, False])
def test_a_gpu_has_the_numbers_of_the_cpu(size, triton, monkeypatch):
    """Up to the rounding of log, sqrt, sin and cos."""
    if triton and not philox.has_triton():
        pytest.skip("needs Triton")
    monkeypatch.setattr(philox, "has_triton", lambda: triton)
    device = torch.device("cuda")
    for first in (0, 3):
        here = philox.normals(PLACES, 2, size, torch.device("cpu"), first)
        there = philox.normals(PLACES, 2, size, device, first).cpu()
        assert torch.allclose(here, there, rtol=1e-4, atol=2e-5)
    for calls, blocks, skip in ((2, 9, 0), (1, 300, 5)):
        at = (PLACES, calls, blocks)
        words = [philox.words(*at, torch.device(name), skip).cpu() for name in ("cpu", "cuda")]
        assert torch.equal(*words)
