"""What is measured of launches beside the times of bench: counters, cost on the host, choices of tune, overlap."""
