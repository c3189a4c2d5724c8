"""How launches are timed, and recorded timelines, which are read without a GPU."""
