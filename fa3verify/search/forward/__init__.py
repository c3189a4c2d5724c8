"""Searches of forward kernels: what an individual is made of, how it mutates, and how it is judged.

A ``colony`` holds the individuals that are judged at once: rows of scores, channels of V, and what they share, all on
one island, which is a shape and a configuration. ``scores`` (with ``row`` and ``chains``), ``values`` and
``surroundings`` mutate it, led by a ``guide``. ``judge`` computes its figures, and ``search`` selects parents.
"""
