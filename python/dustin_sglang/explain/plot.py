"""Inline SVG: lines over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 240, 44, 10, 10, 34
_MOST_LABELS = 16


def x_of(index: int, count: int) -> float:
    """Horizontal place of round `index` of `count`."""
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (index / (count - 1) if count > 1 else 0.5)


def plot(lines: Mapping[str, Sequence[float | None]], title: str) -> str:
    """Shares from 0 to 1 over rounds, a line each; None leaves a gap. The nth line has the class ``line-n``."""
    count = max(len(values) for values in lines.values())
    parts = [f'<svg id="plot" role="img" aria-label="{title}" viewBox="0 0 {_WIDTH} {_HEIGHT}">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _y(share)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for index in range(0, count, -(-count // _MOST_LABELS)):
        parts.append(f'<text x="{x_of(index, count):.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{index + 1}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 3}" text-anchor="middle">round</text>')
    now = x_of(0, count)
    parts.append(f'<line id="now" x1="{now:.1f}" x2="{now:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    for number, (name, values) in enumerate(lines.items()):
        parts.append(_line(number, name, values))
    return "".join([*parts, "</svg>"])


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)


def _line(number: int, name: str, values: Sequence[float | None]) -> str:
    points = [(i, x_of(i, len(values)), _y(v), v) for i, v in enumerate(values) if v is not None]
    path = " ".join(f"{x:.1f},{y:.1f}" for _, x, y, _ in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>round {i + 1}: {name} {v:.1%}</title></circle>'
        for i, x, y, v in points
    )
    return f'<g class="line-{number}"><polyline points="{path}"/>{dots}</g>'
