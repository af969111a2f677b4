"""Tenants: whose request it is, by which key, and what room each has beside others."""
