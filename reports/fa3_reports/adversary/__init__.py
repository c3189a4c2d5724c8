"""The adversary: whether inputs that are bred for it break the error bounds of our own twins."""
