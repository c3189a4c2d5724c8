"""torch beside numpy: copies between the two, bit for bit, and what can run on this machine."""
