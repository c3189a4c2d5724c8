"""The code that makes what this folder publishes; ``python -m fa3_reports VERB`` from a checkout, in no wheel."""
