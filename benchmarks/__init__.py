"""Benchmarks: each module with a `run() -> list[Row]` compares pagedkv with a peer or a floor in one run.

`python -m benchmarks [NAME ...]` from the repository root runs them. Not part of the installed package.
"""
