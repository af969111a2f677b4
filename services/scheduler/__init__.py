"""The scheduler service: decides what every GPU computes next."""
