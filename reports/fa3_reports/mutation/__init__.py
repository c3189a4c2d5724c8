"""How much the suite catches: mutants of the twins' source, bugs that kernels shipped with, rules of other projects."""
