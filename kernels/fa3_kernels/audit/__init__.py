"""What the compiler makes of every shipped kernel, and which measurements belong to it."""
