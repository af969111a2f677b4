"""The runner, which computes a batch's steps."""
