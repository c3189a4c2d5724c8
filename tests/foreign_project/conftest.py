"""A repository of somebody else's, which has its kernels judged by this one line."""

fa3_kernels = ["kernels:right", "kernels:wrong"]
