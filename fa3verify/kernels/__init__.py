"""What is judged: the record of a kernel, the twins, loading of somebody's own, and the registry of all."""
