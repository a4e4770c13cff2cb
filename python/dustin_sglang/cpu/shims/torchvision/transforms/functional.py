"""Names imported from ``torchvision.transforms.functional``."""

from enum import Enum
from typing import NoReturn


class InterpolationMode(Enum):
    """Resampling filters, as PIL and torchvision name them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(*args: object, **kwargs: object) -> NoReturn:
    """Refuse to convert: there is no torchvision here."""
    raise NotImplementedError("images need the real torchvision; dustin-sglang's CPU set-up runs text models only")
