"""The audit of compiled code: what the compiler makes of every shipped kernel, and which measurements belong to it.

:mod:`.shipped` lists the launches, :mod:`.calls` turns them into calls of kernels, :mod:`.compile` compiles these
without a GPU, :mod:`.sass` reads the machine code, and :mod:`.evidence` gives hashes of what was accepted.
"""
