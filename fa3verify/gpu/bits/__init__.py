"""The campaign behind every claim that our GPU kernels have the bits of their twins, and the quantiser's speed and accuracy."""
