"""The verbs of ``python -m fa3_reports``, a file a verb."""
