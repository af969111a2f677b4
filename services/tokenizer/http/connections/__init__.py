"""Listens, and checks what comes: connections, heads, hosts, bodies."""
