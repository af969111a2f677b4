"""What people type after `lockstep serve`: other servers' flags, a file of settings, completion."""
