"""What every process of a service has: its start and end, its log, its metrics."""
