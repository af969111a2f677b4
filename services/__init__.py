"""The three services of Lockstep. None of them imports another one."""
