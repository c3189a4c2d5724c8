"""The pipeline in time: a cycle-approximate simulator of the producer/consumer schedule."""
