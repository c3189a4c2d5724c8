"""The page of a device: what was measured on one GPU, made of the files in its folder alone."""
