"""Tensors in hand: a call of attention that somebody made, checked without its kernel."""
