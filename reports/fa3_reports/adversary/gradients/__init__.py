"""Colonies of gradients: whole small problems, whose arrays are bred.

``colony`` has the shapes and the individuals that are judged at once, ``execution`` the arithmetic before the last
rounding with the ends of all orders of additions, ``mutations`` change arrays, ``search`` selects.
"""
