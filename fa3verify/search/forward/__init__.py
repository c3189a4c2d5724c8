"""Colonies of the forward: rows of scores, channels of V, and what all of them share.

A ``colony`` is what is judged at once on an island, which is a shape and configuration; ``scores``, ``values`` and
``surroundings`` mutate it, led by a ``guide``. ``judge`` has its figures, ``causes`` say why a bound was left, and
``search`` selects.
"""
