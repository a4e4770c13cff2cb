"""Explanation: one request as an HTML page that shows which positions each signal chose, over the text, round by round.

No SGLang is involved: both models run in transformers, as in `dustin_sglang.calibrate`. `cached` is a model with the KV
of one sequence, `rounds` drafts, chooses and verifies as a server does, `sources` says who chose what, `stability` how
lists change, `page` and `plot` write the page.
"""
