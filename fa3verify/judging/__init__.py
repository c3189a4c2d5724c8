"""A kernel judged on a case: truth, bound and baseline, the figures made of them, and the verdict."""
