"""The processes that a launcher starts, watches, restarts and shows."""
