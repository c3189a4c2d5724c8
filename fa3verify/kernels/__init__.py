"""What is judged: the record of a kernel, the twins, and functions of somebody's own."""
