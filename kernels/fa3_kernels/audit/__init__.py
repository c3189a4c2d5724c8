"""Compiled code: :mod:`.sass` reads that of any kernel, :mod:`.evidence` has what the audit accepted of ours.

The audit, which compiles every shipped kernel, is no part of a wheel: ``python -m fa3_reports audit``.
"""
