"""Attention in models that run: an extra that needs torch, and that one function alone imports."""
