"""The serving benchmark: the paper's end-to-end experiments and the replay of recorded traces."""
