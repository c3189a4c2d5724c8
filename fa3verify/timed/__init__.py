"""Timings as data: cells, results, tables and rows, which are read without a GPU."""
