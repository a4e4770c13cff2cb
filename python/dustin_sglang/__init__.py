"""Dustin for SGLang: speculative decoding whose target verification reads a chosen part of a long KV cache."""

__version__ = "0.1.0"
