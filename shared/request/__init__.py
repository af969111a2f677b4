"""What a request is, to all services: its fields and their ranges, its limits, how it is sampled, its grammar."""
