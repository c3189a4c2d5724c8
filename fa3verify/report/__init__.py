"""Reports: one dataset with everything in it, and the pages made from it."""
