"""Read the JSON of a profile from a file that nobody vouches for.

A profile comes with a model from somewhere, so every value is checked before it is used, and nothing but a small
regular file is read: no URL, no pipe or device, no name on a hub.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 4 << 20


class ProfileError(ValueError):
    """A profile that does not parse or was made for other models."""


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises
    ------
    ProfileError
        The path is not that of a regular file of at most `MAX_BYTES` whose name ends in .json, or it holds no JSON
        object.
    """
    flag = f"--dustin-profile {path}"
    if "://" in path or not path.endswith(".json"):
        raise ProfileError(f"{flag}: it must be 'auto' or a local file whose name ends in .json; nothing is downloaded")
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProfileError(f"{flag}: not a regular file")
        if status.st_size > MAX_BYTES:
            raise ProfileError(f"{flag}: {status.st_size} bytes; a profile has at most {MAX_BYTES}")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{flag}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{flag} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ProfileError(f"{flag}: not a JSON object")
    return data


def parse_heads(signal: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Heads by layer out of ``{"layer": [head, ...]}``, ascending by layer; ranges are the profile's to check.

    Raises
    ------
    ValueError
        A layer or a head that is not a plain whole number.
    """
    layers = []
    for layer, heads in signal.items():
        if not (layer.isascii() and layer.isdigit() and str(int(layer)) == layer):
            raise ValueError(f"layer {layer!r} is not a whole number")
        if not isinstance(heads, list) or any(type(head) is not int for head in heads):
            raise ValueError(f"heads {heads!r} of layer {layer} are not a list of whole numbers")
        layers.append((int(layer), tuple(heads)))
    return tuple(sorted(layers))


def parse_weights(weights: Any, heads: tuple[tuple[int, tuple[int, ...]], ...]) -> tuple[float, ...] | None:
    """Weights of `heads`, place by place, out of ``{"layer": [weight, ...]}``; None where none are given.

    Raises
    ------
    ValueError
        Not a number for every head of every layer, or one that is not finite and at least 0, or all of them 0.
    """
    if weights is None:
        return None
    if set(weights) != {str(layer) for layer, _ in heads}:
        raise ValueError(f"weights are of layers {', '.join(weights)}; heads are of others")
    flat = []
    for layer, chosen in heads:
        numbers = weights[str(layer)]
        if not isinstance(numbers, list) or len(numbers) != len(chosen):
            raise ValueError(
                f"weights {numbers!r} of layer {layer} are not a number for each of its {len(chosen)} heads"
            )
        flat += [parse_number(number) for number in numbers]
    if not all(0 <= number < float("inf") for number in flat) or not any(flat):
        raise ValueError("weights must be finite, at least 0, and not all 0")
    return tuple(flat)


def parse_number(value: Any) -> float:
    """A JSON number as a float.

    Raises
    ------
    ValueError
        Anything else, such as a string or true.
    """
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def parse_count(value: Any) -> int:
    """A JSON number of things.

    Raises
    ------
    ValueError
        Anything but a whole number of at least 1.
    """
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a whole number of at least 1")
    return value
