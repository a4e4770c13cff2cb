"""The demo: a real SGLang server answers a question about a long document while verification reads a small part of it.

``python -m dustin_sglang.demo`` (or ``./run demo``, which also does the set-up) asks the same question twice, of a
server whose verification is sparse and of one whose verification is dense, and compares.
"""
