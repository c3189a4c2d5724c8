"""Kernels that err, or are right, in how they are called: sizes, views, reuse and caches, each a few lines of its own.

:mod:`tests.quality.calls.museum` has all of them by name; ``python -m tests.quality.calls`` judges them.
"""
