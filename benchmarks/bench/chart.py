"""Pictures as SVG text: lines over a logarithmic axis, and bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["bars", "lines"]

_COLORS = [
    "#1f5fa8",
    "#d1495b",
    "#2f9e6e",
    "#e08e0b",
    "#7a4fa3",
    "#5c6b73",
    "#17a2b8",
    "#b5651d",
    "#9a9a00",
    "#333333",
]
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 480, 70, 40, 190, 50


def _page(title: str, height: int, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**k for k in range(first, last + 1)]


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Mapping[float, float]],
    x_names: Mapping[float, str] | None = None,
) -> str:
    """A line a series, both axes logarithmic. Values must be above 0."""
    points = [(x, y) for values in series.values() for x, y in values.items()]
    if not points:
        return ""
    xs, ys = sorted({x for x, _ in points}), _ticks(*_range(y for _, y in points))
    x_low, x_high = math.log(xs[0]), math.log(xs[-1]) if len(xs) > 1 else math.log(xs[0]) + 1
    y_low, y_high = math.log(ys[0]), math.log(ys[-1])
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - x_low) / (x_high - x_low) * inner_w
        up = (math.log(y) - y_low) / (y_high - y_low) * inner_h
        return _LEFT + across, _HEIGHT - _BOTTOM - up

    parts = []
    for y in ys:
        _, at = place(xs[0], y)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    for x in xs:
        at, _ = place(x, ys[0])
        name = (x_names or {}).get(x, f"{x:g}")
        parts.append(
            f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{escape(name)}</text>"
        )
    parts.append(
        f'<text x="{_LEFT + inner_w / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
        f'<text x="16" y="{_TOP + inner_h / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {_TOP + inner_h / 2})">{escape(y_label)}</text>'
    )
    for k, (name, values) in enumerate(series.items()):
        color = _COLORS[k % len(_COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in sorted(values.items()))
        at = _TOP + 14 + 18 * k
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<line x1="{_WIDTH - _RIGHT + 12}" x2="{_WIDTH - _RIGHT + 32}" y1="{at - 4}" '
            f'y2="{at - 4}" stroke="{color}" stroke-width="3"/>'
            f'<text x="{_WIDTH - _RIGHT + 38}" y="{at}">{escape(name)}</text>'
        )
    return _page(title, _HEIGHT, parts)


def _range(values: object) -> tuple[float, float]:
    found = list(values)  # type: ignore[call-overload]
    low, high = min(found), max(found)
    return low, high if high > low else low * 10


def bars(title: str, unit: str, values: Mapping[str, float]) -> str:
    """A horizontal bar for each value, from 0."""
    if not values:
        return ""
    left, row = 260, 24
    most = max(max(values.values()), 1e-30)
    parts = []
    for k, (name, value) in enumerate(values.items()):
        y = _TOP + row * k
        width = max(0.0, value) / most * (_WIDTH - left - 120)
        parts.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{row - 7}" '
            f'fill="{_COLORS[k % len(_COLORS)]}"/>'
            f'<text x="{left + width + 6:.1f}" y="{y + 13}">{value:.4g} {escape(unit)}</text>'
        )
    return _page(title, _TOP + row * len(values) + 16, parts)
