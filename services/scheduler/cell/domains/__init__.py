"""The cell's DP ranks and failure domains: attached, drained, kept in lockstep, given requests."""
