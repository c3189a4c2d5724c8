"""Colonies of the forward: rows of scores, channels of V, and what all of them share.

``islands`` are shapes and configurations; a ``colony`` is what is judged at once; ``scores``, ``values`` and
``surroundings`` mutate it, led by a ``guide``.
"""
