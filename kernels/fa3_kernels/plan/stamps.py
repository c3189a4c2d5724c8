"""The timeline of an instrumented kernel: which events it stamps.

:mod:`fa3_kernels.gluon.stamps` writes them inside a kernel; ``fa3_reports.stamps`` reads them. Stamps are
int32 (ctas, actors, steps, COLUMNS): the lower half of the cycle counter, 0 where nothing was stamped. Actors are the
consumer warpgroups, then the producer. A step is a key block of a CTA, counted over all its tiles; a consumer's step is
P V of that block with the scores and the softmax of the next one, in the main loop of a tile alone.
"""

COLUMNS = 8
# Turn taken; GEMMs issued and turn passed; S ready; P V done. There is no event where nothing waits, such as behind the
# exponentials: ptxas moves no instruction over a clock read, and the order it chooses there is worth 5 %.
CONSUMER_EVENTS = ("turn", "issued", "scores", "output")
PRODUCER_EVENTS = (
    "k_free",
    "k_issued",
    "v_free",
    "v_issued",
)  # slot free to be written; its load or transposition done
# The events that kernels stamp. A consumer stamps one event a step: with all four fp16 at head_dim 128 was 19 % slower
# on an H200, with the turn and one of the others 12 to 16 %, with the turn and the producer's events 0.1 %.
STAMPED = ("turn", *PRODUCER_EVENTS)
