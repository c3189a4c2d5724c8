"""What runs on a GPU or reads what was measured there: bench, timelines, validation of the simulator."""
