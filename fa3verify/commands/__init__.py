"""What the verbs and the functions of :mod:`fa3verify` do: a campaign with its report, the atlas, a
replay.
"""
