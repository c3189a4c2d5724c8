"""Inputs: recipes that draw Q, K and V, and Hypothesis strategies over problems and recipes."""
