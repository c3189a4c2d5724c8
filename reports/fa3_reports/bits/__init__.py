"""The campaign behind every claim that GPU kernels have their twins' bits, and the quantiser's speed and accuracy."""
