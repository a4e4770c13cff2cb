"""Calibration: measure which layers and heads of a model pair choose well, and write them to a profile.

No SGLang is involved: both models run in transformers. `trace` records attention, `windows` collects it over texts,
`mass` says how good a list is, `needles` ranks heads the paper's way, `search` chooses, `weights` fits what heads
count for, `evaluate` measures the choice on held-out text, `report` draws.
"""
