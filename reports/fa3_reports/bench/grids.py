"""The names of the grids, apart from their cells so that the command line imports no numbers."""

GRIDS = (
    "paper",
    "fresh",
    "ablation",
    "ragged",
    "decode",
    "gqa",
    "accumulator_loss",
    "length",
    "schedules",
    "unseen",
    "unseen2",
    "unseen3",
    "widths",
    "practice",
    "drawn",
    "backward",
    "backward_widths",
    "backward_drawn",
)
