"""The truth: problem definition, float64 attention and gradients, number formats, quantisers, bounds."""
