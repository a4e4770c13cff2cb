"""Stub that lets text models run without torchvision.

SGLang and transformers import torchvision for image processing. Its wheels are built against one torch build and do not
load beside a CPU torch, so this directory comes first on ``PYTHONPATH``. It has the names they import and no image
processing.
"""

__version__ = "0.0.0"
