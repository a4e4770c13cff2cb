"""Names imported from ``torchvision.io``."""

from enum import Enum
from typing import NoReturn


class ImageReadMode(Enum):
    """Colour modes of `decode_image`."""

    UNCHANGED = 0
    RGB = 3


def decode_image(*args: object, **kwargs: object) -> NoReturn:
    """Refuse to decode: there is no torchvision here."""
    raise NotImplementedError("images need the real torchvision; dustin-sglang's CPU set-up runs text models only")


decode_jpeg = decode_image
