"""One DP rank's scheduler, without I/O: what runs in the next step, and what happens to its tokens."""
