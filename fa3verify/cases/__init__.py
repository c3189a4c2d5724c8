"""Cases, the space they are drawn from, and what of it was tried."""
