"""The GPU kernels' speed beside peers: cool bursts, logged clocks, no figure for a kernel whose bits are wrong."""
