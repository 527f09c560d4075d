"""Pictures fit a page: their width, their type, and where panels and legends go."""

from __future__ import annotations

import io

import pytest
from matplotlib.text import Text
from PIL import Image

from corefed.base.panels import DPI, TYPE, WIDTH, labelled, legend_below, panels, save


@pytest.mark.parametrize(
    ("number", "shape"),
    [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (5, (2, 3)), (6, (2, 3))],
)
def test_panels_go_side_by_side_and_then_below(number: int, shape: tuple[int, int]) -> None:
    figure, axes = panels(number, height=2)
    assert len(axes) == number
    assert axes[0].get_gridspec().get_geometry() == shape
    assert figure.get_size_inches() == pytest.approx((WIDTH, 2 * shape[0]))


def test_a_picture_has_the_width_of_the_page_and_letters_of_one_size() -> None:
    figure, axes = panels(2, legend=1)
    for axis in axes:
        axis.plot([1, 10], [1, 1000], label="one")
        axis.plot([1, 10], [2, 3], label="_not named")
        axis.set(title="a title", xlabel="x", xscale="log", yscale="log")
    figure.suptitle("above both")
    assert list(labelled(axes)) == ["one"]
    legend_below(figure, labelled(axes))
    buffer = io.BytesIO()
    save(figure, buffer, format="png")
    with Image.open(buffer) as picture:
        assert picture.width == WIDTH * DPI
        assert picture.getpixel((0, 0)) == (255, 255, 255, 255)  # readable on a dark page
    shown = [text for text in figure.findobj(Text) if text.get_text()]
    assert len(shown) > 10
    assert {text.get_fontsize() for text in shown} == {TYPE}
