"""The verb bench: our kernels beside their peers. Cells, records, tables, and what is timed and checked."""
