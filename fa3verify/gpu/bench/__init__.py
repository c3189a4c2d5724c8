"""Speed of the GPU kernels beside their peers: cool bursts, clocks logged, and no figure for a kernel whose bits are wrong."""
