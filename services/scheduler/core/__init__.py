"""One DP rank's scheduler, without I/O."""
