"""The adversary of gradients: the same evolution, on the arrays of whole small problems.

``colony`` has the shapes and the individuals that are judged at once, ``execution`` the arithmetic before the last
rounding with the ends of all orders of additions, ``mutations`` change arrays, ``search`` selects.
"""
