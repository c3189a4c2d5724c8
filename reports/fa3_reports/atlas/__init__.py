"""The page that sets kernels of several atlases side by side: ``python -m fa3_reports atlas``."""
