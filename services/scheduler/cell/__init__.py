"""The engine of one cell, without I/O: its requests, its DP ranks, and the failure domains they form."""
