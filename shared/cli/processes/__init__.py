"""The processes that a launcher starts, watches and restarts."""
